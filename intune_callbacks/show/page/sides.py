"""The figures of a run, side by side: before and after, rank by rank, or one run beside another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from intune_callbacks.show.page.runs import Run
from intune_callbacks.words import (
    NOTHING,
    allocation,
    amount,
    duration,
    four_digits,
    headline,
    quantity,
    times,
    with_window,
)

__all__ = ["Row", "allocation_line", "before_and_after", "measured", "two_runs"]

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
    ("samples over wall, samples/s", "throughput_samples_per_s", ""),
    ("data wait", "wait_frac", "%"),
    ("first batch after", "first_batch_s", "s"),
    ("starts of epochs", "seam_s", "s"),
    ("pauses: start, validation, checkpoints", "paused_s", "s"),
)
SETTINGS = (("mode", "mode"), ("policy", "policy"))


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


def before_and_after(report: Mapping[str, Any]) -> list[Row]:
    """Return what was measured and allocated before the first change and after the last one."""
    rows = measured(report["before"], report["after"])
    for stage in _shown(report):
        first, last = (_with_window(stage, report, which) for which in ("first", "current"))
        ratio = times(stage["first"], stage["current"]) if stage["first"] != stage["current"] else ""
        rows.append(Row(_named(stage), first, last, ratio, "allocation"))
    return rows


def measured(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Row]:
    """Return a row for each figure that one of the two sides has; sides as in ``before`` of a report."""
    rows = []
    for name, key, unit, has_ratio in MEASURED:
        left, right = first.get(key), second.get(key)
        if left is not None or right is not None:
            ratio = times(left, right) if has_ratio else ""
            rows.append(Row(name, quantity(left, unit), quantity(right, unit), ratio, "measured"))
    return rows


def two_runs(first: Run, second: Run) -> list[Row]:
    """Return all figures of two runs, and of their settings and versions those that differ."""
    one, other = first.report, second.report
    rows = [Row("verdict", headline(one), headline(other), "", "verdict")]
    rows += measured(one["after"], other["after"])
    for name, key, unit in OF_ALL:
        of = [whole.get(key) if isinstance(whole := run.get("whole"), dict) else None for run in (one, other)]
        if any(value is not None for value in of):
            ratio = times(*of) if key == "throughput_samples_per_s" else ""
            rows.append(Row(name, quantity(of[0], unit), quantity(of[1], unit), ratio, "whole run"))
    left, right = ({_named(stage): _with_window(stage, r, "current") for stage in _shown(r)} for r in (one, other))
    for name in dict.fromkeys([*left, *right]):
        rows.append(Row(name, left.get(name, NOTHING), right.get(name, NOTHING), "", "allocation"))
    rows.append(Row("changes", amount(one["changes"]), amount(other["changes"]), "", "course"))
    for name, key in (("settled after", "settled_after_s"), ("length", "wall_s")):
        rows.append(Row(name, duration(one[key]), duration(other[key]), "", "course"))
    rows.append(Row("steps", amount(one["steps"]), amount(other["steps"]), "", "course"))
    if one["auc"] is not None or other["auc"] is not None:
        rows.append(Row("test AUC", four_digits(one["auc"]), four_digits(other["auc"]), "", "course"))
    settings = [_settings(one), _settings(other)]
    if not (one["settings"] and other["settings"]):  # one of them was not tuned, or has not ended: nothing to compare
        settings = [{name: values[name] for name in settings[0] if name in settings[1]} for values in settings]
    rows += _differing("settings", *settings)
    rows += _differing("versions", one["versions"], other["versions"])
    return rows


def allocation_line(report: Mapping[str, Any], which: str) -> str:
    """Return workers and depths in one line, as the end card does; windows are left out.

    Args:
        report: whole, as `runs.read` gives it.
        which: ``first`` or ``current``.
    """
    return allocation({stage["name"]: stage[which] for stage in _shown(report)}, {})


def _shown(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The stages themselves; a window is shown with the workers whose results it holds."""
    return [stage for stage in report["stages"] if stage["window_of"] is None]


def _named(stage: Mapping[str, Any]) -> str:
    return f"{stage['name']}, {'workers' if stage['unit'] == 'workers' else 'depth'}"


def _with_window(stage: Mapping[str, Any], report: Mapping[str, Any], which: str) -> str:
    windows = [other[which] for other in report["stages"] if other["window_of"] == stage["name"]]
    return with_window(stage[which], windows[0] if windows else None)


def _settings(report: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: report[key] for name, key in SETTINGS}
    found["memory soft limit"] = report["memory"].get("soft_limit_frac")
    found |= {f"at first: {_named(stage)}": _with_window(stage, report, "first") for stage in _shown(report)}
    # The value alone: where it was written down makes no other run of it.
    told = {str(name): _value(given) for name, given in report["settings"].items()}
    return {name: value for name, value in found.items() if name not in told} | told


def _value(given: object) -> object:
    return given["value"] if isinstance(given, Mapping) and "value" in given else given


def _differing(group: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Row]:
    names = [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]
    return [Row(str(name), _plain(one.get(name)), _plain(other.get(name)), "differs", group) for name in names]


def _plain(value: object) -> str:
    return NOTHING if value is None else str(value)
