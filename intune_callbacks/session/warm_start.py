"""What a run found, for the next one to start from: `found.yaml` for people, `state.json` for the agent."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from intune_callbacks.errors import warn
from intune_callbacks.record.before_after import describe
from intune_callbacks.record.files import write_whole
from intune_callbacks.record.history import Decision
from intune_callbacks.record.report import Report, Side
from intune_callbacks.session.fingerprint import differences, fingerprint
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Allocation

__all__ = ["WarmStart", "parse_found", "write_found"]

log = logging.getLogger(__name__)

FOUND, STATE = "found.yaml", "state.json"
FORMAT = 2
HEADER = """\
# What InTune found in this run: how many workers and results ahead, and the setting it was found in.
#
#   in Python      InTuneCallback(warm_start={folder})
#   in a recipe    intune run NAME intune.warm_start={folder}
#
# starts the next run from it, if that has the same fingerprint; otherwise it starts anew and says why. The values under
# `allocation` may be edited; what the machine does not allow is cut. What the agent learned is in {state}. Below is
# JSON, which every reader of YAML reads; lines that begin with # are comments.
"""


class Unfit(Exception):
    """Why a run is not started from another; never leaves this module."""


def write_found(
    folder: Path,
    tuner: Tuner,
    *,
    batch_size: int,
    ranks: int,
    versions: Mapping[str, str],
    started_from: str | None = None,
) -> Path | None:
    """Write what a tuner found and what it knows, each file as a whole or not at all.

    Args:
        folder: of this run and rank.
        tuner: closed.
        started_from: the run this one was started from, if so.

    Returns:
        The path of `found.yaml`; None, and nothing is written, when the tuner changed nothing on purpose (modes
        ``observe`` and ``advise``), froze, or did not measure a single window of something that can be changed.

    Raises:
        OSError: when it cannot be written.
    """
    summary = tuner.summary()
    units = {row.name: row.unit for row in summary.stages}
    # An epoch may have brought other stages: what was measured before that is of another pipeline.
    decisions = [decision for decision in tuner.history.decisions if decision.before.keys() == units.keys()]
    if summary.mode != "tune" or summary.frozen or not decisions or not units:
        return None
    allocation, after = _best(decisions, tuner, summary)
    state = json.dumps(tuner.state_dict() | {"allocation": allocation}, allow_nan=False)
    same = fingerprint(
        [asdict(row) for row in summary.stages],
        batch_size=batch_size,
        machine=decisions[-1].observation.resources,
        policy=tuner.policy.name,
        ranks=ranks,
        versions=versions,
    )
    first = summary.before.allocation
    tree = {
        "format": FORMAT,
        "settled": decisions[-1].settled,
        "started_from": started_from,
        "allocation": {
            name: {"value": value, "unit": units[name], "before": first.get(name)} for name, value in allocation.items()
        },
        "before": _figures(summary.before),
        "after": _figures(after),
        "fingerprint": same,
        "state": {"file": STATE, "sha256": hashlib.sha256(state.encode()).hexdigest()},
    }
    run = folder.parent if ranks > 1 else folder
    write_whole(folder / STATE, state)
    write_whole(folder / FOUND, HEADER.format(folder=json.dumps(str(run)), state=STATE) + _text(tree))
    return folder / FOUND


class WarmStart:
    """The wish to start from another run, until the first batch shows whether that fits.

    Args:
        source: a run folder or the path of its `found.yaml`; None is no such wish.
        rank: this process among those that train together; it reads what this rank wrote.
        world: how many train together.

    Attributes:
        source: as given.
    """

    def __init__(self, source: str | None, rank: int = 0, world: int = 1) -> None:
        self.source, self._rank, self._world = source, rank, world
        self._used, self._why = False, "training ended before its first batches were seen"
        self._is_open = source is not None

    @property
    def entry(self) -> dict[str, Any] | None:
        """What the report says: ``from``, ``used`` and ``why``; None where nothing was asked for."""
        return None if self.source is None else {"from": self.source, "used": self._used, "why": self._why}

    @property
    def used_source(self) -> str | None:
        """The run this one was started from, None if it was started anew."""
        return self.source if self._used else None

    def leave(self, why: str) -> None:
        """Do not start from the other run."""
        self._why, self._is_open = why, False

    def begin(self, tuner: Tuner, batch_size: int, versions: Mapping[str, str]) -> None:
        """Start from the other run if it fits, once; else say why not. Never raises.

        Args:
            tuner: it has decided nothing yet; in the modes ``observe`` and ``advise`` nothing is changed.
        """
        if not self._is_open:
            return
        self._is_open = False
        mode = tuner.config.mode
        try:
            self._why = self._begin(tuner, batch_size, versions)
            log.info("InTune: warm start from %s: %s", self.source, self._why)
        except Exception as error:
            self._why = (
                str(error)
                if isinstance(error, Unfit)
                else f"it could not be taken over: {type(error).__name__}: {error}"
            )
            if mode == "tune":
                warn(f"InTune starts anew, not from {self.source}: {self._why}")

    def _begin(self, tuner: Tuner, batch_size: int, versions: Mapping[str, str]) -> str:
        mode = tuner.config.mode
        if mode == "observe":
            return "mode='observe' changes nothing"
        assert self.source is not None
        found, state = _read(_file(self.source, self._rank, self._world))
        stages, machine = tuner.setting()
        now = fingerprint(
            [asdict(stage) for stage in stages],
            batch_size=batch_size,
            machine=machine,
            policy=tuner.policy.name,
            ranks=self._world,
            versions=versions,
        )
        if different := differences(found["fingerprint"], now):
            raise Unfit("; ".join(different))
        wanted = _allocation(found["allocation"], [stage.name for stage in stages])
        if mode != "tune":
            return f"mode={mode!r} changes nothing; it would start with {_listed(wanted)}"
        tuner.restore({**state, "allocation": wanted})
        self._used = True
        given = {stage.name: stage.current for stage in tuner.setting()[0]}
        cut = {name: given[name] for name, value in wanted.items() if given[name] != value}
        return f"the fingerprint is the same{f', the machine allows {_listed(cut)}' if cut else ''}"


def parse_found(text: str) -> dict[str, Any]:
    """Return what `found.yaml` holds; its comments are lines of their own.

    Raises:
        ValueError: naming the line, for what is not JSON, and naming the key that is there twice.
    """
    found = json.loads(re.sub(r"(?m)^ *#.*$", "", text), object_pairs_hook=_once)
    if not isinstance(found, dict):
        raise ValueError(f"expected a mapping, found {type(found).__name__}")
    return found


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return tree


def _best(decisions: Sequence[Decision], tuner: Tuner, summary: Report) -> tuple[Allocation, Side]:
    """Return the best allocation that was measured, and how it did: a run may have ended on a trial."""
    now = {row.name: row.current for row in summary.stages if row.current is not None}
    best = {**now, **tuner.best} if tuner.best.keys() == now.keys() else now
    if best == now:
        return now, summary.after
    return best, describe([d.observation for d in decisions if d.before == best])


def _figures(side: Side) -> dict[str, Any]:
    given = {key: getattr(side, key) for key in ("throughput_samples_per_s", "wait_frac")}
    return {key: None if value is None else round(value, 4) for key, value in given.items()}


def _text(tree: Mapping[str, Any]) -> str:
    """Return JSON with what holds nothing but values on one line: a stage is one line."""
    text = json.dumps(tree, indent=2, allow_nan=False)
    # JSON has no line break inside a text, so a brace at the end of a line opens a mapping.
    return re.sub(r"\{\n([^{}]*)\n *\}", lambda part: "{" + re.sub(r"\n *", " ", part[1]).strip() + "}", text) + "\n"


def _file(source: str, rank: int, world: int) -> Path:
    """Return this rank's file; without one, that of a run with more or fewer ranks, so that the reason is named."""
    path = Path(source).expanduser()
    given, name = (path.parent, path.name) if path.suffix in (".yaml", ".yml") else (path, FOUND)
    run = given.parent if re.fullmatch(r"rank\d+", given.name) else given
    own = run / f"rank{rank}" if world > 1 else given
    for folder in (own, run, run / "rank0"):
        if (folder / name).is_file():
            return folder / name
    raise Unfit(f"there is no {own / name}")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `write_found` wrote.

    Raises:
        Unfit: for what it did not write.
    """
    try:
        found = parse_found(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Unfit(f"{path} cannot be read: {error}") from None
    if not {"format", "allocation", "fingerprint", "state"} <= set(found):
        raise Unfit(f"{path} is not what InTune wrote at the end of a run")
    if found["format"] != FORMAT:
        raise Unfit(f"format: {found['format']} there, {FORMAT} here")
    name = str(found["state"]["file"])
    beside = path.parent / name
    try:
        if Path(name).name != name or (beside.exists() and not beside.is_file()):
            raise Unfit(f"{path} names {name!r}: expected the name of a file beside it")
        text = beside.read_bytes()
    except OSError as error:
        raise Unfit(f"{beside} cannot be read: {error}") from None
    if hashlib.sha256(text).hexdigest() != found["state"]["sha256"]:
        raise Unfit(f"{beside} is not the one that was written with {path.name}")
    return found, dict(json.loads(text))


def _allocation(given: Mapping[str, Any], stages: Sequence[str]) -> Allocation:
    """Return the values, which somebody may have edited.

    Raises:
        Unfit: naming what is no value of a stage.
    """
    values = {name: entry["value"] if isinstance(entry, Mapping) else entry for name, entry in given.items()}
    for name, value in values.items():
        if name not in stages:
            raise Unfit(f"allocation: there is no stage {name!r}")
        if type(value) is not int or value < 0:
            raise Unfit(f"allocation: {name!r} is {value!r}, expected a whole number")
    return values


def _listed(allocation: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in allocation.items()) or "nothing"
