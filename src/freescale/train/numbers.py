"""Numbers that are none: found by all ranks in the step in which they arise, with the samples that they come from.

The dense gradient is added up over the ranks, so what is not finite on one of them is not finite on all: nobody has to
be asked. Rows are changed after the backward pass, so such a step can be made to change nothing at all.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from freescale.data.batch import Batch
from freescale.errors import FreeScaleError
from freescale.train.network import Network
from freescale.transport.c10d import C10d

_RECENT = 64
_ENOUGH = 8
"""Steps before a norm can be called unusual."""
_MOST_IN_A_ROW = 10
"""Steps that may be skipped before it is clear that this leads nowhere."""
_NAMED, _GATHERED = 8, 64
"""Samples that are told, and that a rank tells the others of at once."""


class NumbersError(FreeScaleError):
    """A loss or a gradient that is not a number, or far too large."""

    exit_code = 6


class Judge:
    """Says whether the dense gradient of a step can be used. The same on every rank, since the gradient is."""

    def __init__(self, spike: float) -> None:
        """`spike`: how many times the median of the last steps is too much; 0 if nothing is."""
        self._spike = spike
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def fault(self, norm: float) -> str:
        """What is wrong with a gradient of this norm, if anything."""
        if not math.isfinite(norm):
            return "the gradient is not finite"
        usual = statistics.median(self._recent) if self._spike and len(self._recent) >= _ENOUGH else 0.0
        if usual and norm > self._spike * usual:
            return f"the gradient is {norm / usual:.0f} times what it was"
        self._recent.append(norm)
        return ""

    def state_dict(self) -> list[float]:
        """What it compares with."""
        return list(self._recent)

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Go on from there."""
        self._recent = deque(state, maxlen=_RECENT)


@dataclass(frozen=True)
class Fault:
    """Numbers of a step that cannot be used."""

    step: int
    what: str
    samples: Sequence[int]
    """Whose own loss or gradient is not finite, on all ranks; none if only all of them together are not."""
    learnt: bool
    """Whether some ranks learnt from their part of the step before the others knew."""

    def __str__(self) -> str:
        named = ", ".join(map(str, self.samples[:_NAMED])) + (", ..." if len(self.samples) > _NAMED else "")
        return f"step {self.step}: {self.what}; {f'samples {named}' if named else 'no sample alone'}"

    def entry(self, *, kept: bool) -> dict[str, Any]:
        """For the metrics. `kept`: the step stays, without a change."""
        entry = {"kind": "fault", "step": self.step if kept else 0, "at": self.step, "what": self.what}
        return entry | {"samples": list(self.samples)}

    def error(self) -> NumbersError:
        """Where training has to end."""
        remedy = 'look at those samples, or go on without them: train.on_fault = "rollback" or "skip"'
        return NumbersError(str(self), remedy=remedy if self.samples else "lower the learning rates, or set train.clip")


class Faults:
    """What a run does about numbers that are none."""

    def __init__(self, policy: Literal["stop", "skip", "rollback"]) -> None:
        self._policy, self._in_a_row = policy, 0

    def go_back(self, fault: Fault | None, left_out: Set[int]) -> bool:
        """Whether to train again from the newest checkpoint, without the samples of a fault. Raises where it ends."""
        self._in_a_row = 0 if fault is None else self._in_a_row + 1
        if fault is None:
            return False
        new = set(fault.samples) - left_out
        helpless = fault.learnt and not new
        if self._policy == "stop" or self._in_a_row > _MOST_IN_A_ROW or helpless:
            raise fault.error()
        return fault.learnt or (self._policy == "rollback" and bool(new))


def gathered(samples: Sequence[int], transport: C10d) -> list[int]:
    """What all ranks name, in order."""
    row = torch.full((_GATHERED + 1,), -1, device=transport.device)
    row[: len(samples[:_GATHERED])] = torch.tensor(samples[:_GATHERED], dtype=torch.int64)
    found = transport.all_gather(row, name="unsound samples").wait()
    return sorted(set(found[found >= 0].tolist()))


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all numbers are, by one pass over each tensor: what is not finite stays so in a sum."""
    return all(bool(tensor.sum().isfinite()) for tensor in tensors)


def culprits(network: Network, batch: Batch, moved: Mapping[str, Tensor] | None) -> list[int]:
    """Samples of a batch whose own loss or gradient is not finite, computed one by one; maybe none alone is.

    `moved`: the rows of the batch, if they travelled here.
    """
    parts = [network.model.prepare(part) for part in batch.split(max(1, len(batch)))]
    leaves = [values.detach().requires_grad_() for values in (moved or {}).values()]
    rows = None if moved is None else dict(zip(moved, leaves, strict=True))
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    found, asked = [], network.wanted([part.ids for part in parts])
    for sample, part, wanted in zip(batch.sample_id.tolist(), parts, asked, strict=True):
        loss = network(part, wanted, rows)
        gradients: Any = torch.autograd.grad(loss, [*leaves, *weights], allow_unused=True) if loss.requires_grad else ()
        if not are_finite([loss.detach(), *(one for one in gradients if one is not None)]):
            found.append(sample)
    return found
