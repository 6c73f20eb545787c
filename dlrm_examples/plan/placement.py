"""Which GPU holds which embedding table, decided on paper: no GPU, no torch.

The fewest tables are cut by rows that level the GPUs. If the tables are too large for the GPUs, those go to host memory
that cost the fewest reads there. What is needed, and what it costs, is in `costs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlrm_examples.plan.costs import Job, Machine, Shard, Traffic, gpu_bytes, host_bytes, traffic
from dlrm_examples.plan.remedies import remedies
from intune_callbacks.errors import ConfigError

__all__ = ["DoesNotFit", "Plan", "make_plan"]

# GPUs count as level if none holds more than this share of its usable memory above the mean.
LEVEL_FRAC = 0.05
SEARCH_NODES = 10_000
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every row of every table is.

    Args:
        job: what is to be trained.
        machine: what on.
        shards: every row of every table once, by table, then by first row.
    """

    job: Job
    machine: Machine
    shards: tuple[Shard, ...]

    @property
    def gpu_bytes(self) -> list[int]:
        """Memory used on each GPU, without the reserve."""
        return gpu_bytes(self.job, self.shards, self.machine.gpus)

    @property
    def host_bytes(self) -> int:
        """Host memory used, without the reserve."""
        return host_bytes(self.job, self.shards)

    @property
    def imbalance(self) -> float:
        """Memory used on the fullest GPU, over the mean; 1 is level."""
        used = self.gpu_bytes
        return max(used) * len(used) / sum(used)

    @property
    def traffic(self) -> list[Traffic]:
        """What each GPU moves in a step."""
        return traffic(self.job, self.shards, self.machine.gpus)

    def of_table(self, index: int) -> list[Shard]:
        """Return the shards of one table."""
        return [shard for shard in self.shards if shard.table == index]


class DoesNotFit(ConfigError):
    """There is no plan.

    Args:
        needed_bytes: memory that tables, state, MLPs and buffers take.
        usable_bytes: memory of GPUs and host after the reserve.
        cures: changes that make it fit, as words of the command line -> what they stand for.
    """

    def __init__(self, needed_bytes: int, usable_bytes: int, cures: dict[str, str]) -> None:
        self.needed_bytes, self.usable_bytes, self.cures = needed_bytes, usable_bytes, cures
        needed, usable = needed_bytes / GIB, usable_bytes / GIB
        problem = f"the model needs {needed:.1f} GiB and {usable:.1f} GiB are usable: "
        if needed > usable:
            problem += f"{needed - usable:.1f} GiB too much"
        else:
            problem += "enough in all, but a table in host memory stays whole, and each GPU must hold the MLPs"
        words = "\n".join(f"      {change:<28}{meaning}" for change, meaning in cures.items())
        super().__init__(
            [f"{problem}; what would fit:\n{words}" if cures else f"{problem}; no one change was found to fit"]
        )


def make_plan(job: Job, machine: Machine) -> Plan:
    """Place every table.

    Raises:
        DoesNotFit: says by how much, and which changes would make it fit.
    """
    found = _plan(job, machine)
    if found is None:
        gpus, tables = machine.gpus, len(job.tables)
        buffers = gpus * job.buffer_bytes(0, gpus) + tables * (job.buffer_bytes(1, gpus) - job.buffer_bytes(0, gpus))
        needed = job.rows * job.row_bytes + gpus * job.mlp_bytes + buffers
        usable = gpus * job.usable(machine.hbm_bytes) + job.usable(machine.host_bytes)
        raise DoesNotFit(needed, usable, dict(remedies(job, machine, lambda *changed: _plan(*changed) is not None)))
    return found


