"""Heads and losses of several tasks: binary labels and numbers, with an optional mixture of experts (MMoE)."""

from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from freescale.config import TaskConfig


class ExpertHeads(nn.Module):
    """Multi-gate mixture of experts: every task mixes the outputs of shared experts by a gate of its own."""

    def __init__(self, dim: int, tasks: int, experts: int) -> None:
        super().__init__()
        self._experts = experts
        self.experts = nn.Linear(dim, experts * dim)
        self.gates = nn.Linear(dim, tasks * experts)
        self.heads = nn.Parameter(torch.empty(tasks, dim).normal_(std=dim**-0.5))
        self.bias = nn.Parameter(torch.zeros(tasks))

    def forward(self, x: Tensor) -> Tensor:
        """Return one output per task: [candidates, tasks]."""
        experts = F.silu(self.experts(x)).unflatten(-1, (self._experts, -1))
        gates = self.gates(x).unflatten(-1, (len(self.heads), self._experts)).softmax(-1)
        mixed = torch.einsum("cte,ced->ctd", gates, experts)
        return (mixed * self.heads).sum(-1) + self.bias


def build_heads(task: TaskConfig, dim: int) -> nn.Module:
    """Build the heads of a task: one output per label."""
    if task.experts:
        return ExpertHeads(dim, len(task.labels), task.experts)
    return nn.Linear(dim, len(task.labels))


def multi_task_loss(outputs: Tensor, labels: Tensor, task: TaskConfig) -> Tensor:
    """Return the weighted sum of the losses of all labels [candidates, tasks]; NaN is no label.

    Binary labels: cross entropy of the output as a logit. Numbers: half of the squared error.
    """
    known = labels.abs() <= torch.finfo(labels.dtype).max  # as `isfinite`, with fewer launches
    labels = labels.to(outputs.dtype).nan_to_num(0.0, 0.0, 0.0)
    loss = F.binary_cross_entropy_with_logits(outputs, labels, reduction="none")
    if task.regression:
        is_number = _constant(tuple(label in task.regression for label in task.labels), torch.bool, outputs.device)
        loss = torch.where(is_number, 0.5 * (outputs - labels).square(), loss)
    if task.weights:
        loss = loss * _constant(task.weights, loss.dtype, loss.device)
    return (loss * known).sum()


@lru_cache
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor that is copied to its device once: with each copy the host would wait."""
    return torch.tensor(values, dtype=dtype, device=device)
