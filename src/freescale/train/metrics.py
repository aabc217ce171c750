"""What evaluation measures. Retrieval: at which place the right item stands. Pure."""

from collections.abc import Iterable

import torch
from torch import Tensor

CUTS = (10, 50, 200)


def places(scores: Tensor, right: Tensor, first: int, own: Tensor, hidden: Tensor) -> Tensor:
    """How many items of a piece of the corpus stand before the right one of each query; equal scores by item number.

    `scores` [queries, items from `first` on], `own` the score of each query's right item `right`, `hidden` marks items
    that do not count.
    """
    item = torch.arange(first, first + scores.shape[1], device=scores.device)
    before = (scores > own[:, None]) | ((scores == own[:, None]) & (item < right[:, None]))
    return (before & ~hidden).sum(1)


def retrieval_sums(place: Tensor) -> Tensor:
    """Add up, over queries with `place` items before their right one: count, hits at each cut, NDCG@10, MRR."""
    place = place.double()
    gain = 1.0 / (place + 2.0).log2()
    hits: Iterable[Tensor] = ((place < cut).double().sum() for cut in CUTS)
    return torch.stack([torch.tensor(float(len(place))), *hits, (gain * (place < 10)).sum(), (1 / (place + 1)).sum()])


def retrieval_means(sums: Tensor) -> dict[str, float]:
    """Turn sums over all ranks into metrics by name."""
    count, *rest = sums.tolist()
    names = [*(f"hr@{cut}" for cut in CUTS), "ndcg@10", "mrr"]
    return {name: value / max(count, 1.0) for name, value in zip(names, rest, strict=True)} | {"users": count}
