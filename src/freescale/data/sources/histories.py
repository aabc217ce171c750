"""Events, in any order and larger than memory, into a data set of histories sorted by time.

Events are first partitioned into buckets by a hash of their user, so that all of a user's are in one bucket and one
bucket fits in memory. Each bucket becomes histories, or with impressions samples for ranking. These are then gathered
in ranges of the time of their last event (or of the impression), which gives the order in which a production system
would have logged them. A log that fits goes the same way in one bucket.
"""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.sources import impressions
from freescale.data.sources.events import FILE, NUMBER, ORDER, Events
from freescale.data.sources.impressions import LAST
from freescale.data.sources.times import scaled
from freescale.data.store import writer
from freescale.data.store.manifest import Manifest
from freescale.data.store.quarantine import Quarantine
from freescale.data.vocabulary import FILE as VOCABULARY
from freescale.data.vocabulary import fingerprint
from freescale.errors import DataError, reason
from freescale.log import info_once, warning_once
from freescale.progress import progress, track

_BATCH = 1_000_000
_BYTES_PER_EVENT = 160  # of a bucket while it is sorted and grouped
USERS_FILE = "users.parquet"


class Log(NamedTuple):
    """What becomes a data set."""

    events: Events
    scratch: Path
    """A folder for files on the way."""
    quarantine: Quarantine
    memory: int = 1 << 30
    """Bytes that sorting may hold."""
    impressions: Events | None = None
    """For ranking: what users were shown, with labels."""
    max_history: int = 1000
    """Most events that are kept before an impression."""


@dataclass(frozen=True)
class Imported:
    """What came out of an import."""

    users: int
    items: int
    events: int
    unknown_events: int
    """Events and impressions whose item the given vocabulary does not have."""
    samples: int
    """Rows of the data set: one per user, or with impressions one per user and moment."""


def write(log: Log, target: str | Path, *, vocabulary: Path | None = None) -> Imported:
    """Turn events into a data set at `target`, with its vocabulary: the log's own, or that of an earlier data set."""
    known = None if vocabulary is None else _known(vocabulary)
    try:
        with writer.new_folder(target) as folder:
            return _Import(log, folder).run(known)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, pa.ArrowException, OSError) as error:
        remedy = "check its format and encoding"
        raise DataError(f"the log cannot be read: {reason(error)}", where=log.events.name, remedy=remedy) from error


def _known(folder: Path) -> pl.DataFrame:
    path = folder / VOCABULARY
    try:
        return pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        what = "there is no vocabulary here" if not path.exists() else f"the vocabulary cannot be read: {reason(error)}"
        raise DataError(what, where=str(folder), remedy="give the folder of an imported data set") from error