def _plan(job: Job, machine: Machine) -> Plan | None:
    tables = len(job.tables)
    # With every table cut by rows all fit that can, but then each GPU holds a buffer for each table.
    for served in (-(-tables // machine.gpus), tables):
        hosted = _hosted(job, machine, served)
        shards = None if hosted is None else _level(job, machine, hosted)
        if shards is not None:
            return Plan(job, machine, tuple(sorted(shards, key=lambda shard: (shard.table, shard.first_row))))
    return None


def _hosted(job: Job, machine: Machine, served: int) -> list[int] | None:
    """Return the tables to keep in host memory: of all choices that leave the GPUs room, the fewest reads per sample.

    A depth-first search with the fractional knapsack as its bound. It is cut off after `SEARCH_NODES`, which only
    lists of many unlike tables reach.

    Args:
        job, machine: as for `make_plan`.
        served: tables each GPU gets a buffer for.
    """
    gpus, tables = machine.gpus, job.tables
    room = job.usable(machine.hbm_bytes) - job.mlp_bytes - job.buffer_bytes(served, gpus)
    # What a table frees on every GPU when all of them share it.
    share = [-(-table.rows // gpus) * job.row_bytes for table in tables]
    order = sorted(range(len(tables)), key=lambda t: (-share[t] / tables[t].bag, t))
    capacity = job.usable(machine.host_bytes)
    best: tuple[int, int, tuple[int, ...]] | None = None
    start: tuple[int, int, int, int, tuple[int, ...]] = (0, sum(share) - room, 0, 0, ())
    stack = [start] if room >= 0 else []
    nodes = 0
    while stack and nodes < SEARCH_NODES:
        nodes += 1
        at, missing, used, reads, chosen = stack.pop()
        if missing <= 0:
            best = min(best or (reads, used, chosen), (reads, used, chosen))
            continue
        least = reads + _fewest_reads(missing, [(share[t], tables[t].bag) for t in order[at:]])
        if least == math.inf or (best is not None and least > best[0]):
            continue
        table = order[at]
        stack.append((at + 1, missing, used, reads, chosen))
        with_it = used + tables[table].rows * job.row_bytes
        if with_it <= capacity:
            stack.append((at + 1, missing - share[table], with_it, reads + tables[table].bag, (*chosen, table)))
    return None if best is None else list(best[2])


def _fewest_reads(missing: int, left: Sequence[tuple[int, int]]) -> float:
    """Return a lower bound of the reads that free `missing` bytes, of tables (bytes, reads) by falling ratio."""
    reads = 0.0
    for size, bag in left:
        if size >= missing:
            return math.ceil(reads + bag * missing / size - 1e-9)
        missing, reads = missing - size, reads + bag
    return math.inf


def _level(job: Job, machine: Machine, hosted: Sequence[int]) -> list[Shard] | None:
    """Return the shards with the fewest tables cut by rows that level the GPUs; else the most level ones that fit."""
    usable = job.usable(machine.hbm_bytes)
    kept = sorted(set(range(len(job.tables))) - set(hosted), key=lambda t: (-job.tables[t].rows, t))
    best: tuple[int, list[Shard]] | None = None
    for cut in range(len(kept) + 1 if machine.gpus > 1 else 1):
        shards = _place(job, machine.gpus, hosted, kept[:cut], kept[cut:])
        used = gpu_bytes(job, shards, machine.gpus)
        fullest = max(used)
        if fullest > usable:
            continue
        if fullest - sum(used) / len(used) <= LEVEL_FRAC * usable:
            return shards
        if best is None or fullest < best[0]:
            best = fullest, shards
    return None if best is None else best[1]


def _place(job: Job, gpus: int, hosted: Sequence[int], cut: Sequence[int], whole: Sequence[int]) -> list[Shard]:
    """Return shards: `cut` in equal blocks of rows on all GPUs, the others each on one.

    Of the GPUs that stay level, the one that serves the fewest tables takes the next; if none does, the emptiest.
    """
    shards = [shard for table in cut for shard in _blocks(table, job.tables[table].rows, gpus)]
    rows, serves = [0] * gpus, [0] * gpus
    for shard in shards:
        rows[shard.gpu] += shard.rows
    level = (sum(rows) + sum(job.tables[table].rows for table in whole)) / gpus
    for table in whole:
        size = job.tables[table].rows
        gpu = min(range(gpus), key=lambda g: (max(0.0, rows[g] + size - level), serves[g], rows[g], g))
        rows[gpu] += size
        serves[gpu] += 1
        shards.append(Shard(table, gpu, 0, size, "table-wise"))
    for table in hosted:
        gpu = min(range(gpus), key=lambda g: (serves[g], rows[g], g))
        serves[gpu] += 1
        shards.append(Shard(table, gpu, 0, job.tables[table].rows, "host"))
    return shards


def _blocks(table: int, rows: int, gpus: int) -> Iterator[Shard]:
    """Yield blocks of ceil(rows / gpus) rows, as TorchRec's row-wise sharding cuts them; the last may be smaller."""
    block = -(-rows // gpus)
    for gpu, first in enumerate(range(0, rows, block)):
        yield Shard(table, gpu, first, min(first + block, rows), "row-wise")
