"""What a run gave: its losses, its speed, its report, and the report of an untuned run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from intune_callbacks.measure.resources import MachineProbe
from intune_callbacks.record.before_after import describe
from intune_callbacks.record.findings import build_report
from intune_callbacks.record.report import Memory, Report, Side, StageRow
from intune_callbacks.types import Observation, Stage
from intune_callbacks.words import amount, four_digits, number

from .schema import Config
from .stopwatch import Marks

__all__ = ["Fitted", "Outcome", "observed", "result_table", "tested", "untuned"]


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a framework brings home from one training.

    Args:
        marks: the ends of the steps, on this rank.
        losses: training loss of each step, of the samples of all ranks.
        figures: what `metrics.evaluate` gave for the held-out rows.
        workers: stage -> the workers it started with.
        skipped_rows: malformed rows of the training split that were left out.
    """

    marks: Marks
    losses: list[float]
    figures: Mapping[str, float]
    workers: Mapping[str, int]
    skipped_rows: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a training run gave.

    Args:
        report: as in report.json.
        losses: training loss of each step.
        steady: the second half of the steps by the stopwatch, in the form of the report's ``after``.
    """

    report: dict[str, Any]
    losses: list[float]
    steady: Side


def observed(marks: Marks, threads: Mapping[str, int]) -> Side:
    """Return the steady part of a run in the form of the report's ``after``."""
    return describe([_observation(marks, threads)])


def tested(figures: Mapping[str, float]) -> dict[str, Any]:
    """Return what the report says about the held-out rows.

    Args:
        figures: what `metrics.evaluate` gave.
    """
    # Of rows that are all clicks, or none, there is no AUC, and JSON knows no NaN.
    found = {key: number(value) for key, value in figures.items()}
    names = {"auc": "auc", "accuracy": "accuracy", "log_loss": "loss"}
    return {
        "auc": found["auc"],
        "test": {**{name: found[key] for name, key in names.items()}, "rows": round(found["rows"] or 0)},
    }


def result_table(outcome: Outcome, trees: Mapping[str, float] | None = None) -> str:
    """Return what a run gave as a table: quality on the held-out rows, speed over the last half.

    Args:
        outcome: of the run.
        trees: what `metrics.evaluate` gave for gradient boosted trees: a third line.
    """
    test = {"auc": outcome.report["auc"], **outcome.report.get("test", {})}
    quality = {"AUC": "auc", "accuracy": "accuracy", "log loss": "log_loss"}
    cells = {title: four_digits(test[key]) for title, key in quality.items() if key in test}
    cells["samples/s"] = amount(outcome.steady.throughput_samples_per_s)
    cells["data wait"] = f"{outcome.steady.wait_frac or 0.0:.1%}"
    lines = [[*cells], [*cells.values()]]
    if trees is not None:
        found = {"auc": tested(trees)["auc"], **tested(trees)["test"]}
        lines.append([*(four_digits(found[key]) for key in quality.values()), "gradient boosted trees"])
    return "\n".join("".join(f"{word:<11}" for word in line).rstrip() for line in lines)


def _observation(marks: Marks, threads: Mapping[str, int]) -> Observation:
    """Return the steady part of a run as one window, so that it is judged by the same rule as the tuner's own."""
    steps, samples, wall_s, wait_s = marks.steady()
    rate = 1.0 / wall_s if wall_s else 0.0
    return Observation(
        step=marks.steps,
        at_s=0.0,
        elapsed_s=wall_s,
        batches=steps,
        samples=samples,
        batches_per_s=steps * rate,
        samples_per_s=samples * rate,
        wait_frac=wait_s * rate,
        model_s=(wall_s - wait_s) / max(1, steps),
        stages=_stages(threads),
        rates={},
        resources=MachineProbe().read(),
        latency_s=wait_s / max(1, steps),
    )


def _stages(threads: Mapping[str, int]) -> tuple[Stage, ...]:
    return tuple(Stage(name, "cpu", "workers", n, n, n) for name, n in threads.items())


def untuned(config: Config, marks: Marks, threads: Mapping[str, int], steady: Side) -> dict[str, Any]:
    """Return the report of a run without the callback; its numbers are the stopwatch's."""
    summary = Report(
        mode="off",
        wall_s=marks.wall_s,
        steps=marks.steps,
        samples=marks.samples,
        stages=tuple(StageRow(**asdict(stage), first=stage.current) for stage in _stages(threads)),
        memory=Memory(soft_limit_frac=config.intune.memory_soft_limit),
        before=steady,
        after=steady,
    )
    return build_report(summary).to_json()
