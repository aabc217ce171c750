"""What TorchRec trainers import: sharders, the training pipeline, and converters of KeyedJaggedTensors.

`PrioritizedEmbeddingSharder` makes TorchRec's own sharded collections, with TorchRec's state-dict keys, so checkpoints
are interchangeable. Only while `PrioritizedPipeline` computes a batch do rows come from what the pipeline has fetched.
`TransportEmbeddingSharder` leaves everything to TorchRec but the transfer of rows and row gradients, which uses one of
FreeScale's transports. Its training result is bitwise that of TorchRec's transfer.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.dist_data import SequenceEmbeddingsAwaitable
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist, EmbeddingShardingInfo
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from freescale.config.schema import TransportConfig, TransportName
from freescale.data.batch import Events
from freescale.embedding.fused import require_exact
from freescale.embedding.row_order import interleave
from freescale.errors import UsageError
from freescale.integrations.pipeline import PrioritizedEmbeddingCollection, PrioritizedPipeline
from freescale.transport.base import Transport, Work
from freescale.transport.selection import select_transports
from freescale.transport.world import from_group

__all__ = [
    "PrioritizedEmbeddingSharder",
    "PrioritizedPipeline",
    "TransportEmbeddingSharder",
    "events_from_keyed_jagged",
    "interleave",
    "keyed_jagged_from_events",
]


def events_from_keyed_jagged(features: KeyedJaggedTensor) -> dict[str, Events]:
    """Return the features of a KeyedJaggedTensor as jagged `Events`, one per key, with the values under that key."""
    return {key: Events(jagged.offsets(), {key: jagged.values()}) for key, jagged in features.to_dict().items()}


def keyed_jagged_from_events(features: Mapping[str, Events]) -> KeyedJaggedTensor:
    """Return a KeyedJaggedTensor with a key per entry, whose `Events` hold the values under that key."""
    values = torch.cat([events[key] for key, events in features.items()])
    lengths = torch.cat([events.lengths for events in features.values()])
    return KeyedJaggedTensor(keys=list(features), values=values, lengths=lengths)


class PrioritizedEmbeddingSharder(EmbeddingCollectionSharder):
    """Shards collections row-wise in fused kernels, so that `PrioritizedPipeline` can overlap their communication.

    fused_params: of the tables, as for TorchRec's sharders, such as `{"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "learning_rate": 0.1}`; by default FBGEMM's SGD. Without the pipeline the model trains as TorchRec does.
    """

    def __init__(
        self, fused_params: dict[str, Any] | None = None, qcomm_codecs_registry: dict[str, Any] | None = None
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> PrioritizedEmbeddingCollection:
        """Shard as TorchRec does. Raise where the training result could differ from TorchRec's."""
        if self.fused_params and "optimizer" in self.fused_params:
            require_exact(self.fused_params["optimizer"], module_fqn or "PrioritizedEmbeddingSharder")
        named = {"qcomm_codecs_registry": self.qcomm_codecs_registry, "module_fqn": module_fqn}
        return PrioritizedEmbeddingCollection(module, params, env, self.fused_params, device, **named)

    def sharding_types(self, compute_device_type: str) -> list[str]:  # noqa: ARG002
        """Only row-wise tables are supported."""
        return ["row_wise"]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:  # noqa: ARG002
        """Only fused kernels update rows in place."""
        return ["fused"]

    @property
    def sharded_module_type(self) -> type[PrioritizedEmbeddingCollection]:
        """The class of sharded collections."""
        return PrioritizedEmbeddingCollection


