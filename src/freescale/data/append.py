"""Append a partition to a data set: import its log with the ids of the data set, join the context of its users.

Everything is written under new names first. The partition is part of the data set when `partitions.json` is replaced,
so an append that is stopped at any moment leaves the data set as it was, and can be repeated.

partitions.json                  see `partitions`
vocabulary*.parquet              the keys of the data set, or with raw ids those so far
date=2026-11-16/hour=03/         one partition: a data set with a manifest
context/bucket-07-000012.parquet the latest events of users; the number is that of the partition that wrote it
"""

import io
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pyarrow.parquet as pq

from freescale.data.histories import MAX_HISTORY, ImportJob, ImportSummary, write_histories
from freescale.data.manifest import MANIFEST_FILE, Manifest, parse_manifest
from freescale.data.numbering import save_keys
from freescale.data.partitions import PARTITIONS_FILE, DataPartition, PartitionList, dump_partitions, parse_partitions
from freescale.data.user_context import ContextJoin
from freescale.data.vocabulary import VOCABULARY_FILE, feature_vocabulary_file
from freescale.errors import DataError, UsageError, reason
from freescale.storage import StorageFolder

_CONTEXT = "context"


class AppendOptions(NamedTuple):
    """What belongs to the data set rather than to one partition."""

    vocabulary: Path | None = None
    """A data set whose ids are kept; only with the first partition."""
    raw: Collection[str] = ()
    """Columns with raw ids."""
    max_history: int = 0
    """Most events of a sample; 0: as in the data set."""


class Appended(NamedTuple):
    """A new partition, and the counts of its import."""

    partition: DataPartition
    summary: ImportSummary


def append_partition(job: ImportJob, address: str, name: str, options: AppendOptions) -> Appended | None:
    """Import a log as a new partition. Return None if the data set has a partition of this name already."""
    store = StorageFolder(address)
    seen = store.read(PARTITIONS_FILE)
    listed = PartitionList() if seen is None else parse_partitions(seen, f"{address}/{PARTITIONS_FILE}")
    if any(one.name == name for one in listed.partitions):
        return None
    listed.require_new(name, where=address)
    listed = _with_options(listed, options, address)
    known = _download_vocabularies(store, listed, job.scratch / "known") if listed.partitions else options.vocabulary
    folder, contexts = job.scratch / "partition", _Contexts(store, listed, job.scratch / "context")
    newest = listed.partitions[-1].last_time if listed.partitions else 0
    join = ContextJoin(contexts.read, contexts.write, listed.max_history, newest)
    summary = write_histories(job._replace(context=join), folder, vocabulary=known, raw={"user_id", *listed.raw})
    added = _describe(name, folder, join)
    _require_same_ids(listed, added.manifest, address)
    _upload_vocabularies(store, listed, added.manifest, folder, known)
    store.upload(folder, name)
    store.upload(contexts.folder, _CONTEXT)
    if store.read(PARTITIONS_FILE) != seen:
        what, remedy = "another append has changed the data set at the same time", "append one partition at a time"
        raise DataError(what, where=address, remedy=remedy)
    grown = listed._replace(partitions=(*listed.partitions, added), context=tuple(contexts.versions))
    store.replace(PARTITIONS_FILE, dump_partitions(grown))
    contexts.delete_replaced()
    return Appended(added, summary)


