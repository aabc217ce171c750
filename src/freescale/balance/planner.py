"""From the lengths of a step's samples to where they are computed: a cost model and the rules of a run."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freescale.balance.assign import assign
from freescale.balance.cost import Calibration, Cost, Products, fit, sizes
from freescale.balance.placement import Floats, Ints, Placement
from freescale.config import BalanceConfig
from freescale.errors import DataError
from freescale.log import info_once, warning_once


class Planner:
    """Plans one step after another, alike on every rank; with `balance.adapt`, from what was measured before."""

    def __init__(
        self,
        cost: Cost,
        rules: BalanceConfig,
        *,
        world_size: int,
        hosts: Ints | None = None,
        is_rank_zero: bool = False,
    ) -> None:
        self.basis = Basis(cost)
        self.stopwatch = Stopwatch() if rules.adapt else None
        self._learner, self._is_rank_zero = Learner(is_rank_zero=is_rank_zero), is_rank_zero
        self._rules, self._world_size = rules, world_size
        limit, equal = rules.max_tokens or None, rules.counts == "equal"
        self._given = {"world_size": world_size, "hosts": hosts, "max_tokens": limit, "equal_counts": equal}
        self._sums = np.zeros(4)

    def __call__(self, lengths: Mapping[str, Ints], homes: Ints) -> Placement:
        """`lengths`: of all samples, by group; those of `history` and `candidates` are what is computed."""
        history = lengths["history"]
        candidates = lengths.get("candidates", np.zeros_like(history))
        basis = self.basis
        try:
            costs, tokens = basis.cost.of(history, candidates), history + candidates
            placement = assign(costs, homes, tokens=tokens, speeds=basis.speeds, **self._given)
        except ValueError as error:
            remedy = "raise max_tokens if it is named here, or give fewer or shorter samples in a step"
            raise DataError("the samples of a step cannot be placed", where=str(error), remedy=remedy) from error
        self._sums += 1, placement.at_home, placement.max_over_mean, placement.moved_tokens
        return placement

    def tells(self) -> Sequence[int]:
        """What this rank has to say before the next plan; as many numbers on every rank."""
        return [*self.stopwatch.read(), *self._learner.proposes()] if self.stopwatch is not None else ()

    def hears(self, told: Ints) -> None:
        """What all ranks said."""
        if self.stopwatch is not None:
            self.basis = self._learner.learn(self.basis, told)

    def state_dict(self) -> dict[str, Any]:
        """What placements rest on, for a checkpoint."""
        speeds = self.basis.speeds
        return {"cost": list(astuple(self.basis.cost)), "speeds": None if speeds is None else speeds.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; but a cost that was set, and not to be learnt, stays. Of other ranks speeds start anew."""
        speeds = state["speeds"] if len(state["speeds"] or ()) == self._world_size else None
        fixed = self._rules.cost and not self._rules.adapt
        cost = self.basis.cost if fixed else Cost(*(state["cost"] or ()))
        self.basis = Basis(cost, None if speeds is None else np.array(speeds))
        slow = {rank: speed for rank, speed in enumerate(speeds or ()) if speed != 1}
        if slow and not self._rules.adapt and self._is_rank_zero:
            measured = "ranks keep to the speeds that an earlier part of this run measured"
            warning_once(f"{measured}, against the usual 1.00: {slow}")

    @property
    def calibration(self) -> Calibration | None:
        """The last one that was learnt."""
        return self._learner.calibration

    @property
    def sums(self) -> Floats:
        """The number of placements that were planned, and the sums of what `means` divides by it."""
        return self._sums.copy()

    @property
    def means(self) -> dict[str, float]:
        """Of all placements that were planned."""
        _, *sums = (self._sums / max(1.0, self._sums[0])).tolist()
        return dict(zip(("at_home", "max_over_mean", "moved_tokens"), sums, strict=True))

    def report(self) -> list[str]:
        """Say what was planned, and what was learnt."""
        means = self.means
        lines = [
            f"balance: the slowest rank was given {means['max_over_mean']:.3f} of the mean work, "
            f"{means['at_home']:.3f} without; {means['moved_tokens']:.1%} of the tokens moved"
        ]
        if self.calibration is not None:
            constants, error = ", ".join(f"{value:.4g}" for value in self.basis.cost.constants), self.calibration.error
            lines.append(f"measured: balance.cost = [{constants}], off by {error:.1%} of a step's time")
        return lines if self._sums[0] else []


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
