"""A data set on disk: its numbered row groups, and statistics over them.

Reads data sets with a manifest, partitioned data sets, and plain Parquet folders. Every library error becomes a
`DataError` or a quarantined row group. Thread-safe.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from freescale.data.columns import ColumnRequest, ColumnType, require_same_shapes, select_columns
from freescale.data.manifest import MANIFEST_FILE, Manifest, parse_manifest
from freescale.data.order import MAX_GROUP_ROWS, RowGroupLayout
from freescale.data.parquet import FETCH_AGAIN, FileEntry, ParquetReader
from freescale.data.partitions import IS_TARGET, PARTITIONS_FILE, PartitionList, parse_partitions
from freescale.data.validation import Location, Quarantine, RowGroup, decode_rows
from freescale.errors import DataError, reason
from freescale.progress import track

_NumberedStripe = tuple[int, tuple[FileEntry, ...]]
"""The index of a stripe's first row group, and its files."""
_CHECK_ADDRESS = "check the address and its permissions"
Ints = NDArray[np.int64]
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_MAX_PENDING = 1 << 22


class Dataset:
    """User histories in Parquet files, with a manifest or without."""

    def __init__(
        self,
        address: str,
        *,
        features: Sequence[str | ColumnRequest] = (),
        longest: int = 10**6,
        quarantine: Quarantine | None = None,
        until: str = "",
    ) -> None:
        """Open a data set. `until`: the last partition to read, or a part of its name; by default all are read."""
        self.address = address
        self.quarantine = quarantine or Quarantine()
        self._longest = longest
        self._files = ParquetReader(address)
        self.manifest = self._find_manifest()
        self.partitioned = self._find_partitions(until) if self.manifest is None else None
        """The partitions, if the data set is partitioned."""
        if self.partitioned is not None:
            self.manifest = self.partitioned.manifest()
        self._stripes, self.layout = _stripes_of(self.manifest) if self.manifest else self._discover()
        self._starts = [first for first, _ in self._stripes]
        self._features = [*features, IS_TARGET] if self.partitioned else features
        self.columns = self._choose_columns(self._features)

    @property
    def rows(self) -> int:
        """Number of histories, including unusable ones."""
        return self.layout.rows

    @property
    def ends(self) -> tuple[int, ...]:
        """Rows up to the end of each partition; empty without partitions."""
        partitions = () if self.partitioned is None else self.partitioned.partitions
        return tuple(accumulate(one.manifest.rows for one in partitions))

    @property
    def first_groups(self) -> int:
        """Number of row groups that statistics of a run are taken from: those of the first partition, or all."""
        if self.partitioned is None:
            return self.layout.groups
        return self.partitioned.partitions[0].manifest.layout().groups

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return self._files.bytes_read

    def read_group(self, group: int) -> RowGroup:
        """Read and validate one row group. If it is unreadable, raise, or with on_bad = skip return no usable row."""
        file, index = self._locate(group)
        rows = int(self.layout.group_rows(group))
        try:
            table = self._files.read_group(file, index, self.columns)
            if table.num_rows != rows:
                raise DataError(f"the row group holds {table.num_rows} rows instead of {rows}")
            if not file.has_checksums:  # plain Parquet: only the first schema was validated
                require_same_shapes(self.columns, select_columns(table.schema, self._features, file.name))
        except Exception as error:  # Arrow raises many types on damaged bytes
            what = error.what if isinstance(error, DataError) else reason(error)
            location = Location(file.name, index)
            self.quarantine.reject(location, "unreadable", what, remedy=FETCH_AGAIN, rows=rows, cause=error)
            return RowGroup.unreadable(rows, self.columns)

        def report(row: int, kind: str, what: str) -> None:
            self.quarantine.reject(Location(file.name, index, row), kind, what, remedy="fix or remove that row")

        return decode_rows(table, self.columns, longest=self._longest, report=report)

    def unchecked_files(self) -> list[str]:
        """Files without page checksums, in which a flipped bit goes undetected."""
        files = [file for _, files in self._stripes for file in files if not file.has_checksums]
        return [file.name for file in files if not self._files.has_page_checksums(file)]

    def _find_manifest(self) -> Manifest | None:
        raw = self._read_if_exists(MANIFEST_FILE)
        return None if raw is None else parse_manifest(raw, f"{self.address}/{MANIFEST_FILE}")

    def _find_partitions(self, until: str) -> PartitionList | None:
        raw = self._read_if_exists(PARTITIONS_FILE)
        if raw is None:
            return None
        found = parse_partitions(raw, f"{self.address}/{PARTITIONS_FILE}")
        found = found.until(until) if until else found
        if not found.partitions:
            what = f"there is no partition up to {until}" if until else "there is no partition yet"
            raise DataError(what, where=self.address, remedy="add one with `freescale data import ... --append NAME`")
        return found

    def _read_if_exists(self, name: str) -> bytes | None:
        try:
            return self._files.read(name)
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            remedy = "give the folder that holds the Parquet files"
            raise DataError("this is a file, not a data set", where=self.address, remedy=remedy) from error
        except OSError as error:
            raise DataError(reason(error), where=self.address, remedy=_CHECK_ADDRESS) from error

    def _discover(self) -> tuple[list[_NumberedStripe], RowGroupLayout]:
        """Number the row groups of files without a manifest, in order of file name."""
        try:
            files = self._files.list("*.parquet")
        except OSError as error:
            raise DataError(reason(error), where=self.address, remedy=_CHECK_ADDRESS) from error
        if not files:
            remedy = "create some with `freescale data import` or `freescale data synth`, or give their folder"
            raise DataError("no Parquet files here", where=self.address, remedy=remedy)
        stripes: list[_NumberedStripe] = []
        counts: list[int] = []
        for file in files:
            try:
                metadata = self._files.footer(file).metadata
                rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
                if not all(0 <= count <= MAX_GROUP_ROWS for count in rows):
                    raise DataError(f"a row group claims {max(rows, key=abs):,} rows; {MAX_GROUP_ROWS:,} are the most")
            except DataError as error:
                location = Location(file.name)
                self.quarantine.reject(location, "unreadable file", error.what, remedy=FETCH_AGAIN, cause=error)
                continue
            stripes.append((len(counts), (file,)))
            counts += rows
        return stripes, RowGroupLayout.from_counts(counts)

    def _choose_columns(self, features: Sequence[str | ColumnRequest]) -> dict[str, ColumnType]:
        cause = "there is none"
        for file in (file for _, files in self._stripes for file in files):
            try:
                self.schema = self._files.footer(file).schema
            except DataError as error:  # reported if a row group of that file is read
                cause = f"{error.where}: {error.what}"
                continue
            return select_columns(self.schema, features, file.name)
        raise DataError(f"no file here can be read ({cause})", where=self.address, remedy=FETCH_AGAIN)

    def _locate(self, group: int) -> tuple[FileEntry, int]:
        first, files = self._stripes[bisect_right(self._starts, group) - 1]
        index, file = divmod(group - first, len(files))
        return files[file], index


