"""Local rows in FBGEMM, planned and sharded by TorchRec: fp32, updated by a fused optimizer in the backward pass.

TorchRec's planner and DistributedModelParallel build the shards (one collection per width, row-wise). `exchange` moves
ids and rows, so only the kernel that holds the rows is used of TorchRec's modules.
"""

import itertools
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from fbgemm_gpu.tbe.config.optimizer_config import WeightDecayMode
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import KernelConfig, PlannerError, TopologyFactory, TrainerConfig
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from freescale.config import TablesConfig
from freescale.embedding.sharded import PlainShard
from freescale.embedding.tables import Table, by_dim
from freescale.errors import ConfigError, reason

_OPTIMIZERS = {
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
}
_LOCAL_DECAY = {mode.value for mode in (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE)}
_KEPT_FREE = 0.15  # share of memory that the planner reserves for everything else

logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # advice to TorchRec's authors, not to users


class FusedShard:
    """The rows and optimizers of one or more of TorchRec's sharded collections, in FBGEMM.

    On a GPU torch updates the rows where it can: FBGEMM's update is a backward pass, which on the deferred thread would
    wait in autograd's queue behind that of the step.
    """

    def __init__(self, collections: Sequence["FusedCollection"]) -> None:
        self._collections = collections
        self._in_torch = [c.plain_shard() for c in collections]
        self._updating, self.lr_lock = threading.Lock(), threading.Lock()
        """`lr_lock` protects the learning rates: an update uses the one that its kernel has at the lookup."""

    @property
    def first_rows(self) -> Mapping[str, int]:
        """The number of the first local row of each table."""
        return {
            name: first for plain in self._in_torch if plain is not None for name, first in plain.first_rows.items()
        }

    def look_up(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        """Read rows from the weights: FBGEMM's own lookup would keep them for a backward pass."""
        read: dict[str, Tensor] = {}
        for c, plain in zip(self._collections, self._in_torch, strict=True):
            if plain is None:
                read |= {name: c.weights[name].index_select(0, local[name]) for name in c.names}
            else:
                read |= plain.look_up({name: local[name] for name in c.names})
        return read

    def update(self, local: dict[str, Tensor], gradients: dict[str, Tensor], *, lr: Mapping[str, float]) -> None:
        """Update rows by the backward pass of a lookup, which includes the optimizer."""
        with self._updating:
            for c, plain in zip(self._collections, self._in_torch, strict=True):
                if plain is not None:
                    plain.update({n: local[n] for n in c.names}, {n: gradients[n] for n in c.names}, lr=lr)
                    continue
                with self.lr_lock:
                    output = c.look_up(local, lr[c.names[0]])
                output.backward(torch.cat([gradients[name] for name in c.names]).view_as(output))

    def learning_rates(self) -> dict[str, float]:
        """Return the current learning rate of each table."""
        with self.lr_lock:
            return {name: c.kernel.get_learning_rate() for c in self._collections for name in c.names}

    def state(self) -> dict[str, Tensor]:
        """Return weights and sums of squares."""
        return {name: values for c in self._collections for name, values in c.state().items()}


class FusedCollection:
    """The local rows of one of TorchRec's sharded collections. `named`: FreeScale's names of its tables."""

    def __init__(self, sharded: ShardedEmbeddingCollection, named: Mapping[str, str]) -> None:
        module = fused_kernel(sharded)
        self.kernel: SplitTableBatchedEmbeddingBagsCodegen = module.emb_module
        self.names = [named[table.name] for table in module.config.embedding_tables]
        self.weights: dict[str, Tensor] = dict(zip(self.names, self.kernel.split_embedding_weights(), strict=True))
        # The first feature of a table represents all: ids are deduplicated over them.
        tables = self.kernel.feature_table_map
        self._first = [place == 0 or tables[place - 1] != table for place, table in enumerate(tables)]

    def plain_shard(self) -> PlainShard | None:
        """Return the rows for updates by torch; None on a CPU, or if the optimizer does more than torch's does here."""
        options = self.kernel.optimizer_args
        on_cpu = next(iter(self.weights.values())).device.type == "cpu"
        if on_cpu or options.weight_decay or options.gradient_clipping or options.max_norm:
            return None
        name = next(name for name, kind in _OPTIMIZERS.items() if kind == self.kernel.optimizer)
        return PlainShard(self.state(), TablesConfig(optimizer=name, eps=options.eps))  # type: ignore[arg-type]

    def look_up(self, local: dict[str, Tensor], lr: float) -> Tensor:
        """Look up rows with FBGEMM, for an update with this learning rate."""
        parts = iter([local[name] for name in self.names])
        values = torch.cat([local[name] for name in self.names])
        lengths = [len(next(parts)) if first else 0 for first in self._first]
        offsets = torch.tensor([0, *itertools.accumulate(lengths)], device=values.device)
        before = self.kernel.get_learning_rate()
        self.kernel.set_learning_rate(lr)
        output = self.kernel(indices=values, offsets=offsets)
        self.kernel.set_learning_rate(before)
        return output

    def state(self) -> dict[str, Tensor]:
        """Return weights and optimizer state by name."""
        sums = self.kernel.split_optimizer_states()  # none for SGD
        return self.weights | {f"{name}.sum": state[0] for name, state in zip(self.names, sums, strict=False)}


def fused_kernel(sharded: ShardedEmbeddingCollection) -> BatchedFusedEmbedding:
    """Return the kernel of a collection. Raise unless an update in two parts is exact."""
    lookups: list[Any] = sharded._lookups
    modules = [module for lookup in lookups for module in lookup._emb_modules]
    kinds, one_kernel = sharded._sharding_types, [type(module) for module in modules] == [BatchedFusedEmbedding]
    where = f"collection of the tables {', '.join(sharded._table_names)}"
    if kinds != ["row_wise"] or not one_kernel:
        what = f"its tables are {' and '.join(kinds)} in {len(modules)} kernels"
        what += "; only row-wise tables in one fused kernel are supported"
        remedy = "shard it row_wise with the fused kernel"
        remedy += "; put tables with another optimizer or precision into another collection"
        raise ConfigError(what, where=where, remedy=remedy)
    kernel: SplitTableBatchedEmbeddingBagsCodegen = modules[0].emb_module
    if kernel.weights_precision != SparseType.FP32:
        raise not_exact_error(f"rows of {kernel.weights_precision.value} are rounded at random", where)
    if kernel.optimizer_args.weight_decay_mode not in _LOCAL_DECAY:
        raise not_exact_error("its weight decay depends on more than the rows of a batch", where)
    require_exact(kernel.optimizer, where)
    return modules[0]


def require_exact(optimizer: EmbOptimType, where: str) -> None:
    """Raise for an optimizer whose result changes when the rows of a step are updated in two parts."""
    if optimizer not in _OPTIMIZERS.values():
        raise not_exact_error(f"{optimizer} counts its updates, or changes rows that no batch read", where)


def not_exact_error(why: str, where: str) -> ConfigError:
    """Return the error for tables that cannot be updated exactly in two parts."""
    remedy = "use SGD, row-wise Adagrad or Adagrad in fp32, or TorchRec's own EmbeddingCollectionSharder for it"
    return ConfigError(f"prioritized embeddings would not be exact: {why}", where=where, remedy=remedy)


def fused_shard(tables: Sequence[Table], config: TablesConfig, group: ProcessGroup, device: torch.device) -> FusedShard:
    """Plan, shard and allocate tables, one collection per width."""
    sharded = [(_sharded(of_width, config, group, device), of_width) for of_width in by_dim(tables)]
    return FusedShard([FusedCollection(c, {t.name: t.name for t in of_width}) for c, of_width in sharded])


def _sharded(tables: list[Table], config: TablesConfig, group: ProcessGroup, device: torch.device) -> Any:
    """One row-wise ShardedEmbeddingCollection."""
    module = embedding_collection(tables, group.size())
    return shard_row_wise(module, tables, config, group, device, init_data_parallel=False).module


def embedding_collection(tables: Sequence[Table], world_size: int) -> EmbeddingCollection:
    """Return an unsharded collection of tables with one feature each."""
    configs = [
        EmbeddingConfig(
            name=t.name, num_embeddings=t.allocated(world_size), embedding_dim=t.dim, feature_names=[t.name]
        )
        for t in tables
    ]
    return EmbeddingCollection(device=torch.device("meta"), tables=configs)


def shard_row_wise(
    module: nn.Module,
    tables: Sequence[Table],
    config: TablesConfig,
    group: ProcessGroup,
    device: torch.device,
    *,
    init_data_parallel: bool = True,
) -> DistributedModelParallel:
    """Shard the collections of a module row-wise, as TorchRec plans them for the cluster's memory."""
    fused = {"optimizer": _OPTIMIZERS[config.optimizer], "learning_rate": config.lr, "eps": config.eps}
    sharders: list[Any] = [EmbeddingCollectionSharder(fused_params=fused)]
    constraint = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
    constraints, kept = {t.name: constraint for t in tables}, FixedPercentageStorageReservation(_KEPT_FREE)
    planner = EmbeddingShardingPlanner(_topology(group, device), constraints=constraints, storage_reservation=kept)
    try:
        plan = planner.collective_plan(module, sharders, group)
    except PlannerError as error:
        what = f"the tables do not fit the memory of {group.size()} ranks: {reason(error)}"
        raise ConfigError(what, remedy="use more ranks, a smaller model.dim, or fewer rows") from error
    env = ShardingEnv.from_process_group(group)
    return DistributedModelParallel(module, env, device, plan, sharders, init_data_parallel, init_parameters=False)


def _topology(group: ProcessGroup, device: torch.device) -> Topology:
    kind = "cpu" if device.type == "cpu" else "cuda"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", group.size()))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    hbm = None if device.type == "cpu" else torch.get_device_module(device).mem_get_info(device)[1]
    trainer = TrainerConfig(
        world_size=group.size(), local_world_size=local, hbm_cap_bytes=hbm, ddr_cap_bytes=memory // local
    )
    return TopologyFactory.create_topology(trainer, kernel_config=KernelConfig(compute_device=kind))
