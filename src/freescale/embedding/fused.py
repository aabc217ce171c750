"""Own rows in FBGEMM, planned and sharded by TorchRec: fp32, updated by a fused optimizer inside the backward pass.

TorchRec's planner and DistributedModelParallel decide and build the shards (one collection per width, row-wise). Ids
and rows travel by our own exchange, so from TorchRec's modules only the lookup of local rows is used.
"""

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import KernelConfig, PlannerError, TopologyFactory, TrainerConfig
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from freescale.config import TablesConfig
from freescale.embedding.tables import Table, by_dim
from freescale.errors import ConfigError, reason

_OPTIMIZERS = {
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
}
_KEPT_FREE = 0.15  # share of memory that the planner leaves to everything else

logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # advice to TorchRec's authors, not to users


class FusedShard:
    """Rows and their optimizer, in FBGEMM."""

    def __init__(
        self, tables: Sequence[Table], config: TablesConfig, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._groups = [_Group(group_tables, config, group, device) for group_tables in by_dim(tables)]
        self._lock = threading.Lock()

    def look_up(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        """Read rows where they live: FBGEMM's own lookup would keep them for a backward pass."""
        weights = {name: values for group in self._groups for name, values in group.weights.items()}
        return {name: weights[name].index_select(0, rows) for name, rows in local.items()}

    def update(self, local: dict[str, Tensor], gradients: dict[str, Tensor], *, lr: float) -> None:
        """Run the backward pass of a lookup, which holds the optimizer."""
        with self._lock:  # the learning rate is FBGEMM's, not the lookup's
            for group in self._groups:
                output = group.look_up(local, lr)
                output.backward(torch.cat([gradients[name] for name in group.names]).view_as(output))

    def state(self) -> dict[str, Tensor]:
        """Weights and sums of squares."""
        found: dict[str, Tensor] = {}
        for group in self._groups:
            found |= group.state()
        return found


class _Group:
    """The tables of one width."""

    def __init__(
        self, tables: list[Table], config: TablesConfig, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.names = [table.name for table in tables]
        sharded = _sharded(tables, config, group, device)
        (self._lookup,) = sharded._lookups
        (kernel,) = self._lookup._emb_modules
        self._kernel = kernel.emb_module
        self.weights: dict[str, Tensor] = dict(zip(self.names, self._kernel.split_embedding_weights(), strict=True))

    def look_up(self, local: dict[str, Tensor], lr: float) -> Tensor:
        self._kernel.set_learning_rate(lr)
        values = torch.cat([local[name] for name in self.names])
        lengths = torch.tensor([len(local[name]) for name in self.names], device=values.device)
        return self._lookup(KeyedJaggedTensor(keys=self.names, values=values, lengths=lengths))

    def state(self) -> dict[str, Tensor]:
        sums = self._kernel.split_optimizer_states()  # none for SGD
        return self.weights | {f"{name}.sum": state[0] for name, state in zip(self.names, sums, strict=False)}


def _sharded(tables: list[Table], config: TablesConfig, group: dist.ProcessGroup, device: torch.device) -> Any:
    """One row-wise ShardedEmbeddingCollection, planned for this cluster's memory."""
    collection = EmbeddingCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
            for t in tables
        ],
    )
    fused = {"optimizer": _OPTIMIZERS[config.optimizer], "learning_rate": config.lr, "eps": config.eps}
    sharders: list[Any] = [EmbeddingCollectionSharder(fused_params=fused)]
    constraint = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        topology=_topology(group, device),
        constraints={table.name: constraint for table in tables},
        storage_reservation=FixedPercentageStorageReservation(_KEPT_FREE),
    )
    try:
        plan = planner.collective_plan(collection, sharders, group)
    except PlannerError as error:
        raise ConfigError(
            f"the tables do not fit the memory of {group.size()} ranks: {reason(error)}",
            remedy="use more ranks, a smaller model.dim, or fewer rows",
        ) from error
    env = ShardingEnv.from_process_group(group)
    return DistributedModelParallel(
        collection, env=env, device=device, plan=plan, sharders=sharders, init_parameters=False
    ).module


def _topology(group: dist.ProcessGroup, device: torch.device) -> Topology:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", group.size()))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    trainer = TrainerConfig(world_size=group.size(), local_world_size=local, ddr_cap_bytes=memory // local)
    return TopologyFactory.create_topology(trainer, kernel_config=KernelConfig(compute_device=device.type))
