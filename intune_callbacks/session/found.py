"""What a run leaves for the next one to start from: `found.yaml` for people, `state.json` for the agent."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from intune_callbacks.record.before_after import describe
from intune_callbacks.record.files import write_whole
from intune_callbacks.record.fingerprint import fingerprint
from intune_callbacks.record.history import Decision
from intune_callbacks.record.report import Report, Side
from intune_callbacks.session.tuner import Tuner
from intune_callbacks.types import Allocation

__all__ = ["Unfit", "ask_found", "file_of", "found_by", "parse_found", "read_found", "send_found", "write_found"]

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
    """Why a run is not started from another."""


def write_found(folder: Path, tree: Mapping[str, Any], state: str) -> Path:
    """Write what `found_by` returned, each file as a whole or not at all, and return the path of `found.yaml`.

    Raises:
        OSError: when it cannot be written.
    """
    run = folder.parent if tree["fingerprint"]["ranks"] > 1 else folder
    write_whole(folder / STATE, state)
    write_whole(folder / FOUND, HEADER.format(folder=json.dumps(str(run)), state=STATE) + _text(tree))
    return folder / FOUND


def send_found(address: str, tree: Mapping[str, Any], state: str) -> str | None:
    """Send an agent service what `write_found` writes, and return why it was not kept, None if it was."""
    from intune_callbacks.service.client import Agent, Unanswered
    from intune_callbacks.service.wire import encode

    try:
        status, told = Agent(address).ask("/v1/found", encode({"found": tree, "state": state}))
    except (Unanswered, ValueError) as error:
        return str(error)
    return None if status == 200 else f"status {status} {told}"[:160]


def found_by(
    tuner: Tuner, *, batch_size: int, ranks: int, versions: Mapping[str, str], started_from: str | None = None
) -> tuple[dict[str, Any], str] | None:
    """Return what a later run can start from: the tree of `found.yaml` and the text of `state.json`.

    Args:
        tuner: closed.
        batch_size, ranks, versions: as for `fingerprint`.
        started_from: the run this one was started from, if so.

    Returns:
        None when the tuner changed nothing on purpose (modes ``observe`` and ``advise``), froze, or did not measure a
        single window of something that can be changed.
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
    return tree, state


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


def file_of(source: str, rank: int, world: int) -> Path:
    """Return this rank's file; without one, that of a run with more or fewer ranks, so that the reason is named.

    Raises:
        Unfit: there is none.
    """
    path = Path(source).expanduser()
    given, name = (path.parent, path.name) if path.suffix in (".yaml", ".yml") else (path, FOUND)
    run = given.parent if re.fullmatch(r"rank\d+", given.name) else given
    own = run / f"rank{rank}" if world > 1 else given
    for folder in (own, run, run / "rank0"):
        if (folder / name).is_file():
            return folder / name
    raise Unfit(f"there is no {own / name}")


def read_found(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
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
    name = str(found["state"]["file"])
    beside = path.parent / name
    try:
        if Path(name).name != name or (beside.exists() and not beside.is_file()):
            raise Unfit(f"{path} names {name!r}: expected the name of a file beside it")
        text = beside.read_bytes()
    except OSError as error:
        raise Unfit(f"{beside} cannot be read: {error}") from None
    return found, _state(found, text, f"{beside} is not the one that was written with {path.name}")


def ask_found(address: str, now: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return what an agent service knows of a run with the fingerprint `now`, None where it knows none.

    Raises:
        Unfit: it gives no answer, or one of no use.
    """
    from intune_callbacks.service.client import Agent, Unanswered
    from intune_callbacks.service.wire import encode

    try:
        status, told = Agent(address).ask("/v1/like", encode(now))
    except (Unanswered, ValueError) as error:
        raise Unfit(str(error)) from None
    if status != 200 or not isinstance(told, dict):
        raise Unfit(f"status {status} {told}"[:160])
    entry = told.get("entry")
    if entry is None:
        return None
    found = entry["found"]
    return found, _state(found, str(entry["state"]).encode(), "its state is not the one of what it found")


def _state(found: Mapping[str, Any], text: bytes, otherwise: str) -> dict[str, Any]:
    if found["format"] != FORMAT:
        raise Unfit(f"format: {found['format']} there, {FORMAT} here")
    if hashlib.sha256(text).hexdigest() != found["state"]["sha256"]:
        raise Unfit(otherwise)
    return dict(json.loads(text))
