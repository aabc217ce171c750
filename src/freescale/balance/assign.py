"""Assigns samples to ranks. Pure and deterministic: every rank computes the same placement from the same input.

    placement = assign(costs, source_rank, world_size=256)
    placement.rank

By default (`rebalance`) little moves: the excess of overloaded ranks, then small sets of samples that ranks swap. The
other strategies repartition all samples.
"""

from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from freescale.balance.cost import draw_indices
from freescale.balance.padded import PaddedProblem, place_padded
from freescale.balance.placement import (
    AssignmentProblem,
    Floats,
    Ints,
    Placement,
    evaluate_placement,
    lpt,
    match_source_ranks,
    zigzag,
)
from freescale.balance.rebalance import RankLoads, equalize_counts, move_excess, trade_for_cheapest
from freescale.balance.subset_swaps import return_to_source, swap_subsets

Strategy = Literal["rebalance", "zigzag", "lpt"]
Compute = Literal["jagged", "padded"]
"""jagged: a rank computes the sum of its samples. padded: as many times its longest sample as it has samples."""
TOLERANCES = (0.005, 0.01, 0.02, 0.05)
"""Of `tolerance_curve`."""
_CURVE_SAMPLES, _MOST_CURVE_STEPS = 8192, 8
_LARGEST_COST = 2.0**30
_ROUNDING = 1e-12
_TARGETS = (0.99, 0.65, 0.4)  # shares of the tolerance
_FEW_SAMPLES = 12  # per rank: with more, moving the excess alone moves nearly as little as can be


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
    tolerance: float = 0.005,
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
    if isinstance(problem, PaddedProblem):
        _require_sortable(problem, strategy)
        placements = place_padded(problem, tolerance)
    else:
        strategies = {"rebalance": partial(_rebalance, tolerance=tolerance), "zigzag": zigzag, "lpt": lpt}
        placements = [strategies[strategy](problem)]
    # The current placement comes first, so that nothing moves where a move gains nothing.
    candidates = [rank for rank in (source, *placements) if _is_allowed(problem, rank)]
    _require(len(candidates) > 0, f"found no placement within max_tokens = {max_tokens}")
    limit = problem.lower_bound_time * (1.0 + tolerance)
    return evaluate_placement(problem, _best(problem, candidates, limit))


def _rebalance(problem: AssignmentProblem, *, tolerance: float) -> Ints:
    """Return a placement that moves little; a repartition with bins near the source ranks if that ends too late.

    A lower target leaves room for the last samples, which may fit nowhere under the limit itself.
    """
    bound, candidates = problem.lower_bound_time, []
    limit = bound * (1.0 + tolerance)
    few = len(problem.costs) <= _FEW_SAMPLES * problem.world_size
    for target in dict.fromkeys(bound * (1.0 + share * tolerance) for share in _TARGETS):
        loads = RankLoads(problem, target)
        move_excess(loads)
        if problem.equal_counts:
            equalize_counts(loads)
            if bound > problem.mean_time:  # a long sample sets the bound
                trade_for_cheapest(loads)
        if not few and _is_good(problem, loads.rank, limit):
            return loads.rank
        swap_subsets(loads, size=2 if few else 1)
        candidates.append(loads.rank)
        if _is_good(problem, loads.rank, limit):
            break
    else:
        candidates += _repartition(problem, limit)
    loads = RankLoads(problem, limit, _best(problem, candidates, limit))
    return_to_source(loads)
    return loads.rank


def _repartition(problem: AssignmentProblem, limit: float) -> list[Ints]:
    """Return LPT placements, as they are and improved. Those by tokens satisfy max_tokens more often."""
    by_tokens = replace(problem, costs=problem.tokens.astype(np.float64))
    placements = []
    for measure in (problem,) if problem.max_tokens is None else (problem, by_tokens):
        loads = RankLoads(problem, limit, match_source_ranks(problem, lpt(measure)))
        placements.append(loads.rank.copy())
        swap_subsets(loads, size=2)
        placements.append(loads.rank)
    return placements


def _best(problem: AssignmentProblem, candidates: list[Ints], limit: float) -> Ints:
    """Return the placement that ends first, but none before the limit counts; of several, that which moves least."""

    def quality(rank: Ints) -> tuple[bool, float, int]:
        late = max(float(problem.times(rank).max(initial=0.0)), limit * (1.0 + _ROUNDING))
        return not _is_allowed(problem, rank), late, problem.moved_tokens(rank)

    return min(candidates, key=quality)


def _is_good(problem: AssignmentProblem, rank: Ints, limit: float) -> bool:
    """Whether a placement is allowed and no rank ends after the limit."""
    ends_within = problem.times(rank).max(initial=0.0) <= limit * (1.0 + _ROUNDING)
    return bool(ends_within and _is_allowed(problem, rank))


def _require_sortable(problem: PaddedProblem, strategy: Strategy) -> None:
    """Refuse what does not go with groups of like length."""
    _require(not problem.equal_counts, "equal_counts leaves nothing to balance where ranks pad: use compute = 'jagged'")
    _require(strategy == "rebalance", f"strategy = '{strategy}' ignores padding: use compute = 'jagged' with it")
    descending = bool((np.diff(problem.tokens[problem.longest_first]) <= 0).all())
    _require(descending, "compute = 'padded' needs costs that grow with tokens")


def _is_allowed(problem: AssignmentProblem, rank: Ints) -> bool:
    """Whether a placement satisfies max_tokens and equal_counts."""
    fits = problem.max_tokens is None or problem.tokens_per_rank(rank).max(initial=0) <= problem.max_tokens
    return bool(fits and (not problem.equal_counts or np.ptp(np.bincount(rank, minlength=problem.world_size)) <= 1))


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


class Tradeoff(NamedTuple):
    """What balancing with a tolerance moves and reaches: means over simulated steps."""

    tolerance: float
    moved_tokens: float
    """Share of the tokens that change ranks."""
    max_over_mean: float
    """Time of the slowest rank over the time of a perfectly even split."""


def tolerance_curve(
    lengths: Ints, costs: Floats, counts: Ints, *, world_size: int, batch: int, seed: int = 0
) -> list[Tradeoff]:
    """Balance random batches with several tolerances. Samples are described by distinct lengths, and their counts."""
    share, source_rank = np.cumsum(counts) / counts.sum(), np.repeat(np.arange(world_size), batch)
    steps = int(np.clip(_CURVE_SAMPLES // len(source_rank), 1, _MOST_CURVE_STEPS))
    rng = np.random.default_rng(seed)
    drawn = [draw_indices(share, len(source_rank), rng) for _ in range(steps)]
    curve = []
    for tolerance in TOLERANCES:
        placements = [
            assign(costs[step], source_rank, world_size=world_size, tokens=lengths[step], tolerance=tolerance)
            for step in drawn
        ]
        reached = [(placement.moved_tokens, placement.max_over_mean) for placement in placements]
        curve.append(Tradeoff(tolerance, *np.mean(reached, axis=0).tolist()))
    return curve
