"""How Criteo files are read: what the pipelines of all frameworks are asked for, as one value."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from dlrm_examples.criteo.blocks import Split
from dlrm_examples.criteo.formats import Reader, Ref, count_rows, epoch_order, parse, scan
from dlrm_examples.criteo.parse import KERNELS
from dlrm_examples.criteo.tsv import CATEGORIES, Rows
from intune_callbacks.config import choice_problem, nearest, number_problem
from intune_callbacks.errors import ConfigError

__all__ = ["Reading"]


@dataclass(frozen=True)
class Reading:
    """Which rows of which files, in which order, in batches of which size, by how many workers.

    Args:
        paths: the files, each with Criteo rows only: TSV, also as ``.gz`` or ``.zst``, ``.parquet``, ``.packed``, or
            arrays (``_dense.npy``, ``.bin``).
        batch_size: rows per batch.
        table_rows: rows of the embedding tables, one number for all or 26; the categories' moduli.
        split: ``train`` or ``test``.
        test_fraction: share of the rows held out for ``test``, 0..1.
        seed: decides the order of blocks and rows, and the split.
        shuffle: by default the training split is shuffled and the test split is not.
        drop_last: leave out a smaller last batch. By default in training only: one SGD step on a handful of rows,
            as large as any other, spoils the model it ends with.
        workers: stage -> its workers, threads or parallel calls; 1 where not given, 0 runs a stage inline.
        prefetch: batches kept ready.
        read_latency_ms: sleep this long for each block, to stand for a network file system.
        block_bytes: bytes of a file read at once; of Parquet always a row group, of a packed file a block.
        on_bad_row: ``error``, or ``skip``, which leaves malformed rows out and counts them.
        kernel: what parses text, ``numba`` or ``numpy``, with the same result; by default numba where it is installed.
        cache_dir: a folder on a local disk for blocks that were parsed: later epochs, other ranks and later runs read
            them from there, whatever their tables, split and batches. What is not there is parsed by ``read``.
    """

    paths: Iterable[str | os.PathLike[str]]
    batch_size: int
    _: KW_ONLY
    table_rows: int | Sequence[int] = 100_000
    split: str = "train"
    test_fraction: float = 0.1
    seed: int = 0
    shuffle: bool | None = None
    drop_last: bool | None = None
    workers: Mapping[str, int] = field(default_factory=dict)
    prefetch: int = 2
    read_latency_ms: float = 0.0
    block_bytes: int = 1 << 21
    on_bad_row: str = "error"
    kernel: str | None = None
    cache_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        # What is given may be a generator, of `Path.glob` for one.
        object.__setattr__(self, "paths", tuple(os.fspath(path) for path in self.paths))

    @property
    def files(self) -> tuple[str, ...]:
        """The paths as text."""
        return tuple(os.fspath(path) for path in self.paths)

    @property
    def moduli(self) -> tuple[int, ...]:
        """What each of the 26 categories is taken modulo of."""
        return (self.table_rows,) * CATEGORIES if isinstance(self.table_rows, int) else tuple(self.table_rows)

    @property
    def chosen(self) -> Split:
        """Which rows are read."""
        return Split(self.split, self.test_fraction, self.seed)

    @property
    def is_shuffled(self) -> bool:
        """Whether blocks and rows are shuffled."""
        return self.split == "train" if self.shuffle is None else self.shuffle

    @property
    def drops_last(self) -> bool:
        """Whether a smaller last batch is left out."""
        return self.split == "train" if self.drop_last is None else self.drop_last

    @property
    def latency_s(self) -> float:
        """What is added to the read of each block, seconds."""
        return self.read_latency_ms / 1e3

    def threads(self, stage: str) -> int:
        """Return the workers of a stage."""
        return self.workers.get(stage, 1)

    def reader(self) -> Reader:
        """Return what reads the references."""
        return Reader(None if self.cache_dir is None else os.fspath(self.cache_dir), self.kernel)

    def refs(self) -> list[Ref]:
        """Return what is read at once, in the order of the files."""
        return scan(self.files, self.block_bytes)

    def sample(self, rows: int) -> Rows:
        """Return rows of the split from the blocks that the first epoch begins with: at least so many, if there are.

        Args:
            rows: how many are enough.
        """
        refs, read, parts = self.refs(), self.reader(), list[Rows]()
        for index in epoch_order(refs, shuffle=self.is_shuffled, seed=self.seed, epoch=0):
            content = read(refs[index])
            parts.append(parse(content, self.moduli, on_bad_row=self.on_bad_row, split=self.chosen, kernel=self.kernel))
            if sum(map(len, parts)) >= rows:
                break
        return Rows.joined(parts)

    def batches(self, refs: Sequence[Ref]) -> int:
        """Return the batches of an epoch; text is read once for it.

        Args:
            refs: what `refs` gave.
        """
        rows = count_rows(refs, self.chosen, self.reader())
        return rows // self.batch_size if self.drops_last else -(-rows // self.batch_size)

    def check(self, stages: Sequence[str], *, autotune: bool = False, problems: Iterable[str] = ()) -> None:
        """Raise an error if a pipeline could not be built of this.

        Args:
            stages: the stages that have workers.
            autotune: whether `workers` and `prefetch` may be -1, which leaves them to the framework.
            problems: what else the pipeline cannot do.

        Raises:
            ConfigError: with all problems at once.
        """
        found = list(problems)
        found += [f"paths: {path} is not a file" for path in self.files if not os.path.isfile(path)]
        found += [] if self.files else ["paths: none given, expected one or more Criteo files"]
        found += number_problem("batch_size", self.batch_size, 1, 1 << 24)
        found += number_problem("test_fraction", self.test_fraction, 0.0, 1.0)
        found += number_problem("seed", self.seed, 0, (1 << 32) - 1)
        found += number_problem("prefetch", self.prefetch, -1 if autotune else 1, 4096)
        found += number_problem("read_latency_ms", self.read_latency_ms, 0.0, 60_000.0)
        found += number_problem("block_bytes", self.block_bytes, 1, 1 << 31)
        found += choice_problem("split", self.split, ("train", "test"))
        found += choice_problem("on_bad_row", self.on_bad_row, ("error", "skip"))
        found += choice_problem("kernel", self.kernel, KERNELS) if self.kernel is not None else ()
        for name, count in self.workers.items():
            found += number_problem(f"workers[{name!r}]", count, -1 if autotune else 0, 4096)
            found += [] if name in stages else [f"workers: there is no stage {name!r}{nearest(name, stages)}"]
        if len(self.moduli) != CATEGORIES:
            found.append(f"table_rows: {len(self.moduli)} numbers given, expected one or {CATEGORIES}")
        for rows in self.moduli:
            found += number_problem("table_rows", rows, 1, (1 << 31) - 1)
        if found:
            raise ConfigError(list(dict.fromkeys(found)))
