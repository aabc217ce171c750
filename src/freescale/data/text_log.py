"""Text log."""

import codecs
import csv
import glob
import io
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import csv as arrow_csv

from freescale.data.event_log import LOG_NUMBER
from freescale.data.validation import Location, Quarantine
from freescale.data.writer import output_errors
from freescale.errors import DataError, UsageError, reason, suggest
from freescale.log import info_once
from freescale.progress import progress

LogFormat = Literal["parquet", "jsonl", "csv"]
_HEAD = 1 << 16  # bytes, which hold the longest header
_SEPARATORS = (",", ";", "\t", "|")


class CsvStyle(NamedTuple):
    """How a text log is written."""

    separator: str = ""
    """Empty: one of , ; tab and | is guessed from the header."""
    quote: str = '"'
    """Empty: quotes mean nothing."""
    encoding: str = "utf-8"

    @staticmethod
    def parse(separator: str, quote: str, encoding: str) -> "CsvStyle":
        r"""A style from the words of the command line: "auto", "none", and \t for a tab."""
        style = CsvStyle("" if separator == "auto" else separator.replace("\\t", "\t"), quote, encoding)
        style = style._replace(quote="" if quote == "none" else quote)
        for option, given in (("--separator", style.separator), ("--quote", style.quote)):
            if given and (len(given.encode()) != 1 or given in "\r\n"):
                remedy = "give one ASCII character, or \\t for a tab"
                raise UsageError(f"{option} '{given}' is not a single character", remedy=remedy)
        if style.separator and style.separator == style.quote:
            raise UsageError("--separator and --quote are the same", remedy="give another --quote, or none")
        return style


def find_log_files(sources: Sequence[Path]) -> list[Path]:
    """The files of a log: those given, those that fit a glob, and those below a folder but hidden ones, by name."""
    found: list[Path] = []
    for source in sources:
        if source.is_file():
            found.append(source)
        elif source.is_dir():
            inside = sorted(path for path in source.rglob("*") if path.is_file() and not _hidden(path, source))
            found += _require_files(inside, "the folder holds no files", source)
        elif glob.has_magic(str(source)):
            matches = map(Path, sorted(glob.glob(str(source), recursive=True)))
            found += _require_files([path for path in matches if path.is_file()], "no file fits the pattern", source)
        else:
            raise DataError("no such file", where=str(source), remedy="give the path of the downloaded file")
    return found


def _hidden(path: Path, folder: Path) -> bool:
    """Whether writers such as Spark leave it beside the data: _SUCCESS, .part-0.crc."""
    return any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)


def _require_files(paths: list[Path], what: str, where: Path) -> list[Path]:
    if not paths:
        raise DataError(what, where=str(where), remedy="give the files of the log, or their folder")
    return paths


def detect_format(source: Path, encoding: str) -> LogFormat:
    """What a file holds, by its content."""
    with source.open("rb") as file:
        magic = file.read(4)
    if source.suffix == ".parquet" or magic == b"PAR1":
        return "parquet"
    if magic == b"PK\x03\x04":
        remedy = "unpack it, or export the sheet as CSV"
        raise DataError("this is an archive or a spreadsheet", where=str(source), remedy=remedy)
    begin = read_head(source, encoding).lstrip()[:1]
    if begin == "[":
        remedy = "write one object per line, for example with `jq -c '.[]'`"
        raise DataError("this is one JSON array, not JSON Lines", where=str(source), remedy=remedy)
    return "jsonl" if begin == "{" else "csv"


def detect_common_format(sources: Sequence[Path], encoding: str) -> LogFormat:
    """What all files of a log hold; files of several kinds are refused."""
    kinds = {source: detect_format(source, encoding) for source in sources}
    first = sources[0]
    for source, kind in kinds.items():
        if kind != kinds[first]:
            what = f"the log mixes formats: {first.name} is {kinds[first]}, {source.name} is {kind}"
            raise DataError(what, where=str(source), remedy="give files of one format")
    return kinds[first]


def open_text(source: Path) -> pa.NativeFile:
    """A stream of a text file, decompressed if its name says so."""
    return pa.input_stream(str(source), compression="detect")


def stream_size(stream: pa.NativeFile) -> int | None:
    """Bytes of a text; None of a compressed one, which has no size until it is read."""
    return stream.size() if stream.seekable() else None


def read_head(source: Path, encoding: str) -> str:
    """The first characters of a text file."""
    with open_text(source) as stream:
        raw = stream.read(_HEAD)
    return codecs.getincrementaldecoder(encoding)().decode(raw).removeprefix("\ufeff")


class CsvHeader(NamedTuple):
    """The names of a text file's columns, and how they are written."""

    names: list[str]
    lines: int
    """Lines that the header takes; a quoted name may hold a line break."""
    style: CsvStyle


