"""What a trainer is made of, and where it stands."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from freescale.balance.ahead import Batches
from freescale.balance.cost import Cost
from freescale.balance.plan import Planner
from freescale.bubbles.book import Bubbles
from freescale.config import RunConfig
from freescale.embedding.sharded import ShardedTables
from freescale.train.network import Network
from freescale.train.step import Step
from freescale.transport.world import World


@dataclass(frozen=True)
class Parts:
    """What a trainer is made of; `build` makes it."""

    config: RunConfig
    world: World
    loader: Batches
    planner: Planner | None
    """Of the loader's batches, where they are balanced."""
    steps: int
    """Of the whole run."""
    network: Network
    tables: ShardedTables | None
    optimizer: torch.optim.Optimizer
    step: Step
    bubbles: Bubbles
    cost: Cost
    """Of a sample, for the report."""
    evaluate: Callable[[], dict[str, float]] | None
    """Metrics over the held-out part, the same on all ranks; None where nothing is held out."""


@dataclass
class Progress:
    """Where a training stands, the same on all ranks."""

    cursor: dict[str, int | str]
    """Behind the last batch that was computed."""
    done: int = 0
    """Steps."""
    left_out: set[int] = field(default_factory=set)
    """Samples that gave what is not a number, and are trained on no more."""
