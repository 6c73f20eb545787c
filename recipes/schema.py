"""The typed sections of a recipe's configuration, and which of their values go together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrm_examples.criteo.tsv import CATEGORIES, hashed_table_rows
from dlrm_examples.models.hammock import HammockConfig
from dlrm_examples.models.schedule import Schedule
from dlrm_examples.models.sizes import INTERACTIONS, DLRMConfig
from dlrm_examples.models.tables import TABLES
from intune_callbacks.config import TunerConfig, choice_problem
from intune_callbacks.errors import ConfigError

__all__ = ["Config", "InTune", "Model", "Pipeline", "Trainer"]

FRAMEWORKS = ("lightning", "keras")
STYLES = ("blocks", "plain")
BAD = ("error", "skip")
STRATEGIES = ("auto", "hybrid")
NETWORKS = ("dlrm", "hammock")
OPTIMIZERS = ("sgd", "adagrad", "rowwise-adagrad")
HASHED = "hashed"


def limited(default: Any, low: float, high: float) -> Any:
    """Return a dataclass field that accepts the numbers low..high."""
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the rows are read; the numbers of workers and the prefetch depth are where the tuner starts.

    Args:
        block_bytes: bytes of text that are read, parsed and shuffled as one item; about 240 bytes make a row.
        read_workers: blocks read at once.
        parse_workers: blocks parsed at once.
        shuffle_workers: blocks shuffled at once.
        collate_workers: batches collated at once; there is no such stage in tf.data's ``blocks``.
        prefetch: batches kept ready.
        style: of a tf.data pipeline: ``blocks``, or ``plain``, which reads line by line as most people write it.
        on_bad_row: ``error``, or ``skip``, which leaves malformed rows out; the report counts them.
        cache_dir: a folder on a local disk for parsed blocks, which later epochs and runs read from there; not of
            tf.data's ``plain``. None for none.
    """

    block_bytes: int = limited(1 << 18, 1 << 10, 1 << 31)
    read_workers: int = limited(1, 1, 256)
    parse_workers: int = limited(1, 1, 256)
    shuffle_workers: int = limited(1, 1, 256)
    collate_workers: int = limited(1, 1, 256)
    prefetch: int = limited(2, 1, 4096)
    style: str = "blocks"
    on_bad_row: str = "error"
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        problems = [*choice_problem("style", self.style, STYLES), *choice_problem("on_bad_row", self.on_bad_row, BAD)]
        if self.on_bad_row == "skip" and self.style == "plain":
            problems.append("on_bad_row='skip': style='plain' does not count what it leaves out; use style='blocks'")
        if self.cache_dir is not None and self.style == "plain":
            problems.append(f"cache_dir={self.cache_dir}: style='plain' reads no blocks; use style='blocks'")
        _raise(problems)


