"""Made-up logs whose lengths and popularity are those of real ones, seeded, of any size.

Lengths: `kuairand` is lognormal(8.93, 0.93) clipped at 21,000 and fits the published quantiles of KuaiRand-1K; `ml1m`
is 20 + lognormal(4.28, 1.23); `heavy` is Zipf 1.2 on [1, 4096]. Items: Zipf 0.7 as public logs have it, 1.05 as
production logs do. Rows come in the order of their last event, as a log would.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from freescale.data.order.permute import Permutation, key_of
from freescale.data.store import writer
from freescale.data.store.manifest import Manifest

Preset = Literal["kuairand", "ml1m", "heavy"]
Popularity = Literal["public", "production"]
_EXPONENT = {"public": 0.7, "production": 1.05}
_START = 1_700_000_000
_SECONDS_BETWEEN_USERS = 5
_SECONDS_BETWEEN_EVENTS = 3600.0
_BLOCK_EVENTS = 1 << 20
_TRIAL = 20_000


def lengths(preset: Preset, users: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw events per user."""
    if preset == "kuairand":
        return np.clip(rng.lognormal(8.93, 0.93, users), 1, 21_000).astype(np.int64)
    if preset == "ml1m":
        return 20 + rng.lognormal(4.28, 1.23, users).astype(np.int64)
    weights = np.arange(1, 4097, dtype=np.float64) ** -1.2
    return 1 + np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random(users)).astype(np.int64)


def items(count: int, catalogue: int, popularity: Popularity, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw item ids. The popular ones lie anywhere in the table, as they do when ids are dealt by arrival."""
    # The inverse of a power law's integral over [1, n + 1): no table of n weights, and exact in the tail.
    slope = 1.0 - _EXPONENT[popularity]
    top = float(catalogue + 1) ** slope
    rank = (1.0 + rng.random(count) * (top - 1.0)) ** (1.0 / slope)
    rank = np.minimum(rank.astype(np.int64) - 1, catalogue - 1)
    return Permutation(catalogue, key_of(catalogue))(rank)


def write(
    target: str | Path,
    preset: Preset,
    *,
    users: int,
    catalogue: int = 100_000,
    popularity: Popularity = "public",
    seed: int = 0,
    shorter: int = 1,
) -> Manifest:
    """Write a synthetic data set; memory holds about a million events at a time.

    `shorter`: how many times shorter histories are than the preset's, for machines that cannot train on whole ones.
    """

    def drawn(count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return np.maximum(1, lengths(preset, count, rng) // shorter)

    per_user = float(drawn(_TRIAL, np.random.default_rng(seed)).mean())
    note = f"synthetic: {preset}, {popularity} popularity over {catalogue:,} items, seed {seed}"
    note += f", {shorter} times shorter" if shorter > 1 else ""
    blocks = _blocks(drawn, users, catalogue, popularity, seed, max(1, int(_BLOCK_EVENTS / per_user)))
    rows = writer.rows_per_group(users, int(users * per_user))
    with writer.new_folder(target) as folder:
        return writer.write(folder, blocks, rows_per_group=rows, items=catalogue, note=note, expected_rows=users)


def _blocks(
    drawn: Callable[[int, np.random.Generator], NDArray[np.int64]],
    users: int,
    catalogue: int,
    popularity: Popularity,
    seed: int,
    block: int,
) -> Iterator[pa.Table]:
    for first in range(0, users, block):
        rng = np.random.default_rng([seed, first])
        user = np.arange(first, min(first + block, users), dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(drawn(len(user), rng))])
        item = listed(offsets, items(int(offsets[-1]), catalogue, popularity, rng))
        yield pa.table({"user_id": user, "item_id": item, "timestamp": listed(offsets, times(user, offsets, rng))})


def times(user: NDArray[np.int64], offsets: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Ascending times that end, for user u, at a moment that grows with u."""
    elapsed = np.cumsum(rng.exponential(_SECONDS_BETWEEN_EVENTS, int(offsets[-1]))).astype(np.int64)
    last = elapsed[offsets[1:] - 1]
    return elapsed + np.repeat(_START + user * _SECONDS_BETWEEN_USERS - last, np.diff(offsets))


def listed(offsets: NDArray[np.int64], values: NDArray[Any]) -> pa.ListArray:
    """A list column: row i holds values offsets[i] to offsets[i + 1]."""
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))
