"""What retrieval is measured by: at which place the right item stands. Pure."""

from collections.abc import Iterable

import torch
from torch import Tensor

CUTS = (10, 50, 200)


def retrieval_sums(place: Tensor) -> Tensor:
    """Add up, over queries with `place` items before their right one: count, hits at each cut, NDCG@10, MRR."""
    place = place.double()
    gain = 1.0 / (place + 2.0).log2()
    hits: Iterable[Tensor] = ((place < cut).double().sum() for cut in CUTS)
    return torch.stack([place.new_tensor(len(place)), *hits, (gain * (place < 10)).sum(), (1 / (place + 1)).sum()])


def retrieval_means(sums: Tensor) -> dict[str, float]:
    """Turn sums over all ranks into metrics by name."""
    count, *rest = sums.tolist()
    names = [*(f"hr@{cut}" for cut in CUTS), "ndcg@10", "mrr"]
    return {name: value / max(count, 1.0) for name, value in zip(names, rest, strict=True)} | {"users": count}
