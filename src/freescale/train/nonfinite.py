"""NaN and Inf: detected by all ranks in the step in which they arise, with the samples that cause them.

DDP sums the dense gradient over the ranks, so a value that is not finite on one rank is not finite on any: detection
needs no extra collective. Rows are updated after the backward pass, so a faulty step can skip all updates. On a GPU the
updates depend on the check there, and the host reads it when it has launched them.
"""

import math
import statistics
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from freescale.data.batch import Batch
from freescale.errors import FreeScaleError
from freescale.train.sharded_model import SequenceModule
from freescale.transport.c10d import C10d

_RECENT_NORMS = 64
_MIN_NORMS = 8
"""Norms to see before one can be called a spike."""
_MAX_CONSECUTIVE = 10
"""Consecutive faulty steps after which training ends, whatever the policy."""
_NAMED_SAMPLES, _GATHERED_SAMPLES = 8, 64
"""Samples that a message names, and that one rank sends to the others at once."""


class NonFiniteError(FreeScaleError):
    """A loss or gradient that is NaN, infinite or far too large."""

    exit_code = 6


class GradNormMonitor:
    """Decides from its norm whether the dense gradient can be used. Equal on all ranks, since the gradient is."""

    def __init__(self, spike: float) -> None:
        """`spike`: the multiple of the recent median norm that counts as a fault; 0 disables the check."""
        self._spike = spike
        self._recent: deque[float] = deque(maxlen=_RECENT_NORMS)

    def fault(self, norm: float) -> str:
        """Return why a gradient of this norm cannot be used, or an empty text."""
        if not math.isfinite(norm):
            return "the gradient is not finite"
        if norm > self.largest:
            return f"the gradient norm is {norm / self._median:.0f} times its recent median"
        self._recent.append(norm)
        return ""

    @property
    def largest(self) -> float:
        """The largest norm of a gradient that can be used."""
        return self._spike * self._median or sys.float_info.max

    @property
    def _median(self) -> float:
        """The median of the recent norms; 0 if there is none to compare with."""
        return statistics.median(self._recent) if self._spike and len(self._recent) >= _MIN_NORMS else 0.0

    def state_dict(self) -> list[float]:
        """Return the recent norms."""
        return list(self._recent)

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Restore the recent norms."""
        self._recent = deque(state, maxlen=_RECENT_NORMS)


@dataclass(frozen=True)
class NonFiniteFault:
    """A step whose loss or gradients cannot be used."""

    step: int
    what: str
    samples: Sequence[int]
    """Samples of all ranks whose own loss or gradient is not finite; empty if only their sum is not."""
    partially_applied: bool
    """Whether some ranks applied row gradients of the step before all ranks detected the fault."""

    def __str__(self) -> str:
        names = ", ".join(map(str, self.samples[:_NAMED_SAMPLES]))
        names += ", ..." if len(self.samples) > _NAMED_SAMPLES else ""
        return f"step {self.step}: {self.what}; {f'samples {names}' if names else 'no sample alone'}"

    def entry(self, *, kept: bool) -> dict[str, Any]:
        """Return an entry for the metrics. `kept`: the step counts as done, without an update."""
        entry = {"kind": "fault", "step": self.step if kept else 0, "at": self.step, "what": self.what}
        return entry | {"samples": list(self.samples)}

    def error(self) -> NonFiniteError:
        """Return the error that ends training."""
        remedy = 'inspect those samples, or continue without them: train.on_fault = "rollback" or "skip"'
        if not self.samples:
            remedy = "lower the learning rates, or set train.clip"
        return NonFiniteError(str(self), remedy=remedy)


class FaultPolicy:
    """Applies `train.on_fault`: end training, skip the step, or go back to a checkpoint."""

    def __init__(self, policy: Literal["stop", "skip", "rollback"]) -> None:
        self._policy, self._consecutive = policy, 0

    def requires_rollback(self, fault: NonFiniteFault | None, excluded: Set[int]) -> bool:
        """Return whether to train again from the newest checkpoint without the faulty samples.

        Raises NonFiniteError if training has to end. `excluded`: samples that are left out already.
        """
        self._consecutive = 0 if fault is None else self._consecutive + 1
        if fault is None:
            return False
        new = set(fault.samples) - excluded
        unrecoverable = fault.partially_applied and not new
        if self._policy == "stop" or self._consecutive > _MAX_CONSECUTIVE or unrecoverable:
            raise fault.error()
        return fault.partially_applied or (self._policy == "rollback" and bool(new))


def gather_samples(samples: Sequence[int], transport: C10d) -> list[int]:
    """Return the sorted sample ids of all ranks."""
    row = torch.full((_GATHERED_SAMPLES + 1,), -1, device=transport.device)
    row[: len(samples[:_GATHERED_SAMPLES])] = torch.tensor(samples[:_GATHERED_SAMPLES], dtype=torch.int64)
    gathered = transport.all_gather(row, name="nonfinite samples").wait_on_host()
    return sorted(set(gathered[gathered >= 0].tolist()))


def are_finite(tensors: Sequence[Tensor]) -> bool | Tensor:
    """Return whether all values are finite: NaN and Inf survive a sum. On a GPU the host does not wait for the answer.

    There it is the largest magnitude that is tested, which one launch finds for many tensors.
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]  # nothing has no largest magnitude
    if tensors and tensors[0].device.type != "cpu":
        largest = torch.nn.utils.get_total_norm(tensors, math.inf)
        return largest <= torch.finfo(largest.dtype).max  # NaN is not; one launch, where `isfinite` takes four
    return all(bool(tensor.sum().isfinite()) for tensor in tensors)