def read_header(source: Path, style: CsvStyle, wanted: Sequence[str]) -> CsvHeader:
    """Read the header. Without a separator, take the one that yields the wanted columns, else the most columns."""
    text = read_head(source, style.encoding)
    if not text:
        raise DataError("the file is empty", where=str(source), remedy="leave it out, or fetch it again")
    if style.separator:
        return _split(text, style)
    found = [_split(text, style._replace(separator=separator)) for separator in _SEPARATORS]
    best = max(found, key=lambda one: (len(set(wanted) & set(one.names)), len(one.names)))  # the first of equals
    if best.style.separator != ",":
        shown = {"\t": "tabs", ";": "';'", "|": "'|'"}[best.style.separator]
        info_once(f"fields are separated by {shown}, judging by the header of {source.name}; --separator overrides")
    return best


def _split(text: str, style: CsvStyle) -> CsvHeader:
    quoting = csv.QUOTE_MINIMAL if style.quote else csv.QUOTE_NONE
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=style.separator, quotechar=style.quote or None, quoting=quoting
    )
    return CsvHeader(next(reader, []), reader.line_num, style)


Ints = NDArray[np.int64]
LINE = CsvStyle("\x01", "")
"""A style that splits nothing: a separator that no log holds."""
_JSON_SAMPLE = 1000
_BREAK = pc.MatchSubstringOptions("\n")


