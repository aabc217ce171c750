"""Plans the placement of each step from sample lengths, a cost model and the rules of a run. Uses no process group.

With `balance.adapt` the cost model follows measured steps. Each rank sums what it computed and how long that took
(`Stopwatch`). The sums of all ranks are gathered with the lengths of the next batch, so every rank updates its cost
model alike (`CostModelEstimator`). Only a fit may differ in its last bits between kinds of machines, so all ranks use
that of rank 0, which is gathered with its next sums.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freescale.balance.assign import Compute, assign
from freescale.balance.cost import Calibration, Cost, NormalEquations, fit, sizes
from freescale.balance.placement import Floats, Ints, Placement
from freescale.config import BalanceConfig
from freescale.errors import DataError
from freescale.log import info_once, warning_once
from freescale.visibility import Visibility

SUMS = 5
"""Steps, samples, tokens, pairs and nanoseconds."""
_SPEED_WINDOW = 5  # rounds whose median is a rank's speed: one outlier changes nothing
_DECAY = 0.98  # weight of earlier measurements per round: about fifty rounds shape the cost
_FIT_EVERY = 8
_SPEED_NOISE = 0.02  # speeds this near to 1 are noise
_MIN_SPEED = 0.05  # a rank without work could never show that it has recovered
_LOG_CHANGE = 0.1


class Planner:
    """Plans each step, identically on every rank."""

    def __init__(
        self,
        cost: Cost,
        rules: BalanceConfig,
        *,
        world_size: int,
        hosts: Ints | None = None,
        is_rank_zero: bool = False,
        compute: Compute = "jagged",
        anchored: bool = False,
    ) -> None:
        self.cost_model = CostModel(cost)
        self.stopwatch = Stopwatch() if rules.adapt else None
        self._estimator, self._is_rank_zero = CostModelEstimator(is_rank_zero=is_rank_zero), is_rank_zero
        self._rules, self._world_size = rules, world_size
        self._limits = {
            "world_size": world_size,
            "hosts": hosts,
            "max_tokens": rules.max_tokens or None,
            "equal_counts": rules.counts == "equal",
            "tolerance": rules.tolerance,
        }
        self._compute: Compute = compute
        self._anchored = anchored  # candidates see half of the history in the mean
        self._sums = np.zeros(4)

    def __call__(self, lengths: Mapping[str, Ints], source_rank: Ints) -> Placement:
        """Place the samples of a step. `lengths`: of all samples, by group; `history` and `candidates` are computed."""
        costs, tokens = self.sizes(lengths)
        placement = self._place(costs, tokens, source_rank)
        self._sums += 1, placement.max_over_mean_before, placement.max_over_mean, placement.moved_tokens
        return placement

    def sizes(self, lengths: Mapping[str, Ints]) -> tuple[Floats, Ints]:
        """Return the cost and the tokens of each sample."""
        history = lengths["history"]
        candidates = lengths.get("candidates", np.zeros_like(history))
        visible = self._visible(history, candidates) if self._anchored else None
        return self.cost_model.cost.of(history, candidates, visible), history + candidates

    def _place(self, costs: Floats, tokens: Ints, source_rank: Ints, *, tolerance: float | None = None) -> Placement:
        """Place samples; `tolerance`: instead of that of the rules."""
        limits: dict[str, Any] = dict(self._limits)
        if tolerance is not None:
            limits["tolerance"] = tolerance
        try:
            return assign(
                costs, source_rank, tokens=tokens, speeds=self.cost_model.speeds, compute=self._compute, **limits
            )
        except ValueError as error:
            remedy = "raise max_tokens if it is named here, or give fewer or shorter samples in a step"
            raise DataError("the samples of a step cannot be placed", where=str(error), remedy=remedy) from error

    def _visible(self, history: Ints, candidates: Ints) -> Floats:
        """Return what anchored candidates see: as after half of the history, because anchors are not known here."""
        visibility = self.cost_model.cost.visibility
        return candidates * (history / 2 if visibility is None else visibility.seen(history // 2))

    def local_stats(self) -> Sequence[int]:
        """Return what this rank contributes to the next update of the cost model; of one length on every rank."""
        return [*self.stopwatch.read(), *self._estimator.proposal()] if self.stopwatch is not None else ()

    def receive_stats(self, stats: Ints) -> None:
        """Update the cost model from the statistics of all ranks."""
        if self.stopwatch is not None:
            self.cost_model = self._estimator.update(self.cost_model, stats)

    def state_dict(self) -> dict[str, Any]:
        """Return cost and speeds for a checkpoint."""
        speeds = self.cost_model.speeds
        cost = self.cost_model.cost
        return {"cost": [*cost.constants, cost.power], "speeds": None if speeds is None else speeds.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore cost and speeds. A configured cost wins unless it adapts; another world size resets the speeds."""
        speeds = state["speeds"] if len(state["speeds"] or ()) == self._world_size else None
        fixed = self._rules.cost and not self._rules.adapt
        cost = self.cost_model.cost if fixed else self.cost_model.cost.with_constants(*(state["cost"] or ()))
        self.cost_model = CostModel(cost, None if speeds is None else np.array(speeds))
        slow = {rank: speed for rank, speed in enumerate(speeds or ()) if speed != 1}
        if slow and not self._rules.adapt and self._is_rank_zero:
            measured = "ranks keep to the speeds that an earlier part of this run measured"
            warning_once(f"{measured}, against the usual 1.00: {slow}")

    @property
    def calibration(self) -> Calibration | None:
        """The last fit of the cost, if any."""
        return self._estimator.calibration

    @property
    def sums(self) -> Floats:
        """The number of placements, and the sums that `means` divides by it."""
        return self._sums.copy()

    @property
    def means(self) -> dict[str, float]:
        """Means over all placements."""
        _, *sums = (self._sums / max(1.0, self._sums[0])).tolist()
        return dict(zip(("max_over_mean_before", "max_over_mean", "moved_tokens"), sums, strict=True))

    def report(self) -> list[str]:
        """Return what was planned and measured, as human-readable lines."""
        means, of_mean = self.means, " before padding" if self._compute == "padded" else ""
        lines = [
            f"balance: the slowest rank was given {means['max_over_mean']:.3f} of the mean work{of_mean}, "
            f"{means['max_over_mean_before']:.3f} without; {means['moved_tokens']:.1%} of the tokens moved"
        ]
        if self.calibration is not None:
            constants = ", ".join(f"{value:.4g}" for value in self.cost_model.cost.constants)
            lines.append(
                f"measured: balance.cost = [{constants}], off by {self.calibration.error:.1%} of a step's time"
            )
        return lines if self._sums[0] else []


