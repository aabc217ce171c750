"""Build a data set of time-sorted histories, or of ranking samples, from events in any order and larger than memory.

Events are first partitioned into buckets by a hash of their user, so that a user's events are in one bucket and a
bucket fits in memory. Each bucket becomes histories or, with impressions, ranking samples. These are then merged in
ranges of the time of their last event (or impression), the order in which a production system would have logged them.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data import writer
from freescale.data.columns import CANDIDATE, is_candidate
from freescale.data.event_log import LOG_ORDER, EventLog, rescale_ticks, usable_events
from freescale.data.manifest import Manifest
from freescale.data.numbering import (
    FeatureVocabularies,
    KeyNumbering,
    count_keys,
    keep_ids,
    load_vocabulary,
    merge_counts,
    save_keys,
)
from freescale.data.order import concat_ranges
from freescale.data.partitions import CONTEXT_BUCKETS
from freescale.data.user_context import SAMPLE_ORDER, ContextJoin
from freescale.data.validation import Quarantine
from freescale.data.vocabulary import RAW_IDS, fingerprint
from freescale.errors import DataError, UsageError, reason
from freescale.log import info_once, warning_once
from freescale.progress import progress, track

_BYTES_PER_EVENT = 160  # memory to sort and group a bucket, without features
_BYTES_PER_FEATURE, _BYTES_PER_SET = 40, 120  # more for every feature, and for a set of a few ids
_BASE_COLUMNS = 4  # user, item, time and order
MAX_HISTORY = 1000
USERS_FILE = "users.parquet"
LAST_TIME = SAMPLE_ORDER
"""Temporary column: the time by which the rows of a data set are sorted."""
_CHUNK = 1_000_000  # events in memory as lists
_PARTITION_FILES = 8  # a partition is small, and there are many


class ImportJob(NamedTuple):
    """Input and limits of one import."""

    events: EventLog
    scratch: Path
    """Folder for temporary files."""
    quarantine: Quarantine
    memory: int = 1 << 30
    """Bytes that sorting may use."""
    impressions: EventLog | None = None
    """For ranking: items shown to users, with labels."""
    max_history: int = MAX_HISTORY
    """Number of most recent events to keep before an impression."""
    context: ContextJoin | None = None
    """For a partition: joins its events with earlier ones of their users."""


@dataclass(frozen=True)
class ImportSummary:
    """Counts of a finished import."""

    users: int
    items: int
    events: int
    unknown_events: int
    """Events and impressions whose item is outside the given vocabulary."""
    samples: int
    """Rows of the data set: one per user, or with impressions one per user and timestamp."""


def write_histories(
    job: ImportJob, target: str | Path, *, vocabulary: Path | None = None, raw: Collection[str] = ()
) -> ImportSummary:
    """Import events into a data set at `target`, with new vocabularies or those of an earlier data set.

    `raw`: columns with raw ids, for dynamic tables.
    """
    known = None if vocabulary is None else load_vocabulary(vocabulary)
    try:
        with writer.atomic_folder(target) as folder:
            return _Importer(job, folder, FeatureVocabularies(folder, vocabulary, raw)).run(known)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, pa.ArrowException, OSError) as error:
        remedy = "check its format and encoding"
        raise DataError(f"the log cannot be read: {reason(error)}", where=job.events.name, remedy=remedy) from error


class _SideFeatures(NamedTuple):
    """Features to join in every bucket, by `item_id` and by `user_id`."""

    items: pl.DataFrame | None = None
    users: pl.DataFrame | None = None

    def join_items(self, events: pl.DataFrame, prefix: str = "") -> pl.DataFrame:
        """Events with the features of their items."""
        if self.items is None:
            return events
        named = self.items.rename(lambda name: name if name == "item_id" else f"{prefix}{name}")
        return events.join(named, on="item_id", how="left")

    def join_users(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Rows in their order, with the features of their users."""
        return rows if self.users is None else rows.join(self.users, on="user_id", how="left", maintain_order="left")


