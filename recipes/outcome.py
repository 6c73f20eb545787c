"""What every runner shares: the files, the sizes, the step marks, the results, the report of an untuned run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dlrm_examples.criteo.tsv import hashed_table_rows
from dlrm_examples.generate import generate
from dlrm_examples.models.schedule import Schedule
from dlrm_examples.models.sizes import DLRMConfig
from dlrm_examples.models.tables import TABLES
from intune_callbacks.errors import ConfigError
from intune_callbacks.measure.resources import MachineProbe
from intune_callbacks.record.before_after import describe
from intune_callbacks.record.report import build_report
from intune_callbacks.types import Observation, Stage
from intune_callbacks.words import amount, four_digits, number
from recipes.config import Config
from recipes.sections import HASHED

__all__ = [
    "Marks",
    "Outcome",
    "callback_options",
    "files",
    "observed",
    "reading",
    "result_table",
    "schedule",
    "sizes",
    "table_rows",
    "tested",
    "untuned",
    "workers",
]

SHARDS = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a training run gave.

    Args:
        report: as in report.json.
        losses: training loss of each step.
        steady: the second half of the steps as the probe saw it, in the form of the report's ``after``.
    """

    report: dict[str, Any]
    losses: list[float]
    steady: dict[str, Any]


class Marks:
    """The moments at which steps ended: the same for a tuned and an untuned run, and independent of the tuner."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []
        self._samples: list[int] = []

    def mark(self, at_s: float, wait_s: float, samples: int) -> None:
        """Note the end of a step.

        Args:
            at_s: wall clock, seconds.
            wait_s: seconds waited for data since the start.
            samples: samples of the step.
        """
        self._marks.append((at_s, wait_s))
        self._samples.append(samples)

    @property
    def steps(self) -> int:
        """Steps so far."""
        return len(self._marks)

    @property
    def samples(self) -> int:
        """Samples so far."""
        return sum(self._samples)

    @property
    def wall_s(self) -> float:
        """Seconds from the end of the first step to the end of the last one."""
        return self._marks[-1][0] - self._marks[0][0] if self._marks else 0.0

    def steady(self) -> tuple[int, int, float, float]:
        """Return steps, samples, wall seconds and data wait seconds of the second half of the steps.

        The first half is the time to start up and, for a tuned run, to find its allocation.
        """
        first = self.steps // 2
        if first < 1:
            return 0, 0, 0.0, 0.0
        (begin_s, begin_wait_s), (end_s, end_wait_s) = self._marks[first - 1], self._marks[-1]
        return self.steps - first, sum(self._samples[first:]), end_s - begin_s, end_wait_s - begin_wait_s


def files(config: Config) -> list[Path]:
    """Return the Criteo files to read; without `data`, generate them beside the run directory.

    Raises:
        ConfigError: the directory holds no file.
    """
    if config.data is None:
        folder = config.run_dir.parent / "data" / f"{config.rows}-rows-seed-{config.seed}"
        return generate(folder, rows=config.rows, shards=SHARDS, seed=config.seed)
    if config.data.is_file():
        return [config.data]
    found = sorted(f for f in config.data.iterdir() if f.is_file() and f.suffix != ".json" and f.name[0] != ".")
    if not found:
        raise ConfigError(
            [f"data={config.data}: the directory holds no file; give Criteo files (TSV, .gz, .zst, .parquet)"]
        )
    return found


def reading(config: Config, split: str) -> dict[str, Any]:
    """Return the arguments every reader of the files takes: how rows are split, ordered and read."""
    return {
        "table_rows": table_rows(config),
        "split": split,
        "test_fraction": config.test_frac,
        "seed": config.seed,
        "prefetch": config.pipeline.prefetch,
        "read_latency_ms": config.read_latency_ms if split == "train" else 0.0,
        "block_bytes": config.pipeline.block_bytes,
    }


def callback_options(config: Config, mode: str) -> dict[str, Any]:
    """Return the arguments of `InTuneCallback`; the card is the runner's to print."""
    given = {field.name: getattr(config.intune, field.name) for field in fields(config.intune)}
    return given | {"mode": mode, "run_dir": str(config.run_dir), "show_card": False}


def sizes(config: Config) -> DLRMConfig:
    """Return the sizes of the model."""
    model = config.model
    return DLRMConfig(
        table_rows=table_rows(config),
        embedding_dim=model.embedding_dim,
        bottom=(*model.bottom_mlp, model.embedding_dim),
        top=(*model.top_mlp, 1),
        interaction=model.interaction,
        dcn_layers=model.dcn_layers,
        dcn_low_rank=model.dcn_low_rank,
        bag_sizes=model.bag_sizes,
    )


def table_rows(config: Config) -> tuple[int, ...]:
    """Return the rows of the 26 tables, which are also the moduli of the category ids."""
    limit = config.model.max_table_rows
    if config.model.tables == HASHED:
        return hashed_table_rows(limit)
    return tuple(min(rows, limit) for rows in TABLES[config.model.tables])


def schedule(config: Config) -> Schedule:
    """Return the schedule of the learning rate."""
    trainer = config.trainer
    return Schedule(trainer.warmup_steps, trainer.decay_start_step, trainer.decay_steps)


def workers(config: Config, stages: Iterable[str]) -> dict[str, int]:
    """Return the workers each of the stages starts with."""
    return {stage: getattr(config.pipeline, f"{stage}_workers") for stage in stages}


def observed(marks: Marks, threads: dict[str, int]) -> dict[str, Any]:
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


def result_table(outcome: Outcome) -> str:
    """Return what a run gave as a table of two lines: quality on the held-out rows, speed over the last half."""
    test = {"auc": outcome.report["auc"], **outcome.report.get("test", {})}
    quality = {"AUC": "auc", "accuracy": "accuracy", "log loss": "log_loss"}
    cells = {title: four_digits(test[key]) for title, key in quality.items() if key in test}
    cells["samples/s"] = amount(outcome.steady["throughput_samples_per_s"])
    cells["data wait"] = f"{outcome.steady['wait_frac']:.1%}"
    return "\n".join("".join(f"{word:<11}" for word in line).rstrip() for line in (cells, cells.values()))


def _observation(marks: Marks, threads: dict[str, int]) -> Observation:
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


def _stages(threads: dict[str, int]) -> tuple[Stage, ...]:
    return tuple(Stage(name, "cpu", "workers", n, n, n) for name, n in threads.items())


def untuned(config: Config, marks: Marks, threads: dict[str, int], steady: dict[str, Any]) -> dict[str, Any]:
    """Return the report of a run without the callback; its numbers are the probe's."""
    summary = {
        "mode": "off",
        "policy": None,
        "frozen": None,
        "changes": 0,
        "settled_after_s": None,
        "wall_s": marks.wall_s,
        "steps": marks.steps,
        "samples": marks.samples,
        "stages": [asdict(stage) | {"first": stage.current} for stage in _stages(threads)],
        "memory_soft_limit": config.intune.memory_soft_limit,
        "before": steady,
        "after": steady,
        "decisions": [],
    }
    return build_report(summary)