class _Contexts:
    """The context of users, before and after a partition. `folder` holds the new files until they are uploaded."""

    def __init__(self, store: StorageFolder, listed: PartitionList, folder: Path) -> None:
        self._store, self._before, self._number = store, listed.context, len(listed.partitions)
        self.folder, self.versions = folder, list(listed.context)
        folder.mkdir()

    def read(self, bucket: int) -> pl.DataFrame | None:
        """Return the context of a bucket."""
        if (version := self._before[bucket]) < 0:
            return None
        name = _context_name(bucket, version)
        raw = self._store.read(name)
        try:
            return pl.read_parquet(io.BytesIO(raw or b""))
        except pl.exceptions.PolarsError as error:
            what = f"the context of users cannot be read: {reason(error)}"
            where = f"{self._store.address}/{name}"
            raise DataError(what, where=where, remedy="restore that file, or import the data set again") from error

    def write(self, bucket: int, context: pl.DataFrame) -> None:
        """Keep the context of a bucket for the next partition."""
        path = self.folder / Path(_context_name(bucket, self._number)).name
        pq.write_table(context.to_arrow(), path, write_page_checksum=True, compression="zstd")
        self.versions[bucket] = self._number

    def delete_replaced(self) -> None:
        """Delete the files that the new ones replace."""
        for bucket, (before, now) in enumerate(zip(self._before, self.versions, strict=True)):
            if 0 <= before != now:
                self._store.delete(_context_name(bucket, before))


def _context_name(bucket: int, version: int) -> str:
    return f"{_CONTEXT}/bucket-{bucket:02d}-{version:06d}.parquet"


def _with_options(listed: PartitionList, options: AppendOptions, address: str) -> PartitionList:
    """Adopt the options with the first partition; refuse others later."""
    if not listed.partitions:
        return listed._replace(raw=tuple(sorted(options.raw)), max_history=options.max_history or MAX_HISTORY)
    wrong = []
    if options.vocabulary is not None:
        wrong.append("--vocabulary")
    if options.raw and sorted(options.raw) != sorted(listed.raw):
        wrong.append("--raw-ids")
    if options.max_history not in (0, listed.max_history):
        wrong.append("--max-history")
    if wrong:
        what = f"{' and '.join(wrong)} cannot change: the first partition has determined it"
        raise UsageError(what, where=address, remedy="leave it out, or begin another data set")
    return listed


def _describe(name: str, folder: Path, join: ContextJoin) -> DataPartition:
    manifest = parse_manifest((folder / MANIFEST_FILE).read_bytes(), name)
    counts = {count: join.counts[count] for count in ("targets", "duplicates", "late", "too_late")}
    return DataPartition(name, manifest, **counts, last_time=max(join.newest, join.latest))


def _require_same_ids(listed: PartitionList, manifest: Manifest, address: str) -> None:
    """Refuse a partition whose ids would mean something else than those of the first one."""
    if not listed.partitions:
        return
    first = listed.partitions[0].manifest
    if (manifest.vocabulary, dict(manifest.features)) != (first.vocabulary, dict(first.features)):
        what = "the features of this log differ from those of the first partition"
        raise DataError(what, where=address, remedy="append with the options of the first partition")


def _vocabulary_files(manifest: Manifest, raw: Collection[str]) -> list[str]:
    features = {*manifest.features, *raw} - {"item_id"}
    return [VOCABULARY_FILE, *map(feature_vocabulary_file, sorted(features))]


def _download_vocabularies(store: StorageFolder, listed: PartitionList, folder: Path) -> Path:
    folder.mkdir()
    for name in _vocabulary_files(listed.partitions[0].manifest, listed.raw):
        if (raw := store.read(name)) is not None:
            (folder / name).write_bytes(raw)
    return folder


def _upload_vocabularies(
    store: StorageFolder, listed: PartitionList, manifest: Manifest, folder: Path, known: Path | None
) -> None:
    """Move the vocabularies to the data set, with the first partition; keys of raw ids with every partition."""
    raw = {VOCABULARY_FILE if column == "item_id" else feature_vocabulary_file(column) for column in listed.raw}
    for name in _vocabulary_files(manifest, listed.raw):
        if not listed.partitions or name in raw:
            if listed.partitions and known is not None and (known / name).exists():
                both = pl.concat([pl.read_parquet(known / name), pl.read_parquet(folder / name)])
                counts = both.group_by("key", "id").agg(pl.col("count").sum()).select("key", "count", "id")
                save_keys(counts.sort("id"), folder / name)
            store.upload(folder / name, name)
        (folder / name).unlink()