class _Import:
    """The steps of one import, in order. Impressions, where there are any, go the same way as events."""

    def __init__(self, log: Log, folder: Path) -> None:
        self._log, self._folder, self._ticks = log, folder, log.events.ticks
        self._logs = [log.events] if log.impressions is None else [log.events, log.impressions]
        self._tables = [events.table for events in self._logs]

    def run(self, known: pl.DataFrame | None) -> Imported:
        with progress("checking events"):
            self._tables = [_without_bad(events, self._log.quarantine) for events in self._logs]
        self._agree()
        seen = [_keys(table, "item_id") for table in self._tables]
        events, *_ = totals = [int(counts["count"].sum()) for counts in seen]
        for total, found in zip(totals, self._logs, strict=True):
            if not total:
                raise DataError("the log holds no usable event", where=found.name, remedy="check its format")
        items, numbers, unknown = _number(_merged(seen[0], seen[1:]).sort("key"), known)
        _save(items, self._folder / VOCABULARY)
        self._use_numbers("item_id", numbers)
        if self._tables[0].collect_schema()["user_id"] == pl.String:  # integer users are their own numbers
            users = _keys(self._tables[0], "user_id", events)
            _save(users, self._folder / USERS_FILE)
            self._use_numbers("user_id", users.select("key").with_row_index("number"))
        buckets = max(1, -(-sum(totals) * _BYTES_PER_EVENT // self._log.memory))
        written = self._samples(buckets) if self._log.impressions else self._histories(buckets)
        manifest = self._write(written, events, items["key"], buckets)
        distinct = pl.scan_parquet(written).select(pl.col("user_id").n_unique()).collect(engine="streaming").item()
        return Imported(distinct, len(items), manifest.events, unknown, manifest.rows)

    def _agree(self) -> None:
        """Give impressions the events' types of keys, and both the finer ticks."""
        self._ticks = max(events.ticks for events in self._logs)
        for number, (table, events) in enumerate(zip(self._tables, self._logs, strict=True)):
            if events.ticks != self._ticks:
                finer = scaled(pl.col("timestamp"), self._ticks // events.ticks)
                self._tables[number] = table.with_columns(finer.alias("timestamp"))
        for key in ("user_id", "item_id"):
            if len({table.collect_schema()[key] for table in self._tables}) > 1:
                self._tables = [table.with_columns(pl.col(key).cast(pl.String)) for table in self._tables]

    def _use_numbers(self, column: str, numbers: pl.DataFrame) -> None:
        """Replace keys by their numbers; what has none becomes null."""
        named = numbers.lazy().select(pl.col("key").alias(column), pl.col("number").cast(pl.Int64))
        joined = [table.join(named, on=column, how="left") for table in self._tables]
        self._tables = [table.with_columns(pl.col("number").alias(column)).drop("number") for table in joined]

    def _histories(self, buckets: int) -> list[Path]:
        """Group each bucket's events into histories, ordered by the time of their last event."""
        written = []
        parts = sorted(self._partition(self._tables[0], "events", buckets).iterdir())
        for number, bucket in enumerate(track(parts, "sorting histories", unit="buckets")):
            histories = _group(_read(bucket), self._ticks)
            written.append(self._log.scratch / f"histories-{number}.parquet")
            share = _rows_at_once(len(histories), buckets)
            histories.write_parquet(written[-1], row_group_size=share, compression="lz4")
        return written

    def _samples(self, buckets: int) -> list[Path]:
        """Join each bucket's impressions with the events before them, ordered by the time of the impression."""
        events, offered = (self._partition(table, str(n), buckets) for n, table in enumerate(self._tables))
        written, left_out, cut = [], 0, 0
        for number, bucket in enumerate(track(sorted(offered.iterdir()), "joining impressions", unit="buckets")):
            if not (of_users := events / bucket.name).exists():
                left_out += len(_read(bucket))
                continue
            found = impressions.assemble(_read(of_users), _read(bucket), max_history=self._log.max_history)
            left_out, cut = left_out + found.without_history, cut + found.cut
            if len(found.rows):
                written.append(self._log.scratch / f"samples-{number}.parquet")
                _write_tables(found.tables(self._ticks), written[-1], _rows_at_once(len(found.rows), buckets))
        if not written:
            what, remedy = "no impression has an event of its user before it", "check users and times of both logs"
            raise DataError(what, where=self._logs[1].name, remedy=remedy)
        if left_out:
            warning_once(f"{left_out:,} impressions are left out: their users have no event before them")
        if cut:
            info_once(f"{cut:,} histories are cut to their last {self._log.max_history:,} events (--max-history)")
        return written

    def _partition(self, table: pl.LazyFrame, name: str, buckets: int) -> Path:
        parts = self._log.scratch / f"buckets-{name}"
        parts.mkdir()
        by_user = {"bucket": pl.col("user_id").hash() % buckets}
        with progress("partitioning by user"):
            table.sink_parquet(pl.PartitionBy(parts, key=by_user, include_key=False), compression="lz4", mkdir=True)
        return parts

    def _write(self, parts: list[Path], events: int, items: pl.Series, ranges: int) -> Manifest:
        histories = pl.scan_parquet(parts)
        if self._log.impressions:  # an event is in several histories
            events = histories.select(pl.col("item_id").list.len().sum()).collect(engine="streaming").item()
            ranges = max(1, -(-events * _BYTES_PER_EVENT // self._log.memory))
        last = histories.select(LAST).collect(engine="streaming")[LAST].sort()
        cuts = [int(last[len(last) * i // ranges]) for i in range(1, ranges)]
        columns = len(histories.collect_schema()) - 2  # but user_id and LAST
        rows = writer.rows_per_group(len(last), events, columns)
        note = f"imported from {', '.join(events.name for events in self._logs)}"
        ordered = _in_time_order(histories, cuts)
        size = {"rows_per_group": rows, "items": len(items), "expected_rows": len(last)}
        return writer.write(self._folder, ordered, vocabulary=fingerprint(items.to_arrow()), note=note, **size)


def _without_bad(events: Events, quarantine: Quarantine) -> pl.LazyFrame:
    """Find events with a missing or unconvertible field; stop at them or leave them out."""
    names = [name for name in events.table.collect_schema().names() if not name.startswith("_")]
    broken = pl.any_horizontal(pl.col(name).is_null() for name in names)
    for batch in events.table.filter(broken).collect_batches(engine="streaming"):
        for row in batch.iter_rows(named=True):
            missing = [name for name in names if row[name] is None]
            hint = ": a label is a number from 0 to 1" if missing[0].startswith("label_") else ""
            what = f"{', '.join(missing)} missing or not of its type{hint}"
            place = events.place(row[FILE], row[NUMBER])
            quarantine.bad(place, "incomplete event", what, remedy=f"mend that {events.counts}")
    return events.table.filter(~broken).drop(FILE, NUMBER)


def _keys(table: pl.LazyFrame, column: str, events: int | None = None) -> pl.DataFrame:
    """The distinct keys of a log in their own order, and how often each occurs."""
    # Counted batch by batch: Polars' own streaming group_by was seen to hold memory that grows with the events.
    found, pending = pl.DataFrame(schema={"key": table.collect_schema()[column], "count": pl.Int64}), []
    batches = table.select(key=column).collect_batches(engine="streaming", chunk_size=_BATCH)
    for batch in track(batches, f"counting by {column}", total=events, unit="events", size=len):
        pending.append(batch.group_by("key").agg(pl.len().cast(pl.Int64).alias("count")))
        if sum(map(len, pending)) > _BATCH:
            found, pending = _merged(found, pending), []
    return _merged(found, pending).sort("key")


def _merged(found: pl.DataFrame, more: list[pl.DataFrame]) -> pl.DataFrame:
    """Add up counts of keys."""
    return pl.concat([found, *more]).group_by("key").agg(pl.col("count").sum())


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


def _read(bucket: Path) -> pl.DataFrame:
    return pl.read_parquet(bucket / "*.parquet" if bucket.is_dir() else bucket)


def _rows_at_once(rows: int, buckets: int) -> int:
    """A range of time is read from every bucket at once, so row groups are no larger than what it takes of one."""
    return max(32, rows // buckets)


def _write_tables(tables: Iterable[pa.Table], path: Path, row_group_size: int) -> None:
    tables = iter(tables)
    first = next(tables)
    with pq.ParquetWriter(path, first.schema, compression="lz4") as out:
        for table in (first, *tables):
            out.write_table(table, row_group_size=row_group_size)


def _group(events: pl.DataFrame, ticks: int) -> pl.DataFrame:
    """Histories of one bucket. Events of one moment keep the order of the log; without time it is all there is."""
    if "timestamp" in events.columns:
        timed = events.sort("user_id", "timestamp", ORDER).with_columns(
            pl.col("timestamp").alias(LAST), pl.col("timestamp") // ticks
        )
    else:
        timed = events.sort("user_id", ORDER).with_columns(
            pl.int_range(pl.len(), dtype=pl.Int64).over("user_id").alias("timestamp"), pl.col(ORDER).alias(LAST)
        )
    features = [name for name in events.columns if name not in ("user_id", "item_id", "timestamp", ORDER)]
    of_user = timed.group_by("user_id", maintain_order=True)
    return of_user.agg("item_id", "timestamp", *features, pl.col(LAST).last()).sort(LAST, "user_id")


def _in_time_order(histories: pl.LazyFrame, cuts: list[int]) -> Iterator[pa.Table]:
    """Rows by LAST, a range at a time: before the first cut, between two, from the last one on."""
    for low, high in pairwise([None, *sorted(set(cuts)), None]):
        after = pl.lit(True) if low is None else pl.col(LAST) >= low
        before = pl.lit(True) if high is None else pl.col(LAST) < high
        found = histories.filter(after & before).collect(engine="streaming").sort(LAST, "user_id").drop(LAST)
        yield _plain_lists(found.to_arrow())


def _plain_lists(table: pa.Table) -> pa.Table:
    """Polars hands out 64-bit list offsets; Parquet readers everywhere expect plain lists."""
    plain = {f.name: pa.list_(f.type.value_type) if pa.types.is_large_list(f.type) else f.type for f in table.schema}
    return table.cast(pa.schema(plain)) if table.num_rows else pa.schema(plain).empty_table()
