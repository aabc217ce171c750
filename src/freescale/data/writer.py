"""Write histories as a data set for many ranks: small striped row groups, with checksums on every page.

A data set is written next to its target and renamed at the end, so that it is complete or absent.
"""

import errno
import mmap
import os
import re
import shutil
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.manifest import GROUPS_PER_FILE, MANIFEST_FILE, Manifest, Stripe, data_file_name, dump_manifest
from freescale.data.parquet import FileEntry, chunk_checksums
from freescale.data.vocabulary import numbered_fingerprint
from freescale.errors import DataError, FreeScaleError, StorageError, storage_errors
from freescale.progress import track

FILES = 64
Tables = Iterable[pa.Table]
_GROUP_BYTES = 384 << 10
_SMALLEST_GROUP = 32
_ENOUGH_GROUPS = 512
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors that only writing raises."""


def rows_per_group(rows: int, events: int, columns: int = 2) -> int:
    """Rows per row group: about 400 kB in a large data set; in a small one, enough groups for every rank."""
    bytes_per_row = max(1.0, 8.0 * columns * events / max(1, rows))
    fit = max(1, int(_GROUP_BYTES / bytes_per_row))
    return min(fit, max(_SMALLEST_GROUP, rows // _ENOUGH_GROUPS))


@contextmanager
def atomic_folder(target: str | Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; rename it to the target on success, delete it on failure."""
    target = Path(target).absolute()
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    with storage_errors(target):
        if target.exists() and target.samefile(Path.cwd()):
            what, remedy = "the target is the current folder, which a rename would replace", "name a new folder"
            raise DataError(what, where=str(target), remedy=remedy)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            remedy = "give a new folder, or delete it first"
            raise DataError("the target exists and is not empty", where=str(target), remedy=remedy)
        partial.mkdir(parents=True)
    try:
        with output_errors(target):
            yield partial
        with storage_errors(target):
            if target.exists():
                target.rmdir()
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def output_errors(target: str | Path) -> Iterator[None]:
    """Raise write failures as StorageError, instead of blaming the input that is read at the same time."""
    try:
        yield
    except Exception as error:  # Arrow raises OSError, polars its own type with the errno in the text
        number = _os_error(error)
        if isinstance(error, FreeScaleError) or number not in _WRITE_ERRORS:
            raise
        raise StorageError.from_os_error(OSError(number, os.strerror(number)), target) from error


def _os_error(error: BaseException) -> int:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    numbered = re.search(r"(?:os error|errno) (\d+)", str(error))
    return int(numbered[1]) if numbered else 0


def write_dataset(
    folder: str | Path,
    tables: Tables,
    *,
    rows_per_group: int,
    items: int,
    vocabulary: str = "",
    note: str = "",
    features: Mapping[str, int] | None = None,
    groups_per_file: int = GROUPS_PER_FILE,
    expected_rows: int | None = None,
    files: int = FILES,
) -> Manifest:
    """Write histories in the given order. Creates the folder if it does not exist.

    `tables` may have any sizes; memory holds one table and one row group. `items`: all ids are below it. `vocabulary`:
    fingerprint of the item keys; by default every key equals its id. `features`: size of the vocabulary of every
    categorical column. `expected_rows`: total for the progress bar. `files`: most files of a stripe.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shown = {"total": expected_rows, "unit": "histories", "size": lambda group: group.num_rows}
    groups, limit = track(_regroup(tables, rows_per_group), "writing", **shown), files * groups_per_file
    stripes: list[Stripe] = []
    events = 0
    while not stripes or stripes[-1].groups == limit:
        stripe, more = _write_stripe(folder, len(stripes), groups, rows_per_group, limit, files)
        stripes.append(stripe)
        events += more
    if len(stripes) > 1 and not stripes[-1].rows:
        stripes.pop()
    vocabulary = vocabulary or numbered_fingerprint(items)
    manifest = Manifest(tuple(stripes), events, items, vocabulary, note, dict(features or {}))
    (folder / MANIFEST_FILE).write_bytes(dump_manifest(manifest))
    return manifest


def _regroup(tables: Tables, rows: int) -> Iterator[pa.Table]:
    """Regroup a stream of tables into tables of exactly `rows` rows; the last may be short."""
    pending: list[pa.Table] = []
    count = 0
    for table in tables:
        start = 0
        while count + table.num_rows - start >= rows:
            pending.append(table.slice(start, rows - count))
            start += rows - count
            yield pa.concat_tables(pending).combine_chunks()
            pending.clear()
            count = 0
        if start < table.num_rows:
            pending.append(table.slice(start))
            count += table.num_rows - start
    if pending:
        yield pa.concat_tables(pending).combine_chunks()


def _write_stripe(
    folder: Path, number: int, groups: Iterator[pa.Table], size: int, limit: int, files: int
) -> tuple[Stripe, int]:
    writers: list[pq.ParquetWriter] = []
    paths: list[Path] = []
    rows = events = written = 0
    with ExitStack() as opened:
        while written < limit and (group := next(groups, None)) is not None:
            if len(writers) < files:
                paths.append(folder / data_file_name(number, len(writers)))
                writers.append(opened.enter_context(_open(paths[-1], group.schema)))
            writers[written % files].write_table(group, row_group_size=size)
            rows, written = rows + group.num_rows, written + 1
            events += len(group["item_id"].chunk(0).flatten())
    return Stripe(tuple(map(_seal, track(paths, "adding checksums", unit="files"))), rows, size), events


def _open(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    # Ascending integers compress best as deltas, ids as byte planes under zstd. No statistics: nothing reads them, and
    # a flipped bit in them would go undetected.
    encodings = {}
    for field in schema:
        leaf, kind = field.name, field.type
        while pa.types.is_list(kind):
            leaf, kind = f"{leaf}.list.element", kind.value_type
        if pa.types.is_floating(kind) or (pa.types.is_integer(kind) and kind.bit_width >= 32):
            encodings[leaf] = "DELTA_BINARY_PACKED" if field.name in ("timestamp", "user_id") else "BYTE_STREAM_SPLIT"
    disabled = {"use_dictionary": False, "write_statistics": False, "store_schema": False}
    packed = {"compression": "zstd", "compression_level": 1, "column_encoding": encodings}
    return pq.ParquetWriter(path, schema, write_page_checksum=True, **packed, **disabled)


def _seal(path: Path) -> FileEntry:
    """Checksum a finished file: columns into its checksum file, the rest into the returned manifest entry."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (footer_size,) = struct.unpack("<I", data[-8:-4])
        footer_crc = zlib.crc32(data[-8 - footer_size : -8])
        with memoryview(data) as view:
            sums = chunk_checksums(view, pq.read_metadata(path))
        sealed = FileEntry(path.name, len(data), footer_size, footer_crc, zlib.crc32(sums))
    (path.parent / sealed.checksums_name).write_bytes(sums)
    return sealed
