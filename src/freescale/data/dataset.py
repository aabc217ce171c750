"""Dataset."""

import json
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from freescale.data.order import MAX_GROUP_ROWS, RowGroupLayout
from freescale.data.parquet import FETCH_AGAIN, FileEntry, ParquetReader
from freescale.data.validation import ColumnType, Location, Quarantine, RowGroup, decode_rows, select_columns
from freescale.errors import DataError, reason
from freescale.progress import track

MANIFEST_FILE = "manifest.json"
MANIFEST_VERSION = 2
GROUPS_PER_FILE = 4096


class Stripe(NamedTuple):
    """Row group k of a stripe is group k // len(files) of file k % len(files)."""

    files: tuple[FileEntry, ...]
    rows: int
    rows_per_group: int

    @property
    def groups(self) -> int:
        """Row groups over all files; only the last may be short."""
        return -(-self.rows // self.rows_per_group)


class Manifest(NamedTuple):
    """A whole data set."""

    stripes: tuple[Stripe, ...]
    events: int
    items: int
    """Rows of the item vocabulary: stored item ids below this are known items."""
    vocabulary: str
    """Fingerprint of the vocabulary: which item each of these ids is."""
    note: str = ""
    """Where the data came from and what was made up, in one line."""

    @property
    def rows(self) -> int:
        """Histories in the data set."""
        return sum(stripe.rows for stripe in self.stripes)

    def layout(self) -> RowGroupLayout:
        """Sizes of all row groups, in log order."""
        of_stripes = [(s.rows_per_group, s.rows - s.rows_per_group * np.arange(s.groups)) for s in self.stripes]
        counts = [np.minimum(most, left) for most, left in of_stripes]
        return RowGroupLayout.from_counts(np.concatenate([np.empty(0, dtype=np.int64), *counts]))


def data_file_name(stripe: int, file: int) -> str:
    """Name the files so that their alphabetical order is the order of the stripes."""
    return f"part-{stripe:05d}-{file:02d}.parquet"


def dump_manifest(manifest: Manifest) -> bytes:
    """Write the manifest with its own checksum."""
    body = _body(manifest)
    return json.dumps({"freescale": MANIFEST_VERSION, "crc": _crc(body), "data": body}, separators=(",", ":")).encode()


def manifest_checksum(manifest: Manifest) -> str:
    """Checksum of a data set's contents: of the sizes and checksums of all its files."""
    return f"{_crc(_body(manifest)):08x}"


def _body(manifest: Manifest) -> dict[str, object]:
    # Every rank reads this, so it is kept to some 25 bytes a file: names follow from the numbers.
    stripes = [
        [stripe.rows, stripe.rows_per_group, [[f.size, f.footer_size, f.footer_crc, f.sums_crc] for f in stripe.files]]
        for stripe in manifest.stripes
    ]
    others = {name: getattr(manifest, name) for name in ("events", "items", "vocabulary", "note")}
    return {"stripes": stripes, **others}


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Read a manifest back; anything but what `dump` wrote is an error."""
    try:
        tree = json.loads(raw)
        version, body = tree["freescale"], tree["data"]
        if version == MANIFEST_VERSION and tree["crc"] == _crc(body):
            stripes = tuple(
                Stripe(
                    tuple(FileEntry(data_file_name(s, f), *file) for f, file in enumerate(files)), rows, rows_per_group
                )
                for s, (rows, rows_per_group, files) in enumerate(body["stripes"])
            )
            found = Manifest(stripes, body["events"], body["items"], str(body["vocabulary"]), str(body["note"]))
            if not _possible(found):
                raise ValueError("no data set has such numbers")
            return found
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"the manifest is damaged: {error}", where=where, remedy=_REWRITE) from error
    if version != MANIFEST_VERSION:
        what = f"the manifest has version {version!r}, this package reads {MANIFEST_VERSION}"
        raise DataError(what, where=where, remedy=_REWRITE)
    raise DataError("the manifest is damaged: its checksum does not match", where=where, remedy=_REWRITE)


_REWRITE = "write the data set again with `freescale data import` or `freescale data synth`"


def _possible(found: Manifest) -> bool:
    """Whether all counts are counts, and the rows no more than such files hold: memory is set aside by them."""
    files = [file for stripe in found.stripes for file in stripe.files]
    counts = [n for file in files for n in (file.size, file.footer_size, file.footer_crc, file.sums_crc)]
    counts += [found.events, found.items, *(n for s in found.stripes for n in (s.rows, s.rows_per_group))]
    return all(type(n) is int and 0 <= n < 2**63 for n in counts) and all(
        1 <= s.rows_per_group <= MAX_GROUP_ROWS and s.groups <= len(s.files) * GROUPS_PER_FILE for s in found.stripes
    )


def _crc(body: object) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


_NumberedStripe = tuple[int, tuple[FileEntry, ...]]
"""The number of its first row group, and its files."""
_CHECK_ADDRESS = "check the address and its permissions"


class Dataset:
    """Histories in Parquet files."""

    def __init__(
        self, address: str, *, features: Sequence[str] = (), longest: int = 10**6, quarantine: Quarantine | None = None
    ) -> None:
        self.address = address
        self.quarantine = quarantine or Quarantine()
        self._longest = longest
        self._files = ParquetReader(address)
        self.manifest = self._find_manifest()
        self._stripes, self.layout = _described(self.manifest) if self.manifest else self._discovered()
        self._starts = [first for first, _ in self._stripes]
        self.columns = self._choose_columns(features)

    @property
    def rows(self) -> int:
        """Histories in the data set, usable or not."""
        return self.layout.rows

    @property
    def bytes_read(self) -> int:
        """Bytes fetched so far."""
        return self._files.bytes_read

    def read_group(self, group: int) -> RowGroup:
        """Read and check one row group. One that cannot be read is an error, or holds no usable row where allowed."""
        file, index = self._locate(group)
        rows = int(self.layout.group_rows(group))
        try:
            table = self._files.read_group(file, index, self.columns)
            if table.num_rows != rows:
                raise DataError(f"the row group holds {table.num_rows} rows instead of {rows}")
            if not file.has_checksums:  # only the columns of the first file were looked at so far
                select_columns(table.schema, tuple(self.columns), Location(file.name))
        except Exception as error:  # Arrow raises many kinds on damaged bytes; none may reach the user bare
            what = error.what if isinstance(error, DataError) else reason(error)
            place = Location(file.name, index)
            self.quarantine.reject(place, "unreadable", what, remedy=FETCH_AGAIN, rows=rows, cause=error)
            return RowGroup.unreadable(rows, self.columns)

        def report(row: int, kind: str, what: str) -> None:
            self.quarantine.reject(Location(file.name, index, row), kind, what, remedy="mend or remove that row")

        return decode_rows(table, longest=self._longest, report=report)

    def unchecked_files(self) -> list[str]:
        """Files whose pages carry no checksum, so that a flipped bit in them cannot be seen."""
        files = [file for _, files in self._stripes for file in files if not file.has_checksums]
        return [file.name for file in files if not self._files.has_page_checksums(file)]

    def _find_manifest(self) -> Manifest | None:
        try:
            raw = self._files.read(MANIFEST_FILE)
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            remedy = "give the folder that holds the Parquet files"
            raise DataError("this is a file, not a data set", where=self.address, remedy=remedy) from error
        except OSError as error:
            raise DataError(reason(error), where=self.address, remedy=_CHECK_ADDRESS) from error
        return parse_manifest(raw, f"{self.address}/{MANIFEST_FILE}")

    def _discovered(self) -> tuple[list[_NumberedStripe], RowGroupLayout]:
        """Number the row groups of files that nobody described: by file name, one after another."""
        try:
            found = self._files.list("*.parquet")
        except OSError as error:
            raise DataError(reason(error), where=self.address, remedy=_CHECK_ADDRESS) from error
        if not found:
            remedy = "make some with `freescale data import` or `freescale data synth`, or give their folder"
            raise DataError("no Parquet files here", where=self.address, remedy=remedy)
        stripes: list[_NumberedStripe] = []
        counts: list[int] = []
        for file in found:
            try:
                metadata = self._files.footer(file).metadata
                rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
                if not all(0 <= count <= MAX_GROUP_ROWS for count in rows):
                    raise DataError(f"a row group claims {max(rows, key=abs):,} rows; {MAX_GROUP_ROWS:,} are the most")
            except DataError as error:
                place = Location(file.name)
                self.quarantine.reject(place, "unreadable file", error.what, remedy=FETCH_AGAIN, cause=error)
                continue
            stripes.append((len(counts), (file,)))
            counts += rows
        return stripes, RowGroupLayout.from_counts(counts)

    def _choose_columns(self, features: Sequence[str]) -> dict[str, ColumnType]:
        why = "there is none"
        for file in (file for _, files in self._stripes for file in files):
            try:
                schema = self._files.footer(file).schema
            except DataError as error:  # reported when, and if, a group of that file is read
                why = f"{error.where}: {error.what}"
                continue
            return select_columns(schema, features, Location(file.name))
        raise DataError(f"no file here can be read ({why})", where=self.address, remedy=FETCH_AGAIN)

    def _locate(self, group: int) -> tuple[FileEntry, int]:
        first, files = self._stripes[bisect_right(self._starts, group) - 1]
        index, file = divmod(group - first, len(files))
        return files[file], index


def _described(found: Manifest) -> tuple[list[_NumberedStripe], RowGroupLayout]:
    first = accumulate((stripe.groups for stripe in found.stripes), initial=0)
    return [(next(first), stripe.files) for stripe in found.stripes], found.layout()


Ints = NDArray[np.int64]
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_MAX_PENDING = 1 << 22


@dataclass
class ValueCounts:
    """How often each of many integers was seen; memory follows the distinct ones."""

    values: Ints = field(default_factory=lambda: np.zeros(0, int))
    counts: Ints = field(default_factory=lambda: np.zeros(0, int))
    _pending: list[tuple[Ints, Ints]] = field(default_factory=list)
    _held: int = 0

    def add(self, seen: Ints) -> None:
        """Count some more."""
        values, counts = np.unique(seen, return_counts=True)
        self._pending.append((values, counts))
        self._held += len(values)
        if self._held > _MAX_PENDING:
            self.merge_pending()

    def merge_pending(self) -> None:
        """Merge what is pending into the sorted totals."""
        parts = [(self.values, self.counts), *self._pending]
        self.values, back = np.unique(np.concatenate([v for v, _ in parts]), return_inverse=True)
        self.counts = np.bincount(back, np.concatenate([c for _, c in parts])).astype(np.int64)
        self._pending.clear()
        self._held = 0


@dataclass(frozen=True)
class DatasetStats:
    """The figures of a data set."""

    rows: int
    events: int
    lengths: ValueCounts
    items: ValueCounts

    def quantile(self, share: float) -> int:
        """The smallest length that at least this share of the histories do not exceed."""
        lengths = self.lengths
        return int(np.quantile(lengths.values, share, weights=lengths.counts, method="inverted_cdf"))

    @property
    def mean_length(self) -> float:
        """Events per history."""
        return self.events / max(1, self.rows)

    @property
    def variation(self) -> float:
        """Standard deviation of the length over its mean."""
        share = self.lengths.counts / max(1, self.rows)
        variance = float(share @ (self.lengths.values - self.mean_length) ** 2)
        return variance**0.5 / max(self.mean_length, 1e-12)

    def popularity(self) -> Ints:
        """Events per item, most popular first."""
        return np.sort(self.items.counts)[::-1]

    def top_share(self, share: float) -> float:
        """Which part of the events goes to this share of the items."""
        popularity = self.popularity()
        top = max(1, round(share * len(popularity)))
        return float(popularity[:top].sum() / max(1, self.events))


def compute_stats(dataset: Dataset, *, workers: int = 2) -> DatasetStats:
    """Read a whole data set once and describe it."""
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
    """All row groups, a few read ahead."""
    total = dataset.layout.groups
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for first in range(0, total, 64):
            yield from pool.map(dataset.read_group, range(first, min(first + 64, total)))
