"""Impressions into samples for ranking: what a user was shown at one moment, behind the events strictly before it.

A sample is a row of a data set whose `candidate_id` and `label_*` lists hold the impressions of one user at one moment.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from freescale.data.order.layout import ranges
from freescale.data.sources.events import ORDER
from freescale.data.store.columns import CANDIDATE

LAST = "_last"
"""Column of a history or sample on its way: the moment by which the rows of a data set are ordered."""
_CHUNK = 1_000_000  # events in memory as lists


class Samples(NamedTuple):
    """Samples of some users, not yet with their histories."""

    rows: pl.DataFrame
    """`user_id`, LAST, candidates, labels, and where the history lies: events `begin` to `end`."""
    events: pl.DataFrame
    """Sorted by user and time."""
    without_history: int
    """Impressions that are left out, since their user has no event before them."""
    cut: int
    """Samples whose history is longer than what is kept of it."""

    def tables(self, ticks: int) -> Iterator[pa.Table]:
        """Rows of the data set, by time, some at a time: an event is in the history of every sample after it."""
        total = (self.rows["end"] - self.rows["begin"]).cum_sum().to_numpy()
        features = self.events.drop("user_id", ORDER).with_columns(pl.col("timestamp") // ticks)
        for begin, end in pairwise([0, *(np.flatnonzero(np.diff(total // _CHUNK)) + 1).tolist(), len(total)]):
            yield _with_histories(self.rows[begin:end], features)


def assemble(events: pl.DataFrame, offered: pl.DataFrame, *, max_history: int) -> Samples:
    """Put together the impressions of one user and moment, and find the events strictly before it."""
    events = events.sort("user_id", "timestamp", ORDER)
    labels = [name for name in offered.columns if name.startswith("label_")]
    moment = offered.sort("user_id", "timestamp", ORDER).group_by("user_id", "timestamp", maintain_order=True)
    rows = moment.agg(pl.col("item_id").alias(CANDIDATE), *labels)
    # One order of events and impressions, where impressions come before events of the same moment.
    marks = [frame.select("user_id", "timestamp", seen=pl.lit(seen)) for frame, seen in ((events, 1), (rows, 0))]
    merged = pl.concat(marks).sort("user_id", "timestamp", "seen").with_columns(end=pl.col("seen").cum_sum())
    first = (pl.col("end") - pl.col("seen")).first().over("user_id")
    found = merged.with_columns(begin=first).filter(pl.col("seen") == 0).select("begin", "end")
    rows = pl.concat([rows, found.cast(pl.Int64)], how="horizontal")
    kept = rows.filter(pl.col("end") > pl.col("begin"))
    left_out = rows.filter(pl.col("end") == pl.col("begin"))[CANDIDATE].list.len().sum()
    shortest = pl.max_horizontal("begin", pl.col("end") - max_history)
    cut = int((kept["end"] - kept["begin"] > max_history).sum())
    ordered = kept.with_columns(begin=shortest).rename({"timestamp": LAST}).sort(LAST, "user_id")
    return Samples(ordered, events, int(left_out), cut)


def _with_histories(rows: pl.DataFrame, features: pl.DataFrame) -> pa.Table:
    begin, end = (rows[name].to_numpy() for name in ("begin", "end"))
    offsets = pa.array(np.concatenate([[0], np.cumsum(end - begin)]), pa.int32())
    values = features[ranges(begin, end - begin)].to_arrow()
    lists = {n: pa.ListArray.from_arrays(offsets, values[n].combine_chunks()) for n in values.column_names}
    rest = rows.drop("user_id", "begin", "end").to_arrow()
    others = {name: rest[name] for name in rest.column_names}
    return pa.table({"user_id": rows["user_id"].to_arrow(), **lists, **others})