def withhold_nonfinite(gradients: Iterable[Tensor], finite: bool | Tensor) -> None:
    """Set gradients to 0 unless all values of their rank are finite."""
    withheld = ~finite if isinstance(finite, Tensor) else not finite
    for gradient in gradients:
        if isinstance(withheld, Tensor):
            gradient.masked_fill_(withheld, 0.0)
        elif withheld:
            gradient.zero_()


class GradientCheck:
    """The check of a step on a device. The host reads it after all updates of the step are launched.

    `usable` makes the updates depend on it without the host: 1 if the gradient can be used, else 0.
    """

    def __init__(self, norm: Tensor, finite: Tensor, *, largest: float, rows: Mapping[str, Tensor]) -> None:
        compared = norm.double()
        self.usable = (compared <= largest).to(norm.dtype)  # NaN is not; as the host compares
        self._values = torch.empty(2, dtype=torch.float64, pin_memory=True)
        self._values.copy_(torch.stack([compared, finite]), non_blocking=True)  # promotes to fp64
        self._copied = torch.accelerator.current_stream(norm.device).record_event()
        self.rows = dict(rows)
        """Those of the batch, to look for the samples of a fault."""
        for values in rows.values():  # they are freed here, and were allocated on another stream
            values.record_stream(torch.accelerator.current_stream(norm.device))

    def read(self) -> tuple[float, bool]:
        """Wait for the gradient norm, and for whether the losses and row gradients of this rank are finite."""
        self._copied.synchronize()
        norm, finite = self._values.tolist()
        return norm, bool(finite)


def nonfinite_samples(
    module: SequenceModule, batch: Batch, fetched: Mapping[str, Tensor] | None, *, device: torch.device
) -> list[int]:
    """Return the samples of a batch whose own loss or gradient is not finite, computed one by one; maybe none.

    `fetched`: the rows of the batch, if tables are sharded.
    """
    if not len(batch):
        return []
    singles = [batch.select(torch.tensor([index])) for index in range(len(batch))]
    parts = [module.model.prepare(single.to(device)) for single in singles]
    leaves = [values.detach().requires_grad_() for values in (fetched or {}).values()]
    rows = None if fetched is None else dict(zip(fetched, leaves, strict=True))
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    samples, ids_of_parts = [], module.unique_ids([part.ids for part in parts])
    for sample, part, ids in zip(batch.sample_id.tolist(), parts, ids_of_parts, strict=True):
        loss = module(part, ids, rows)
        gradients: Any = torch.autograd.grad(loss, [*leaves, *weights], allow_unused=True) if loss.requires_grad else ()
        if not are_finite([loss.detach(), *(gradient for gradient in gradients if gradient is not None)]):
            samples.append(sample)
    return samples
