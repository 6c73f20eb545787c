"""What the ranks of the hybrid tests do: functions of a module, as they run in processes of their own."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm_examples.models.dlrm_torch import DLRM, DLRMConfig
from dlrm_examples.models.schedule import Schedule

# So few steps, and of this seed: with more of them a rounding error flips a ReLU, and from there on two right trainings
# leave each other (200 steps: 1e-4 in the losses, 1e-2 in the weights; which CPUs do it differs). `alone` watches it.
BATCH, STEPS, SEED = 32, 40, 4
ROUNDING = 2e-6
TABLES = (1000, 500, 4001, 777, 64, 3)
SIZES = DLRMConfig(table_rows=TABLES, embedding_dim=16, bottom=(32, 16), top=(32, 1))
RATES = {"sgd": 0.3, "rowwise-adagrad": 0.01}
CONSTANT = Schedule()
EPS = 1e-6  # neither torch's default nor fbgemm's


def batch(step: int, tables: tuple[int, ...] = TABLES) -> tuple[Tensor, Tensor, Tensor]:
    """Return dense [B, 13], categories [B, T] int32 and labels [B] of one step of all ranks."""
    random = torch.Generator().manual_seed(step)
    dense = torch.rand(BATCH, 13, generator=random)
    ids = torch.stack([torch.randint(0, rows, (BATCH,), generator=random) for rows in tables], 1).int()
    return dense, ids, torch.randint(0, 2, (BATCH,), generator=random).float()


def near_a_kink(model: torch.nn.Module) -> list[float]:
    """Return a list that grows with each forward pass: how near each ReLU's input came to 0, where it has a kink."""
    found: list[float] = []

    def look(layer: Any, inputs: tuple[Tensor], output: Any) -> None:
        found.append(float(inputs[0].detach().abs().min()))

    for layer in model.modules():
        if isinstance(layer, torch.nn.ReLU):
            layer.register_forward_hook(look)
    return found


@functools.cache
def alone(
    config: DLRMConfig, optimizer: str, steps: int = STEPS, schedule: Schedule = CONSTANT
) -> tuple[list[float], list[Tensor], dict[str, Tensor]]:
    """Train `dlrm_torch.DLRM` in this process; return losses, tables and the other weights."""
    from dlrm_examples.models.optimizers_torch import optimizer_for

    model = DLRM(config, torch.Generator().manual_seed(SEED))
    tables = model.embeddings.weight
    rest = [weights for weights in model.parameters() if weights is not tables]
    update = optimizer_for(optimizer, [tables], rest, RATES[optimizer], EPS)
    losses, nearest = [], near_a_kink(model)
    for step in range(steps):
        dense, ids, labels = batch(step, config.table_rows)
        for group in update.param_groups:
            group["lr"] = schedule.rate(step, RATES[optimizer])
        update.zero_grad()
        loss = binary_cross_entropy_with_logits(model(dense, ids), labels)
        torch.autograd.backward(loss)
        update.step()
        losses.append(float(loss.detach()))
    assert min(nearest) > ROUNDING, "a rounding error can flip a ReLU: take fewer steps, or another seed"
    names = {name: value for name, value in model.state_dict().items() if not name.startswith("embeddings.")}
    return losses, [model.table(index) for index in range(len(config.table_rows))], names


def together(rank: int, *jobs: tuple[Any, ...]) -> list[Any]:
    """Do the jobs, each a function and its arguments, one after the other on all ranks; return what they return."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    try:
        return [function(*arguments) for function, *arguments in jobs]
    finally:
        distributed.destroy_process_group()


class Divided(NamedTuple):
    """What a divided training gave: as of `alone`, the shapes of each rank's parts of each table, the states."""

    losses: list[float]
    tables: list[Tensor]
    rest: dict[str, Tensor]
    shapes: list[list[tuple[int, ...]]]
    first: dict[str, Tensor]
    last: dict[str, Tensor]


