"""What would make a plan fit: single changes, each of them tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from dlrm_examples.plan.costs import DTYPES, Job, Machine

__all__ = ["remedies"]

MOST_GPUS = 1024
MOST_HOST_GIB = 1 << 14


def remedies(job: Job, machine: Machine, fits: Callable[[Job, Machine], bool]) -> Iterator[tuple[str, str]]:
    """Yield each change that makes it fit, as words of `intune plan`, and what they mean.

    Args:
        job: what does not fit.
        machine: what on.
        fits: tells whether a job fits on a machine.
    """

    def capped(rows: int) -> Job:
        return replace(job, tables=tuple(replace(table, rows=min(table.rows, rows)) for table in job.tables))

    gpus = _smallest(lambda n: fits(job, replace(machine, gpus=n)), machine.gpus + 1, MOST_GPUS)
    if gpus is not None:
        yield f"--gpus {gpus}", "more GPUs of this size"
    if DTYPES[job.dtype] > DTYPES["fp16"] and fits(replace(job, dtype="fp16"), machine):
        yield "--dtype fp16", "tables of half the size"
    if job.optimizer == "adagrad" and fits(replace(job, optimizer="rowwise-adagrad"), machine):
        yield "--optimizer rowwise-adagrad", "one number of state per row"
    now_gib = machine.host_bytes >> 30
    host_gib = _smallest(lambda n: fits(job, replace(machine, host_bytes=n << 30)), now_gib + 1, MOST_HOST_GIB)
    if host_gib is not None:
        yield f"--host {host_gib}GiB", "tables in host memory: slower"
    batch = _smallest(lambda n: fits(replace(job, batch_size=-n), machine), 1 - job.batch_size, -1)
    if batch is not None:
        yield f"--batch {-batch}", "smaller buffers"
    # The largest cap that fits, as the smallest negative number.
    cap = _smallest(lambda n: fits(capped(-n), machine), 1 - max(table.rows for table in job.tables), -1)
    if cap is not None:
        unit = 10 ** max(0, len(str(-cap)) - 2)
        yield f"--max-rows {-cap // unit * unit}", "category ids modulo so many rows"


def _smallest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the smallest number of low..high that fits; if one does, all larger ones are taken to."""
    if low > high:
        return None
    # In growing steps: a plan for a thousand GPUs takes a hundred times as long as one for ten.
    at, step = low, 1
    while not fits(at):
        if at == high:
            return None
        low, at, step = at + 1, min(at + step, high), 2 * step
    while low < at:
        middle = (low + at) // 2
        low, at = (low, middle) if fits(middle) else (middle + 1, at)
    return low
