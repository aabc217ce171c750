"""Adds up what happened between two progress entries, from values that the steps have computed anyway.

Counts are known to the host: nothing here waits for a device until the meter is read, and then once.
"""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from freescale.balance.planner import Planner
from freescale.train.step import StepState

_SUMMED = ("loss", "samples", "tokens", "ids", "unique_ids", "fetched_ids", "colliding_ids")
"""What differs between ranks and is summed over them, in the order of `Taken.sums`."""


class Taken(NamedTuple):
    """What a meter held on this rank when it was read."""

    sums: list[float]
    """To be summed over the ranks; see _SUMMED."""
    seconds: float
    steps: int
    usable_steps: int
    """Those without a fault. Loss and gradient norm are means over them."""
    grad_norm: tuple[float, float]
    """Mean and maximum, the same on all ranks."""
    balance: dict[str, float]
    """Means over the placements that were planned meanwhile; empty where nothing is balanced."""

    @property
    def seconds_per_step(self) -> float:
        """Wall-clock time of a step."""
        return self.seconds / self.steps

    def entry(self, sums: Sequence[float]) -> dict[str, float]:
        """Figures for the journal. `sums`: those of all ranks added up."""
        of = dict(zip(_SUMMED, sums, strict=True))
        found = {
            "loss": of["loss"] / self.usable_steps if self.usable_steps else math.nan,
            "samples/s": of["samples"] / self.seconds,
            "tokens/s": of["tokens"] / self.seconds,
            "seconds": self.seconds_per_step,
        }
        if self.usable_steps:
            found |= {"grad_norm": self.grad_norm[0], "grad_norm_max": self.grad_norm[1]}
        if of["ids"]:
            found["unique_ids"] = of["unique_ids"] / of["ids"]
        if of["fetched_ids"]:
            found["colliding_ids"] = of["colliding_ids"] / of["fetched_ids"]
        return found | self.balance


class Meter:
    """Counts steps until it is read."""

    def __init__(self, planner: Planner | None) -> None:
        self._planner = planner
        self.restart()

    def restart(self) -> None:
        """Count from here."""
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._steps = 0
        self._counts = np.zeros(len(_SUMMED) - 1)
        self._planned = None if self._planner is None else self._planner.sums
        self._since = time.perf_counter()

    def count(self, state: StepState) -> None:
        """Count a step that is done."""
        self._steps += 1
        self._counts += len(state.batch), int(state.batch.history.offsets[-1]), *_ids(state)
        if not state.fault and state.grad_norm is not None:
            self._losses += [loss.detach() for loss in state.losses]
            self._norms.append(state.grad_norm)

    def take(self) -> Taken:
        """What was counted; counting starts anew."""
        loss = mean = largest = 0.0
        if self._norms:
            norms = torch.stack(self._norms).double()
            values = torch.stack([torch.stack(self._losses).double().sum(), norms.mean(), norms.max()])
            loss, mean, largest = values.tolist()
        seconds = time.perf_counter() - self._since
        sums = [loss, *self._counts.tolist()]
        taken = Taken(sums, seconds, self._steps, len(self._norms), (mean, largest), self._balance())
        self.restart()
        return taken

    def _balance(self) -> dict[str, float]:
        if self._planner is None or self._planned is None:
            return {}
        plans, *sums = (self._planner.sums - self._planned).tolist()
        names = ("imbalance_before", "imbalance_after", "moved_tokens")
        return {name: value / plans for name, value in zip(names, sums, strict=True)} if plans else {}


def _ids(state: StepState) -> tuple[int, int, int, int]:
    """Ids looked up; distinct ones; of a batch whose rows were fetched ahead, those, and those that collided."""
    ids = sum(wanted.inverse.numel() for part in state.unique_ids for wanted in part.values())
    unique = sum(len(wanted.unique) for wanted in state.embedding.unique_ids.values())
    arrives = state.embedding.fetch_split
    if arrives is None:
        return ids, unique, 0, 0
    return ids, unique, unique, sum(map(sum, arrives.shared.requested))
