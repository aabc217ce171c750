"""What measured steps teach about the cost of a sample and the speed of each rank. Knows no process group.

Each rank sums up what it computed and how long that took (`Stopwatch`). The sums of all ranks travel with the lengths
of the next batch, so every rank learns the same from them (`Learner`) and none has to be asked. Only a fit may differ
in its last bits between kinds of machines, so all ranks take that of rank 0, which travels with its next sums.
"""

import threading
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freescale.balance.calibrate import Calibration, Products, fit
from freescale.balance.cost import Cost, sizes
from freescale.balance.place.placement import Floats, Ints
from freescale.log import info_once

SUMS = 5
"""Steps, samples, tokens, pairs and nanoseconds."""
_RECENT = 5  # rounds whose median is a rank's speed: one odd step changes nothing
_KEPT = 0.98  # of what was measured before, in every round: about fifty rounds shape the cost
_FIT_EVERY = 8
_SAME = 0.02  # speeds this near to the usual one are noise
_SLOWEST = 0.05  # who were given nothing could never show that it has recovered
_TELL = 0.1


class Basis(NamedTuple):
    """What placements rest on, beside the samples."""

    cost: Cost
    speeds: Floats | None = None
    """Of each rank, if they differ."""


class Stopwatch:
    """What this rank computed, and how long that took. One thread notes, another one reads."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[int, int, int]] = {}
        self._sums = np.zeros(SUMS, dtype=np.int64)
        self._lock, self._warm = threading.Lock(), False

    def given(self, step: int, lengths: ArrayLike, candidates: ArrayLike) -> None:
        """The samples of a step, by their lengths."""
        tokens, pairs = sizes(lengths, candidates)
        self._given[step] = len(tokens), int(tokens.sum()), int(pairs.sum())

    def took(self, step: int, nanoseconds: int) -> None:
        """How long they were computed. The first step of a process pays for what is done once, and is left out."""
        done = self._given.pop(step)
        with self._lock:
            self._sums += np.array([1, *done, nanoseconds], dtype=np.int64) * self._warm
        self._warm = True

    def read(self) -> list[int]:
        """The sums since the last time."""
        with self._lock:
            found = self._sums.tolist()
            self._sums[:] = 0
        return found


class Learner:
    """Learns from what all ranks measured, alike on each of them."""

    def __init__(self, *, is_rank_zero: bool) -> None:
        self._is_rank_zero = is_rank_zero
        """Whether this rank speaks for all."""
        self._products, self._rounds = Products(), 0
        self._recent: deque[Floats] = deque(maxlen=_RECENT)
        self._told: Floats | None = None
        self.calibration: Calibration | None = None
        """The last one."""

    def proposes(self) -> list[int]:
        """The constants of the last fit, to the last bit, as whole numbers."""
        found = self.calibration.cost.constants if self.calibration is not None else (0.0, 0.0, 0.0)
        return np.array(found).view(np.int64).tolist()

    def learn(self, basis: Basis, told: Ints) -> Basis:
        """Take into account what all ranks measured, and what rank 0 proposes: [ranks, SUMS + 3]."""
        sums, proposed = told[:, :SUMS], Cost(*told[0, SUMS:].view(np.float64).tolist())
        cost = proposed if proposed.summed(1, 1, 1) > 0 else basis.cost
        computed = (sums[:, 0] > 0) & (sums[:, 1] > 0) & (sums[:, 4] > 0)
        if not computed.any():
            return basis._replace(cost=cost)
        self._rounds += 1
        speeds = self._speeds(cost, sums, computed)
        self._tell(speeds)
        self._fit(sums[computed], speeds[computed])
        return Basis(cost, speeds)

    def _speeds(self, cost: Cost, sums: Ints, computed: NDArray[np.bool_]) -> Floats:
        """Work per time, against the usual rank. Work without what every step costs: a rank's own share of that
        shows as less speed, so that times and not work become equal.
        """
        work = np.where(computed, cost.summed(*sums[:, 1:4].T), np.nan)
        speed = work / np.maximum(sums[:, 4], 1)
        self._recent.append(speed / np.nanmedian(speed))
        known = np.array(self._recent)
        known[:, np.isnan(known).all(axis=0)] = 1.0
        found = np.maximum(np.nanmedian(known, axis=0).round(2), _SLOWEST)
        return np.where(np.abs(found - 1.0) <= _SAME, 1.0, found)

    def _fit(self, sums: Ints, speeds: Floats) -> None:
        self._products.fade(_KEPT)
        self._products.add(sums[:, :4], sums[:, 4] * 1e-9 * speeds)
        if self._rounds % _FIT_EVERY == 0:
            self.calibration = fit(self._products)

    def _tell(self, speeds: Floats) -> None:
        before = np.ones_like(speeds) if self._told is None else self._told
        changed = np.abs(speeds - before) > _TELL
        for rank in np.flatnonzero(changed).tolist() if self._is_rank_zero else ():
            share = "its full share again" if speeds[rank] == 1 else f"{speeds[rank]:.2f} of the usual share"
            info_once(f"balance.adapt: after {self._rounds} steps rank {rank} gets {share}, as measured")
        self._told = np.where(changed, speeds, before)
