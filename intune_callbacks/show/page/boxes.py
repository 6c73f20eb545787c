"""The parts of the page that take more than a template: the pipeline as boxes, settings, the wait of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from intune_callbacks.record.card import tone
from intune_callbacks.record.report import Report, StageRow
from intune_callbacks.show.page.columns import RunColumns
from intune_callbacks.words import PAGE_ARROW, amount, four_digits, quantity, setting, stage_value

__all__ = ["Box", "boxes", "facts", "wait_of_rank"]

FLAGS = {"now": "bottleneck", "first": "bottleneck at first", "": ""}
LAST_WINDOWS = 20
"""Windows at the end whose median stands in a box. A choice: how it is now, without the noise of one window."""


@dataclass(frozen=True, slots=True)
class Box:
    """A stage of the pipeline, or the model at its end.

    Args:
        name: of the stage.
        kind: ``now`` where the bottleneck is, ``first`` where it was, ``model`` for a model that is fed, or nothing.
        flag: the same in words.
        lines: what is said of it, and its values.
        bars: shares 0..1, None where unknown.
    """

    name: str
    kind: str
    flag: str
    lines: tuple[tuple[str, str], ...]
    bars: tuple[tuple[str, float | None], ...]


def boxes(report: Report, columns: RunColumns) -> list[Box]:
    """Return the pipeline in its order, and the model; nothing where no stage can be resized."""
    windows = {stage.window_of: stage for stage in report.stages if stage.window_of is not None}
    sides = report.before, report.after
    first, now = (side.stage if side.verdict == "input-bound" else None for side in sides)
    made = []
    for stage in (stage for stage in report.stages if stage.window_of is None):
        name = stage.name
        kind = "now" if name == now else "first" if name == first else ""
        lines = [("workers" if stage.unit == "workers" else "depth", _moved(stage))]
        if name in windows:
            lines.append(("window", _moved(windows[name])))
        if stage.delivering is not None:
            lines.append(("delivering", amount(stage.delivering)))
        bars = ("busy", _lately(columns.busy.get(name))), ("queue", _lately(columns.fill.get(name)))
        made.append(Box(name, kind, FLAGS[kind], tuple(lines), bars))
    if made:
        kind = "model" if tone(report) == "good" else ""
        flag = FLAGS["now"] if report.after.verdict == "compute-bound" else ""
        step, waits = quantity(report.after.model_s, "ms"), report.after.wait_frac
        made.append(Box("model", kind, flag, (("a step", step),), (("waits", waits),)))
    return made


def facts(report: Report) -> dict[str, str]:
    """Return mode, policy, settings with where they came from, and versions."""
    found = {"mode": f"{report.mode} (from {report.mode_source})", "policy": report.policy or "not known"}
    found |= {str(name): setting(given) for name, given in report.settings.items() if name not in found}
    soft = report.memory.soft_limit_frac
    if soft is not None and "memory_soft_limit" not in found:
        found["memory soft limit"] = f"{quantity(soft, '%')} of the limit"
    found |= {"steps": amount(report.steps), "samples": amount(report.samples)}
    if report.auc is not None:
        found["test AUC"] = four_digits(report.auc)
    return found | {str(name): str(version) for name, version in report.versions.items()}


def wait_of_rank(report: Report, rank: int) -> str:
    """Return how long a rank waits for data in a step, as rank 0 was told."""
    waits = (report.ranks or {}).get("wait_s")
    return quantity(waits[rank] if isinstance(waits, list) and rank < len(waits) else None, "ms")


def _moved(stage: StageRow) -> str:
    first, last = stage_value(stage.first), stage_value(stage.current)
    return last if first == last else f"{first}{PAGE_ARROW}{last}"


def _lately(values: Sequence[float | None] | None) -> float | None:
    known = [value for value in (values or ())[-LAST_WINDOWS:] if value is not None]
    return median(known) if known else None