class _Importer:
    """The steps of one import. Impressions, if any, are processed like events."""

    def __init__(self, job: ImportJob, folder: Path, vocabularies: FeatureVocabularies) -> None:
        self._job, self._folder, self._ticks = job, folder, job.events.ticks_per_second
        self._logs = [job.events] if job.impressions is None else [job.events, job.impressions]
        self._tables = [events.table for events in self._logs]
        self._vocabularies, self._side = vocabularies, _SideFeatures()

    def run(self, known: pl.DataFrame | None) -> ImportSummary:
        with progress("checking events"):
            self._tables = [usable_events(events, self._job.quarantine) for events in self._logs]
        if self._job.impressions:  # labels are those of candidates
            self._tables[0] = self._tables[0].drop(pl.selectors.starts_with("label_"))
        self._unify_types()
        self._require_raw_columns()
        key_counts = [count_keys(table, "item_id") for table in self._tables]
        events, *_ = totals = [int(counts["count"].sum()) for counts in key_counts]
        for total, log in zip(totals, self._logs, strict=True):
            if not total:
                raise DataError("the log contains no usable event", where=log.name, remedy="check its format")
        counts = merge_counts(key_counts[0], key_counts[1:])
        items = self._vocabularies.number_items(counts, known)
        for column, kind in self._job.events.kinds.items():
            self._tables[0] = self._vocabularies.number_column(self._tables[0], column, kind)
        self._number_side_tables(counts, items, events)
        buckets = CONTEXT_BUCKETS if self._job.context else self._parts_in_memory(sum(totals))
        written = self._samples(buckets) if self._job.impressions else self._histories(buckets)
        manifest = self._write(written, events, items.vocabulary["key"], buckets)
        distinct = pl.scan_parquet(written).select(pl.col("user_id").n_unique()).collect(engine="streaming").item()
        return ImportSummary(distinct, len(items.vocabulary), manifest.events, items.unknown, manifest.rows)

    def _require_raw_columns(self) -> None:
        """Refuse raw ids of columns that hold no ids."""
        events = self._job.events
        sides = [table.kinds for table in (events.items, events.users) if table is not None]
        columns = {"item_id", "user_id", *events.kinds, *(name for kinds in sides for name in kinds)}
        if wrong := sorted(set(self._vocabularies.raw) - columns):
            what = f"'{wrong[0]}' cannot have raw ids: it is not a column of ids of this import"
            raise UsageError(what, where=events.name, remedy=f"columns of ids: {', '.join(sorted(columns))}")

    def _number_side_tables(self, counts: pl.DataFrame, items: KeyNumbering, events: int) -> None:
        """Replace the keys of items and users by ids, in the log and in the side tables."""
        item_table, user_table = self._job.events.items, self._job.events.users
        item_rows = user_rows = None
        if item_table:
            item_rows = self._vocabularies.number_table(item_table, counts, items.ids, name="item_id")
        self._replace_keys("item_id", items.ids)
        is_text = self._tables[0].collect_schema()["user_id"] == pl.String  # integer keys are the ids
        if is_text or user_table:
            users = count_keys(self._tables[0], "user_id", events)
            if is_text and "user_id" in self._vocabularies.raw:
                ids = keep_ids(users, column="the users").ids
            else:
                ids = users.select("key", number=pl.int_range(pl.len()) if is_text else pl.col("key"))
            if user_table:
                once = users.with_columns(count=pl.lit(1, pl.Int64))  # a row has the features of its user once
                user_rows = self._vocabularies.number_table(user_table, once, ids, name="user_id")
            if is_text:
                save_keys(users, self._folder / USERS_FILE)
                self._replace_keys("user_id", ids)
        self._side = _SideFeatures(item_rows, user_rows)

    def _parts_in_memory(self, events: int) -> int:
        """Number of parts of a log, each of which can be sorted in the given memory."""
        columns = self._tables[0].collect_schema()
        kinds = [*columns.values(), *([] if self._side.items is None else self._side.items.schema.values())]
        sets = sum(kind.is_nested() for kind in kinds)
        extra = _BYTES_PER_FEATURE * max(0, len(kinds) - _BASE_COLUMNS) + _BYTES_PER_SET * sets
        return max(1, -(-events * (_BYTES_PER_EVENT + extra) // self._job.memory))

    def _unify_types(self) -> None:
        """Convert events and impressions to common key types and to the finer ticks."""
        self._ticks = max(events.ticks_per_second for events in self._logs)
        for number, (table, events) in enumerate(zip(self._tables, self._logs, strict=True)):
            if events.ticks_per_second != self._ticks:
                finer = rescale_ticks(pl.col("timestamp"), self._ticks // events.ticks_per_second)
                self._tables[number] = table.with_columns(finer.alias("timestamp"))
        for key in ("user_id", "item_id"):
            if len({table.collect_schema()[key] for table in self._tables}) > 1:
                self._tables = [table.with_columns(pl.col(key).cast(pl.String)) for table in self._tables]

    def _replace_keys(self, column: str, numbers: pl.DataFrame) -> None:
        """Replace keys by ids; keys without an id become null."""
        named = numbers.lazy().select(pl.col("key").alias(column), _id=pl.col("number"))
        joined = [table.join(named, on=column, how="left") for table in self._tables]
        self._tables = [table.with_columns(pl.col("_id").alias(column)).drop("_id") for table in joined]

    def _histories(self, buckets: int) -> list[Path]:
        """Group the events of each bucket into histories, sorted by the time of their last event."""
        written = []
        parts = sorted(self._partition(self._tables[0], "events", buckets).iterdir())
        for number, bucket in enumerate(track(parts, "sorting histories", unit="buckets")):
            histories = _group_by_user(self._side.join_items(_read(bucket)), self._ticks)
            if self._job.context is not None:
                user = int(histories["user_id"][0])
                histories = self._job.context.samples(user % CONTEXT_BUCKETS, histories.drop(LAST_TIME))
                histories = histories.sort(LAST_TIME, "user_id")
                if not len(histories):
                    continue
            histories = self._side.join_users(histories)
            written.append(self._job.scratch / f"histories-{number}.parquet")
            share = _rows_at_once(len(histories), buckets)
            histories.write_parquet(written[-1], row_group_size=share, compression="lz4")
        if not written:
            remedy = "append a partition when it has events"
            raise DataError(
                "every event of the log is in the data set already", where=self._logs[0].name, remedy=remedy
            )
        return written

    def _samples(self, buckets: int) -> list[Path]:
        """Join the impressions of each bucket with the events before them, sorted by the time of the impression."""
        events, impressions = (self._partition(table, str(n), buckets) for n, table in enumerate(self._tables))
        written, dropped, cut = [], 0, 0
        for number, bucket in enumerate(track(sorted(impressions.iterdir()), "joining impressions", unit="buckets")):
            if not (user_events := events / bucket.name).exists():
                dropped += len(_read(bucket))
                continue
            before, shown = self._side.join_items(_read(user_events)), _read(bucket)
            shown = self._side.join_items(shown, prefix="candidate_")
            samples = join_impressions(before, shown, max_history=self._job.max_history)
            samples = samples._replace(rows=self._side.join_users(samples.rows))
            dropped, cut = dropped + samples.without_history, cut + samples.cut
            if len(samples.rows):
                written.append(self._job.scratch / f"samples-{number}.parquet")
                _write_tables(samples.tables(self._ticks), written[-1], _rows_at_once(len(samples.rows), buckets))
        if not written:
            what, remedy = "no impression has an event of its user before it", "check users and times of both logs"
            raise DataError(what, where=self._logs[1].name, remedy=remedy)
        if dropped:
            warning_once(f"{dropped:,} impressions are dropped: their users have no event before them")
        if cut:
            info_once(f"{cut:,} histories are truncated to their last {self._job.max_history:,} events (--max-history)")
        return written

    def _partition(self, table: pl.LazyFrame, name: str, buckets: int) -> Path:
        parts = self._job.scratch / f"buckets-{name}"
        parts.mkdir()
        key = pl.col("user_id") if self._job.context else pl.col("user_id").hash()
        by_user = {"_bucket": key % buckets}
        with progress("partitioning by user"):
            table.sink_parquet(pl.PartitionBy(parts, key=by_user, include_key=False), compression="lz4", mkdir=True)
        return parts

    def _write(self, parts: list[Path], events: int, items: pl.Series, ranges: int) -> Manifest:
        histories = pl.scan_parquet(parts)
        if self._job.impressions or self._job.context:  # an event can be in several histories
            events = histories.select(pl.col("item_id").list.len().sum()).collect(engine="streaming").item()
            ranges = self._parts_in_memory(events)
        last = histories.select(LAST_TIME).collect(engine="streaming")[LAST_TIME].sort()
        cuts = [int(last[len(last) * i // ranges]) for i in range(1, ranges)]
        lists = sum(kind.is_nested() for kind in histories.collect_schema().values())
        rows = writer.rows_per_group(len(last), events, lists)
        note = f"imported from {', '.join(events.name for events in self._logs)}"
        ordered, is_raw = _in_time_order(histories, cuts), "item_id" in self._vocabularies.raw
        return writer.write_dataset(
            self._folder,
            ordered,
            rows_per_group=rows,
            items=0 if is_raw else len(items),
            vocabulary=RAW_IDS if is_raw else fingerprint(items.to_arrow()),
            note=note,
            features=self._vocabularies.sizes,
            expected_rows=len(last),
            files=_PARTITION_FILES if self._job.context else writer.FILES,
        )


def _read(bucket: Path) -> pl.DataFrame:
    return pl.read_parquet(bucket / "*.parquet" if bucket.is_dir() else bucket)


def _rows_at_once(rows: int, buckets: int) -> int:
    """Row group size of a bucket: about as many rows as one time range reads from it."""
    return max(32, rows // buckets)


def _write_tables(tables: Iterable[pa.Table], path: Path, row_group_size: int) -> None:
    tables = iter(tables)
    first = next(tables)
    with pq.ParquetWriter(path, first.schema, compression="lz4") as out:
        for table in (first, *tables):
            out.write_table(table, row_group_size=row_group_size)


def _group_by_user(events: pl.DataFrame, ticks: int) -> pl.DataFrame:
    """Histories of one bucket. Events with equal or missing timestamps keep the order of the log."""
    if "timestamp" in events.columns:
        timed = events.sort("user_id", "timestamp", LOG_ORDER).with_columns(
            pl.col("timestamp").alias(LAST_TIME), pl.col("timestamp") // ticks
        )
    else:
        timed = events.sort("user_id", LOG_ORDER).with_columns(
            pl.int_range(pl.len(), dtype=pl.Int64).over("user_id").alias("timestamp"),
            pl.col(LOG_ORDER).alias(LAST_TIME),
        )
    features = [name for name in events.columns if name not in ("user_id", "item_id", "timestamp", LOG_ORDER)]
    by_user = timed.group_by("user_id", maintain_order=True)
    return by_user.agg("item_id", "timestamp", *features, pl.col(LAST_TIME).last()).sort(LAST_TIME, "user_id")


def _in_time_order(histories: pl.LazyFrame, cuts: list[int]) -> Iterator[pa.Table]:
    """Rows sorted by LAST_TIME, one range between two cuts at a time."""
    for low, high in pairwise([None, *sorted(set(cuts)), None]):
        after = pl.lit(True) if low is None else pl.col(LAST_TIME) >= low
        before = pl.lit(True) if high is None else pl.col(LAST_TIME) < high
        rows = histories.filter(after & before).collect(engine="streaming").sort(LAST_TIME, "user_id").drop(LAST_TIME)
        yield _plain_lists(rows.to_arrow())


def _plain_lists(table: pa.Table) -> pa.Table:
    """Convert the 64-bit list offsets of Polars to plain lists, which all Parquet readers accept."""
    plain = {field.name: _plain_list(field.type) for field in table.schema}
    return table.cast(pa.schema(plain)) if table.num_rows else pa.schema(plain).empty_table()


def _plain_list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(_plain_list(kind.value_type)) if pa.types.is_large_list(kind) else kind


class RankingSamples(NamedTuple):
    """Ranking samples of one bucket: the impressions of one user and timestamp, and the range of earlier events.

    Histories are materialized in `tables`, because an event is in the history of every later sample.
    """

    rows: pl.DataFrame
    """`user_id`, LAST_TIME, candidates, labels, features, and the history as events `_begin` to `_end`."""
    events: pl.DataFrame
    """Sorted by user and time."""
    without_history: int
    """Dropped impressions, whose user has no earlier event."""
    cut: int
    """Samples with a truncated history."""

    def tables(self, ticks: int) -> Iterator[pa.Table]:
        """Rows of the data set, sorted by time, in chunks of bounded memory."""
        total = (self.rows["_end"] - self.rows["_begin"]).cum_sum().to_numpy()
        features = self.events.drop("user_id", LOG_ORDER).with_columns(pl.col("timestamp") // ticks)
        for begin, end in pairwise([0, *(np.flatnonzero(np.diff(total // _CHUNK)) + 1).tolist(), len(total)]):
            yield _with_histories(self.rows[begin:end], features)


def join_impressions(events: pl.DataFrame, impressions: pl.DataFrame, *, max_history: int) -> RankingSamples:
    """Group impressions by user and timestamp, and find the events strictly before each group."""
    events = events.sort("user_id", "timestamp", LOG_ORDER)
    others = [name for name in impressions.columns if is_candidate(name)]
    groups = impressions.sort("user_id", "timestamp", LOG_ORDER).group_by("user_id", "timestamp", maintain_order=True)
    rows = groups.agg(pl.col("item_id").alias(CANDIDATE), *others)
    # Merge events and impressions; impressions sort before events with the same timestamp.
    marks = [frame.select("user_id", "timestamp", seen=pl.lit(seen)) for frame, seen in ((events, 1), (rows, 0))]
    merged = pl.concat(marks).sort("user_id", "timestamp", "seen").with_columns(end=pl.col("seen").cum_sum())
    first = (pl.col("end") - pl.col("seen")).first().over("user_id")
    bounds = merged.with_columns(begin=first).filter(pl.col("seen") == 0).select(_begin="begin", _end="end")
    rows = pl.concat([rows, bounds.cast(pl.Int64)], how="horizontal")
    kept = rows.filter(pl.col("_end") > pl.col("_begin"))
    dropped = rows.filter(pl.col("_end") == pl.col("_begin"))[CANDIDATE].list.len().sum()
    truncated = pl.max_horizontal("_begin", pl.col("_end") - max_history)
    cut = int((kept["_end"] - kept["_begin"] > max_history).sum())
    ordered = kept.with_columns(_begin=truncated).rename({"timestamp": LAST_TIME}).sort(LAST_TIME, "user_id")
    return RankingSamples(ordered, events, int(dropped), cut)


def _with_histories(rows: pl.DataFrame, features: pl.DataFrame) -> pa.Table:
    begin, end = (rows[name].to_numpy() for name in ("_begin", "_end"))
    offsets = pa.array(np.concatenate([[0], np.cumsum(end - begin)]), pa.int32())
    values = features[concat_ranges(begin, end - begin)].to_arrow()
    lists = {n: pa.ListArray.from_arrays(offsets, values[n].combine_chunks()) for n in values.column_names}
    rest = rows.drop("user_id", "_begin", "_end").to_arrow()
    others = {name: rest[name] for name in rest.column_names}
    return pa.table({"user_id": rows["user_id"].to_arrow(), **lists, **others})
