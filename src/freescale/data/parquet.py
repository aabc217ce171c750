"""Checksummed Parquet reads from any fsspec address.

Reads only the byte ranges of the requested columns, without the read-ahead of a file system, because every excess byte
is multiplied by the world size. Files with recorded checksums have every byte verified, including the bytes outside of
pages that Parquet's own page checksums do not cover.
"""

import mmap
import struct
import threading
import zlib
from bisect import bisect_right
from collections.abc import Container, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.errors import DataError, reason

MAGIC = b"PAR1"
FETCH_AGAIN = "fetch or write that file again"
_FOOTERS_KEPT = 256  # about 250 kB each for a file of 1 GiB
_TRUE, _FALSE, _BYTE, _DOUBLE, _BYTES, _LISTS, _STRUCT = 1, 2, 3, 7, 8, (9, 10), 12
_NUMBERS = (4, 5, 6)


class FileEntry(NamedTuple):
    """One Parquet file with its size and checksums at the time of writing; -1 where they were not recorded."""

    name: str
    size: int
    footer_size: int = -1
    footer_crc: int = -1
    sums_crc: int = -1

    @property
    def checksums_name(self) -> str:
        """Name of the file that holds a checksum for every column of every row group."""
        return f"{self.name}.crc"

    @property
    def has_checksums(self) -> bool:
        """Whether checksums were recorded for the file."""
        return self.footer_crc >= 0


class ColumnChunk(NamedTuple):
    """The bytes of one column in one row group."""

    number: int
    column: str
    start: int
    end: int


def column_chunks(group: pq.RowGroupMetaData) -> list[ColumnChunk]:
    """Byte ranges of the columns of a row group. The first range of a file includes the magic number."""
    columns = (group.column(number) for number in range(group.num_columns))
    return [
        _chunk(n, c.path_in_schema.split(".")[0], c.dictionary_page_offset, c.data_page_offset, c.total_compressed_size)
        for n, c in enumerate(columns)
    ]


def _foreign_chunks(footer: bytes) -> list[list[ColumnChunk]]:
    """Byte ranges of the columns of every row group, from a footer without a recorded checksum."""
    groups = [
        [column[3] for column in group[1]] for group in ThriftReader(footer).struct()[4]
    ]  # field numbers of parquet.thrift
    return [[_chunk(n, c[3][0].decode(), c.get(11), c[9], c[7]) for n, c in enumerate(columns)] for columns in groups]


def _chunk(number: int, column: str, dictionary: int | None, data: int, size: int) -> ColumnChunk:
    start = min(offset for offset in (dictionary, data) if offset)
    return ColumnChunk(number, column, 0 if start == len(MAGIC) else start, start + size)


class ParquetFooter(NamedTuple):
    """The parsed footer of a file."""

    metadata: pq.FileMetaData
    schema: pa.Schema
    image: "_SparseFile"
    checksums: NDArray[np.uint32] | None
    """Checksums by row group and column, if recorded."""
    foreign: list[list[ColumnChunk]] | None
    """Byte ranges by row group, if no checksums were recorded."""

    def chunks(self, index: int) -> list[ColumnChunk]:
        """Byte ranges of the columns of a row group."""
        return column_chunks(self.metadata.row_group(index)) if self.foreign is None else self.foreign[index]


