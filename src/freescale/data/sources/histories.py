"""Events, in any order and larger than memory, into a data set of histories sorted by time.

Events are first dealt into buckets by a hash of their user, so that all of a user's are in one bucket and one bucket
fits in memory. Each bucket becomes histories. These are then gathered in ranges of the time of their last event, which
gives the order in which a production system would have logged them. A log that fits goes the same way in one bucket.
"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.store import writer
from freescale.data.store.manifest import Manifest
from freescale.data.store.quarantine import Place, Quarantine
from freescale.data.vocabulary import FILE, fingerprint
from freescale.errors import DataError, reason
from freescale.progress import progress, track

_BATCH = 1_000_000
_BYTES_PER_EVENT = 160  # of a bucket while it is sorted and grouped
USERS_FILE = "users.parquet"


class Log(NamedTuple):
    """Events as they were found."""

    events: pl.LazyFrame
    name: str
    scratch: Path
    """A folder for files on the way."""
    quarantine: Quarantine
    memory: int = 1 << 30
    """Bytes that sorting may hold."""


@dataclass(frozen=True)
class Imported:
    """What came out of an import."""

    users: int
    items: int
    events: int
    unknown_events: int
    """Events whose item the given vocabulary does not have."""


def write(log: Log, target: str | Path, *, vocabulary: Path | None = None) -> Imported:
    """Turn events into a data set at `target`, with its vocabulary: the log's own, or that of an earlier data set."""
    try:
        known = None if vocabulary is None else pl.read_parquet(vocabulary / FILE)
        with writer.new_folder(target) as folder:
            return _Import(log, folder).run(known)
    except FileNotFoundError as error:
        remedy = "give the folder of an imported data set"
        raise DataError("there is no vocabulary here", where=str(vocabulary), remedy=remedy) from error
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, pa.ArrowException) as error:
        remedy = "check its format and encoding"
        raise DataError(f"the log cannot be read: {reason(error)}", where=log.name, remedy=remedy) from error