class TextLog:
    """One text file on its way to Parquet."""

    def __init__(self, source: Path, target: Path, quarantine: Quarantine, *, name: str) -> None:
        self._source, self._target, self._quarantine, self._name = source, target, quarantine, name

    def read_csv(self, style: CsvStyle, wanted: Sequence[str], *, names: Sequence[str] = ()) -> pl.LazyFrame:
        """Read the wanted columns. `names`: those of all columns, for a file without a header."""
        try:
            head = CsvHeader(list(names), 0, style) if names else read_header(self._source, style, wanted)
            _require_columns(wanted, head.names, self._source)
            with output_errors(self._target), _without_traceback():
                self._convert(head, wanted)
        except (pa.ArrowException, OSError, UnicodeError, LookupError) as error:
            what, remedy = f"the log cannot be read: {reason(error)}", "check the file, --separator and --encoding"
            raise DataError(what, where=str(self._source), remedy=remedy) from error
        return pl.scan_parquet(self._target)

    def read_lines(self, encoding: str = "utf-8") -> pl.LazyFrame:
        """Read whole lines, as column `line`."""
        return self.read_csv(LINE._replace(encoding=encoding), ["line"], names=["line"])

    def read_json(self, encoding: str, wanted: Sequence[str]) -> pl.LazyFrame:
        """Read fields of an object per line. A line that is no object has none of them."""
        lines = self.read_lines(encoding)
        _require_columns(wanted, _json_names(lines.select("line").head(_JSON_SAMPLE).collect()["line"]), self._source)
        line = pl.col("line")
        return lines.select(
            LOG_NUMBER, *(line.str.json_path_match(f"$[{json.dumps(name)}]").alias(name) for name in wanted)
        )

    def _convert(self, head: CsvHeader, wanted: Sequence[str]) -> None:
        style, numbering = head.style, _LineNumbering(head.lines + 1)
        parse = arrow_csv.ParseOptions(
            delimiter=style.separator,
            quote_char=style.quote or False,
            newlines_in_values=bool(style.quote),
            ignore_empty_lines=False,  # they count
            invalid_row_handler=numbering.set_aside,
        )
        # Names of our own, since a log may use one twice. One thread: only then does Arrow know a record's number.
        columns = [str(number) for number in range(len(head.names))]
        read = arrow_csv.ReadOptions(
            use_threads=False, encoding=style.encoding, column_names=columns, skip_rows=head.lines
        )
        convert = arrow_csv.ConvertOptions(column_types=dict.fromkeys(columns, pa.string()), strings_can_be_null=True)
        places = [head.names.index(name) for name in wanted]
        schema = pa.schema([(LOG_NUMBER, pa.int64()), *((name, pa.string()) for name in wanted)])
        with (
            open_text(self._source) as stream,
            arrow_csv.open_csv(stream, read, parse, convert) as text,
            pq.ParquetWriter(self._target, schema, **_packed(wanted)) as out,
            progress(f"reading {self._source.name}", total=stream_size(stream), unit="B") as bar,
        ):
            for batch in text:
                bar.advance(batch.nbytes) if stream_size(stream) is None else bar.update(stream.tell())
                breaks = _line_breaks(batch.columns) if style.quote else np.zeros(batch.num_rows, np.int64)
                lines = numbering.lines(breaks)
                self._report(numbering.ragged)
                records = pa.record_batch([pa.array(lines), *(batch.column(place) for place in places)], schema)
                if all(column.null_count for column in batch.columns):
                    records = records.filter(pa.array(~_empty(batch.columns)))
                out.write_batch(self._closed(records) if breaks.any() else records)
            self._report(numbering.rest())

    def _closed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Without records in which a quote is not closed, so that a field which is read spans lines."""
        spans = _line_breaks(batch.columns[1:]) > 0
        for line in batch.column(0).filter(pa.array(spans)).to_pylist():
            what, remedy = "a field spans several lines", "close its quote, or give the right --quote"
            self._quarantine.reject(Location(self._name, line=line), "malformed line", what, remedy=remedy)
        return batch.filter(pa.array(~spans))

    def _report(self, ragged: list[tuple[int, arrow_csv.InvalidRow]]) -> None:
        for line, row in ragged:
            what = f"the line has {row.actual_columns} fields instead of {row.expected_columns}"
            remedy = "mend that line, or give the right --separator and --quote"
            self._quarantine.reject(Location(self._name, line=line), "malformed line", what, remedy=remedy)
        ragged.clear()


@contextmanager
def _without_traceback() -> Iterator[None]:
    """Print nothing where Arrow cannot hand over a line that is not text: it fails by itself, and that is reported."""
    before = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if not isinstance(unraisable.exc_value, UnicodeDecodeError):
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


class _LineNumbering:
    """Numbers of lines from Arrow's numbers of records.

    Records that cannot be split are in no batch, and a record with line breaks inside quotes takes several lines.
    """

    def __init__(self, first: int) -> None:
        self._next = first  # record
        self._more = 0  # lines than records so far
        self._pending: list[arrow_csv.InvalidRow] = []
        self.ragged: list[tuple[int, arrow_csv.InvalidRow]] = []
        """Records that cannot be split, with the lines they begin at."""

    def set_aside(self, row: arrow_csv.InvalidRow) -> str:
        """Called by Arrow, ahead of the batch that the record would be in."""
        self._pending.append(row)
        return "skip"

    def lines(self, breaks: Ints) -> Ints:
        """The line at which each record of the next batch begins, from the line breaks inside each."""
        if not len(breaks):
            return breaks
        numbers = np.arange(self._next, self._next + len(breaks) + len(self._pending))
        kept = numbers[np.isin(numbers, [row.number for row in self._pending], invert=True)][: len(breaks)]
        return self._up_to(int(kept[-1]) + 1, kept, breaks)

    def rest(self) -> list[tuple[int, arrow_csv.InvalidRow]]:
        """Number what follows the last batch."""
        if self._pending:
            none = np.zeros(0, np.int64)
            self._up_to(self._pending[-1].number + 1, none, none)
        return self.ragged

    def _up_to(self, end: int, kept: Ints, breaks: Ints) -> Ints:
        ragged = [row for row in self._pending if row.number < end]
        self._pending = self._pending[len(ragged) :]
        inside = np.zeros(end - self._next, np.int64)
        inside[kept - self._next] = breaks
        inside[[row.number - self._next for row in ragged]] = [row.text.count("\n") for row in ragged]
        line = np.arange(self._next, end) + self._more + np.cumsum(inside) - inside
        self.ragged += [(int(line[row.number - self._next]), row) for row in ragged]
        found = line[kept - self._next]
        self._more, self._next = self._more + int(inside.sum()), end
        return found


def _empty(columns: Sequence[pa.Array]) -> NDArray[np.bool_]:
    """Which records have no field at all, as those of blank lines."""
    return np.logical_and.reduce([column.is_null().to_numpy(zero_copy_only=False) for column in columns])


def _line_breaks(columns: Sequence[pa.Array]) -> Ints:
    """How many line breaks each record has inside its fields."""
    total = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        if pc.call_function("any", [pc.call_function("match_substring", [column], _BREAK)]).as_py():
            breaks = pc.call_function("count_substring", [column], _BREAK)
            total += breaks.fill_null(0).to_numpy(zero_copy_only=False)
    return total


def _packed(columns: Sequence[str]) -> dict[str, Any]:
    """Options of Parquet: numbers of lines ascend, and text repeats."""
    encoding = {LOG_NUMBER: "DELTA_BINARY_PACKED"}
    return {"compression": "lz4", "use_dictionary": list(columns), "column_encoding": encoding}


def _json_names(lines: pl.Series) -> list[str]:
    """The keys that occur in some lines."""
    found: dict[str, None] = {}
    for line in lines.drop_nulls():
        try:
            fields = json.loads(line)
        except ValueError:  # a bad line, which is reported where its fields are missed
            continue
        if isinstance(fields, dict):
            found |= dict.fromkeys(fields)
    return list(found)


def _require_columns(wanted: Sequence[str], present: Sequence[str], source: Path) -> None:
    for name in wanted:
        if name not in present:
            raise DataError(f"the log has no column '{name}'", where=str(source), remedy=suggest(name, present))
        if present.count(name) > 1:
            what = f"the log has {present.count(name)} columns '{name}'"
            raise DataError(what, where=str(source), remedy="rename all but one of them")
