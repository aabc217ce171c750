"""Traces of torch.profiler, of all ranks of any trainer: what a recorder would have written down.

Knows nothing of what becomes of the steps, and no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from freescale.bubbles.events import RankStep
from freescale.bubbles.kineto.trace import TracedRank, read_trace
from freescale.errors import DataError
from freescale.log import warning_once
from freescale.progress import track

_ENDS_TOGETHER = ("allreduce", "reducescatter", "allgather", "alltoall", "barrier")
_NOISE = 10_000
"""Ends of one collective lie so far apart on one clock too: a smaller difference says nothing about clocks."""


@dataclass(frozen=True)
class Traces:
    """The steps that all ranks have, on one clock."""

    steps: list[list[RankStep]]
    """One list per step, of every rank in order."""
    clock_bound: int
    """How well clocks agree, in nanoseconds: half of the collectives that all ranks leave together end within this of
    each other, on the rank where that is worst. 0 where there are none to compare."""


def read(folder: Path) -> Traces:
    """Read the traces of all ranks, one file each, from the folder that torch.profiler wrote them to."""
    ranks = _ranks(folder)
    numbers = _common_steps(ranks, folder)
    shifts, bound = _shifts(ranks)
    steps: list[list[RankStep]] = []
    lacking = set[str]()
    for number in track(numbers, "aligning traces", unit="steps"):
        # What one rank has under way may be over on another, whose arrival counts all the same.
        names = set[str]().union(*(rank.under_way(number) for rank in ranks))
        steps.append([rank.step(number, names).shifted(by) for rank, by in zip(ranks, shifts, strict=True)])
        on_all = set.intersection(*({t.name for t in step.transfers} for step in steps[-1]))
        lacking |= {name for name in names - on_all if " of rank " not in name}
    if lacking:
        warning_once(
            f"some ranks lack collectives of others ('{min(lacking)}'): the last arrival is that of those who have it"
        )
    return Traces(steps, bound)


def _ranks(folder: Path) -> list[TracedRank]:
    found: dict[int, tuple[TracedRank, Path]] = {}
    paths = sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")])
    for path in track(paths, "reading traces", unit="files"):
        rank = read_trace(path)
        if rank.rank in found:
            what = f"two traces of rank {rank.rank}: {found[rank.rank][1].name} and {path.name}"
            raise DataError(what, where=str(folder), remedy="keep one trace per rank, all of the same steps")
        found[rank.rank] = rank, path
    if not found:
        remedy = "give the folder that torch.profiler's tensorboard_trace_handler wrote to"
        raise DataError("no trace here: no *.json and no *.json.gz", where=str(folder), remedy=remedy)
    return [found[rank][0] for rank in sorted(found)]


def _common_steps(ranks: Sequence[TracedRank], folder: Path) -> list[int]:
    everywhere = set.intersection(*(set(rank.bounds) for rank in ranks))
    if not everywhere:
        remedy = "profile the same steps on all ranks"
        raise DataError("no step is in the traces of all ranks", where=str(folder), remedy=remedy)
    if others := sorted(set[int]().union(*(rank.bounds for rank in ranks)) - everywhere):
        warning_once(f"not in the traces of all ranks, so left out: step {', '.join(map(str, others))}")
    return sorted(everywhere)


def _shifts(ranks: Sequence[TracedRank]) -> tuple[list[int], int]:
    """What to add to each rank's clock, and how far apart the ends of collectives then still lie."""
    shifts: list[int] = []
    known, bound = dict[str, int](), 0
    for rank in ranks:
        ends = {t.name: t.done for t in rank.transfers if t.name.startswith(_ENDS_TOGETHER)}
        apart = [known[name] - end for name, end in ends.items() if name in known] or [0]
        if shifts and not known.keys() & ends.keys():
            warning_once(f"rank {rank.rank} shares no collective with lower ranks: its clock is taken as it is")
        middle = median_low(apart)
        spread = median_low(abs(one - middle) for one in apart)
        shifts.append(middle if abs(middle) > _NOISE + 3 * spread else 0)
        bound = max(bound, median_low(abs(one - shifts[-1]) for one in apart))
        known = {name: end + shifts[-1] for name, end in ends.items()} | known
    return shifts, bound
