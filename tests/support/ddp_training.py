"""What a DDP trainer of the tests trains with: histories of uneven length, their batches, and a model."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import freescale as fs
from tests.support.ranks import World

SAMPLES, BATCH, EPOCHS, ITEMS = 90, 4, 2, 50
COST = fs.Cost(token=20.0, pair=1.0)
LENGTHS = np.minimum(np.random.default_rng(0).lognormal(2.0, 1.2, SAMPLES).astype(int) + 1, 60)


class Histories(Dataset[dict[str, Tensor]]):
    """What a sample holds follows from its number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        items = (torch.arange(int(LENGTHS[index])) * 7 + index) % (ITEMS - 1) + 1
        return {"number": torch.tensor(index), "item": items, "target": items.double().mean()}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        "number": torch.stack([sample["number"] for sample in samples]),
        "item": nn.utils.rnn.pad_sequence([sample["item"] for sample in samples], batch_first=True),
        "length": torch.tensor([len(sample["item"]) for sample in samples]),
        "target": torch.stack([sample["target"] for sample in samples]),
    }


@dataclass(frozen=True)
class Jagged:
    number: Tensor
    events: fs.Events
    target: Tensor
    epoch: int = 3
    loss_weight: Tensor | None = None


def jagged(samples: list[dict[str, Tensor]]) -> Jagged:
    lengths = torch.tensor([0, *(len(sample["item"]) for sample in samples)])
    items = torch.cat([sample["item"] for sample in samples])
    number, target = (torch.stack([sample[name] for sample in samples]) for name in ("number", "target"))
    return Jagged(number, fs.Events(lengths.cumsum(0), {"item": items}), target)


class Model(nn.Module):
    """A loss for every sample, or for every event; padding and company do not change it."""

    def __init__(self, per_event: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.per_event = per_event
        self.items = nn.Embedding(ITEMS, 8, dtype=torch.float64)
        self.look = nn.Linear(8, 8, dtype=torch.float64)
        self.say = nn.Linear(8, 1, dtype=torch.float64)

    def forward(self, batch: Any) -> Tensor:
        if isinstance(batch, Jagged):
            lengths, target = batch.events.lengths, batch.target
            items = torch.zeros(len(lengths), max([0, *lengths.tolist()]), dtype=torch.int64)
            items[torch.arange(items.shape[1]) < lengths[:, None]] = batch.events["item"]
        else:
            items, lengths, target = batch["item"], batch["length"], batch["target"]
        held = torch.arange(items.shape[1]) < lengths[:, None]
        rows = self.items(items) * held[..., None]
        seen = rows + torch.tanh(self.look(rows.sum(1) / lengths.clamp(min=1)[:, None]))[:, None]
        off = (self.say(seen)[..., 0] - target[:, None] / ITEMS).square() * held
        return off.sum() if self.per_event else (off.sum(1) / lengths.clamp(min=1)).sum()


def loader_of(world: World, kind: str, **more: Any) -> tuple[DataLoader[Any], Any]:
    data = Histories()
    sampler = DistributedSampler(data, world.ranks, world.rank, shuffle=True, seed=7)
    collate = jagged if kind == "jagged" else padded
    return DataLoader(data, BATCH, sampler=sampler, collate_fn=collate, **more), sampler


def balanced(loader: Any, kind: str, per_event: bool, **more: Any) -> Any:
    terms: dict[str, Any] = {"terms": lambda lengths: lengths} if per_event else {}
    if kind == "jagged":
        return fs.BalancedLoader(loader, lengths=lambda b: b.events.lengths, cost=COST, **terms, **more)
    if kind == "placed":
        return fs.BalancedLoader(loader, lengths=LENGTHS, cost=COST, **terms, **more)
    names = {"item": 0}
    return fs.BalancedLoader(loader, lengths=lambda b: b["length"], cost=COST, pad_values=names, **terms, **more)
