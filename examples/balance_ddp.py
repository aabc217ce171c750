"""Balanced batches in a DDP trainer: a transformer on sequences of very different lengths.

torchrun --nproc-per-node 2 examples/balance_ddp.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import freescale as fs

ITEMS, DIM, LONGEST = 200, 32, 400


class Walks(Dataset[Tensor]):
    """Synthetic histories: each item is near the one before it. A few are long."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Tensor:
        rng = torch.Generator().manual_seed(index)
        length = int(torch.empty(1).log_normal_(3.5, 1.2, generator=rng).clamp(2, LONGEST))
        return torch.randint(-2, 3, (length,), generator=rng).cumsum(0) % ITEMS


def collate(histories: list[Tensor]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(history) for history in histories])
    return {"item": nn.utils.rnn.pad_sequence(histories, batch_first=True), "length": lengths}


class Model(nn.Module):
    """Predicts the next item. Returns the loss of every event that has a next one."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(ITEMS, DIM), nn.Embedding(LONGEST, DIM)
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 4 * DIM, dropout=0.0, batch_first=True)
        self.head = nn.Linear(DIM, ITEMS)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        items, place = batch["item"], torch.arange(batch["item"].shape[1])
        seen = nn.Transformer.generate_square_subsequent_mask(items.shape[1])
        logits = self.head(self.layer(self.items(items) + self.places(place), src_mask=seen, is_causal=True))
        has_next = place[1:] < batch["length"][:, None]
        return nn.functional.cross_entropy(logits[:, :-1][has_next], items[:, 1:][has_next], reduction="none")


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Walks()
    sampler = DistributedSampler(data, seed=1)
    loader = fs.BalancedLoader(
        DataLoader(data, batch_size=8, sampler=sampler, collate_fn=collate),
        lengths=lambda batch: batch["length"],  # or the lengths of the whole dataset: then nothing moves
        cost=fs.Cost(token=12 * DIM * DIM, pair=2 * DIM),
        pad_values={"item": 0},
        compute="padded",  # the transformer computes every sample at the length of the longest one of its batch
        terms=lambda lengths: lengths - 1,
    )
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(3):
        loader.set_epoch(epoch)
        losses = []
        for batch in loader:
            loss = (model(batch) * batch["loss_weight"]).sum()  # DDP averages over ranks: the mean over all events
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean / dist.get_world_size():.3f}")
    if dist.get_rank() == 0:
        print(*loader.report(), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
