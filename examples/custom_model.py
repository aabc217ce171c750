"""A model of your own in the trainer: balanced, its rows behind compute, its run resumable, by three methods.

torchrun --nproc-per-node 2 examples/custom_model.py
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import freescale as fs
from freescale.data import synthetic
from freescale.data.batch import Batch
from freescale.models.protocol import Rows
from freescale.train.build import build
from freescale.train.metrics_logger import read_entries
from freescale.transport.world import destroy_world, init_world

ITEMS, OOV, DIM = 2000, 16, 16


@dataclass(frozen=True)
class Inputs:
    """A batch, laid out."""

    ids: dict[str, Tensor]
    """`item`: all events, and behind them a wrong item for each history."""
    begin: Tensor
    last: Tensor
    """First and last event of each history."""

    @property
    def count(self) -> int:
        """Terms of the loss on this rank; the divisor is their sum over all ranks."""
        return len(self.last)


class NextByMean(nn.Module):
    """Which item comes last, by the mean of all others? Each is told from one drawn at random."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = {"item": (ITEMS + OOV, DIM)}
        self.head = nn.Linear(DIM, DIM)

    def prepare(self, batch: Batch) -> Inputs:
        """Looks at the batch alone, which may be empty. What is random is keyed by sample, never by rank."""
        known, offsets = batch.history.lengths > 1, batch.history.offsets
        wrong = (batch.sample_id[known] * 2_654_435_761 + batch.step_key) % ITEMS
        ids = torch.cat([batch.history["item_id"], wrong])
        return Inputs({"item": ids}, offsets[:-1][known], offsets[1:][known] - 1)

    def forward(self, inputs: Inputs, rows: dict[str, Rows]) -> Tensor:
        """The *sum* of the losses: where a sample is computed cannot matter."""
        events, wrong = rows["item"].lookup().tensor_split([-inputs.count or len(inputs.ids["item"])])
        sums = torch.cat([events.new_zeros(1, DIM), events.cumsum(0)])
        mean = (sums[inputs.last] - sums[inputs.begin]) / (inputs.last - inputs.begin)[:, None]
        margin = (self.head(mean) * (events[inputs.last] - wrong)).sum(1)
        return nn.functional.softplus(-margin).sum()


def main() -> None:
    world = init_world(timeout=60)
    with tempfile.TemporaryDirectory() as folder:
        places = [folder]
        dist.broadcast_object_list(places)
        place = Path(places[0])
        if world.is_rank_zero:
            synthetic.write_log(place / "data", "ml1m", users=400, catalogue=ITEMS)
        dist.barrier()
        config = fs.RunConfig(
            data=fs.DataConfig(path=str(place / "data"), global_batch=64, split="none", oov_rows=OOV),
            train=fs.TrainConfig(epochs=4, log_every=7, lr=1e-2),
        )
        trainer = build(config, world, place / "run", model=NextByMean())
        trainer.fit()
        trainer.close()
        if world.is_rank_zero:
            losses = [entry["loss"] for entry in read_entries(place / "run") if entry["kind"] == "train"]
            print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
        dist.barrier()
    destroy_world()


if __name__ == "__main__":
    main()
