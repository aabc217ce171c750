"""A padded transformer under DDP: step time without balancing, and balanced for jagged and for padded compute.

torchrun --nproc-per-node 2 examples/balance_padded.py

Compute is emulated: beside its small transformer, each rank sleeps in proportion to the padded cells of its batch, as a
GPU would take that time. Balancing tokens hardly helps a model that pads; grouping samples of like length does.
"""

import time
from collections.abc import Callable, Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import freescale as fs

ITEMS, DIM, LONGEST, BATCH = 100, 16, 400, 16
SECONDS_PER_CELL = 4e-6  # of an emulated rank


class Histories(Dataset[Tensor]):
    """Synthetic histories. A few are long."""

    def __len__(self) -> int:
        return 384

    def __getitem__(self, index: int) -> Tensor:
        rng = torch.Generator().manual_seed(index)
        length = int(torch.empty(1).log_normal_(3.5, 1.2, generator=rng).clamp(2, LONGEST))
        return torch.randint(1, ITEMS, (length,), generator=rng)


def collate(histories: list[Tensor]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(history) for history in histories])
    return {"item": nn.utils.rnn.pad_sequence(histories, batch_first=True), "length": lengths}


class PaddedTransformer(nn.Module):
    """Predicts the last item from the others. Returns the loss of every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.head = nn.Embedding(ITEMS, DIM), nn.Linear(DIM, ITEMS)
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.0, batch_first=True)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        items, last = batch["item"], batch["length"] - 1
        time.sleep(SECONDS_PER_CELL * items.numel())
        seen = torch.arange(items.shape[1]) < last[:, None]
        encoded = self.layer(self.items(items), src_key_padding_mask=~seen) * seen[..., None]
        target = items.gather(1, last[:, None])[:, 0]
        return nn.functional.cross_entropy(self.head(encoded.sum(1)), target, reduction="none")


def train(batches: Iterable[dict[str, Tensor]]) -> tuple[float, float]:
    """Train for one epoch. Return the mean milliseconds of a step and the mean padded cells of its slowest rank."""
    torch.manual_seed(0)
    model = DistributedDataParallel(PaddedTransformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cells, began = [], time.perf_counter()
    for batch in batches:
        weight = batch.get("loss_weight", torch.tensor(1 / BATCH))
        (model(batch) * weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        cells.append(float(batch["item"].numel()))
    milliseconds = 1e3 * (time.perf_counter() - began) / len(cells)
    slowest = torch.tensor(cells)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return milliseconds, float(slowest.mean())


def balanced(loader: DataLoader[Tensor], compute: Literal["jagged", "padded"]) -> fs.BalancedLoader:
    return fs.BalancedLoader(
        loader,
        lengths=lambda batch: batch["length"],
        cost=fs.Cost(token=1.0),  # time in proportion to the cells, as emulated here
        pad_values={"item": 0},
        compute=compute,
    )


def main() -> None:
    dist.init_process_group("gloo")
    data = Histories()
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, seed=1), collate_fn=collate, drop_last=True)
    settings: dict[str, Callable[[], Iterable[dict[str, Tensor]]]] = {
        "no balancing": lambda: loader,
        "compute='jagged'": lambda: balanced(loader, "jagged"),
        "compute='padded'": lambda: balanced(loader, "padded"),
    }
    for name, batches in settings.items():
        milliseconds, cells = train(batches())
        if dist.get_rank() == 0:
            print(f"{name}: {milliseconds:.1f} ms per step, {cells:,.0f} padded cells on the slowest rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
