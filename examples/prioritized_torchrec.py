"""A TorchRec model whose rows travel behind compute: another sharder, and a pipeline instead of the loop.

torchrun --nproc-per-node 2 examples/prioritized_torchrec.py
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ModuleSharder

import freescale as fs

ITEMS, DIM, BATCH = 5_000, 16, 32


@dataclass
class Batch:
    """What the loader gives."""

    ids: KeyedJaggedTensor
    label: Tensor


def batches(rank: int, steps: int) -> Iterator[Batch]:
    """Made-up users: whether the mean of what they clicked lies in the upper half."""
    rng = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        lengths = torch.randint(1, 20, (BATCH,), generator=rng)
        items = (torch.rand(int(lengths.sum()), generator=rng) ** 2 * ITEMS).long()
        mean = torch.segment_reduce(items.float(), "mean", lengths=lengths)
        yield Batch(KeyedJaggedTensor(keys=["clicked"], values=items, lengths=lengths), (mean > ITEMS / 3).float())


class Model(nn.Module):
    """In training it gives the loss, and what the loop is to see, as TorchRec's pipelines want it."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="item", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["clicked"])
        self.rows = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        self.over = nn.Linear(DIM, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        clicked = self.rows(batch.ids)["clicked"]
        pooled = torch.segment_reduce(clicked.values(), "mean", lengths=clicked.lengths())
        loss = nn.functional.binary_cross_entropy_with_logits(self.over(pooled)[:, 0], batch.label)
        return loss, loss.detach()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    sharders: list[ModuleSharder[Any]] = [fs.PrioritizedEmbeddingSharder(fused_params=fused)]
    model = DistributedModelParallel(Model(), sharders=sharders, device=torch.device("cpu"))
    dense = [parameter for name, parameter in model.named_parameters() if not name.startswith("rows.")]
    optimizer = torch.optim.Adam(dense, lr=0.01)
    pipeline = fs.Pipeline(model, optimizer, batches(dist.get_rank(), steps=200))
    losses = [float(loss) for loss in pipeline]
    if dist.get_rank() == 0:
        print(f"loss {sum(losses[:20]) / 20:.3f} at first, {sum(losses[-20:]) / 20:.3f} at the end")
        print(f"held beside the step: {pipeline.held.rows / 1e3:.0f} kB of rows, {pipeline.held.ids / 1e3:.0f} of ids")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
