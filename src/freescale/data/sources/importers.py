"""Public data sets and plain event logs, opened as one lazy table of events.

Every format ends in the same columns: `user_id`, `item_id` (the log's own keys), `timestamp` (where the log has a
time), `order` (where the event stood in the log), and numeric features. Text logs are first streamed into a Parquet
file of strings by Arrow, whose CSV reader reports every line that it cannot split; nothing may get lost without a word.
"""

import io
import shutil
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from freescale.data.store.quarantine import Place, Quarantine
from freescale.errors import DataError, UsageError, nearest, reason
from freescale.log import notice
from freescale.progress import progress


class Columns(NamedTuple):
    """Which columns of a log mean what."""

    user: str = "user_id"
    item: str = "item_id"
    time: str | None = "timestamp"
    """None: the log has no time, and the order of its lines stands for it."""
    features: tuple[str, ...] = ()


class CsvStyle(NamedTuple):
    """How a text log is written."""

    separator: str = ","
    quote: str = '"'
    """Empty: quotes mean nothing."""
    encoding: str = "utf-8"


_LONGEST_HEADER = 1 << 16
_KUAIRAND = Columns("user_id", "video_id", "time_ms", ("is_click", "long_view", "play_time_ms", "duration_ms"))
_MOVIELENS = Columns("userId", "movieId", "timestamp", ("rating",))


class Job(NamedTuple):
    """What every format gets."""

    sources: Sequence[Path]
    scratch: Path
    """A folder for unpacked files."""
    quarantine: Quarantine
    columns: Columns = Columns()
    style: CsvStyle = CsvStyle()


def open_log(name: str, job: Job) -> pl.LazyFrame:
    """Open a log in a named format."""
    if name not in FORMATS:
        raise UsageError(f"no format is called '{name}'", remedy=nearest(name, FORMATS))
    for source in job.sources:
        if not source.is_file():
            raise DataError("no such file", where=str(source), remedy="give the path of the downloaded file")
    try:
        return FORMATS[name](job)
    except DataError as error:
        error.where = error.where or ", ".join(map(str, job.sources))
        raise
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        where, remedy = ", ".join(map(str, job.sources)), "check its format, or fetch it again"
        raise DataError(f"the log cannot be read: {reason(error)}", where=where, remedy=remedy) from error


def _ml1m(job: Job) -> pl.LazyFrame:
    names = ["user", "_1", "item", "_2", "rating", "_3", "time"]  # "::" is read as two separators
    frame = _read_text(job, CsvStyle(":", ""), names=names, member="ratings.dat")
    return _events(frame, Columns("user", "item", "time", ("rating",)))


def _movielens(job: Job) -> pl.LazyFrame:
    return _events(_read_text(job, CsvStyle(), member="ratings.csv"), _MOVIELENS)


def _lists(job: Job) -> pl.LazyFrame:
    """Lines of `user item item ...`; a line per event is the shortest of them."""
    lines = _read_text(job, CsvStyle("\x01", ""), names=["line"])  # a separator that no log holds
    line = pl.col("line").str.strip_chars()
    words = line.str.split(" ")
    users = lines.filter(line != "").select(user=words.list.first(), item=words.list.slice(1))
    pairs = users.explode("item").filter(pl.col("item").is_not_null())  # a user may have no items
    return _events(pairs, Columns("user", "item", None))


def _generic(job: Job) -> pl.LazyFrame:
    if all(source.suffix == ".parquet" for source in job.sources):
        return _events(pl.scan_parquet(list(job.sources)), job.columns)
    return _events(_read_text(job, job.style), job.columns)


FORMATS: dict[str, Callable[[Job], pl.LazyFrame]] = {
    "ml-1m": _ml1m,
    "ml-20m": _movielens,
    "ml-latest": _movielens,
    "amazon": _lists,
    "kuairand": lambda job: _events(_read_text(job, CsvStyle()), _KUAIRAND),
    "events": _generic,
}


def _read_text(job: Job, style: CsvStyle, *, names: Sequence[str] = (), member: str = "") -> pl.LazyFrame:
    """Stream text logs into Parquet, every field as a string: what does not convert later is then bad, not guessed."""
    files = []
    for number, source in enumerate(job.sources):
        path = _member(source, member, job.scratch) if member and source.suffix == ".zip" else source
        files.append(job.scratch / f"text-{number}.parquet")
        try:
            ragged = _to_parquet(path, files[-1], style, names)
        except (pa.ArrowException, OSError, UnicodeError, LookupError) as error:
            remedy = "check the file, --separator and --encoding"
            raise DataError(f"the log cannot be read: {reason(error)}", where=str(source), remedy=remedy) from error
        for row in ragged:
            what = f"the line has {row.actual_columns} fields instead of {row.expected_columns}"
            remedy = "mend that line, or give the right --separator and --quote"
            job.quarantine.bad(Place(source.name, row=row.number), "malformed line", what, remedy=remedy)
    return pl.scan_parquet(files)


