"""Prioritized embeddings for TorchRec: behind DistributedModelParallel, under TorchRec's own state-dict keys.

A collection that this sharder makes is TorchRec's, and does what TorchRec's does. Only while a pipeline computes a
batch are rows taken from what the pipeline has fetched. So a checkpoint of either is one of the other.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from freescale.embedding.fused import kernel_of, require_exact

Serve = Callable[[KeyedJaggedTensor], dict[str, JaggedTensor] | None]
"""Gives rows that were fetched for these features; None if nobody fetched any."""


class PrioritizedEmbeddingCollection(ShardedEmbeddingCollection):
    """TorchRec's sharded collection, whose rows a pipeline may bring."""

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        kernel_of(self)  # refuses what would not be exact
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