class TransportEmbeddingSharder(EmbeddingCollectionSharder):
    """Shards collections row-wise as TorchRec does, and moves their rows with a FreeScale transport."""

    def __init__(
        self, *, transport: TransportName = "auto", timeout: float = 600, fused_params: dict[str, Any] | None = None
    ) -> None:
        super().__init__(fused_params=fused_params)
        self._transport_name, self._timeout = transport, timeout

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection:
        """Shard as TorchRec does. Collective over the ranks of `env`."""
        group = env.process_group
        if group is None:
            raise UsageError("sharding needs a process group", remedy="call dist.init_process_group first")
        world = from_group(group, device or torch.device("cpu"), timeout=self._timeout)
        transport = select_transports(world, TransportConfig(urgent=self._transport_name), deferred=False).urgent

        class TransportEmbeddingCollection(ShardedEmbeddingCollection):
            """TorchRec creates shardings in a class method, so the transport belongs to the class."""

            @classmethod
            def create_embedding_sharding(
                cls,
                sharding_type: str,  # noqa: ARG003
                sharding_infos: list[EmbeddingShardingInfo],
                env: ShardingEnv,
                device: torch.device | None = None,
                qcomm_codecs_registry: Any = None,  # noqa: ARG003
            ) -> "_TransportSharding":
                return _TransportSharding(transport, sharding_infos, env, device)

        return TransportEmbeddingCollection(module, params, env, self.fused_params, device, module_fqn=module_fqn)

    def sharding_types(self, compute_device_type: str) -> list[str]:  # noqa: ARG002
        """Only row-wise tables are supported."""
        return ["row_wise"]


class _TransportSharding(RwSequenceEmbeddingSharding):
    """TorchRec's row-wise sharding with another output dist."""

    def __init__(self, transport: Transport, *words: Any) -> None:
        super().__init__(*words)
        self._transport = transport

    def create_output_dist(self, device: torch.device | None = None) -> "_TransportOutputDist":
        return _TransportOutputDist(
            self._transport, self._get_num_features(), device if device is not None else self._device
        )


class _TransportOutputDist(BaseEmbeddingDist[SequenceShardingContext, Tensor, Tensor]):
    """Sends rows to the ranks that requested them."""

    def __init__(self, transport: Transport, features: int, device: torch.device | None) -> None:
        super().__init__()
        self._transport = transport
        world_size = transport.peers.world_size
        order = torch.arange(features * world_size, dtype=torch.int32, device=device)
        by_rank = order.view(features, world_size).T.reshape(-1)
        self.register_buffer("_by_rank", by_rank, persistent=False)

    def forward(self, local_embs: Tensor, sharding_ctx: SequenceShardingContext | None = None) -> Awaitable[Tensor]:
        """Start to send rows, which are ordered by feature."""
        assert sharding_ctx is not None
        rows = local_embs.index_select(0, self._order(sharding_ctx, local_embs))
        # TorchRec names the splits by the direction of the ids, which is the opposite one.
        send, receive = sharding_ctx.output_splits, sharding_ctx.input_splits
        arriving = self._transport.all_to_all(rows.detach(), send, receive, name="rows")
        moved = _RowsAwaitable(rows, arriving, self._transport, receive, send)
        return SequenceEmbeddingsAwaitable(moved, sharding_ctx.unbucketize_permute_tensor, local_embs.shape[1])

    def _order(self, context: SequenceShardingContext, rows: Tensor) -> Tensor:
        """Return the permutation that orders rows by rank."""
        lengths, places = context.lengths_after_input_dist, torch.arange(len(rows), device=rows.device)
        assert lengths is not None
        order = context.sparse_features_recat
        recat = self._by_rank if order is None else torch.ops.fbgemm.invert_permute(order)
        if len(set(context.batch_size_per_rank or [])) > 1:
            return torch.ops.fbgemm.permute_1D_sparse_data(recat, lengths.view(-1), places, None, len(places))[1]
        table = lengths.view(len(recat), -1)
        return torch.ops.fbgemm.permute_2D_sparse_data(recat, table, places, None, len(places))[1]


class _RowsAwaitable(Awaitable[Tensor]):
    """Rows in transfer. Waiting adds them to the autograd graph."""

    def __init__(self, rows: Tensor, arriving: Work[Tensor], *back: Any) -> None:
        super().__init__()
        self._all = rows, arriving, *back

    def _wait_impl(self) -> Tensor:
        return _ExchangeFunction.apply(*self._all)


class _ExchangeFunction(torch.autograd.Function):
    """Waits for a started all-to-all. Its backward pass is the reverse all-to-all."""

    @staticmethod
    def forward(ctx: Any, *words: Any) -> Tensor:  # pyrefly: ignore[bad-override]
        _rows, arriving, *ctx.back = words
        return arriving.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None, None]:
        transport, send, receive = ctx.back
        got = transport.all_to_all(gradients[0], send, receive, name="row gradients").wait()
        return got / transport.peers.world_size if get_gradient_division() else got, None, None, None, None
