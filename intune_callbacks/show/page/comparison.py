"""The figures of a run, side by side: before and after, rank by rank, or one run beside another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from intune_callbacks.record.card import headline
from intune_callbacks.record.report import Report, Side, Span, StageRow
from intune_callbacks.show.page.runs import Run
from intune_callbacks.words import NOTHING, allocation, amount, duration, four_digits, quantity, times, with_window

__all__ = ["Row", "allocation_line", "before_and_after", "two_runs"]

# What is measured, the key of it in `before` and `after`, its unit, and whether a ratio says something.
MEASURED = (
    ("throughput, samples/s", "throughput_samples_per_s", "", True),
    ("data wait", "wait_frac", "%", False),
    ("GPU idle for want of data", "exposed_wait_frac", "%", False),
    ("model time of a step", "model_s", "ms", True),
    ("memory in use", "memory_used_bytes", "GB", True),
    ("memory limit", "memory_limit_bytes", "GB", False),
    ("CPUs for the input", "cpus", "", False),
)
# The same of the whole run.
OF_ALL = (
    ("samples over wall, samples/s", "throughput_samples_per_s", "", True),
    ("data wait", "wait_frac", "%", False),
    ("first batch after", "first_batch_s", "s", False),
    ("starts of epochs", "seam_s", "s", False),
    ("pauses: start, validation, checkpoints", "paused_s", "s", False),
)
COURSE: tuple[tuple[str, str, Callable[[object], str]], ...] = (
    ("changes", "changes", amount),
    ("settled after", "settled_after_s", duration),
    ("length", "wall_s", duration),
    ("steps", "steps", amount),
    ("test AUC", "auc", four_digits),
)
UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table of two columns.

    Args:
        name: of what is compared.
        first: its value in the first column, as text.
        second: in the second one.
        more: the ratio, or ``differs`` where a setting differs.
        group: heading under which it stands.
    """

    name: str
    first: str
    second: str
    more: str = ""
    group: str = ""


def before_and_after(report: Report) -> list[Row]:
    """Return what was measured and allocated before the first change and after the last one."""
    rows = _measured(report.before, report.after)
    for stage in _shown(report):
        first, last = (_with_window(stage, report, which) for which in ("first", "current"))
        ratio = times(stage.first, stage.current) if stage.first != stage.current else ""
        rows.append(Row(_named(stage), first, last, ratio, "allocation"))
    return rows


def _measured(first: Side, second: Side) -> list[Row]:
    """Return a row for each figure that one of the two sides has."""
    return list(_rows(MEASURED, first, second, "measured"))


def two_runs(first: Run, second: Run) -> list[Row]:
    """Return all figures of two runs, and of their settings and versions those that differ."""
    one, other = first.report, second.report
    rows = [Row("verdict", headline(one), headline(other), "", "verdict"), *_measured(one.after, other.after)]
    rows += _rows(OF_ALL, one.whole or Span(), other.whole or Span(), "whole run")
    left, right = ({_named(stage): _with_window(stage, r, "current") for stage in _shown(r)} for r in (one, other))
    for name in dict.fromkeys([*left, *right]):
        rows.append(Row(name, left.get(name, NOTHING), right.get(name, NOTHING), "", "allocation"))
    for name, key, words in COURSE:
        given = getattr(one, key), getattr(other, key)
        if key != "auc" or given != (None, None):
            rows.append(Row(name, words(given[0]), words(given[1]), "", "course"))
    settings = [_settings(one), _settings(other)]
    if not (one.settings and other.settings):  # one of them was not tuned, or has not ended: nothing to compare
        settings = [{name: values[name] for name in settings[0] if name in settings[1]} for values in settings]
    rows += _differing("settings", *settings)
    rows += _differing("versions", one.versions, other.versions)
    return rows


def allocation_line(report: Report) -> str:
    """Return workers and depths at the end in one line, as the end card does; windows are left out."""
    return allocation({stage.name: stage.current for stage in _shown(report)}, {})


def _rows(figures: Sequence[tuple[str, str, str, bool]], first: Span, second: Span, group: str) -> Iterator[Row]:
    for name, key, unit, has_ratio in figures:
        left, right = getattr(first, key), getattr(second, key)
        if left is not None or right is not None:
            ratio = times(left, right) if has_ratio else ""
            yield Row(name, quantity(left, unit), quantity(right, unit), ratio, group)


def _shown(report: Report) -> list[StageRow]:
    """The stages themselves; a window is shown with the workers whose results it holds."""
    return [stage for stage in report.stages if stage.window_of is None]


def _named(stage: StageRow) -> str:
    return f"{stage.name}, {'workers' if stage.unit == 'workers' else 'depth'}"


def _with_window(stage: StageRow, report: Report, which: str) -> str:
    windows = [getattr(other, which) for other in report.stages if other.window_of == stage.name]
    return with_window(getattr(stage, which), windows[0] if windows else None)


def _settings(report: Report) -> dict[str, Any]:
    found: dict[str, Any] = {"mode": report.mode, "policy": report.policy or UNKNOWN}
    found["memory soft limit"] = report.memory.soft_limit_frac
    found |= {f"at first: {_named(stage)}": _with_window(stage, report, "first") for stage in _shown(report)}
    # The value alone: where it was written down makes no other run of it.
    named = {str(name): _value(given) for name, given in report.settings.items()}
    return {name: value for name, value in found.items() if name not in named} | named


def _value(given: object) -> object:
    return given["value"] if isinstance(given, Mapping) and "value" in given else given


def _differing(group: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Row]:
    names = [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]
    return [Row(str(name), _plain(one.get(name)), _plain(other.get(name)), "differs", group) for name in names]


def _plain(value: object) -> str:
    return NOTHING if value is None else str(value)
