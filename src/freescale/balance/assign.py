"""Which rank computes which sample. Pure and deterministic: every rank plans alike from the same numbers.

    placement = assign(costs, homes, ranks=256)
    placement.rank

By default only the excess moves (`shed`). The others deal all samples out anew and are here to be compared with.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from freescale.balance import deal
from freescale.balance.level import level
from freescale.balance.placement import Ints, Placement, Problem, measured
from freescale.balance.shed import shed

Strategy = Literal["shed", "zigzag", "lpt"]
TOLERANCE = 0.0045


def assign(
    costs: ArrayLike,
    homes: ArrayLike,
    *,
    ranks: int,
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
    problem = _problem(costs, homes, ranks, tokens, max_tokens, speeds, hosts, equal_counts)
    if strategy == "shed":
        placed = measured(problem, _shed(problem, tolerance))
    else:
        placed = measured(problem, {"zigzag": deal.zigzag, "lpt": deal.lpt}[strategy](problem))
    at_home = measured(problem, problem.homes)
    if _allowed(problem, problem.homes) and at_home.max_over_mean <= placed.max_over_mean:
        return at_home
    _require(_allowed(problem, placed.rank), f"found no placement within max_tokens = {max_tokens}")
    return placed


def _shed(problem: Problem, tolerance: float) -> Ints:
    shelves = shed(problem, tolerance)
    return level(shelves) if problem.equal_counts else shelves.rank


def _allowed(problem: Problem, rank: Ints) -> bool:
    """Whether a placement keeps to the rules."""
    counts = np.bincount(rank, minlength=problem.ranks)
    fits = problem.max_tokens is None or problem.held(rank).max(initial=0) <= problem.max_tokens
    return bool(fits and (not problem.equal_counts or np.ptp(counts) <= 1))


def _problem(
    costs: ArrayLike,
    homes: ArrayLike,
    ranks: int,
    tokens: ArrayLike | None,
    max_tokens: int | None,
    speeds: ArrayLike | None,
    hosts: ArrayLike | None,
    equal_counts: bool,
) -> Problem:
    cost, home = np.asarray(costs, dtype=np.float64), np.asarray(homes, dtype=np.int64)
    token = np.ones(len(cost), dtype=np.int64) if tokens is None else np.asarray(tokens, dtype=np.int64)
    speed = np.ones(ranks) if speeds is None else np.asarray(speeds, dtype=np.float64)
    host = np.zeros(ranks, dtype=np.int64) if hosts is None else np.asarray(hosts, dtype=np.int64)
    for name, found, size in (("homes", home, len(cost)), ("tokens", token, len(cost))):
        _require(len(found) == size, f"{name} has {len(found)} entries for {size} samples")
    for name, found in (("speeds", speed), ("hosts", host)):
        _require(len(found) == ranks, f"{name} has {len(found)} entries for {ranks} ranks")
    _require(bool(np.isfinite(cost).all() and (cost >= 0).all()), "costs must be finite and not negative")
    _require(bool(((home >= 0) & (home < ranks)).all()), f"homes must be ranks from 0 to {ranks - 1}")
    _require(bool((speed > 0).all()), "speeds must be above 0")
    if max_tokens is not None:
        most = int(token.max(initial=0))
        _require(most <= max_tokens, f"a sample of {most} tokens is larger than max_tokens = {max_tokens}")
        _require(
            int(token.sum()) <= ranks * max_tokens, f"{token.sum()} tokens do not fit on {ranks} ranks of {max_tokens}"
        )
    return Problem(cost, home, ranks, token, speed, host, max_tokens, equal_counts)


def _require(ok: bool, otherwise: str) -> None:
    if not ok:
        raise ValueError(f"assign: {otherwise}")
