"""How long a rank computes, from the steps that a run kept whole. Pure."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from freescale.bubbles.events import TRAFFIC, RankStep, Span, merge_intervals
from freescale.bubbles.records import StepSample
from freescale.errors import DataError
from freescale.simulate.operations import Machine

_WARM = 3
_VARIED = 2.0


class Compute(NamedTuple):
    """Both passes, as measured."""

    step: float
    """Seconds, whatever a batch holds."""
    work: float
    """Seconds per unit of work."""
    forward: float
    """Share of the forward pass."""
    error: float
    """By what share a time is off, on average."""

    def applied(self, machine: Machine) -> Machine:
        """A machine that computes so."""
        return replace(machine, step=self.step, work=self.work, forward=self.forward)


def computes(samples: Mapping[int, Sequence[StepSample]]) -> Compute:
    """How long ranks compute for the work of their batches, in whatever order they do things."""
    steps = [sample.step for number, of_ranks in samples.items() if number > _WARM for sample in of_ranks]
    forward, backward = np.array([_passes(step) for step in steps]).reshape(-1, 2).T
    work, took = np.array([step.work for step in steps]), forward + backward
    if not len(work) or not work.any() or not took.any():
        raise DataError("the run kept too few whole steps", remedy=f"train for more than {_WARM} steps")
    slope, base = float(took.sum() / work.sum()), 0.0
    if work.max() > _VARIED * work.min():  # else what every step costs cannot be told from what its work does
        fitted = np.polyfit(work, took, 1)
        slope, base = fitted if (fitted >= 0).all() else (slope, base)
    error = np.abs(took - (base + slope * work)).mean() / took.mean()
    return Compute(float(base), float(slope), float(forward.sum() / took.sum()), float(error))


def _passes(step: RankStep) -> tuple[float, float]:
    """Seconds of both passes: a backward one and the forward span before it. Looking rows up is a forward span too."""
    passes = [span for span in step.spans if span.kind in ("forward", "backward")]
    pairs = [(a, b) for a, b in itertools.pairwise(passes) if (a.kind, b.kind) == ("forward", "backward")]
    return sum(busy(step, a) for a, _ in pairs), sum(busy(step, b) for _, b in pairs)


def busy(step: RankStep, span: Span) -> float:
    """Seconds of a span without waits for transfers."""
    of_transfers = [wait for transfer in step.transfers for wait in transfer.waits]
    waits = merge_intervals([*of_transfers, *((s.begin, s.end) for s in step.spans if s.kind in TRAFFIC)])
    waited = sum(max(0, min(end, span.end) - max(begin, span.begin)) for begin, end in waits)
    return (span.end - span.begin - waited) / 1e9
