"""Samples of a partition: the new events of a user are targets, earlier ones are their context. Pure.

Events are sorted by time, so that a late event is predicted from the events before it, and from no later one. An event
that equals an earlier one in user, item and second is a duplicate and left out. So is one that is older than everything
kept of its user, because there is nothing to compare it with and to predict it from.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from freescale.data.order import concat_ranges
from freescale.data.partitions import IS_TARGET
from freescale.errors import DataError

SAMPLE_ORDER = "_last"
"""Temporary column: the order of samples in a partition."""
_MOST_PIECES = 1000
Ints = NDArray[np.int64]


class PartitionSamples(NamedTuple):
    """Samples of some users, and the context that the next partition begins with."""

    rows: pl.DataFrame
    """A history per row, in no particular order; `SAMPLE_ORDER` is their order in time."""
    context: pl.DataFrame
    """The latest events of each user, in lists."""
    counts: Counter[str]
    """Targets, duplicates, late and too_late events, as in `DataPartition`."""
    latest: int
    """Time of the newest target; 0 without one."""


@dataclass
class ContextJoin:
    """Joins the new events of one bucket of users after another with their context, and counts."""

    read: Callable[[int], pl.DataFrame | None]
    """Returns the context of a bucket."""
    write: Callable[[int, pl.DataFrame], None]
    """Keeps the new one."""
    max_history: int
    newest: int
    """Time of the newest event of earlier partitions."""
    counts: Counter[str] = field(default_factory=Counter)
    latest: int = 0
    """Time of the newest target."""

    def samples(self, bucket: int, histories: pl.DataFrame) -> pl.DataFrame:
        """Return the samples of a bucket, in no particular order."""
        joined = join_context(histories, self.read(bucket), max_history=self.max_history, newest=self.newest)
        self.write(bucket, joined.context)
        self.counts.update(joined.counts)
        self.latest = max(self.latest, joined.latest)
        return joined.rows


def join_context(
    histories: pl.DataFrame, context: pl.DataFrame | None, *, max_history: int, newest: int
) -> PartitionSamples:
    """Join new events with the context of their users. Both have a row per user, with lists of events.

    A sample has at most `max_history` events. A user with more has several samples, each with a context of at least
    half of that where there is one. `newest`: time of the newest event of earlier partitions.
    """
    if context is None:
        context = histories.clear()
    _require_same_columns(histories, context)
    new = _events(histories).with_columns(pl.lit(1, pl.Int8).alias(IS_TARGET))
    active = context.join(histories, on="user_id", how="semi")
    full = active.filter(pl.col("item_id").list.len() >= max_history)
    oldest = full.select("user_id", _oldest=pl.col("timestamp").list.first())
    kept = new.join(oldest, on="user_id", how="left", maintain_order="left").filter(
        (pl.col("timestamp") >= pl.col("_oldest")).fill_null(value=True)
    )
    kept = kept.drop("_oldest")
    known = _events(active).with_columns(pl.lit(0, pl.Int8).alias(IS_TARGET))
    merged = pl.concat([known, kept]).sort("user_id", "timestamp", maintain_order=True)
    distinct = merged.unique(["user_id", "item_id", "timestamp"], keep="first", maintain_order=True)
    targets = distinct.filter(pl.col(IS_TARGET) == 1)
    return PartitionSamples(
        _samples(distinct, max_history),
        pl.concat([context.join(histories, on="user_id", how="anti"), _latest(distinct, max_history)]).sort("user_id"),
        Counter(
            targets=len(targets),
            duplicates=len(merged) - len(distinct),
            late=len(targets.filter(pl.col("timestamp") < newest)),
            too_late=len(new) - len(kept),
        ),
        latest=int(targets["timestamp"].max() or 0),  # type: ignore[arg-type]
    )


def _require_same_columns(histories: pl.DataFrame, context: pl.DataFrame) -> None:
    if histories.schema != context.schema:
        new, old = dict(histories.schema), dict(context.schema)
        different = sorted(name for name in new | old if new.get(name) != old.get(name))
        what = f"the columns differ from those of earlier partitions: {', '.join(different)}"
        raise DataError(what, remedy="append with the options of the first partition")


def _events(histories: pl.DataFrame) -> pl.DataFrame:
    lists = [name for name in histories.columns if name != "user_id"]
    return histories.explode(lists)


def _samples(events: pl.DataFrame, most: int) -> pl.DataFrame:
    """Cut the events of each user into samples. Every target is in exactly one."""
    flags = events[IS_TARGET].to_numpy().astype(bool)
    begin, end, own, number = _cut_all(events["user_id"].to_numpy(), flags, most)
    index, size = concat_ranges(begin, end - begin), end - begin
    is_target = flags[index] & (index >= np.repeat(own, size))
    times = events["timestamp"].to_numpy()
    order = times[end - 1] * _MOST_PIECES + np.minimum(number, _MOST_PIECES - 1)
    taken = events[index].with_columns(
        pl.Series(IS_TARGET, is_target.astype(np.int8)), pl.Series("_sample", np.repeat(np.arange(len(size)), size))
    )
    labels = [name for name in events.columns if name.startswith("label_")]
    taken = taken.with_columns(pl.when(pl.col(IS_TARGET) == 1).then(pl.col(name)).alias(name) for name in labels)
    lists = [pl.col(name) for name in taken.columns if name not in ("user_id", "_sample")]
    rows = taken.group_by("_sample", maintain_order=True).agg(pl.col("user_id").first(), *lists).drop("_sample")
    return rows.with_columns(pl.Series(SAMPLE_ORDER, order))


def _cut_all(user: Ints, flags: NDArray[np.bool_], most: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return begin and end of each sample, where its targets begin, and its number among the samples of its user."""
    if not flags.any():
        return (np.zeros(0, np.int64),) * 4
    first = np.append(0, np.flatnonzero(user[1:] != user[:-1]) + 1)
    last = np.append(first[1:], len(user))
    end = np.maximum.reduceat(np.where(flags, np.arange(1, len(user) + 1), 0), first)  # after the last target
    fits = (last - first <= most) & (end > 0)
    pieces = [np.stack([first, end, first, np.zeros_like(first)], axis=1)[fits]]
    for begin, stop in zip(first[~fits].tolist(), last[~fits].tolist(), strict=True):
        pieces.append(np.array(_cut(begin + np.flatnonzero(flags[begin:stop]), begin, most), np.int64).reshape(-1, 4))
    columns = np.concatenate(pieces).T
    return columns[0], columns[1], columns[2], columns[3]


def _cut(targets: Ints, first: int, most: int) -> list[tuple[int, int, int, int]]:
    """Cut the events of a user that do not fit into one sample."""
    pieces, span = [], most - most // 2
    while len(targets):
        inside = targets[targets < targets[0] + span]
        end = int(inside[-1]) + 1
        pieces.append((max(first, end - most), end, int(targets[0]), len(pieces)))
        targets = targets[len(inside) :]
    return pieces


def _latest(events: pl.DataFrame, most: int) -> pl.DataFrame:
    """Return the latest events of each user, in lists. Their labels have been trained and are not kept."""
    labels = [name for name in events.columns if name.startswith("label_")]
    columns = events.drop(IS_TARGET).with_columns(pl.lit(None, events.schema[n]).alias(n) for n in labels)
    return columns.group_by("user_id", maintain_order=True).agg(pl.all().tail(most))
