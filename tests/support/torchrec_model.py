"""A TorchRec model as a user writes it: three features over two tables of one width, and one over a third table."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.support.ranks import World

ITEMS, USERS, SHOPS = 400, 90, 30
FEATURES = {"clicked": ITEMS, "bought": ITEMS, "user": USERS, "shop": SHOPS}


@dataclass
class Batch:
    """A batch of the user's data loader."""

    ids: KeyedJaggedTensor
    labels: Tensor


class UserModel(nn.Module):
    """A user's model: pooled rows through a small network to a loss."""

    def __init__(self) -> None:
        super().__init__()
        wide = [("item", ITEMS, ["clicked", "bought"]), ("user", USERS, ["user"])]
        self.wide = EmbeddingCollection(device=torch.device("meta"), tables=[_table(*one, 16) for one in wide])
        narrow = [_table("shop", SHOPS, ["shop"], 4)]
        self.narrow = EmbeddingCollection(device=torch.device("meta"), tables=narrow)
        self.over = nn.Sequential(nn.Linear(3 * 16 + 4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        rows = {**dict(self.wide(batch.ids).items()), **dict(self.narrow(batch.ids).items())}
        pooled = [_sums(rows[name].values(), rows[name].lengths()) for name in FEATURES]
        out = self.over(torch.cat(pooled, 1))[:, 0]
        loss = (out - batch.labels).square().mean()
        return loss, (loss.detach(), out.detach())


def _table(name: str, rows: int, features: list[str], dim: int) -> EmbeddingConfig:
    return EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features)


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    number = torch.arange(len(lengths), device=lengths.device)
    is_of_sample = number[:, None] == torch.repeat_interleave(number, lengths)
    return is_of_sample.to(values.dtype) @ values


def sharded(
    world: World,
    sharder: EmbeddingCollectionSharder,
    kind: type[UserModel] = UserModel,
    group: dist.ProcessGroup | None = None,
    *,
    data_parallel: bool = True,
) -> DistributedModelParallel:
    """Return the model sharded over all ranks, with the same weights for every sharder."""
    torch.manual_seed(5)
    model = kind()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world.ranks, compute_device="cpu"),
        constraints={
            name: ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
            for name in ("item", "user", "shop")
        },
    )
    group = group or dist.group.WORLD
    assert group is not None
    sharders: list[Any] = [sharder]
    plan, env = planner.collective_plan(model, sharders, group), ShardingEnv.from_process_group(group)
    parallel = DistributedModelParallel(model, env, torch.device("cpu"), plan, sharders, data_parallel)
    for name, weight in parallel.state_dict().items():
        if "embeddings" in name:
            (shard,) = weight.local_shards()
            first, dim = shard.metadata.shard_offsets[0], shard.tensor.shape[1]
            number = torch.arange(first * dim, (first + len(shard.tensor)) * dim)
            shard.tensor.copy_(torch.sin(number.float() * 12.9898).view(-1, dim) * 0.1)
    return parallel


def outputs(pipeline: Any, loader: Iterable[Any]) -> Iterator[Any]:
    """Train until a rank has no batch, and yield the output of each step."""
    batches_of_rank = iter(loader)
    while True:
        try:
            output = pipeline.progress(batches_of_rank)
        except StopIteration:
            return
        yield output


def batches(world: World, seed: int, steps: int, shared: float) -> Iterator[Batch]:
    """Yield batches of unequal sizes. `shared`: approximate share of ids that the previous batch has too."""
    rng = np.random.default_rng([seed, world.rank])
    for step in range(steps):
        size = int(rng.integers(1, 6))
        lengths = rng.integers(0, 5, (len(FEATURES), size))
        values = [
            _ids(rng, int(n.sum()), rows, step, shared) for n, rows in zip(lengths, FEATURES.values(), strict=True)
        ]
        ids = KeyedJaggedTensor(
            keys=list(FEATURES),
            values=torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(lengths.ravel()),
        )
        yield Batch(ids, torch.from_numpy(rng.normal(size=size)).float())


def _ids(rng: np.random.Generator, count: int, rows: int, step: int, shared: float) -> np.ndarray[Any, Any]:
    """Return ids. Those of odd and even steps are disjoint, except for a share of them."""
    own = rng.integers(0, rows // 3, count) + (step % 2) * (rows // 3)
    common = rng.integers(0, rows // 3, count) + 2 * (rows // 3)
    return np.where(rng.random(count) < shared, common, own)
