"""Which rank computes which sample. Pure and deterministic: every rank plans alike from the same numbers.

    placement = assign(costs, homes, ranks=256)
    placement.rank

By default only the excess moves (`shed`). The others deal all samples out anew (`deal`).
"""

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from freescale.balance.placement import Ints, Placement, Problem, judged, lpt, zigzag
from freescale.balance.rebalance import level, shed

Strategy = Literal["shed", "zigzag", "lpt"]
TOLERANCE = 0.0045
_LARGEST = 2.0**30


def assign(
    costs: ArrayLike,
    homes: ArrayLike,
    *,
    world_size: int,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
    speeds: ArrayLike | None = None,
    hosts: ArrayLike | None = None,
    equal_counts: bool = False,
    strategy: Strategy = "shed",
    tolerance: float = TOLERANCE,
) -> Placement:
    """Place samples so that all ranks take equally long.

    costs: work of each sample. homes: the rank it is on. tokens: what moving it moves. max_tokens: most that a rank can
    hold. speeds: work per time of each rank. hosts: of each rank; moves inside one are preferred. tolerance: how far
    above the least possible time a step may end, for fewer moves.
    """
    cost, home = np.asarray(costs, dtype=np.float64), np.asarray(homes, dtype=np.int64)
    token = np.ones(len(cost), dtype=np.int64) if tokens is None else np.asarray(tokens, dtype=np.int64)
    speed = np.ones(world_size) if speeds is None else np.asarray(speeds, dtype=np.float64)
    host = np.zeros(world_size, dtype=np.int64) if hosts is None else np.asarray(hosts, dtype=np.int64)
    problem = _checked(Problem(cost, home, world_size, token, speed, host, max_tokens, equal_counts))
    found = _shed(problem, tolerance) if strategy == "shed" else [{"zigzag": zigzag, "lpt": lpt}[strategy](problem)]
    # Staying at home comes first, so that nothing moves where moving wins nothing.
    placements = [judged(problem, rank) for rank in (problem.homes, *found) if _allowed(problem, rank)]
    _require(len(placements) > 0, f"found no placement within max_tokens = {max_tokens}")
    return min(placements, key=lambda placement: placement.max_over_mean)


def _shed(problem: Problem, tolerance: float) -> list[Ints]:
    """Moving the excess alone and, where few large samples make that end above its aim, dealing them out too."""
    shelves = shed(problem, tolerance)
    found = level(shelves) if problem.equal_counts else shelves.rank
    aim = problem.least() * (1.0 + tolerance)
    if _allowed(problem, found) and problem.times(found).max(initial=0.0) <= aim * (1 + 1e-12):
        return [found]
    by_tokens = replace(problem, costs=problem.tokens.astype(np.float64))
    return [found, lpt(problem), *([] if problem.max_tokens is None else [lpt(by_tokens)])]


def _allowed(problem: Problem, rank: Ints) -> bool:
    """Whether a placement keeps to the rules."""
    counts = np.bincount(rank, minlength=problem.world_size)
    fits = problem.max_tokens is None or problem.held(rank).max(initial=0) <= problem.max_tokens
    return bool(fits and (not problem.equal_counts or np.ptp(counts) <= 1))


def _checked(problem: Problem) -> Problem:
    """Refuse what makes no sense; costs become whole numbers."""
    costs, homes, world_size, tokens, limit = (
        problem.costs,
        problem.homes,
        problem.world_size,
        problem.tokens,
        problem.max_tokens,
    )
    for name in ("homes", "tokens"):
        found = len(getattr(problem, name))
        _require(found == len(costs), f"{name} has {found} entries for {len(costs)} samples")
    for name in ("speeds", "hosts"):
        found = len(getattr(problem, name))
        _require(found == world_size, f"{name} has {found} entries for {world_size} ranks")
    _require(bool(np.isfinite(costs).all() and (costs >= 0).all()), "costs must be finite and not negative")
    _require(bool(((homes >= 0) & (homes < world_size)).all()), f"homes must be ranks from 0 to {world_size - 1}")
    _require(bool((problem.speeds > 0).all()), "speeds must be above 0")
    if limit is not None:
        most, total = int(tokens.max(initial=0)), int(tokens.sum())
        _require(most <= limit, f"a sample of {most} tokens is larger than max_tokens = {limit}")
        _require(total <= world_size * limit, f"{total} tokens do not fit on {world_size} ranks of {limit}")
    largest = float(costs.max(initial=0.0))
    return replace(problem, costs=np.rint(costs * (_LARGEST / largest))) if largest > 0 else problem


def _require(ok: bool, otherwise: str) -> None:
    if not ok:
        raise ValueError(f"assign: {otherwise}")
