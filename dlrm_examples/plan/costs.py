"""What a sharded DLRM needs: bytes per GPU, and bytes sent per step.

Memory of a table row: its weights, and the optimiser's state: one float32 for row-wise Adagrad, one per weight for
Adagrad, none for SGD (FBGEMM's split_table_batched_embeddings_ops, TorchRec's planner). The MLPs are on every GPU, with
gradients and the optimiser's state. What goes over the wire is held twice, as vectors and as gradients.

Traffic, for N GPUs and B samples a step in all, vectors of D float32, bytes one GPU sends:

=========================  ==========================================================================================
ids to the tables          8 B per id of its B / N samples
table-wise, forward        4 D B (N - 1) / N for each table it serves: the other GPUs' samples (all-to-all)
table-wise, backward       4 D B / N for each table another GPU serves: its own samples' gradients (all-to-all)
row-wise, forward          4 D B (N - 1) / N for each table: partial sums of the whole batch (reduce-scatter)
row-wise, backward         4 D B (N - 1) / N for each table: gradients (all-gather)
MLPs                       2 x 4 P (N - 1) / N for P weights (ring all-reduce; Patarasuk, Yuan 2009)
=========================  ==========================================================================================

The first five are those of TorchRec's table-wise and row-wise sharding (Ivchenko et al., RecSys 2022,
doi 10.1145/3523227.3547387; torchrec/distributed/sharding). A table in host memory is served by one GPU, which reads
each row it needs and writes it back: 2 rows per id.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dlrm_examples.models.sizes import DLRMConfig

__all__ = ["DTYPES", "OPTIMIZERS", "Job", "Machine", "Shard", "Table", "Traffic", "gpu_bytes", "host_bytes", "traffic"]

FLOAT_BYTES, ID_BYTES = 4, 8
DTYPES = {"fp32": 4, "fp16": 2}
OPTIMIZERS = ("sgd", "adagrad", "rowwise-adagrad")
# MLPerf's DLRM, facebookresearch/dlrm, bench/run_and_time.sh.
BOTTOM, TOP = (512, 256), (1024, 1024, 512, 256)


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding table.

    Args:
        name: what it is called in the plan.
        rows: its rows.
        bag: ids a sample has for it, on average.
    """

    name: str
    rows: int
    bag: int = 1


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to place tables on.

    Args:
        gpus: number of GPUs; they are taken to be equally far from each other.
        hbm_bytes: memory of each.
        host_bytes: host memory that GPUs can read, in all.
    """

    gpus: int
    hbm_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be trained.

    Args:
        tables: the tables.
        dim: width of the embeddings.
        dtype: of the tables' weights, one of `DTYPES`; what is sent, and the MLPs, are float32.
        optimizer: one of `OPTIMIZERS`.
        batch_size: samples per step, over all GPUs.
        reserve_frac: share of all memory that is left free, for activations, ids, the CUDA context and fragmentation;
            0.15 is the default of TorchRec's HeuristicalStorageReservation.
    """

    tables: tuple[Table, ...]
    dim: int = 128
    dtype: str = "fp32"
    optimizer: str = "rowwise-adagrad"
    batch_size: int = 65_536
    reserve_frac: float = 0.15

    @property
    def state_bytes(self) -> int:
        """Bytes of optimiser state per table row."""
        return {"sgd": 0, "adagrad": FLOAT_BYTES * self.dim, "rowwise-adagrad": FLOAT_BYTES}[self.optimizer]

    @property
    def row_bytes(self) -> int:
        """Bytes of one table row, with its state."""
        return self.dim * DTYPES[self.dtype] + self.state_bytes

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(table.rows for table in self.tables)

    @property
    def mlp_weights(self) -> int:
        """Weights of the two MLPs, whose hidden layers are those of MLPerf's DLRM."""
        sizes = DLRMConfig((1,) * len(self.tables), self.dim, bottom=(*BOTTOM, self.dim), top=(*TOP, 1))
        layers = (sizes.dense_features, *sizes.bottom), (sizes.interaction_width, *sizes.top)
        return sum((before + 1) * after for widths in layers for before, after in itertools.pairwise(widths))

    @property
    def mlp_bytes(self) -> int:
        """Bytes of the MLPs on each GPU: weights, gradients, state."""
        return FLOAT_BYTES * self.mlp_weights * (2 if self.optimizer == "sgd" else 3)

    def usable(self, size_bytes: int) -> int:
        """Return what is left of a memory after the reserve."""
        return int(size_bytes * (1.0 - self.reserve_frac))

    def buffer_bytes(self, served: int, gpus: int) -> int:
        """Return the bytes a GPU holds of what is sent, vectors and gradients.

        Args:
            served: tables the GPU has rows of, or reads from the host.
            gpus: number of GPUs.
        """
        return 2 * FLOAT_BYTES * self.dim * (served * self.batch_size + len(self.tables) * -(-self.batch_size // gpus))


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive rows of one table.

    Args:
        table: index of the table.
        gpu: the GPU that serves it.
        first_row: of the table.
        end_row: one past the last.
        kind: ``table-wise``: the whole table, ``row-wise``: a part of it, ``host``: the whole table in host memory.
    """

    table: int
    gpu: int
    first_row: int
    end_row: int
    kind: str

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.end_row - self.first_row


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes one GPU moves in a step.

    Args:
        embeddings: sent to other GPUs: ids, vectors, gradients of vectors.
        mlps: sent to other GPUs: gradients of the MLPs.
        host: read from host memory and written back.
    """

    embeddings: int
    mlps: int
    host: int


def gpu_bytes(job: Job, shards: Iterable[Shard], gpus: int) -> list[int]:
    """Return the memory used on each GPU, bytes, without the reserve."""
    rows, served = [0] * gpus, [0] * gpus
    for shard in shards:
        served[shard.gpu] += 1
        rows[shard.gpu] += 0 if shard.kind == "host" else shard.rows
    return [
        job.mlp_bytes + n * job.row_bytes + job.buffer_bytes(tables, gpus)
        for n, tables in zip(rows, served, strict=True)
    ]


def host_bytes(job: Job, shards: Iterable[Shard]) -> int:
    """Return the host memory used, bytes, without the reserve."""
    return job.row_bytes * sum(shard.rows for shard in shards if shard.kind == "host")


def traffic(job: Job, shards: Sequence[Shard], gpus: int) -> list[Traffic]:
    """Return what each GPU moves in a step."""
    vectors = FLOAT_BYTES * job.dim * job.batch_size
    others = (gpus - 1) / gpus
    ids = ID_BYTES * sum(table.bag for table in job.tables) * job.batch_size / gpus * others
    mlps = round(2 * FLOAT_BYTES * job.mlp_weights * others)
    split = {shard.table for shard in shards if shard.kind == "row-wise"}
    found = []
    for gpu in range(gpus):
        whole = [shard for shard in shards if shard.gpu == gpu and shard.kind != "row-wise"]
        elsewhere = len(job.tables) - len(split) - len(whole)
        forward = vectors * others * (len(whole) + len(split))
        backward = vectors * (elsewhere / gpus + others * len(split))
        looked_up = sum(job.tables[shard.table].bag for shard in whole if shard.kind == "host") * job.batch_size
        found.append(Traffic(round(ids + forward + backward), mlps, 2 * looked_up * job.row_bytes))
    return found
