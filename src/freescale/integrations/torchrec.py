"""Prioritized embeddings for TorchRec: behind DistributedModelParallel, under TorchRec's own state-dict keys.

A collection that this sharder makes is TorchRec's, and does what TorchRec's does. Only while a pipeline computes a
batch are rows taken from what the pipeline has fetched. So a checkpoint of either is one of the other.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.dist_data import SequenceEmbeddingsAwaitable
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist, EmbeddingShardingInfo
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from freescale.config.schema import TransportConfig, TransportName
from freescale.embedding.fused import fused_kernel, require_exact
from freescale.errors import UsageError
from freescale.transport.base import Transport, Work
from freescale.transport.selection import select_transports
from freescale.transport.world import from_group

Serve = Callable[[KeyedJaggedTensor], dict[str, JaggedTensor] | None]
"""Gives rows that were fetched for these features; None if nobody fetched any."""


class PrioritizedEmbeddingCollection(ShardedEmbeddingCollection):
    """TorchRec's sharded collection, whose rows a pipeline may bring."""

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        fused_kernel(self)  # refuses what would not be exact
        self._serve: Serve | None = None
        self._hooks: list[RemovableHandle] = []

    @property
    def tables(self) -> list[EmbeddingConfig]:
        """Its tables, as they were configured."""
        return self._embedding_configs

    @property
    def env(self) -> ShardingEnv:
        """Over which ranks it is sharded."""
        return self._env

    def served(self, serve: Serve, *, settle: Callable[[], None], forget: Callable[[], None]) -> None:
        """From now on this pipeline brings rows, and no other.

        `settle` is called before anybody else reads the tables, `forget` before somebody else may change them.
        """
        for hook in self._hooks:
            hook.remove()
        self._serve = serve
        self._hooks = [self.register_state_dict_pre_hook(lambda *_: settle())]
        self._hooks.append(self.register_load_state_dict_pre_hook(lambda *_: forget()))

    def forward(self, features: KeyedJaggedTensor) -> Any:  # type: ignore[override]
        """Rows of every id, by feature."""
        rows = None if self._serve is None else self._serve(features)
        return super().forward(features) if rows is None else rows


class PrioritizedEmbeddingSharder(EmbeddingCollectionSharder):
    """Shards collections row-wise in fused kernels, so that `fs.Pipeline` can move their rows behind compute."""

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> PrioritizedEmbeddingCollection:
        """As TorchRec's sharder; refused if the result of training could differ from TorchRec's."""
        if self.fused_params and "optimizer" in self.fused_params:
            require_exact(self.fused_params["optimizer"], module_fqn or "PrioritizedEmbeddingSharder")
        named = {"qcomm_codecs_registry": self.qcomm_codecs_registry, "module_fqn": module_fqn}
        return PrioritizedEmbeddingCollection(module, params, env, self.fused_params, device, **named)

    def sharding_types(self, compute_device_type: str) -> list[str]:  # noqa: ARG002
        """Rows travel only of tables that are dealt row by row."""
        return ["row_wise"]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:  # noqa: ARG002
        """Only fused ones change rows where they are."""
        return ["fused"]

    @property
    def sharded_module_type(self) -> type[PrioritizedEmbeddingCollection]:
        """What it makes."""
        return PrioritizedEmbeddingCollection