def _to_parquet(source: Path, target: Path, style: CsvStyle, names: Sequence[str]) -> list[csv.InvalidRow]:
    """Gives the lines that cannot be split."""
    ragged: list[csv.InvalidRow] = []

    def set_aside(row: csv.InvalidRow) -> str:
        ragged.append(row)
        return "skip"

    parse = csv.ParseOptions(delimiter=style.separator, quote_char=style.quote or False, invalid_row_handler=set_aside)
    # One thread: only then does Arrow know the number of a bad line.
    columns, skipped = (list(names), 0) if names else (_header(source, style, parse), 1)
    read = csv.ReadOptions(use_threads=False, encoding=style.encoding, column_names=columns, skip_rows=skipped)
    convert = csv.ConvertOptions(column_types=dict.fromkeys(read.column_names, pa.string()), strings_can_be_null=True)
    with (
        _open_text(source) as stream,
        csv.open_csv(stream, read, parse, convert) as text,
        pq.ParquetWriter(target, text.schema, compression="lz4") as out,
        progress(f"reading {source.name}", total=_size(stream), unit="B") as bar,
    ):
        for batch in text:
            out.write_batch(batch)
            bar.advance(batch.nbytes) if _size(stream) is None else bar.update(stream.tell())
    return ragged


def _header(source: Path, style: CsvStyle, parse: csv.ParseOptions) -> list[str]:
    """Names of the columns: Arrow wants them beforehand to read everything as text."""
    with _open_text(source) as stream:
        line = stream.read(_LONGEST_HEADER).split(b"\n", 1)[0]
    return csv.read_csv(io.BytesIO(line + b"\n"), csv.ReadOptions(encoding=style.encoding), parse).column_names


def _open_text(source: Path) -> pa.NativeFile:
    return pa.input_stream(str(source), compression="detect")


def _size(stream: pa.NativeFile) -> int | None:
    """Bytes of a text; None of a compressed one, which has no size until it is read."""
    return stream.size() if stream.seekable() else None


def _events(frame: pl.LazyFrame, columns: Columns) -> pl.LazyFrame:
    """Give the columns their common names and types. What does not convert becomes null."""
    present = frame.collect_schema()
    for name in filter(None, (columns.user, columns.item, columns.time, *columns.features)):
        if name not in present:
            raise DataError(f"the log has no column '{name}'", remedy=nearest(name, present.names()))
    sample = frame.head(10_000).collect()
    if columns.time is None:
        notice("the log has no time: the order of its lines is taken for it, and timestamps are positions")
    return frame.with_row_index("order").select(
        _key(sample[columns.user]).alias("user_id"),
        _key(sample[columns.item]).alias("item_id"),
        *([_time(sample[columns.time]).alias("timestamp")] if columns.time else []),
        pl.col("order").cast(pl.Int64),
        *(_feature(sample[name]) for name in columns.features),
    )


def _key(sample: pl.Series) -> pl.Expr:
    """Keys are integers where the whole sample is, and none would lose a leading zero; else text."""
    text = sample.cast(pl.String)
    whole = text.count() and text.cast(pl.Int64, strict=False).cast(pl.String).equals(text)
    kind = pl.Int64 if sample.dtype.is_integer() or whole else pl.String
    return pl.col(sample.name).cast(kind, strict=False)


def _time(sample: pl.Series) -> pl.Expr:
    """Seconds or whatever unit the log counts in; dates become seconds. What most of the sample is decides."""
    column = pl.col(sample.name)
    whole = column.cast(pl.Int64, strict=False)
    if sample.dtype.is_temporal():
        return column.dt.epoch("s")
    if sample.dtype.is_numeric():
        return whole
    real = column.cast(pl.Float64, strict=False).cast(pl.Int64, strict=False)
    date = column.str.to_datetime(strict=False).dt.epoch("s")
    return max((whole, real, date), key=lambda way: _kept(sample, way))  # the first of equals


def _feature(sample: pl.Series) -> pl.Expr:
    """A number as it is stored; text becomes integers where it loses nothing by it, else floats."""
    column = pl.col(sample.name)
    if sample.dtype.is_numeric() or sample.dtype == pl.Boolean:
        return column
    whole, real = column.cast(pl.Int64, strict=False), column.cast(pl.Float32, strict=False)
    if sample.dtype != pl.String or (sample.count() and not _kept(sample, real)):
        remedy = "leave it out, or give it numbers in the log"
        raise DataError(f"feature '{sample.name}' is not numeric", remedy=remedy)
    return whole if _kept(sample, whole) == _kept(sample, real) else real


def _kept(sample: pl.Series, way: pl.Expr) -> int:
    """How many values of a sample convert this way; the others are bad rows."""
    try:
        return int(sample.to_frame().select(way.count()).item())
    except pl.exceptions.PolarsError:  # not a single value looks like a date
        return 0


def _member(source: Path, name: str, scratch: Path) -> Path:
    """Take one file out of an archive, by its last name and into a name of ours, so that no path can lead elsewhere."""
    try:
        with zipfile.ZipFile(source) as archive:
            found = [entry for entry in archive.namelist() if entry.rsplit("/", 1)[-1] == name]
            if not found:
                remedy = "check that it is the right download"
                raise DataError(f"the archive holds no {name}", where=str(source), remedy=remedy)
            target = scratch / f"unpacked-{name}"
            with archive.open(found[0]) as packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
            return target
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        what = f"the archive cannot be read: {error}"
        raise DataError(what, where=str(source), remedy="download it again") from error