@dataclass(frozen=True, slots=True)
class Model:
    """The network; the defaults are Meta's Kaggle setting (bench/dlrm_s_criteo_kaggle.sh, facebookresearch/dlrm).

    Args:
        network: ``dlrm``, or ``hammock``, two layers over one-hot inputs, which has of what follows `tables`,
            `max_table_rows`, `buckets` and `hidden`.
        embedding_dim: width of every embedding and of the bottom MLP's output.
        bottom_mlp: hidden widths between the 13 dense features and `embedding_dim`.
        top_mlp: hidden widths between the interaction and the click logit.
        tables: rows of the 26 tables: a name of `models.tables`, or ``hashed``, ten times as many as the Kaggle data's.
        max_table_rows: most rows of one embedding table; category ids are taken modulo the table's rows.
        interaction: ``dot``, or ``dcn``, DLRM-DCNv2's low-rank cross layers.
        dcn_layers: cross layers of ``dcn``.
        dcn_low_rank: rank of each cross layer of ``dcn``.
        bag_sizes: ids per table, 26 numbers: each id of the data becomes a bag of so many, as in MLPerf's synthetic
            multi-hot data; None leaves one id per table.
        buckets: of ``hammock``: values each number is cut into, at quantiles of the training rows.
        hidden: of ``hammock``: width of the layer between the two.
    """

    network: str = "dlrm"
    embedding_dim: int = limited(16, 1, 4096)
    bottom_mlp: tuple[int, ...] = (512, 256, 64)
    top_mlp: tuple[int, ...] = (512, 256)
    tables: str = HASHED
    max_table_rows: int = limited(100_000, 2, 2**31 - 1)
    interaction: str = "dot"
    dcn_layers: int = limited(3, 1, 64)
    dcn_low_rank: int = limited(512, 1, 65_536)
    bag_sizes: tuple[int, ...] | None = None
    buckets: int = limited(32, 2, 65_536)
    hidden: int = limited(32, 1, 65_536)

    def __post_init__(self) -> None:
        problems = [*choice_problem("network", self.network, NETWORKS)]
        problems += [*choice_problem("tables", self.tables, (HASHED, *TABLES))]
        problems += choice_problem("interaction", self.interaction, INTERACTIONS)
        if self.bag_sizes is not None and len(self.bag_sizes) != CATEGORIES:
            problems.append(f"bag_sizes: {len(self.bag_sizes)} numbers given, expected {CATEGORIES}, one per table")
        _raise(problems)

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of the 26 tables, which are also the moduli of the category ids."""
        if self.tables == HASHED:
            return hashed_table_rows(self.max_table_rows)
        return tuple(min(rows, self.max_table_rows) for rows in TABLES[self.tables])

    @property
    def sizes(self) -> DLRMConfig:
        """The sizes of a DLRM."""
        return DLRMConfig(
            table_rows=self.table_rows,
            embedding_dim=self.embedding_dim,
            bottom=(*self.bottom_mlp, self.embedding_dim),
            top=(*self.top_mlp, 1),
            interaction=self.interaction,
            dcn_layers=self.dcn_layers,
            dcn_low_rank=self.dcn_low_rank,
            bag_sizes=self.bag_sizes,
        )

    @property
    def hammock(self) -> HammockConfig:
        """The sizes of a Hammock."""
        return HammockConfig(self.table_rows, self.buckets, self.hidden)

    @property
    def weights_per_row(self) -> int:
        """Width of the tables."""
        return self.hidden if self.network == "hammock" else self.embedding_dim


@dataclass(frozen=True, slots=True)
class Trainer:
    """What the Lightning Trainer, or Keras's `fit`, gets.

    The learning rate rises and falls as in Meta's LRPolicyScheduler (dlrm_s_pytorch.py); see `models.schedule`.

    Args:
        max_epochs: passes over the training rows.
        max_steps: stop after this many steps; -1 for no limit.
        learning_rate: of the optimiser, after the warm-up and before the decay.
        optimizer: ``sgd``, ``adagrad``, or ``rowwise-adagrad``: Adagrad with one number of state per table row.
        eps: added to the root in both kinds of Adagrad.
        warmup_steps: steps of linear warm-up; 0 for none.
        decay_start_step: first step of the quadratic decay.
        decay_steps: length of the decay; 0 for none.
        devices: ranks, each with a device of its own.
        strategy: ``auto``: one device; ``hybrid``: tables sharded over the devices, MLPs replicated; needs TorchRec.
        accelerator: Lightning's name of the device; Keras takes the GPU if there is one.
        cpu_threads: CPUs one operation of the model may use; None leaves it to the framework, which takes all of them,
            also those that feed it. TensorFlow takes it once in a process, before its first operation.
    """

    max_epochs: int = limited(1, 1, 1_000_000)
    max_steps: int = limited(-1, -1, 2**62)
    learning_rate: float = limited(0.1, 0.0, 1000.0)
    optimizer: str = "sgd"
    eps: float = limited(1e-8, 0.0, 1.0)
    warmup_steps: int = limited(0, 0, 2**62)
    decay_start_step: int = limited(0, 0, 2**62)
    decay_steps: int = limited(0, 0, 2**62)
    devices: int = limited(1, 1, 65_536)
    strategy: str = "auto"
    accelerator: str = "auto"
    cpu_threads: int | None = limited(None, 1, 4096)

    def __post_init__(self) -> None:
        problems = [*choice_problem("optimizer", self.optimizer, OPTIMIZERS)]
        problems += choice_problem("strategy", self.strategy, STRATEGIES)
        if self.devices > 1 and self.strategy == "auto":
            problems.append(f"devices={self.devices}: strategy=auto trains on one device; expected strategy=hybrid")
        if self.decay_steps and self.decay_start_step < self.warmup_steps:
            problems.append(
                f"decay_start_step={self.decay_start_step}: expected warmup_steps={self.warmup_steps} or later; "
                "the warm-up must end before the decay begins"
            )
        if self.decay_start_step and not self.decay_steps:
            problems.append(f"decay_start_step={self.decay_start_step}: there is no decay without decay_steps")
        _raise(problems)

    @property
    def schedule(self) -> Schedule:
        """The schedule of the learning rate."""
        return Schedule(self.warmup_steps, self.decay_start_step, self.decay_steps)


@dataclass(frozen=True, slots=True)
class InTune(TunerConfig):
    """How the callback tunes, and where it starts.

    Args:
        warm_start: `run_dir` of an earlier run, or the path of its ``found.yaml``, to start from; None starts anew.
    """

    warm_start: str | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """One run of a recipe.

    Args:
        framework: ``lightning`` or ``keras``; Keras's backend is the one ``KERAS_BACKEND`` names.
        seed: of the generated rows, the split, the order of the rows and the model's first weights.
        data: a Criteo file, of any format in `docs/criteo.md`, or a directory of them; None generates `rows` rows.
        rows: generated rows; not used when `data` is given.
        batch_size: samples per step, over all devices.
        test_frac: share of the rows held out for the AUC, 0..1, drawn at random.
        read_latency_ms: added to the read of every block, to emulate a network file system.
        gbdt: at the end fit gradient boosted trees to the same rows, a million at most, and print what they reach;
            needs the extra ``gbdt``.
        run_dir: where report.json, history.jsonl and found.yaml are written.
        pipeline: how the rows are read.
        model: the network.
        trainer: what the Trainer or `fit` gets.
        intune: how the tuner behaves.
    """

    framework: str = "lightning"
    seed: int = limited(1, 0, 2**31 - 1)
    data: Path | None = None
    rows: int = limited(100_000, 1_000, 10**10)
    batch_size: int = limited(128, 1, 10_000_000)
    test_frac: float = limited(0.1, 0.001, 0.9)
    read_latency_ms: float = limited(0.0, 0.0, 60_000.0)
    gbdt: bool = False
    run_dir: Path = Path("runs/dlrm-lightning")
    pipeline: Pipeline = field(default_factory=Pipeline)
    model: Model = field(default_factory=Model)
    trainer: Trainer = field(default_factory=Trainer)
    intune: InTune = field(default_factory=InTune)

    def __post_init__(self) -> None:
        trainer = self.trainer
        problems = [*choice_problem("framework", self.framework, FRAMEWORKS)]
        if self.batch_size % trainer.devices:
            problems.append(
                f"batch_size={self.batch_size}: expected a multiple of trainer.devices={trainer.devices}; "
                "every device gets the same number of samples"
            )
        if self.framework == "keras" and trainer.strategy == "auto" and trainer.optimizer == "rowwise-adagrad":
            problems.append(
                "trainer.optimizer=rowwise-adagrad: Keras has no such optimiser; expected adagrad or sgd, "
                "framework=lightning, or trainer.strategy=hybrid"
            )
        if trainer.strategy == "hybrid" and self.model.network != "dlrm":
            problems.append(
                f"model.network={self.model.network}: trainer.strategy=hybrid divides the tables of a DLRM; expected "
                "network=dlrm, or strategy=auto"
            )
        if trainer.strategy == "hybrid" and self.pipeline.on_bad_row == "skip":
            problems.append("pipeline.on_bad_row=skip: ranks that share batches cannot leave rows out; expected error")
        _raise(problems)


def _raise(problems: Iterable[str]) -> None:
    found = list(problems)
    if found:
        raise ConfigError(found)
