"""Which rank this is, and what the ranks of a run tell each other at its end: who kept the others waiting for data."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from intune_callbacks.record.report import Report
from intune_callbacks.words import amount, quantity

__all__ = ["compare", "exchange", "place"]

# A choice: the ranks end together, but for the time their last validation takes.
WAIT_S = 5.0
# Share of a step by which one rank waits longer than the others. A choice: less is within the noise.
NOTABLE_FRAC = 0.05

_exchanges = itertools.count()


def exchange(report: Report, rank: int, world: int, wait_s: float = WAIT_S) -> dict[str, Any] | None:
    """Give this rank's figures to the others; at rank 0, return the comparison of all ranks.

    By the key-value store of torch's process group: no collective, so a rank that is missing costs `wait_s`, once.

    Args:
        wait_s: most seconds rank 0 waits for the others.

    Returns:
        None on other ranks, without a process group or its store, and if not all ranks have told theirs in time.
    """
    distributed = sys.modules.get("torch.distributed")
    if world < 2 or distributed is None or not distributed.is_initialized():
        return None
    store_of = getattr(distributed.distributed_c10d, "_get_default_store", None)
    if store_of is None:
        return None
    store = store_of()
    number = next(_exchanges)
    keys = [f"intune_callbacks/{number}/{other}" for other in range(world)]
    store.set(keys[rank], json.dumps(_figures(report)))
    if rank:
        return None
    try:
        store.wait(keys, datetime.timedelta(seconds=wait_s))
    except RuntimeError:
        return None
    return compare([json.loads(store.get(key)) for key in keys])


def _figures(report: Report) -> dict[str, float | None]:
    wait_frac, model_s = report.after.wait_frac, report.after.model_s
    if wait_frac is None or model_s is None or wait_frac >= 1.0:
        return {"wait_s": None, "model_s": None}
    return {"wait_s": model_s * wait_frac / (1.0 - wait_frac), "model_s": model_s}


def compare(ranks: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Return who keeps the others waiting.

    All ranks make a step together, so the others' wait for a late batch is hidden in their model time; the rank whose
    own data wait is longest is the one they wait for.

    Args:
        ranks: by rank, ``wait_s`` and ``model_s``: seconds of a step waiting for data, and in the model; None while
            nothing was measured.

    Returns:
        ``wait_s`` and ``model_s`` by rank, ``straggler``, a rank or None, and ``line``, a sentence.
    """
    waits, models = [rank["wait_s"] for rank in ranks], [rank["model_s"] for rank in ranks]
    found: dict[str, Any] = {"wait_s": waits, "model_s": models, "straggler": None}
    pairs = zip(waits, models, strict=True)
    known = [(wait_s, wait_s + model_s) for wait_s, model_s in pairs if wait_s is not None and model_s is not None]
    if len(known) < len(ranks):
        return found | {"line": "not every rank trained long enough to be measured"}
    worst = max(range(len(ranks)), key=lambda rank: known[rank][0])
    longest_s = known[worst][0]
    others_s = median(wait_s for rank, (wait_s, _) in enumerate(known) if rank != worst)
    if longest_s - others_s <= NOTABLE_FRAC * median(step_s for _, step_s in known):
        most = quantity(longest_s, "ms")
        return found | {"line": f"level: each waits {amount(others_s * 1e3)} to {most} a step for data"}
    return found | {
        "straggler": worst,
        "line": f"rank {worst} keeps the others waiting: {quantity(longest_s, 'ms')} a step for its data, "
        f"theirs {quantity(others_s, 'ms')}",
    }


def place() -> tuple[int, int, int]:
    """Return (rank, world, ranks that share this node's CPUs): as JAX, the launcher or torch's process group tells."""
    jax = sys.modules.get("jax")
    joined = getattr(getattr(jax, "distributed", None), "is_initialized", None)
    if jax is not None and joined is not None and joined():
        return jax.process_index(), jax.process_count(), 1
    rank, world = _told("RANK"), _told("WORLD_SIZE")
    distributed = sys.modules.get("torch.distributed")
    is_half_told = rank is None or world is None  # Lightning Fabric tells the processes it starts the world alone
    if is_half_told and distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, world = distributed.get_rank(), distributed.get_world_size()
    return rank or 0, world or 1, _local_ranks(world or 1)


def _local_ranks(world: int) -> int:
    """Return how many ranks share the CPUs this process may use: torchrun, Ray Train, Open MPI and MPICH tell it.

    Under SLURM a task that is bound to CPUs sees only its own. Where nobody tells, all ranks are on this node, or as
    many as it has GPUs.
    """
    if world == 1:
        return 1
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        told = _told(name)
        if told:
            return told
    if "SLURM_PROCID" in os.environ:
        is_bound = "mask_cpu" in os.environ.get("SLURM_CPU_BIND", "")  # https://slurm.schedmd.com/srun.html
        return 1 if is_bound else _told("SLURM_TASKS_PER_NODE") or world
    torch = sys.modules.get("torch")
    gpus = torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0
    return min(world, gpus or world)


def _told(variable: str) -> int | None:
    """Return the number an environment variable begins with, as in SLURM's ``4(x2)``."""
    found = re.match(r"\d+", os.environ.get(variable, ""))
    return int(found[0]) if found else None
