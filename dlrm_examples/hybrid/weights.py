"""The weights of a divided model: drawn as `dlrm_torch.DLRM` draws them, and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from dlrm_examples.models.sizes import DLRMConfig

__all__ = ["fill", "gathered", "set_tables"]

DRAWN_AT_ONCE = 1 << 22


@torch.no_grad()
def fill(parallel: Any, generator: torch.Generator) -> None:
    """Draw the tables as `dlrm_torch.DLRM` does; every rank draws all rows, a few at a time, and keeps its own.

    Args:
        parallel: the model `model.build` returns.
        generator: where the MLPs' weights were drawn from, just before.
    """
    config: DLRMConfig = parallel.module.config
    shards = _shards(parallel)
    at_once = max(1, DRAWN_AT_ONCE // config.embedding_dim)
    for index, rows in enumerate(config.table_rows):
        bound = (1.0 / rows) ** 0.5
        for first in range(0, rows, at_once):
            drawn = torch.empty(min(at_once, rows - first), config.embedding_dim)
            drawn.uniform_(-bound, bound, generator=generator)
            for held, part in shards.get(index, ()):
                begin, end = max(held, first), min(held + len(part), first + len(drawn))
                if begin < end:
                    part[begin - held : end - held] = drawn[begin - first : end - first].to(part.device)


@torch.no_grad()
def set_tables(parallel: Any, tables: Sequence[Tensor]) -> None:
    """Give every rank its rows of tables that all ranks have in full: for models that fit there.

    Args:
        parallel: the model `model.build` returns.
        tables: [rows, embedding_dim] each.
    """
    for index, parts in _shards(parallel).items():
        for first, part in parts:
            part.copy_(tables[index][first : first + len(part)])


def _shards(parallel: Any) -> dict[int, list[tuple[int, Tensor]]]:
    """Return this rank's parts of each table: the number of the first row, and the rows."""
    held = {}
    state = parallel.state_dict()
    for index, key in enumerate(parallel.module.keys):
        local = state[f"embeddings.embedding_bags.{key}.weight"].local_shards()
        width = parallel.module.config.embedding_dim
        held[index] = [(int(shard.metadata.shard_offsets[0]), shard.tensor[:, :width]) for shard in local]
    return held


def gathered(parallel: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return all tables in full and the other weights by name, on the CPU of every rank: for models that fit there.

    Every rank must call this.
    """
    config: DLRMConfig = parallel.module.config
    own = {index: [(first, part.cpu()) for first, part in parts] for index, parts in _shards(parallel).items()}
    all_ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(all_ranks, own)
    tables = [torch.full((rows, config.embedding_dim), float("nan")) for rows in config.table_rows]
    for first, part, index in _parts(all_ranks):
        tables[index][first : first + len(part)] = part
    names = {name: value for name, value in parallel.state_dict().items() if not name.startswith("embeddings.")}
    return tables, {name: value.detach().cpu().clone() for name, value in names.items()}


def _parts(all_ranks: list[dict[int, list[tuple[int, Tensor]]]]) -> Iterator[tuple[int, Tensor, int]]:
    for held in all_ranks:
        for index, parts in held.items():
            yield from ((first, part, index) for first, part in parts)
