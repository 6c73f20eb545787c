"""What is reported of a run: `report.json`, typed, and read whatever version wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from intune_callbacks.cache.rows import CacheUse
from intune_callbacks.measure.evidence import Cause
from intune_callbacks.measure.measured import Measured
from intune_callbacks.measure.outgrow import Outgrow
from intune_callbacks.record.files import write_whole
from intune_callbacks.types import Hint, Stage
from intune_callbacks.words import NOT_MEASURED, number

__all__ = ["NOT_KNOWN", "REPORT", "Memory", "Report", "Side", "Span", "StageRow", "not_measured", "write_report"]

REPORT, NOT_KNOWN = "report.json", "not known"


@dataclass(frozen=True, slots=True)
class Span:
    """What happened between two moments, by the wall clock; None where nothing was measured.

    Args:
        samples: trained on.
        steps: batches trained on.
        wall_s: seconds.
        paused_s: seconds that are no step: the start, validation, checkpoints.
        seam_s: seconds at the starts of epochs.
        epochs: that began.
        throughput_samples_per_s: over the wall less pauses; of a whole run over all of it.
        throughput_batches_per_s: the same in batches.
        running_samples_per_s: over the wall without pauses and starts of epochs.
        wait_frac: share of the time waited for data, 0..1.
        first_batch_s: seconds to the first batch; of a whole run only.
        begin_at_s: wall clock of its begin, as `at_s` of the history; of a whole run in which a window was seen only.
        validation_s: seconds of `paused_s` in which Keras or Lightning validated; of a whole run only.
    """

    samples: int | None = None
    steps: int | None = None
    wall_s: float | None = None
    paused_s: float | None = None
    seam_s: float | None = None
    epochs: int | None = None
    throughput_samples_per_s: float | None = None
    throughput_batches_per_s: float | None = None
    running_samples_per_s: float | None = None
    wait_frac: float | None = None
    first_batch_s: float | None = None
    begin_at_s: float | None = None
    validation_s: float | None = None


@dataclass(frozen=True, slots=True)
class Side(Span):
    """A run before its first change, or after its last one.

    Args:
        exposed_wait_frac: share of the time the GPU idled for want of data, 0..1; None without a GPU.
        model_s: seconds of a step that are not wait.
        allocation: stage name -> value.
        memory_used_bytes: at the end of the last window.
        memory_limit_bytes: of the container or machine.
        cpus: that the input pipeline may use.
        windows: that were measured.
        verdict: the word for them.
        stage: that limits; None when unknown, or when the input is not the bottleneck.
        headroom: what the input could deliver over what is taken.
        why: a sentence.
        measured: what causes are computed from; never in the file.
        brought: by the changes, see `intune_callbacks.record.before_after`; never in the file.
    """

    exposed_wait_frac: float | None = None
    model_s: float | None = None
    allocation: Mapping[str, Any] = field(default_factory=dict)
    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = None
    cpus: float | None = None
    windows: int = 0
    verdict: str = NOT_KNOWN
    stage: str | None = None
    headroom: float | None = None
    why: str = ""
    measured: Measured | None = None
    brought: float | None = None


@dataclass(frozen=True, slots=True)
class StageRow(Stage):
    """One number of the pipeline, as it was at the end.

    Args:
        first: its value at the start of the run; None where unknown.
    """

    first: int | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in use and its limits.

    Args:
        before_bytes: in use before the first change.
        after_bytes: in use after the last one.
        limit_bytes: of the container or machine.
        soft_limit_frac: share of the limit that the tuner keeps to, 0..1.
        worker_bytes: that one worker process holds of its own, whatever it shares with the training process; None where
            there was none, or none was looked at.
    """

    before_bytes: int | None = None
    after_bytes: int | None = None
    limit_bytes: int | None = None
    soft_limit_frac: float | None = None
    worker_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All that is reported of a run; the names are the keys of `report.json`.

    Args:
        verdict: the word for the run.
        why: what the training waited for before the first change; of a slower run, what was done to it.
        cause: why that was so, empty where there is nothing to say.
        next: what to do, the first line in words and then what to paste.
        causes: why it is not faster now, what limits first.
        advice: numbers to write: ``allocation``, ``gain``, ``lines`` to paste and ``words``; None without a gain.
        outgrow: what more CPUs than there are would bring; None where they are not the limit.
        hints: what is odd about the pipeline.
        whole: of the whole run; None where unknown.
        mode: in force.
        mode_source: where the mode came from.
        settings: each value of the tuner and where it came from.
        policy: its name; None without a tuner.
        before: before the first change.
        after: after the last one.
        changes: resizes.
        settled_after_s: seconds until the policy held; None while it never did.
        wall_s: seconds.
        steps: batches.
        samples: trained on.
        stages: in pipeline order.
        memory: in use, and its limits.
        frozen: an internal error, if there was one.
        auc: test AUC of the trained model, if a recipe measured it.
        versions: package -> version.
        decisions: those in which something was proposed, changed or refused, as in the history.
        ranks: at rank 0 of several: ``wait_s`` and ``model_s`` by rank, ``straggler`` and ``line``.
        warm_start: ``from``, ``used`` and ``why``, where one was asked for.
        cache: what was kept of pure functions' results, where any was marked.
        more: whatever else is in the file, by key.
    """

    verdict: str = ""
    why: str = ""
    cause: str = ""
    next: str = ""
    causes: tuple[Cause, ...] = ()
    advice: Mapping[str, Any] | None = None
    outgrow: Outgrow | None = None
    hints: tuple[Hint, ...] = ()
    whole: Span | None = None
    mode: str = NOT_KNOWN
    mode_source: str = NOT_KNOWN
    settings: Mapping[str, Any] = field(default_factory=dict)
    policy: str | None = None
    before: Side = Side()
    after: Side = Side()
    changes: int = 0
    settled_after_s: float | None = None
    wall_s: float = 0.0
    steps: int = 0
    samples: int = 0
    stages: tuple[StageRow, ...] = ()
    memory: Memory = Memory()
    frozen: str | None = None
    auc: float | None = None
    versions: Mapping[str, Any] = field(default_factory=dict)
    decisions: tuple[Mapping[str, Any], ...] = ()
    ranks: Mapping[str, Any] | None = None
    warm_start: Mapping[str, Any] | None = None
    cache: CacheUse | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Report:
        """Return the report of a file; what is missing, or of another kind than expected, is left at its default."""
        known = {one.name for one in fields(cls)} - {"more"}
        more = {key: value for key, value in state.items() if key not in known}
        return _object(cls, {**state, "more": more}) or cls()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        state: dict[str, Any] = _plain(self)
        more: dict[str, Any] = state.pop("more")
        return state | more


MEDIANS = {"throughput_samples_per_s", "throughput_batches_per_s", "wait_frac"}
NOT_NULL: dict[type, set[str]] = {
    Report: {"cache", "ranks", "warm_start"},
    Side: {*Span.__dataclass_fields__, "measured", "brought"} - MEDIANS,
}
"""What is not there at all where it is None: of a side, what is known of a span only and not of single windows."""


def write_report(directory: str | Path, report: Report) -> Path:
    """Write `report.json` as a whole or not at all, and return its path.

    Args:
        directory: made if it does not exist.
        report: of the run.

    Raises:
        OSError: when it cannot be written.
    """
    path = Path(directory) / REPORT
    write_whole(path, json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n")
    return path


def not_measured(report: Report, reason: str) -> Report:
    """Return the report with the reason in place of a verdict: a longer run would show no more.

    Args:
        report: of a run without a measured step.
        reason: why none was seen and, behind the first semicolon, what would change that.
    """
    why, _, do = reason.partition("; ")
    before, after = (replace(side, verdict=NOT_MEASURED, why=why) for side in (report.before, report.after))
    return replace(report, verdict=NOT_MEASURED, why=why, next=do or report.next, before=before, after=after)


def _plain(value: Any) -> Any:
    """As JSON has it; a field that is None is a null, those of `NOT_NULL` are not there then."""
    if is_dataclass(value):
        not_null = NOT_NULL.get(type(value), ())
        known = {one.name: getattr(value, one.name) for one in fields(value)}
        return {name: _plain(one) for name, one in known.items() if one is not None or name not in not_null}
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _object(cls: Any, state: object) -> Any:
    """Return a dataclass from its JSON; None where that is no object, or lacks what has no default."""
    if not isinstance(state, dict):
        return None
    kinds = get_type_hints(cls)
    given = {one.name: _value(kinds[one.name], state.get(one.name)) for one in fields(cls)}
    known = {name: value for name, value in given.items() if value is not None}
    bare = {one.name for one in fields(cls) if one.default is MISSING and one.default_factory is MISSING}
    return cls(**known) if bare <= known.keys() else None


def _value(kind: Any, state: object) -> Any:
    """Return JSON as a value of this kind; None where it is none."""
    if isinstance(kind, UnionType):
        kind = get_args(kind)[0]  # the other one is None
    if is_dataclass(kind):
        return _object(kind, state)
    if kind in (int, float):
        return None if number(state) is None else kind(state)
    if get_origin(kind) is tuple:
        found = [_value(get_args(kind)[0], one) for one in state] if isinstance(state, list) else []
        return tuple(one for one in found if one is not None)
    plain = str if get_origin(kind) is Literal else get_origin(kind) or kind
    return state if isinstance(state, plain) else None
