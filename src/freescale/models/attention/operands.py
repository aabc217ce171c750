"""What every implementation of HSTU attention reads and gives."""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """What attention reads. q, k, v are [tokens, heads, width]."""

    q: Tensor
    k: Tensor
    v: Tensor
    spans: Tensor
    asked: Tensor
    event: Tensor
    position: Tensor
    time: Tensor
    scale: float


class Gradients(NamedTuple):
    """Of what can be learnt."""

    q: Tensor
    k: Tensor
    v: Tensor
    position: Tensor
    time: Tensor


def like(x: Tensor) -> Tensor:
    """Room for a tensor of the same shape, packed."""
    return x.new_empty(x.shape)