class CostModel(NamedTuple):
    """The cost of samples and the speed of ranks."""

    cost: Cost
    speeds: Floats | None = None
    """Of each rank; None if all are equal."""


class Stopwatch:
    """Sums what this rank computed and how long that took. One thread records, another reads."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[int, int, int]] = {}
        self._sums = np.zeros(SUMS, dtype=np.int64)
        self._lock, self._warm = threading.Lock(), False

    def record_samples(
        self,
        step: int,
        lengths: ArrayLike,
        candidates: ArrayLike,
        visible: ArrayLike | None = None,
        visibility: Visibility | None = None,
    ) -> None:
        """Record the samples of a step by their lengths. The other arguments are those of `cost.sizes`."""
        tokens, pairs = sizes(lengths, candidates, visible, visibility)
        self._pending[step] = len(tokens), int(tokens.sum()), int(pairs.sum())

    def record_time(self, step: int, nanoseconds: int) -> None:
        """Record the compute time of a step. The first step of a process includes warm-up and is ignored."""
        counts = self._pending.pop(step)
        with self._lock:
            self._sums += np.array([1, *counts, nanoseconds], dtype=np.int64) * self._warm
        self._warm = True

    def read(self) -> list[int]:
        """Return the sums since the last call."""
        with self._lock:
            sums = self._sums.tolist()
            self._sums[:] = 0
        return sums


class CostModelEstimator:
    """Estimates a cost model from the measurements of all ranks, identically on each rank."""

    def __init__(self, *, is_rank_zero: bool) -> None:
        self._is_rank_zero = is_rank_zero
        self._equations, self._rounds = NormalEquations(), 0
        self._recent: deque[Floats] = deque(maxlen=_SPEED_WINDOW)
        self._logged_speeds: Floats | None = None
        self.calibration: Calibration | None = None
        """The last fit."""

    def proposal(self) -> list[int]:
        """Return the constants of the last fit as whole numbers, bit by bit."""
        constants = self.calibration.cost.constants if self.calibration is not None else (0.0, 0.0, 0.0)
        return np.array(constants).view(np.int64).tolist()

    def update(self, cost_model: CostModel, stats: Ints) -> CostModel:
        """Return the cost model after a round. `stats`: sums of all ranks and fits, [world_size, SUMS + 3]."""
        sums = stats[:, :SUMS]
        proposed = cost_model.cost.with_constants(*stats[0, SUMS:].view(np.float64).tolist())
        cost = proposed if proposed.summed(1, 1, 1) > 0 else cost_model.cost
        computed = (sums[:, 0] > 0) & (sums[:, 1] > 0) & (sums[:, 4] > 0)
        if not computed.any():
            return cost_model._replace(cost=cost)
        self._rounds += 1
        speeds = self._speeds(cost, sums, computed)
        self._log_speeds(speeds)
        self._fit(sums[computed], speeds[computed])
        return CostModel(cost, speeds)

    def _speeds(self, cost: Cost, sums: Ints, computed: NDArray[np.bool_]) -> Floats:
        """Return work per time relative to the median rank.

        The fixed time of a step is no work, so it lowers a rank's speed: times become equal, not work.
        """
        work = np.where(computed, cost.summed(*sums[:, 1:4].T), np.nan)
        speed = work / np.maximum(sums[:, 4], 1)
        self._recent.append(speed / np.nanmedian(speed))
        recent = np.array(self._recent)
        recent[:, np.isnan(recent).all(axis=0)] = 1.0
        speeds = np.maximum(np.nanmedian(recent, axis=0).round(2), _MIN_SPEED)
        return np.where(np.abs(speeds - 1.0) <= _SPEED_NOISE, 1.0, speeds)

    def _fit(self, sums: Ints, speeds: Floats) -> None:
        self._equations.decay(_DECAY)
        self._equations.add(sums[:, :4], sums[:, 4] * 1e-9 * speeds)
        if self._rounds % _FIT_EVERY == 0:
            self.calibration = fit(self._equations)

    def _log_speeds(self, speeds: Floats) -> None:
        logged = np.ones_like(speeds) if self._logged_speeds is None else self._logged_speeds
        changed = np.abs(speeds - logged) > _LOG_CHANGE
        for rank in np.flatnonzero(changed).tolist() if self._is_rank_zero else ():
            share = "its full share again" if speeds[rank] == 1 else f"{speeds[rank]:.2f} of the usual share"
            info_once(f"balance.adapt: after {self._rounds} steps rank {rank} gets {share}, as measured")
        self._logged_speeds = np.where(changed, speeds, logged)
