"""Row groups of a data set, read one at a time from any fsspec address.

Only the bytes of the asked columns travel: ranges are read exactly, without a file system's own read-ahead, because
what every rank reads too much of multiplies with the ranks. Safe to call from several threads.
"""

import mmap
import struct
import threading
import zlib
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data import columns, manifest
from freescale.data.columns import Group, Kind
from freescale.data.layout import Layout
from freescale.data.manifest import File, Manifest
from freescale.data.quarantine import Place, Quarantine
from freescale.errors import DataError, reason

_MAGIC = b"PAR1"
_FOOTERS_KEPT = 256  # at a quarter of a MB each for files of a GiB


class Dataset:
    """Histories in Parquet: files of ours with a manifest, or anyone's without."""

    def __init__(
        self,
        address: str,
        *,
        features: Sequence[str] = (),
        longest: int = 1_000_000,
        quarantine: Quarantine | None = None,
    ) -> None:
        self.address = address
        self.quarantine = quarantine or Quarantine()
        self.bytes_read = 0
        self._longest = longest
        self._lock = threading.Lock()
        self._fs, self._root = _open_address(address)
        self._footer = lru_cache(maxsize=_FOOTERS_KEPT)(self._read_footer)
        self.manifest = self._find_manifest()
        self._stripes, self.layout = self._from_manifest(self.manifest) if self.manifest else self._from_footers()
        self.columns = self._choose_columns(features)

    @property
    def rows(self) -> int:
        """Histories in the data set, usable or not."""
        return self.layout.rows

    def read_group(self, group: int) -> Group:
        """Read and check one row group. One that cannot be read is an error, or holds no usable row where allowed."""
        file, index = self._locate(group)
        rows = int(self.layout.rows_of(group))
        try:
            table = self._read_table(file, index)
            if table.num_rows != rows:
                raise DataError(f"the row group holds {table.num_rows} rows instead of {rows}")
        except Exception as error:  # Arrow raises many kinds on damaged bytes; none may reach the user bare
            what = error.what if isinstance(error, DataError) else reason(error)
            self.quarantine.bad(
                Place(file.name, index), "unreadable", what, remedy=_FETCH_AGAIN, rows=rows, cause=error
            )
            return Group.unreadable(rows, self.columns)

        def report(row: int, kind: str, what: str) -> None:
            self.quarantine.bad(Place(file.name, index, row), kind, what, remedy="mend or remove that row")

        return columns.decode(table, longest=self._longest, report=report)

    def unchecked_files(self) -> list[str]:
        """Files whose pages carry no checksum, so that a flipped bit in them cannot be seen."""
        if self.manifest:
            return []
        return [stripe.files[0].name for stripe in self._stripes if not self._has_page_checksum(stripe.files[0])]

    def _read_table(self, file: File, index: int) -> pa.Table:
        """Fetch the bytes of the asked columns first and decode them from memory.

        Arrow reads at absolute offsets of the file, so the bytes are laid out at theirs in a mapping as long as the
        file, of which only the touched pages exist. Handing Arrow a Python file instead would take the interpreter
        lock at every read, and wait for it while a step is being launched.
        """
        metadata = self._footer(file)
        image = mmap.mmap(-1, file.size)
        for start, end in _column_ranges(metadata.row_group(index), self.columns):
            image[start:end] = self._read_range(file, start, end)
        source = pa.BufferReader(pa.py_buffer(image))
        reader = pq.ParquetFile(source, metadata=metadata, page_checksum_verification=True, pre_buffer=False)
        return reader.read_row_group(index, columns=list(self.columns), use_threads=False)

    def _read_range(self, file: File, start: int, end: int) -> bytes:
        data = self._fs.cat_file(f"{self._root}/{file.name}", start=start, end=end)
        if len(data) != end - start:
            raise DataError(f"the file ends at byte {start + len(data):,}, before byte {end:,}")
        with self._lock:
            self.bytes_read += len(data)
        return data

    def _find_manifest(self) -> Manifest | None:
        path = f"{self._root}/{manifest.NAME}"
        try:
            raw = self._fs.cat_file(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(reason(error), where=path, remedy="check the address and its permissions") from error
        with self._lock:
            self.bytes_read += len(raw)
        return manifest.parse(raw, path)

    def _from_manifest(self, found: Manifest) -> "tuple[list[_Stripe], Layout]":
        stripes: list[_Stripe] = []
        first = 0
        for stripe in found.stripes:
            stripes.append(_Stripe(first, stripe.files))
            first += stripe.groups
        return stripes, found.layout()

    def _from_footers(self) -> "tuple[list[_Stripe], Layout]":
        """Number the row groups of files that nobody described: by file name, one after another."""
        try:
            found = sorted(self._fs.glob(f"{self._root}/*.parquet"))
            sizes = [self._fs.size(path) for path in found]
        except OSError as error:
            raise DataError(
                reason(error), where=self.address, remedy="check the address and its permissions"
            ) from error
        if not found:
            raise DataError(
                "no Parquet files here",
                where=self.address,
                remedy="make some with `freescale data import` or `freescale data synth`, or give their folder",
            )
        stripes: list[_Stripe] = []
        counts: list[int] = []
        for path, size in zip(found, sizes, strict=True):
            file = File(path.rsplit("/", 1)[-1], size, 0, 0)
            stripes.append(_Stripe(len(counts), (file,)))
            try:
                metadata = self._footer(file)
            except DataError as error:
                self.quarantine.bad(Place(file.name), "unreadable file", error.what, remedy=_FETCH_AGAIN, cause=error)
                continue
            counts += [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        return stripes, Layout.of(counts)

    def _choose_columns(self, features: Sequence[str]) -> dict[str, Kind]:
        for stripe in self._stripes:
            for file in stripe.files:
                try:
                    schema = self._footer(file).schema.to_arrow_schema()
                except DataError:  # reported when, and if, a group of that file is read
                    continue
                return columns.choose(schema, features, Place(file.name))
        raise DataError(
            "no file here has a readable footer",
            where=self.address,
            remedy="fetch or write the data set again",
        )

    def _locate(self, group: int) -> tuple[File, int]:
        low, high = 0, len(self._stripes) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._stripes[middle].first <= group else (low, middle - 1)
        stripe = self._stripes[low]
        index, file = divmod(group - stripe.first, len(stripe.files))
        return stripe.files[file], index

    def _read_footer(self, file: File) -> pq.FileMetaData:
        """Read exactly the footer: pyarrow alone would fetch 64 KiB for it, which is most of a small file."""
        place = str(Place(file.name))
        try:
            size = self._fs.size(f"{self._root}/{file.name}")
            tail = self._read_range(file, max(0, size - 8), size)
            if len(tail) < 8 or tail[4:] != _MAGIC:
                raise DataError("the file is cut short or is not Parquet", where=place, remedy=_FETCH_AGAIN)
            (footer_size,) = struct.unpack("<I", tail[:4])
            if footer_size > size - 12:
                raise DataError(
                    "the footer is damaged: it claims to be longer than the file",
                    where=place,
                    remedy=_FETCH_AGAIN,
                )
            footer = self._read_range(file, size - 8 - footer_size, size - 8)
        except OSError as error:
            raise DataError(reason(error), where=place, remedy=_FETCH_AGAIN) from error
        if self.manifest and (size, footer_size, zlib.crc32(footer)) != (
            file.size,
            file.footer_size,
            file.footer_crc,
        ):
            raise DataError("the footer is not the one that was written", where=place, remedy=_FETCH_AGAIN)
        try:
            return pq.read_metadata(pa.BufferReader(_MAGIC + footer + tail))
        except Exception as error:  # a damaged footer makes Arrow raise almost anything
            raise DataError(f"the footer is damaged: {reason(error)}", where=place, remedy=_FETCH_AGAIN) from error

    def _has_page_checksum(self, file: File) -> bool:
        """Look into the first page header: after type and two sizes, field 4 is the checksum, if there is one."""
        metadata = self._footer(file)
        if not metadata.num_row_groups:
            return True
        chunk = metadata.row_group(0).column(0)
        start = min(x for x in (chunk.dictionary_page_offset, chunk.data_page_offset) if x)
        header = self._read_range(file, start, start + 32)
        position = 0
        for _ in range(3):  # each field: one byte of id and type, then a varint
            position += 1
            while header[position] & 0x80:
                position += 1
            position += 1
        return header[position] == 0x15  # one further field id, type i32


@dataclass(frozen=True)
class _Stripe:
    first: int
    """Number of its first row group."""
    files: tuple[File, ...]


def _column_ranges(group: pq.RowGroupMetaData, wanted: Container[str]) -> list[tuple[int, int]]:
    """Byte ranges of the wanted columns, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for i in range(group.num_columns):
        chunk = group.column(i)
        if chunk.path_in_schema.split(".")[0] in wanted:
            start = min(offset for offset in (chunk.dictionary_page_offset, chunk.data_page_offset) if offset)
            ranges.append((start, start + chunk.total_compressed_size))
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


_FETCH_AGAIN = "fetch or write that file again"


def _open_address(address: str) -> tuple[Any, str]:
    try:
        fs, root = fsspec.core.url_to_fs(address)
    except (ValueError, ImportError, OSError) as error:
        raise DataError(
            f"the address cannot be opened: {reason(error)}",
            where=address,
            remedy="give a local folder or an fsspec address such as s3://bucket/folder, with its package installed",
        ) from error
    return fs, str(root).rstrip("/")