def everything(parallel: Any, update: Any) -> dict[str, Tensor]:
    """Return all weights and all of the optimiser's numbers, each in one piece, on every rank."""
    parts: dict[str, Any] = dict(parallel.state_dict())
    for name, numbers in update.state_dict()["state"].items():
        parts |= {f"{name} {key}": value for key, value in numbers.items()}
    own: list[tuple[str, int, Tensor]] = []
    for name, value in parts.items():
        if hasattr(value, "local_shards"):
            own += [(name, shard.metadata.shard_offsets[0], shard.tensor.clone()) for shard in value.local_shards()]
        elif distributed.get_rank() == 0:
            own.append((name, 0, value.detach().clone()))
    ranks: list[list[tuple[str, int, Tensor]]] = [[]] * distributed.get_world_size()
    distributed.all_gather_object(ranks, own)
    found: dict[str, list[Tensor]] = {}
    for name, _, part in sorted(itertools.chain(*ranks), key=lambda held: held[:2]):
        found.setdefault(name, []).append(part)
    return {name: held[0] if len(held) == 1 else torch.cat(held) for name, held in found.items()}


def divided(
    config: DLRMConfig,
    optimizer: str,
    sharding: str,
    steps: tuple[int, int] = (0, STEPS),
    load: str | None = None,
    save: str | None = None,
    schedule: Schedule = CONSTANT,
) -> Divided:
    """Train the same in ranks."""
    from dlrm_examples.hybrid import checkpoint
    from dlrm_examples.hybrid.model import build, set_rate
    from dlrm_examples.hybrid.weights import gathered

    rank, world = distributed.get_rank(), distributed.get_world_size()
    parallel, update = build(
        config, batch_size=BATCH // world, optimizer=optimizer, learning_rate=RATES[optimizer], eps=EPS, seed=SEED,
        sharding=sharding,
    )  # fmt: skip
    state = {"model": parallel.state_dict(), "optimizer": update.state_dict()}
    if load is not None:
        assert checkpoint.load(load, state)["rank"] in (rank, 0)
        parallel.load_state_dict(state["model"])
        update.load_state_dict(state["optimizer"])
    first = everything(parallel, update)
    losses = []
    own = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    with warnings.catch_warnings(record=True) as warned:
        for step in range(*steps):
            dense, ids, labels = (part[own] for part in batch(step, config.table_rows))
            update.zero_grad()
            set_rate(parallel, update, schedule.rate(step, RATES[optimizer]))
            loss = binary_cross_entropy_with_logits(parallel(dense, ids), labels)
            torch.autograd.backward(loss)
            update.step()
            mean = loss.detach().clone()
            distributed.all_reduce(mean)
            losses.append(float(mean) / world)
    assert not warned, [str(warning.message) for warning in warned]
    if save is not None:
        state = {"model": parallel.state_dict(), "optimizer": update.state_dict()}
        checkpoint.save(save, state, {"rank": rank})
    shapes: list[Any] = [None] * world
    held = parallel.state_dict()
    local = [
        [tuple(shard.tensor.shape) for shard in held[f"embeddings.embedding_bags.t{table}.weight"].local_shards()]
        for table in range(len(config.table_rows))
    ]
    distributed.all_gather_object(shapes, local)
    tables, names = gathered(parallel)
    return Divided(losses, tables, names, shapes, first, everything(parallel, update))


def drawn(config: DLRMConfig) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the first weights, drawn a few rows at a time."""
    from dlrm_examples.hybrid import weights
    from dlrm_examples.hybrid.model import build

    weights.DRAWN_AT_ONCE = 100 * config.embedding_dim
    parallel, _ = build(config, batch_size=8, seed=SEED)
    return weights.gathered(parallel)


def misbuilt() -> list[str]:
    """Return the problems `build` finds."""
    from dlrm_examples.hybrid.model import build
    from intune_callbacks.errors import ConfigError

    try:
        build(
            replace(SIZES, embedding_dim=6, bottom=(6,)), batch_size=0, optimizer="rowwise-adagrad", sharding="diagonal"
        )
    except ConfigError as error:
        return list(error.problems)
    return []


def aborting_at_its_end(rank: int) -> int:
    """Return the rank; its interpreter aborts when it ends."""
    atexit.register(os.abort)
    return rank


def failing(rank: int, how: str) -> int:
    """Meet the others, then fail on rank 1 while they wait for it."""
    distributed.init_process_group("gloo")
    distributed.barrier()
    if rank == 1:
        if how == "raise":
            raise ValueError("no such luck")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stall":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.sigwait([signal.SIGUSR1])
    distributed.barrier()
    return rank


def pid_of_rank(rank: int, folder: str) -> None:
    """Leave this rank's process id in a file, and stay."""
    Path(folder, f"{rank}.partial").write_text(str(os.getpid()))
    Path(folder, f"{rank}.partial").rename(Path(folder, str(rank)))
    signal.sigwait([signal.SIGUSR1])
