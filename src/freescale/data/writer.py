"""Writer."""

import errno
import mmap
import os
import re
import shutil
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.dataset import GROUPS_PER_FILE, MANIFEST_FILE, Manifest, Stripe, data_file_name, dump_manifest
from freescale.data.parquet import FileEntry, chunk_checksums
from freescale.data.vocabulary import numbered_fingerprint
from freescale.errors import DataError, FreeScaleError, StorageError, storage_errors
from freescale.progress import track

FILES = 64
Tables = Iterable[pa.Table]
_GROUP_BYTES = 384 << 10
_SMALLEST_GROUP = 32
_ENOUGH_GROUPS = 512


def rows_per_group(rows: int, events: int, columns: int = 2) -> int:
    """Size row groups: about 400 kB each in a large data set, and in a small one enough groups for every rank."""
    bytes_per_row = max(1.0, 8.0 * columns * events / max(1, rows))
    fit = max(1, int(_GROUP_BYTES / bytes_per_row))
    return min(fit, max(_SMALLEST_GROUP, rows // _ENOUGH_GROUPS))


@contextmanager
def atomic_folder(target: str | Path) -> Iterator[Path]:
    """Give a folder to fill; it takes the target's name only when all went well."""
    target = Path(target).absolute()
    beside = target.with_name(f".{target.name}.partial-{os.getpid()}")
    with storage_errors(target):
        if target.exists() and target.samefile(Path.cwd()):
            what, remedy = "the target is the current folder, which a rename would replace", "name a new folder"
            raise DataError(what, where=str(target), remedy=remedy)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            remedy = "give a new folder, or delete it first"
            raise DataError("the target exists and is not empty", where=str(target), remedy=remedy)
        beside.mkdir(parents=True)
    try:
        with output_errors(target):
            yield beside
        with storage_errors(target):
            if target.exists():
                target.rmdir()
            beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def output_errors(target: str | Path) -> Iterator[None]:
    """Report what a disk refuses to write as that, and not as a fault of the input that is read meanwhile."""
    try:
        yield
    except Exception as error:  # Arrow raises OSErrors, polars its own kind with the number in the text
        number = _os_error(error)
        if isinstance(error, FreeScaleError) or number not in _ONLY_WRITING:
            raise
        raise StorageError.from_os_error(OSError(number, os.strerror(number)), target) from error


_ONLY_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors that reading never meets."""


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
    groups_per_file: int = GROUPS_PER_FILE,
    expected_rows: int | None = None,
) -> Manifest:
    """Write histories in the order given, into a folder that is made if need be.

    `tables` may be of any sizes; memory holds one table and one group. `items`: every id is below it. `vocabulary`:
    fingerprint of the item keys; without one, items are their numbers. `expected_rows`: for the progress.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"total": expected_rows, "unit": "histories", "size": lambda group: group.num_rows}
    groups, limit = track(_regroup(tables, rows_per_group), "writing", **whole), FILES * groups_per_file
    stripes: list[Stripe] = []
    events = 0
    while not stripes or stripes[-1].groups == limit:
        stripe, more = _write_stripe(folder, len(stripes), groups, rows_per_group, limit)
        stripes.append(stripe)
        events += more
    if len(stripes) > 1 and not stripes[-1].rows:
        stripes.pop()
    manifest = Manifest(tuple(stripes), events, items, vocabulary or numbered_fingerprint(items), note)
    (folder / MANIFEST_FILE).write_bytes(dump_manifest(manifest))
    return manifest


def _regroup(tables: Tables, rows: int) -> Iterator[pa.Table]:
    """Cut a stream of tables into tables of exactly `rows` rows, the last one short."""
    held: list[pa.Table] = []
    count = 0
    for table in tables:
        start = 0
        while count + table.num_rows - start >= rows:
            held.append(table.slice(start, rows - count))
            start += rows - count
            yield pa.concat_tables(held).combine_chunks()
            held.clear()
            count = 0
        if start < table.num_rows:
            held.append(table.slice(start))
            count += table.num_rows - start
    if held:
        yield pa.concat_tables(held).combine_chunks()


def _write_stripe(folder: Path, number: int, groups: Iterator[pa.Table], size: int, limit: int) -> tuple[Stripe, int]:
    writers: list[pq.ParquetWriter] = []
    paths: list[Path] = []
    rows = events = written = 0
    with ExitStack() as opened:
        while written < limit and (group := next(groups, None)) is not None:
            if len(writers) < FILES:
                paths.append(folder / data_file_name(number, len(writers)))
                writers.append(opened.enter_context(_open(paths[-1], group.schema)))
            writers[written % FILES].write_table(group, row_group_size=size)
            rows, written = rows + group.num_rows, written + 1
            events += len(group["item_id"].chunk(0).flatten())
    return Stripe(tuple(map(_seal, track(paths, "adding checksums", unit="files"))), rows, size), events


def _open(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    # Ascending integers pack best as deltas, ids as byte planes under zstd. Statistics are left out: nothing here
    # prunes by them, and a flipped bit in them would go unseen.
    encodings = {}
    for field in schema:
        listed = pa.types.is_list(field.type)
        leaf, kind = (f"{field.name}.list.element", field.type.value_type) if listed else (field.name, field.type)
        if pa.types.is_floating(kind) or (pa.types.is_integer(kind) and kind.bit_width >= 32):
            encodings[leaf] = "DELTA_BINARY_PACKED" if field.name in ("timestamp", "user_id") else "BYTE_STREAM_SPLIT"
    left_out = {"use_dictionary": False, "write_statistics": False, "store_schema": False}
    packed = {"compression": "zstd", "compression_level": 1, "column_encoding": encodings}
    return pq.ParquetWriter(path, schema, write_page_checksum=True, **packed, **left_out)


def _seal(path: Path) -> FileEntry:
    """Note the checksums of a finished file: of each column of each row group beside it, the rest for the manifest."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (footer_size,) = struct.unpack("<I", data[-8:-4])
        footer_crc = zlib.crc32(data[-8 - footer_size : -8])
        with memoryview(data) as view:
            sums = chunk_checksums(view, pq.read_metadata(path))
        sealed = FileEntry(path.name, len(data), footer_size, footer_crc, zlib.crc32(sums))
    (path.parent / sealed.checksums_name).write_bytes(sums)
    return sealed
