"""From the lengths of a step's samples to where they are computed: a cost model and the rules of a run. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from freescale.balance.assign import assign
from freescale.balance.cost import Cost
from freescale.balance.placement import Ints, Placement
from freescale.config import BalanceConfig
from freescale.errors import ConfigError


@dataclass(frozen=True)
class Planner:
    """Plans one step after another, alike on every rank."""

    cost: Cost
    rules: BalanceConfig
    ranks: int

    def __call__(self, lengths: Mapping[str, Ints], homes: Ints) -> Placement:
        """`lengths`: of all samples, by group; those of `history` and `candidates` are what is computed."""
        history = lengths["history"]
        candidates = lengths.get("candidates", np.zeros_like(history))
        try:
            return assign(
                self.cost.of(history, candidates),
                homes,
                ranks=self.ranks,
                tokens=history + candidates,
                max_tokens=self.rules.max_tokens or None,
                equal_counts=self.rules.counts == "equal",
            )
        except ValueError as error:
            raise ConfigError(
                f"the samples of a step cannot be placed: {error}",
                key="balance.max_tokens",
                remedy="raise balance.max_tokens, or lower data.global_batch or data.max_history",
            ) from error
