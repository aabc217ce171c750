"""Prioritized embedding communication (PEC) in a TorchRec trainer: another sharder, and another pipeline.

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
    """A batch of the data loader."""

    ids: KeyedJaggedTensor
    label: Tensor


def batches(rank: int, steps: int) -> Iterator[Batch]:
    """Yield synthetic users, labeled by the mean of the items that they clicked."""
    rng = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        lengths = torch.randint(1, 20, (BATCH,), generator=rng)
        items = (torch.rand(int(lengths.sum()), generator=rng) ** 2 * ITEMS).long()
        mean = torch.segment_reduce(items.float(), "mean", lengths=lengths)
        yield Batch(KeyedJaggedTensor(keys=["clicked"], values=items, lengths=lengths), (mean > ITEMS / 3).float())


class Model(nn.Module):
    """Returns the loss and the output, as TorchRec's pipelines expect."""

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
    pipeline: fs.PrioritizedPipeline[Batch] = fs.PrioritizedPipeline(model, optimizer)
    dataloader_iter, losses = batches(dist.get_rank(), steps=200), []
    while True:
        try:
            losses.append(float(pipeline.progress(dataloader_iter)))
        except StopIteration:
            break
    if dist.get_rank() == 0:
        print(f"loss {sum(losses[:20]) / 20:.3f} at first, {sum(losses[-20:]) / 20:.3f} at the end")
        peak = pipeline.peak_memory
        print(f"overlap held at most {peak.rows / 1e3:.0f} kB of rows and {peak.ids / 1e3:.0f} kB of ids")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
