"""From the lengths of a step's samples to where they are computed: a cost model and the rules of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from freescale.balance.adapt import Basis, Learner, Stopwatch
from freescale.balance.calibrate import Calibration
from freescale.balance.cost import Cost
from freescale.balance.place.assign import assign
from freescale.balance.place.placement import Floats, Ints, Placement
from freescale.config import BalanceConfig
from freescale.errors import DataError
from freescale.log import warning_once


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
