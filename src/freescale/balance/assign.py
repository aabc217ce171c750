"""Assigns samples to ranks. Pure and deterministic: every rank computes the same placement from the same input.

    placement = assign(costs, source_rank, world_size=256)
    placement.rank

By default only excess work moves (`rebalance`). The other strategies repartition all samples.
"""

from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from freescale.balance.padded import PaddedProblem, place_padded
from freescale.balance.placement import AssignmentProblem, Ints, Placement, evaluate_placement, lpt, zigzag
from freescale.balance.rebalance import equalize, rebalance

Strategy = Literal["rebalance", "zigzag", "lpt"]
Compute = Literal["jagged", "padded"]
"""jagged: a rank computes the sum of its samples. padded: as many times its longest sample as it has samples."""
TOLERANCE = 0.0045
_LARGEST_COST = 2.0**30


def assign(
    costs: ArrayLike,
    source_rank: ArrayLike,
    *,
    world_size: int,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
    speeds: ArrayLike | None = None,
    hosts: ArrayLike | None = None,
    equal_counts: bool = False,
    strategy: Strategy = "rebalance",
    compute: Compute = "jagged",
    tolerance: float = TOLERANCE,
) -> Placement:
    """Return a placement of samples under which all ranks take about equally long.

    costs: work of each sample. source_rank: the rank that holds it. tokens: its size, which a move transfers.
    max_tokens: the most tokens that a rank can hold. speeds: work per time of each rank. hosts: host of each rank;
    moves inside a host are preferred. tolerance: how far above the lower bound a step may end, for fewer moves.
    compute: "padded" if a rank pads its samples to the longest one; max_tokens then includes padding.
    """
    cost, source = np.asarray(costs, dtype=np.float64), np.asarray(source_rank, dtype=np.int64)
    token = np.ones(len(cost), dtype=np.int64) if tokens is None else np.asarray(tokens, dtype=np.int64)
    speed = np.ones(world_size) if speeds is None else np.asarray(speeds, dtype=np.float64)
    host = np.zeros(world_size, dtype=np.int64) if hosts is None else np.asarray(hosts, dtype=np.int64)
    _require(compute in get_args(Compute), f"compute = '{compute}', but must be 'jagged' or 'padded'")
    problem_type = PaddedProblem if compute == "padded" else AssignmentProblem
    problem = _validate(problem_type(cost, source, world_size, token, speed, host, max_tokens, equal_counts))
    repartition = {"zigzag": zigzag, "lpt": lpt}
    if isinstance(problem, PaddedProblem):
        _require_sortable(problem, strategy)
        candidates = place_padded(problem, tolerance)
    else:
        candidates = _rebalance(problem, tolerance) if strategy == "rebalance" else [repartition[strategy](problem)]
    # The current placement comes first, so that nothing moves where a move gains nothing.
    placements = [
        evaluate_placement(problem, rank) for rank in (problem.source_rank, *candidates) if _is_allowed(problem, rank)
    ]
    _require(len(placements) > 0, f"found no placement within max_tokens = {max_tokens}")
    return min(placements, key=lambda placement: placement.max_over_mean)


def _rebalance(problem: AssignmentProblem, tolerance: float) -> list[Ints]:
    """Return the placement that moves the excess alone; with LPT placements too where it misses its target time."""
    loads = rebalance(problem, tolerance)
    rank = equalize(loads) if problem.equal_counts else loads.rank
    target = problem.lower_bound_time() * (1.0 + tolerance)
    if _is_allowed(problem, rank) and problem.times(rank).max(initial=0.0) <= target * (1 + 1e-12):
        return [rank]
    by_tokens = replace(problem, costs=problem.tokens.astype(np.float64))
    return [rank, lpt(problem), *([] if problem.max_tokens is None else [lpt(by_tokens)])]


def _require_sortable(problem: PaddedProblem, strategy: Strategy) -> None:
    """Refuse what does not go with groups of like length."""
    _require(not problem.equal_counts, "equal_counts leaves nothing to balance where ranks pad: use compute = 'jagged'")
    _require(strategy == "rebalance", f"strategy = '{strategy}' ignores padding: use compute = 'jagged' with it")
    descending = bool((np.diff(problem.tokens[problem.longest_first]) <= 0).all())
    _require(descending, "compute = 'padded' needs costs that grow with tokens")


def _is_allowed(problem: AssignmentProblem, rank: Ints) -> bool:
    """Whether a placement satisfies max_tokens and equal_counts."""
    counts = np.bincount(rank, minlength=problem.world_size)
    fits = problem.max_tokens is None or problem.tokens_per_rank(rank).max(initial=0) <= problem.max_tokens
    return bool(fits and (not problem.equal_counts or np.ptp(counts) <= 1))


def _validate(problem: AssignmentProblem) -> AssignmentProblem:
    """Check the input and round costs to whole numbers."""
    costs, tokens, source_rank = problem.costs, problem.tokens, problem.source_rank
    world_size, limit = problem.world_size, problem.max_tokens
    for name in ("source_rank", "tokens"):
        entries = len(getattr(problem, name))
        _require(entries == len(costs), f"{name} has {entries} entries for {len(costs)} samples")
    for name in ("speeds", "hosts"):
        entries = len(getattr(problem, name))
        _require(entries == world_size, f"{name} has {entries} entries for {world_size} ranks")
    _require(bool(np.isfinite(costs).all() and (costs >= 0).all()), "costs must be finite and not negative")
    _require(
        bool(((source_rank >= 0) & (source_rank < world_size)).all()),
        f"source_rank must be ranks from 0 to {world_size - 1}",
    )
    _require(bool((problem.speeds > 0).all()), "speeds must be above 0")
    if limit is not None:
        most, total = int(tokens.max(initial=0)), int(tokens.sum())
        _require(most <= limit, f"a sample of {most} tokens is larger than max_tokens = {limit}")
        _require(total <= world_size * limit, f"{total} tokens do not fit on {world_size} ranks of {limit}")
    largest = float(costs.max(initial=0.0))
    return replace(problem, costs=np.rint(costs * (_LARGEST_COST / largest))) if largest > 0 else problem


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"assign: {message}")