def _stripes_of(manifest: Manifest) -> tuple[list[_NumberedStripe], RowGroupLayout]:
    first = accumulate((stripe.groups for stripe in manifest.stripes), initial=0)
    return [(next(first), stripe.files) for stripe in manifest.stripes], manifest.layout()


@dataclass
class ValueCounts:
    """Number of occurrences of each distinct integer. Memory grows with the distinct ones."""

    values: Ints = field(default_factory=lambda: np.zeros(0, int))
    counts: Ints = field(default_factory=lambda: np.zeros(0, int))
    _pending: list[tuple[Ints, Ints]] = field(default_factory=list)
    _pending_size: int = 0

    def add(self, observed: Ints) -> None:
        """Count more integers."""
        values, counts = np.unique(observed, return_counts=True)
        self._pending.append((values, counts))
        self._pending_size += len(values)
        if self._pending_size > _MAX_PENDING:
            self.merge_pending()

    def merge_pending(self) -> None:
        """Merge pending counts into the sorted totals."""
        parts = [(self.values, self.counts), *self._pending]
        self.values, inverse = np.unique(np.concatenate([v for v, _ in parts]), return_inverse=True)
        self.counts = np.bincount(inverse, np.concatenate([c for _, c in parts])).astype(np.int64)
        self._pending.clear()
        self._pending_size = 0


@dataclass(frozen=True)
class DatasetStats:
    """Distribution of history lengths and item popularity."""

    rows: int
    events: int
    lengths: ValueCounts
    items: ValueCounts

    def quantile(self, share: float) -> int:
        """Quantile of the history length."""
        lengths = self.lengths
        return int(np.quantile(lengths.values, share, weights=lengths.counts, method="inverted_cdf"))

    @property
    def mean_length(self) -> float:
        """Mean number of events per history."""
        return self.events / max(1, self.rows)

    @property
    def variation(self) -> float:
        """Coefficient of variation of the history length."""
        share = self.lengths.counts / max(1, self.rows)
        variance = float(share @ (self.lengths.values - self.mean_length) ** 2)
        return variance**0.5 / max(self.mean_length, 1e-12)

    def popularity(self) -> Ints:
        """Events per item, most popular first."""
        return np.sort(self.items.counts)[::-1]

    def top_share(self, share: float) -> float:
        """Fraction of the events that the most popular `share` of the items receives."""
        popularity = self.popularity()
        top = max(1, round(share * len(popularity)))
        return float(popularity[:top].sum() / max(1, self.events))


def compute_stats(dataset: Dataset, *, workers: int = 2) -> DatasetStats:
    """Compute statistics in one pass, with bounded memory."""
    lengths, items = ValueCounts(), ValueCounts()
    groups = _read_groups(dataset, workers)
    for group in track(groups, f"reading {dataset.address}", total=dataset.layout.groups, unit="row groups"):
        column = group.columns["item_id"]
        lengths.add(column.lengths[group.usable])
        items.add(column.values)
    lengths.merge_pending()
    items.merge_pending()
    return DatasetStats(int(lengths.counts.sum()), int(items.counts.sum()), lengths, items)


def _read_groups(dataset: Dataset, workers: int) -> Iterator[RowGroup]:
    """Read all row groups, a few in advance."""
    total = dataset.layout.groups
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for first in range(0, total, 64):
            yield from pool.map(dataset.read_group, range(first, min(first + 64, total)))
