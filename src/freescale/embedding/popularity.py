"""How many of the most popular rows to replicate: those that send fewer bytes between hosts so. Pure: numpy only.

A rank requests a row once per step, however many of its samples need it. With W ranks on H hosts of L ranks each, a host
sends a row L p (H - 1) / H times per step, where p is the probability that a rank requests it, and its gradient as
often. A ring that all-reduces the gradient of a replicated row sends 2 (W - 1) / W times its bytes out of every host. If
hosts request each row once, p is that of the host, and L = 1: then replication never sends less.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Requesters(NamedTuple):
    """Who requests rows in a step: all ranks, or all hosts."""

    hosts: int
    per_host: float
    """Of each host."""
    lookups: float
    """Rows that each of them looks up in a table, before deduplication."""
    world_size: int


class Replication(NamedTuple):
    """The rows of a table that are worth a copy on every rank, and what a host sends for the table, in rows per step."""

    rows: int
    sent: float
    """Without replication: rows and gradients, on average over the hosts."""
    saved: float


def choose_replicated(share: Floats, requesters: Requesters, *, drawn: float = 0.0) -> Replication:
    """Return how many of the first rows to replicate. Deterministic.

    `share`: of all lookups, by row. `drawn`: how often every lookup requests each row at random, besides.
    """
    requested = -np.expm1(requesters.lookups * (np.log1p(-np.minimum(share, 1 - 1e-12)) - drawn))
    sent = 2 * requesters.per_host * (1 - 1 / requesters.hosts) * requested
    saved = np.concatenate([[0.0], np.cumsum(sent - 2 * (1 - 1 / requesters.world_size))])
    rows = int(saved.argmax())  # rows that are not sorted by popularity have no such first rows
    return Replication(rows, float(sent.sum()), float(saved[rows]))