class _Import:
    """The steps of one import, in order."""

    def __init__(self, log: Log, folder: Path) -> None:
        self._log, self._events, self._folder = log, log.events, folder

    def run(self, known: pl.DataFrame | None) -> Imported:
        with progress("checking events"):
            self._set_aside_bad()
        seen = self._keys("item_id")
        events = int(seen["count"].sum())
        if not events:
            raise DataError("the log holds no usable event", where=self._log.name, remedy="check its format")
        items, numbers, unknown = _number(seen, known)
        _save(items, self._folder / FILE)
        self._use_numbers("item_id", numbers)
        if self._events.collect_schema()["user_id"] == pl.String:  # integer users are their own numbers
            users = self._keys("user_id", events)
            _save(users, self._folder / USERS_FILE)
            self._use_numbers("user_id", users.select("key").with_row_index("number"))
        buckets = max(1, -(-events * _BYTES_PER_EVENT // self._log.memory))
        manifest = self._write(self._histories(buckets), events, items["key"], buckets)
        return Imported(manifest.rows, len(items), manifest.events, unknown)

    def _set_aside_bad(self) -> None:
        """Find events with a missing or unconvertible field; stop at them or leave them out."""
        names = [name for name in self._events.collect_schema().names() if name != "order"]
        broken = pl.any_horizontal(pl.col(name).is_null() for name in names)
        for batch in self._events.filter(broken).collect_batches(engine="streaming"):
            for row in batch.iter_rows(named=True):
                missing = ", ".join(name for name in names if row[name] is None)
                place, what = Place(self._log.name, row=row["order"]), f"{missing} missing or not of its type"
                self._log.quarantine.bad(place, "incomplete event", what, remedy="mend that line")
        self._events = self._events.filter(~broken)

    def _keys(self, column: str, events: int | None = None) -> pl.DataFrame:
        """The distinct keys of the log in their own order, and how often each occurs."""
        # Counted batch by batch: Polars' own streaming group_by was seen to hold memory that grows with the events.
        found, pending = None, []
        batches = self._events.select(key=column).collect_batches(engine="streaming", chunk_size=_BATCH)
        for batch in track(batches, f"counting by {column}", total=events, unit="events", size=len):
            pending.append(batch.group_by("key").agg(pl.len().cast(pl.Int64).alias("count")))
            if sum(map(len, pending)) > _BATCH:
                found, pending = _merged(found, pending), []
        return _merged(found, pending).sort("key")

    def _use_numbers(self, column: str, numbers: pl.DataFrame) -> None:
        """Replace keys by their numbers."""
        named = numbers.lazy().select(pl.col("key").alias(column), pl.col("number").cast(pl.Int64))
        joined = self._events.join(named, on=column, how="left")
        self._events = joined.with_columns(pl.col("number").alias(column)).drop("number")

    def _histories(self, buckets: int) -> list[Path]:
        """Group each bucket's events into histories, ordered by the time of their last event."""
        parts = self._log.scratch / "buckets"
        parts.mkdir()
        by_user = {"bucket": pl.col("user_id").hash() % buckets}
        target = pl.PartitionBy(parts, key=by_user, include_key=False)
        with progress("partitioning events by user"):
            self._events.sink_parquet(target, compression="lz4", mkdir=True)
        written = []
        for number, bucket in enumerate(track(sorted(parts.iterdir()), "sorting histories", unit="buckets")):
            histories = _group(pl.read_parquet(bucket / "*.parquet" if bucket.is_dir() else bucket))
            written.append(self._log.scratch / f"histories-{number}.parquet")
            # A range of time is read from every bucket at once, so row groups are no larger than what it takes of one.
            share = max(32, len(histories) // buckets)
            histories.write_parquet(written[-1], row_group_size=share, compression="lz4")
        return written

    def _write(self, parts: list[Path], events: int, items: pl.Series, ranges: int) -> Manifest:
        histories = pl.scan_parquet(parts)
        last = histories.select("last").collect(engine="streaming")["last"].sort()
        cuts = [int(last[len(last) * i // ranges]) for i in range(1, ranges)]
        columns = len(histories.collect_schema()) - 2  # but user_id and last
        rows, note = writer.rows_per_group(len(last), events, columns), f"imported from {self._log.name}"
        ordered = _in_time_order(histories, cuts)
        size = {"rows_per_group": rows, "items": len(items), "expected_rows": len(last)}
        return writer.write(self._folder, ordered, vocabulary=fingerprint(items.to_arrow()), note=note, **size)


def _merged(found: pl.DataFrame | None, more: list[pl.DataFrame]) -> pl.DataFrame:
    """Add up counts of keys."""
    parts = more if found is None else [found, *more]
    if not parts:
        return pl.DataFrame(schema={"key": pl.Int64, "count": pl.Int64})
    return pl.concat(parts).group_by("key").agg(pl.col("count").sum())


def _number(seen: pl.DataFrame, known: pl.DataFrame | None) -> tuple[pl.DataFrame, pl.DataFrame, int]:
    """Number the items: by their place in the vocabulary, and behind it, by a stable hash, those it does not have."""
    if known is None:
        return seen, seen.select("key").with_row_index("number"), 0
    if seen["key"].dtype != known["key"].dtype:
        kinds = f"{seen['key'].dtype} in the log, {known['key'].dtype} in the vocabulary"
        remedy = "give the vocabulary that belongs to this log"
        raise DataError(f"the item keys have other types: {kinds}", remedy=remedy)
    fresh = seen.join(known, on="key", how="anti")
    behind = [len(known) + (zlib.crc32(str(key).encode()) << 20) for key in fresh["key"]]
    numbered = known.select("key").with_row_index("number").cast({"number": pl.Int64})
    others = pl.DataFrame([pl.Series("number", behind, pl.Int64), fresh["key"]])
    return known, pl.concat([numbered, others]), int(fresh["count"].sum())


def _save(keys: pl.DataFrame, path: Path) -> None:
    pq.write_table(keys.to_arrow(), path, write_page_checksum=True, compression="zstd")


def _group(events: pl.DataFrame) -> pl.DataFrame:
    """Histories of one bucket. Events of one moment keep the order of the log; without time it is all there is."""
    if "timestamp" in events.columns:
        timed = events.sort("user_id", "timestamp", "order").with_columns(last="timestamp")
    else:
        timed = events.sort("user_id", "order").with_columns(
            pl.int_range(pl.len(), dtype=pl.Int64).over("user_id").alias("timestamp"), last="order"
        )
    features = [name for name in events.columns if name not in ("user_id", "item_id", "timestamp", "order")]
    of_user = timed.group_by("user_id", maintain_order=True)
    return of_user.agg("item_id", "timestamp", *features, pl.col("last").last()).sort("last", "user_id")


def _in_time_order(histories: pl.LazyFrame, cuts: list[int]) -> Iterator[pa.Table]:
    edges = [-math.inf, *sorted(set(cuts)), math.inf]
    for low, high in pairwise(edges):
        inside = pl.col("last").is_between(low, high, closed="left")
        found = histories.filter(inside).collect(engine="streaming").sort("last", "user_id").drop("last")
        yield _plain_lists(found.to_arrow())


def _plain_lists(table: pa.Table) -> pa.Table:
    """Polars hands out 64-bit list offsets; Parquet readers everywhere expect plain lists."""
    plain = {f.name: pa.list_(f.type.value_type) if pa.types.is_large_list(f.type) else f.type for f in table.schema}
    return table.cast(pa.schema(plain)) if table.num_rows else pa.schema(plain).empty_table()
