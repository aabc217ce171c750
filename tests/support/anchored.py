"""Gradients of many targets per history in one pass, and of the same targets as separate samples."""

import torch
from torch import Tensor

from freescale.config import DataConfig, ModelConfig, RunConfig, TaskConfig
from freescale.data.batch import Batch, Events
from freescale.data.feature_schema import ANCHOR
from freescale.embedding.ids import deduplicate
from freescale.models.protocol import Rows
from freescale.models.ranking import Ranking

HISTORIES, LENGTH, TARGETS, ITEMS = 8, 200, 20, 500


def batches() -> tuple[Batch, Batch]:
    """Return histories with evenly spaced targets, and the same targets as separate samples."""
    generator = torch.Generator().manual_seed(0)
    item = torch.randint(ITEMS, (HISTORIES, LENGTH), generator=generator)
    time = torch.randint(1, 5000, (HISTORIES, LENGTH), generator=generator).cumsum(1)
    anchor = torch.arange(1, TARGETS + 1) * (LENGTH // TARGETS) - 1
    label = torch.randint(2, (HISTORIES, TARGETS), generator=generator).float()
    targets = {
        "candidate_id": item[:, anchor].flatten(),
        "candidate_timestamp": time[:, anchor].flatten(),
        "label": label.flatten(),
    }
    history = Events(torch.arange(HISTORIES + 1) * LENGTH, {"item_id": item.flatten(), "timestamp": time.flatten()})
    shown = Events(torch.arange(HISTORIES + 1) * TARGETS, {**targets, ANCHOR: anchor.repeat(HISTORIES)})
    together = Batch(0, 0, torch.arange(HISTORIES), {}, history, shown, None)
    lengths = anchor.repeat(HISTORIES)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    seen = [torch.arange(int(a)) + row * LENGTH for row in range(HISTORIES) for a in anchor]
    index = torch.cat(seen)
    histories = Events(offsets, {name: values[index] for name, values in history.features.items()})
    samples = torch.arange(HISTORIES).repeat_interleave(TARGETS)
    return together, Batch(0, 0, samples, {}, histories, Events(torch.arange(len(samples) + 1), targets), None)


def gradients(batch: Batch, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the gradients of a ranking model and of its item rows."""
    config = RunConfig(
        data=DataConfig(path="none", max_history=LENGTH),
        model=ModelConfig(dim=64, layers=2, heads=2),
        task=TaskConfig(kind="ranking", labels=("label",)),
    )
    torch.manual_seed(0)
    model, table = Ranking(config, items=ITEMS).to(dtype), torch.randn(ITEMS, 64, dtype=dtype, requires_grad=True)
    inputs = model.prepare(batch)
    unique = deduplicate(inputs.ids["item"], rows=ITEMS)
    loss = model(inputs, {"item": Rows(table[unique.unique], unique.inverse)})
    loss.backward()
    named = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert table.grad is not None
    return {**named, "table": table.grad, "loss": loss.detach()[None]}
