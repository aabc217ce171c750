"""Compares what fused kernels compute on a device with torch operators on the CPU."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from freescale.config import TablesConfig
from freescale.embedding.sharded import PlainShard
from freescale.models.keyed import Keys
from freescale.models.sampled_softmax import sampled_softmax

_TOKENS, _ROWS, _NEGATIVES = 150, 40, 70
_CPU = torch.device("cpu")
_Optimizer = Literal["sgd", "rowwise_adagrad", "adagrad"]


def kernel_errors(device: torch.device, width: int) -> dict[str, float]:
    """Return the relative errors on a device; infinite where bits differ that must be equal, and for NaN."""
    generator = torch.Generator().manual_seed(width)
    x, rows = (torch.randn(count, width, generator=generator) for count in (_TOKENS, _ROWS))
    sampled = torch.randint(_ROWS - 1, (_TOKENS, 1 + _NEGATIVES), generator=generator)
    names, keys = ("loss", "d_output", "d_rows"), torch.arange(_TOKENS) * 0x5DEECE66D0B - (1 << 62)
    exact = _loss(x.double(), rows.double(), sampled)
    on_device = _loss(*(value.to(device) for value in (x, rows, sampled)))
    errors = {name: _error(*pair) for name, pair in zip(names, zip(on_device, exact, strict=True), strict=True)}
    hashed = [Keys(keys.to(place)).randint(_NEGATIVES, _ROWS, salt=7) for place in (device, _CPU)]
    dropped = [_drop(x.to(place), keys.to(place)) for place in (device, _CPU)]
    errors |= {"negatives": _inequality(*hashed), "dropout": _inequality(*dropped)}
    for optimizer in get_args(_Optimizer):
        updates = [
            _update(rows.to(place, dtype), x.to(place, dtype), sampled[:, 0].to(place), optimizer)
            for place, dtype in ((device, torch.float32), (_CPU, torch.float64))
        ]
        errors[optimizer] = _error(*updates)
    return errors


def _loss(output: Tensor, rows: Tensor, sampled: Tensor) -> list[Tensor]:
    """Return the loss and its gradients."""
    leaves = [value.clone().requires_grad_() for value in (output, rows)]
    positive, negatives = sampled[:, 0], sampled[:, 1:]
    loss = sampled_softmax(*leaves, positive=positive, negatives=negatives, temperature=0.05)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def _drop(x: Tensor, keys: Tensor) -> Tensor:
    """Return the output of dropout and its gradient."""
    leaf = x.clone().requires_grad_()
    out = Keys(keys).dropout(leaf, 0.2, salt=3)
    return torch.cat([out.detach(), *torch.autograd.grad(out, leaf, x.flip(0))])


def _update(weights: Tensor, gradients: Tensor, rows: Tensor, optimizer: _Optimizer) -> Tensor:
    """Return rows after two updates with several gradients for most rows."""
    state = {"item": weights.clone()}
    if optimizer != "sgd":
        state["item.sum"] = weights.new_zeros(len(weights), weights.shape[1] if optimizer == "adagrad" else 1)
    shard = PlainShard(state, TablesConfig(optimizer=optimizer))
    for step in (1, 2):
        shard.update({"item": rows}, {"item": gradients * step}, lr={"item": 0.1})
    return state["item"]


def _error(result: Tensor, exact: Tensor) -> float:
    error = float((result.cpu().double() - exact).norm() / exact.norm())
    return math.inf if math.isnan(error) else error


def _inequality(result: Tensor, expected: Tensor) -> float:
    return 0.0 if torch.equal(result.cpu(), expected) else math.inf
