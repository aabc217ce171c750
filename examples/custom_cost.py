"""Measure the cost of a sample of a custom model, fit it, and balance by it.

python examples/custom_cost.py
"""

import time

import numpy as np
import torch
from torch import Tensor, nn

import freescale as fs
from freescale.balance.cost import NormalEquations, fit, sizes

DIM, WINDOW = 64, 32


class Windowed(nn.Module):
    """Attention in windows: twice the length is twice the work, not four times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 4 * DIM, dropout=0.0, batch_first=True)

    def forward(self, events: Tensor) -> Tensor:
        return self.layer(events.view(-1, WINDOW, DIM)).sum()


def measured(model: nn.Module, lengths: list[int]) -> list[float]:
    """Return the seconds of a sample of each length, forward and backward: the best of four."""

    def once(length: int) -> float:
        begin = time.perf_counter()
        model(torch.randn(length, DIM)).backward()
        return time.perf_counter() - begin

    return [min(once(length) for _ in range(4)) for length in lengths]


def main() -> None:
    torch.set_num_threads(1)
    model, lengths = Windowed(), [WINDOW * n for n in (1, 2, 4, 8, 16, 32, 64)]
    measured(model, lengths[:1])  # warm-up
    seconds = measured(model, lengths)
    tokens, pairs = sizes(lengths)
    products = NormalEquations()
    products.add(np.stack([np.zeros_like(tokens), np.ones_like(tokens), tokens, pairs], axis=1), seconds)
    law = fit(products)
    print(f"a sample {law.cost.sample:.1e} s, a token {law.cost.token:.1e} s, a pair {law.cost.pair:.1e} s")
    print(f"a measured time is {100 * law.error:.0f}% off that")

    drawn = np.minimum(np.random.default_rng(0).lognormal(5.0, 1.0, 512).astype(int), 2048)
    homes = np.repeat(np.arange(8), 64)
    for name, cost in (("this law", law.cost), ("full attention", fs.Cost.hstu(dim=DIM))):
        placed = fs.balance.assign(cost.of(drawn), homes, world_size=8)
        loads = np.bincount(placed.rank, weights=law.cost.of(drawn), minlength=8)
        print(f"dealt by the cost of {name}: the slowest rank takes {loads.max() / loads.mean():.3f} of the mean")


if __name__ == "__main__":
    main()
