"""Replicating the chosen number of rows lets hosts send the fewest bytes, counted in drawn steps."""

import numpy as np
import pytest
from numpy.typing import NDArray

from freescale.embedding.replicated_rows import Requesters, choose_replicated

ROWS, LOOKUPS = 2_000, 400
COUNTS = np.sort(np.random.default_rng(0).zipf(1.3, ROWS).clip(max=3000))[::-1].astype(np.int64)
SHARE = COUNTS / COUNTS.sum()


def sent_by_hosts(counts: NDArray[np.int64], hosts: int, local: int, steps: int) -> NDArray[np.float64]:
    """The rows and row gradients that all hosts send per step if the first n rows are replicated, for every n.

    Ranks draw items, owners are drawn too, and a ring sends the rows 2 (W - 1) / W times between two neighbours.
    """
    rng, ranks, sent = np.random.default_rng(1), hosts * local, np.zeros(len(counts))
    for _ in range(steps):
        owner = rng.integers(0, hosts, len(counts))
        for rank in range(ranks):
            rows = np.unique(rng.choice(len(counts), LOOKUPS, p=counts / counts.sum()))
            far = rows[owner[rows] != rank // local]
            np.add.at(sent, far, 2 / steps)
    ring = hosts * 2 * (ranks - 1) / ranks * np.arange(len(counts) + 1)
    exchanged = sent.sum() - np.concatenate([[0.0], np.cumsum(sent)])
    return ring + exchanged


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (3, 4), (4, 8)])
def test_the_chosen_number_sends_the_fewest_bytes_between_hosts(hosts: int, local: int) -> None:
    sent = sent_by_hosts(COUNTS, hosts, local, steps=40)
    chosen = choose_replicated(SHARE, Requesters(hosts, local, LOOKUPS, hosts * local))
    assert 0 < chosen.rows < ROWS
    assert sent[chosen.rows] <= 1.01 * sent.min()
    assert chosen.saved == pytest.approx((sent[0] - sent[chosen.rows]) / hosts, rel=0.05)
    assert chosen.sent == pytest.approx(sent[0] / hosts, rel=0.05)


@pytest.mark.parametrize(("hosts", "local"), [(1, 8), (8, 1), (2, 1)])
def test_one_host_or_one_rank_per_host_replicates_nothing(hosts: int, local: int) -> None:
    assert choose_replicated(SHARE, Requesters(hosts, local, LOOKUPS, hosts * local)).rows == 0


def test_rows_that_are_not_sorted_by_popularity_are_not_replicated() -> None:
    assert choose_replicated(SHARE[::-1], Requesters(4, 8, LOOKUPS, 32)).rows == 0


def test_rows_drawn_at_random_count_too() -> None:
    few, more = (choose_replicated(SHARE, Requesters(4, 8, LOOKUPS, 32), drawn=drawn / ROWS) for drawn in (0, 8))
    assert few.rows < more.rows == ROWS, "every rank draws nearly all rows"
