"""A DLRM whose tables are divided among the ranks while every rank holds both MLPs in full (hybrid parallelism).

Naumov et al.: Deep Learning Recommendation Model for Personalization and Recommendation Systems, arXiv 1906.00091,
section 4. TorchRec does the work: its planner gives each rank tables, or rows of tables; ids and vectors travel by
all-to-all; the tables' optimiser runs within the backward pass; the MLPs' gradients are averaged by DDP. The result is
that of `dlrm_torch.DLRM` on the ranks' batches put together.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from dlrm_examples.hybrid.install import MissingTorchRec
from dlrm_examples.hybrid.weights import fill
from dlrm_examples.models.dlrm_torch import DLRM, DLRMConfig
from dlrm_examples.models.layers_torch import BagsOfIds
from intune_callbacks.config import choice_problem, number_problem
from intune_callbacks.errors import ConfigError
from intune_callbacks.measure.resources import MachineProbe

__all__ = ["OPTIMIZERS", "SHARDINGS", "HybridDLRM", "build", "set_rate"]

try:
    with warnings.catch_warnings():
        # TorchRec 1.8 looks for every kernel fbgemm might have, and uses what torch and itself have deprecated.
        warnings.simplefilter("ignore")
        from torch.distributed.optim import _apply_optimizer_in_backward as in_backward  # type: ignore[attr-defined]
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
        from torchrec.distributed.planner.types import ParameterConstraints
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection
        from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
        from torchrec.optim.optimizers import in_backward_optimizer_filter
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
except (ImportError, OSError) as error:
    raise MissingTorchRec(error) from error

SHARDINGS = {
    # Not column-wise: row-wise Adagrad would keep one number for each piece of a row. Not data-parallel: TorchRec
    # leaves such a table to the MLPs' optimiser.
    "auto": ("table_wise", "row_wise"),
    "table_wise": ("table_wise",),
    "row_wise": ("row_wise",),
}
"""How tables may be divided: what the planner chooses from."""

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], type[torch.optim.Optimizer]]] = {
    "sgd": (torch.optim.SGD, torch.optim.SGD),
    "adagrad": (torch.optim.Adagrad, torch.optim.Adagrad),
    "rowwise-adagrad": (RowWiseAdagrad, torch.optim.Adagrad),
}
"""Name -> optimiser of the tables, optimiser of the MLPs."""

RESERVED_FRAC = 0.15
LANES = 4


class Sharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """TorchRec's, which does not offer to divide tables by rows on CPUs although gloo can do it."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return sorted({*super().sharding_types(compute_device_type), "row_wise"})


class HybridDLRM(DLRM):
    """`dlrm_torch.DLRM` with its tables as a TorchRec collection, on the meta device until `build` divides them.

    Args:
        config: the sizes.
        generator: source of the MLPs' initial weights.
    """

    embeddings: Any

    def __init__(self, config: DLRMConfig, generator: torch.Generator) -> None:
        super().__init__(replace(config, table_rows=(1,) * len(config.table_rows)), generator)
        self.config = config
        if config.bag_sizes is not None:
            self.bags = BagsOfIds(config.bag_sizes, config.table_rows)
        self.keys = [f"t{index}" for index in range(len(config.table_rows))]
        # fbgemm wants whole groups of four numbers; what is beyond `embedding_dim` is not looked at.
        self.width = -(-config.embedding_dim // LANES) * LANES
        self.embeddings = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(name=key, embedding_dim=self.width, num_embeddings=rows, feature_names=[key])
                for key, rows in zip(self.keys, config.table_rows, strict=True)
            ],
        )

    def table(self, index: int) -> Tensor:
        """Return no rows, [0, embedding_dim]: no rank holds a whole table, and `fill` draws the first weights."""
        return torch.empty(0, self.config.embedding_dim)

    def embed(self, categories: Tensor, bag_lengths: Tensor | None = None) -> Tensor:
        """Look up all tables, wherever their rows are, and sum each bag.

        Args:
            categories: without `bag_lengths` one id per sample and table, [B, T] int32 or int64;
                with it the ids of all bags, table by table, [ids].
            bag_lengths: how many ids each sample's bag of each table has, [T, B] int32.

        Returns:
            [B, T, embedding_dim].
        """
        if bag_lengths is None:
            bag_lengths = torch.ones(categories.shape[::-1], dtype=torch.int32, device=categories.device)
            categories = categories.t().flatten()
        return self._sums(categories, bag_lengths)

    def embed_bags(self, ids: Tensor) -> Tensor:
        sizes = list(self.config.bag_sizes or ())
        tables = torch.split(ids, sizes, dim=1)
        lengths = torch.tensor(sizes, dtype=torch.int32, device=ids.device).repeat_interleave(len(ids))
        return self._sums(torch.cat([table.flatten() for table in tables]), lengths)

    def _sums(self, categories: Tensor, bag_lengths: Tensor) -> Tensor:
        bags = KeyedJaggedTensor(keys=self.keys, values=categories, lengths=bag_lengths.flatten())
        vectors = self.embeddings(bags).to_dict()
        # By name: their order is the order of the ranks that hold them.
        return torch.stack([vectors[key] for key in self.keys], dim=1)[..., : self.config.embedding_dim]


