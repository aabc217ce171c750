"""Synthetic steps of any number of ranks with unequal work, as a recorder writes them."""

import numpy as np

from freescale.bubbles.events import RankStep, Span, Transfer

MS = 1_000_000


def steps(ranks: int, count: int, seed: int = 0) -> list[list[RankStep]]:
    """Every rank computes as long as its batch says, then all add up their gradients; one rank is always slow."""
    rng = np.random.default_rng(seed)
    found, begin = [], 0
    for number in range(1, count + 1):
        work = rng.lognormal(0.0, 0.35, ranks)
        work[ranks // 3] *= 1.6
        of_ranks = [_step(rank, number, begin, float(work[rank]), rng) for rank in range(ranks)]
        arrived = max(step.transfers[-1].arrived for step in of_ranks)
        over = arrived + 9 * MS
        found.append([_ended(step, over) for step in of_ranks])
        begin = over + 6 * MS
    return found


def _step(rank: int, number: int, begin: int, work: float, rng: np.random.Generator) -> RankStep:
    at, spans, transfers = begin, [], []

    def spend(kind: str, ms: float) -> None:
        nonlocal at
        spans.append(Span(kind, at, at + int(ms * MS)))
        at = spans[-1].end

    def move(kind: str, ms: float) -> None:
        nonlocal at
        transfers.append(Transfer(kind, f"{number}/{kind}", at, at + int(ms * MS), ((at, at + int(ms * MS)),)))
        at = transfers[-1].done

    spend("data", float(rng.exponential(0.8)))
    spend("host", 1.5)
    move("ids", 1.2)
    move("urgent rows", 5.0)
    spend("forward", 20 * work)
    spend("backward", 38 * work)
    transfers.append(Transfer("deferred rows", f"{number}/deferred", spans[-2].begin, spans[-1].begin))
    transfers.append(Transfer("dense gradients", f"{number}/dense", at, at))
    return RankStep(rank, number, begin, at, tuple(spans), tuple(transfers), work * 1e9)


def _ended(step: RankStep, over: int) -> RankStep:
    *before, dense = step.transfers
    moved = dense._replace(done=over, waits=((dense.arrived, over),))
    rows = Transfer("row gradients", f"{step.step}/rows", over, over + 3 * MS, ((over, over + 3 * MS),))
    last = Span("optimizer", over + 3 * MS, over + 6 * MS)
    return step._replace(end=over + 6 * MS, spans=(*step.spans, last), transfers=(*before, moved, rows))