class TransportEmbeddingSharder(EmbeddingCollectionSharder):
    """Shards collections row-wise as TorchRec does, and moves their rows by `way`."""

    def __init__(
        self, *, way: TransportName = "auto", timeout: float = 600, fused_params: dict[str, Any] | None = None
    ) -> None:
        super().__init__(fused_params=fused_params)
        self._way, self._timeout = way, timeout

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection:
        """As TorchRec's sharder, on all ranks of the environment."""
        group = env.process_group
        if group is None:
            raise UsageError("rows travel only in a process group", remedy="call dist.init_process_group first")
        world = from_group(group, device or torch.device("cpu"), timeout=self._timeout)
        transport = select_transports(world, TransportConfig(urgent=self._way), deferred=False).urgent

        class Collection(ShardedEmbeddingCollection):
            """TorchRec makes shardings by a class method, so what they need is in the class."""

            @classmethod
            def create_embedding_sharding(
                cls,
                sharding_type: str,  # noqa: ARG003
                sharding_infos: list[EmbeddingShardingInfo],
                env: ShardingEnv,
                device: torch.device | None = None,
                qcomm_codecs_registry: Any = None,  # noqa: ARG003
            ) -> "_Sharding":
                return _Sharding(transport, sharding_infos, env, device)

        return Collection(module, params, env, self.fused_params, device, module_fqn=module_fqn)

    def sharding_types(self, compute_device_type: str) -> list[str]:  # noqa: ARG002
        """Rows travel of tables that are dealt row by row."""
        return ["row_wise"]


class _Sharding(RwSequenceEmbeddingSharding):
    """TorchRec's, but for the way out."""

    def __init__(self, transport: Transport, *words: Any) -> None:
        super().__init__(*words)
        self._transport = transport

    def create_output_dist(self, device: torch.device | None = None) -> "_OutputDist":
        return _OutputDist(self._transport, self._get_num_features(), device if device is not None else self._device)


class _OutputDist(BaseEmbeddingDist[SequenceShardingContext, Tensor, Tensor]):
    """Rows to the ranks that asked for them."""

    def __init__(self, transport: Transport, features: int, device: torch.device | None) -> None:
        super().__init__()
        self._transport = transport
        world_size = transport.peers.world_size
        by_rank = (
            torch.arange(features * world_size, dtype=torch.int32, device=device)
            .view(features, world_size)
            .T.reshape(-1)
        )
        self.register_buffer("_by_rank", by_rank, persistent=False)

    def forward(self, local_embs: Tensor, sharding_ctx: SequenceShardingContext | None = None) -> Awaitable[Tensor]:
        """Begin to send rows, which lie feature by feature."""
        assert sharding_ctx is not None
        rows = local_embs.index_select(0, self._order(sharding_ctx, local_embs))
        # TorchRec names splits as they were when ids came the other way.
        send, receive = sharding_ctx.output_splits, sharding_ctx.input_splits
        arriving = self._transport.all_to_all(rows.detach(), send, receive, name="rows")
        moved = _Moved(rows, arriving, self._transport, receive, send)
        return SequenceEmbeddingsAwaitable(moved, sharding_ctx.unbucketize_permute_tensor, local_embs.shape[1])

    def _order(self, context: SequenceShardingContext, rows: Tensor) -> Tensor:
        """Where the rows stand when they lie rank by rank."""
        lengths, places = context.lengths_after_input_dist, torch.arange(len(rows), device=rows.device)
        assert lengths is not None
        order = context.sparse_features_recat
        recat = self._by_rank if order is None else torch.ops.fbgemm.invert_permute(order)
        if len(set(context.batch_size_per_rank or [])) > 1:
            return torch.ops.fbgemm.permute_1D_sparse_data(recat, lengths.view(-1), places, None, len(places))[1]
        table = lengths.view(len(recat), -1)
        return torch.ops.fbgemm.permute_2D_sparse_data(recat, table, places, None, len(places))[1]


class _Moved(Awaitable[Tensor]):
    """Rows on their way; whoever waits gets them as a part of the graph."""

    def __init__(self, rows: Tensor, arriving: Work[Tensor], *back: Any) -> None:
        super().__init__()
        self._all = rows, arriving, *back

    def _wait_impl(self) -> Tensor:
        return _Exchanged.apply(*self._all)


class _Exchanged(torch.autograd.Function):
    """An exchange that has begun; its gradient is the exchange back."""

    @staticmethod
    def forward(ctx: Any, *words: Any) -> Tensor:  # pyrefly: ignore[bad-override]
        _rows, arriving, *ctx.back = words
        return arriving.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None, None]:
        transport, send, receive = ctx.back
        got = transport.all_to_all(gradients[0], send, receive, name="row gradients").wait()
        return got / transport.peers.world_size if get_gradient_division() else got, None, None, None, None