class ParquetReader:
    """Reads the files of one folder. Thread-safe."""

    def __init__(self, address: str) -> None:
        try:
            self._fs, root = fsspec.core.url_to_fs(address)
        except (ValueError, ImportError, OSError) as error:
            remedy = "give a local folder or an fsspec address such as s3://bucket/folder, with its package installed"
            raise DataError(f"the address cannot be opened: {reason(error)}", where=address, remedy=remedy) from error
        self._root = str(root).rstrip("/")
        self._lock = threading.Lock()
        self.bytes_read = 0
        self.footer = lru_cache(maxsize=_FOOTERS_KEPT)(self._read_footer)

    def list(self, pattern: str) -> list[FileEntry]:
        """Files whose name matches a pattern, sorted by name."""
        paths: Any = sorted(self._fs.glob(f"{self._root}/{pattern}"))
        return [FileEntry(str(path).rsplit("/", 1)[-1], self._fs.size(path)) for path in paths]

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Read a file, or exactly its bytes [start, end), and count them in `bytes_read`."""
        data = self._fs.cat_file(f"{self._root}/{name}", start=start, end=end)
        if start is not None and end is not None and len(data) != end - start:
            raise DataError(f"the file ends at byte {start + len(data):,}, before byte {end:,}")
        with self._lock:
            self.bytes_read += len(data)
        return data

    def read_group(self, file: FileEntry, index: int, columns: Container[str]) -> pa.Table:
        """Read columns of a row group: fetch and verify their bytes, then decode from memory."""
        footer = self.footer(file)
        selected = [chunk for chunk in footer.chunks(index) if chunk.column in columns]
        pieces = {start: self.read(file.name, start, end) for start, end in _merge_ranges(selected)}
        if footer.checksums is not None:
            _verify(pieces, selected, footer.checksums[index])
        return footer.image.decode(index, list(dict.fromkeys(chunk.column for chunk in selected)), pieces)

    def has_page_checksums(self, file: FileEntry) -> bool:
        """Whether the first page header has field 4, the checksum, after the type and two sizes."""
        footer = self.footer(file)
        if not footer.metadata.num_row_groups:
            return True
        start = max(len(MAGIC), min(chunk.start for chunk in footer.chunks(0)))
        header = self.read(file.name, start, start + 32)
        position = 0
        for _ in range(3):  # each field: one byte for id and type, then a varint
            position += 1
            while header[position] & 0x80:
                position += 1
            position += 1
        return header[position] == 0x15  # field id + 1, type i32

    def _read_footer(self, file: FileEntry) -> ParquetFooter:
        """Read exactly the footer. Arrow would fetch 64 KiB, which is most of a small file."""
        try:
            size = self._fs.size(f"{self._root}/{file.name}")
            tail = self.read(file.name, max(0, size - 8), size)
            if len(tail) < 8 or tail[4:] != MAGIC:
                raise _damaged(file, "the file is cut short or is not Parquet")
            (footer_size,) = struct.unpack("<I", tail[:4])
            if footer_size > size - 12:
                raise _damaged(file, "the footer is damaged: it claims to be longer than the file")
            footer = self.read(file.name, size - 8 - footer_size, size - 8)
            sums = self.read(file.checksums_name) if file.has_checksums else b""
        except OSError as error:
            raise _damaged(file, reason(error)) from error
        if file.has_checksums and (size, footer_size, zlib.crc32(footer)) != (
            file.size,
            file.footer_size,
            file.footer_crc,
        ):
            raise _damaged(file, "the footer has changed since it was written")
        if file.has_checksums and zlib.crc32(sums) != file.sums_crc:
            raise _damaged(file, f"its checksums in {file.checksums_name} have changed since they were written")
        try:
            metadata = pq.read_metadata(pa.BufferReader(MAGIC + footer + tail))
            schema, image = metadata.schema.to_arrow_schema(), _SparseFile(size, metadata)
            shape = (metadata.num_row_groups, metadata.num_columns)
            checksums = np.frombuffer(sums, dtype="<u4").reshape(shape) if file.has_checksums else None
            foreign = None if file.has_checksums else _foreign_chunks(footer)
        except Exception as error:  # Arrow raises many types on a damaged footer
            raise _damaged(file, f"the footer is damaged: {reason(error)}") from error
        return ParquetFooter(metadata, schema, image, checksums, foreign)


def chunk_checksums(data: memoryview, metadata: pq.FileMetaData) -> bytes:
    """Checksums of every column of every row group of a file, as stored in its checksum file."""
    groups = (metadata.row_group(index) for index in range(metadata.num_row_groups))
    sums = [zlib.crc32(data[chunk.start : chunk.end]) for group in groups for chunk in column_chunks(group)]
    return np.array(sums, dtype="<u4").tobytes()


class _SparseFile:
    """An anonymous mapping as long as the file, of which only the bytes being decoded are resident.

    Arrow reads at absolute file offsets, so fetched bytes are placed at their offsets and released after decoding. A
    Python file object would take the GIL at every read and delay kernel launches; a new reader per row group would cost
    as much as the decoding.
    """

    def __init__(self, size: int, metadata: pq.FileMetaData) -> None:
        self._lock = threading.Lock()
        self._bytes = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        source = pa.BufferReader(pa.py_buffer(self._bytes))
        self._reader = pq.ParquetFile(source, metadata=metadata, page_checksum_verification=True, pre_buffer=False)

    def decode(self, index: int, columns: list[str], pieces: Mapping[int, bytes]) -> pa.Table:
        """Decode a row group from pieces of the file, keyed by their start offset."""
        with self._lock:
            try:
                for start, piece in pieces.items():
                    self._bytes[start : start + len(piece)] = piece
                return self._reader.read_row_group(index, columns=columns, use_threads=False)
            finally:
                for start, piece in pieces.items():
                    first = start - start % mmap.PAGESIZE
                    self._bytes.madvise(mmap.MADV_DONTNEED, first, start + len(piece) - first)


def _verify(pieces: Mapping[int, bytes], selected: list[ColumnChunk], sums: NDArray[np.uint32]) -> None:
    starts = sorted(pieces)
    for chunk in selected:
        start = starts[bisect_right(starts, chunk.start) - 1]
        part = memoryview(pieces[start])[chunk.start - start : chunk.end - start]
        if zlib.crc32(part) != sums[chunk.number]:
            raise DataError(f"the bytes of column '{chunk.column}' have changed since they were written")


def _merge_ranges(selected: list[ColumnChunk]) -> list[tuple[int, int]]:
    """Byte ranges of chunks, with adjacent ranges merged into one request."""
    ranges: list[tuple[int, int]] = []
    for chunk in sorted(selected, key=lambda chunk: chunk.start):
        if ranges and ranges[-1][1] == chunk.start:
            ranges[-1] = (ranges[-1][0], chunk.end)
        else:
            ranges.append((chunk.start, chunk.end))
    return ranges


def _damaged(file: FileEntry, what: str) -> DataError:
    return DataError(what, where=file.name, remedy=FETCH_AGAIN)


class ThriftReader:
    """Parses a Parquet footer (Thrift compact protocol) into plain Python values.

    Used only for files without recorded checksums: Arrow aborts the process on some damaged column fields. Raises
    IndexError or ValueError on malformed input.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def struct(self) -> dict[int, Any]:
        """Read a struct as a mapping from field number to value."""
        fields, number = dict[int, Any](), 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._number()
            kind = head & 15
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number()
        if kind == _BYTES:
            return self._bytes(self._varint())
        if kind in _LISTS:
            head = self._byte()
            count = self._varint() if head >> 4 == 15 else head >> 4
            return [self._value(head & 15) for _ in range(count)]
        if kind == _STRUCT:
            return self.struct()
        if kind == _DOUBLE:
            return self._bytes(8)
        if kind in (_TRUE, _FALSE, _BYTE):  # in a list, a boolean takes one byte
            return self._byte()
        raise ValueError(f"unknown Thrift type {kind}")

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _bytes(self, count: int) -> bytes:
        self._at += count
        if self._at > len(self._data):
            raise IndexError("a field is longer than the footer")
        return self._data[self._at - count : self._at]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
        return value | byte << shift

    def _number(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