def build(
    config: DLRMConfig,
    *,
    batch_size: int,
    optimizer: str = "sgd",
    learning_rate: float = 0.1,
    eps: float = 1e-8,
    seed: int = 0,
    sharding: str = "auto",
    device: torch.device | None = None,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Return the model, divided among the ranks of the process group, and the one optimiser of all its parts.

    The first weights are those of `dlrm_torch.DLRM` with a generator of the same seed, whatever the number of ranks.
    The optimiser's `step` updates the MLPs; the tables are updated in the backward pass before, so `.grad` of a table
    is always None, and clipping gradients reaches the MLPs only.

    Args:
        config: the sizes.
        batch_size: samples of one rank's batch; the planner estimates with it.
        optimizer: one of `OPTIMIZERS`.
        learning_rate: of tables and MLPs.
        eps: added to the root in both kinds of Adagrad; fbgemm's own default is not torch's.
        seed: decides the initial weights.
        sharding: one of `SHARDINGS`.
        device: of this rank; the CPU by default.

    Raises:
        ConfigError: with all problems at once.
    """
    _quiet()
    problems = [*choice_problem("optimizer", optimizer, tuple(OPTIMIZERS))]
    problems += choice_problem("sharding", sharding, tuple(SHARDINGS))
    problems += number_problem("batch_size", batch_size, 1, 1 << 24)
    if optimizer == "rowwise-adagrad" and config.embedding_dim % LANES:
        problems.append(
            f"embedding_dim={config.embedding_dim}: rowwise-adagrad takes the mean over a row, and fbgemm's rows are "
            f"multiples of {LANES} wide; expected such a multiple, or sgd or adagrad"
        )
    if not distributed.is_initialized():
        problems.append("there is no process group: call torch.distributed.init_process_group on every rank first")
    if problems:
        raise ConfigError(problems)
    device = device or torch.device("cpu")
    tables, mlps = OPTIMIZERS[optimizer]
    options: dict[str, Any] = {"lr": learning_rate} | ({} if optimizer == "sgd" else {"eps": eps})
    generator = torch.Generator().manual_seed(seed)
    model = HybridDLRM(config, generator)
    # Before the planner, which counts the optimiser's state. A copy: TorchRec writes into it.
    in_backward(tables, model.embeddings.parameters(), dict(options))
    sharders = [Sharder()]
    plan = _planner(model, batch_size, sharding, device).collective_plan(model, sharders, distributed.GroupMember.WORLD)
    parallel = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    fill(parallel, generator)
    dense = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    rest = KeyedOptimizerWrapper(dense, lambda parameters: mlps(parameters, **options))
    return parallel, CombinedOptimizer([parallel.fused_optimizer, rest])


def _quiet() -> None:
    """Keep to itself what TorchRec 1.8 says about its own use of torch 2.13, at every step."""
    for name in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for words in (
        ".*is deprecated. Please use .*torch.distributed",
        ".*`broadcast_buffers` is deprecated",
        ".*we are deprecating ShardedTensor",
    ):
        warnings.filterwarnings("ignore", words, FutureWarning)


def _planner(model: HybridDLRM, batch_size: int, sharding: str, device: torch.device) -> EmbeddingShardingPlanner:
    world = distributed.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    memory = {"ddr_cap": MachineProbe().read().memory_limit_bytes // local}
    if device.type == "cuda":
        memory["hbm_cap"] = torch.cuda.get_device_properties(device).total_memory
    return EmbeddingShardingPlanner(
        topology=Topology(world_size=world, local_world_size=local, compute_device=device.type, **memory),
        batch_size=batch_size,
        storage_reservation=FixedPercentageStorageReservation(RESERVED_FRAC),
        constraints={key: ParameterConstraints(sharding_types=[*SHARDINGS[sharding]]) for key in model.keys},
    )


def set_rate(parallel: DistributedModelParallel, optimizer: CombinedOptimizer, learning_rate: float) -> None:
    """Set the learning rate of the next step, before its forward pass.

    Args:
        parallel, optimizer: what `build` returns.
        learning_rate: of tables and MLPs.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    # Here TorchRec hands the rate to its kernels; in the loop's own `step` it would be after the backward pass.
    parallel.fused_optimizer.step()
