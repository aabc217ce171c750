"""Text logs: find the files of a log, detect their format, and convert CSV or JSON Lines to Parquet with line numbers.

Every line that Arrow's CSV reader cannot split is reported. Fields stay text; later conversions reject what does not
convert. Blank lines are skipped.
"""

import codecs
import csv
import glob
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
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
ColumnUses = Mapping[str, str]
"""Columns to read, and what each is for, for messages."""
_HEAD = 1 << 16  # bytes; longer than any header
_SEPARATORS = (",", ";", "\t", "|")
Ints = NDArray[np.int64]
_JSON_SAMPLE = 1000
_BREAK = pc.MatchSubstringOptions("\n")


class CsvStyle(NamedTuple):
    """Format of a delimited text log."""

    separator: str = ""
    """Empty: detect one of , ; tab and | from the header."""
    quote: str = '"'
    """Empty: no quoting."""
    encoding: str = "utf-8"

    @staticmethod
    def parse(separator: str, quote: str, encoding: str) -> "CsvStyle":
        r"""Style from command-line values: "auto", "none", and \t for a tab."""
        style = CsvStyle("" if separator == "auto" else separator.replace("\\t", "\t"), quote, encoding)
        style = style._replace(quote="" if quote == "none" else quote)
        for option, character in (("--separator", style.separator), ("--quote", style.quote)):
            if character and (len(character.encode()) != 1 or character in "\r\n"):
                remedy = "give one ASCII character, or \\t for a tab"
                raise UsageError(f"{option} '{character}' is not a single character", remedy=remedy)
        if style.separator and style.separator == style.quote:
            raise UsageError("--separator and --quote are the same", remedy="give another --quote, or none")
        return style


def find_log_files(sources: Sequence[Path], pattern: str = "*") -> list[Path]:
    """Files of a log: paths, matches of globs, and non-hidden files below folders with names like `pattern`, sorted."""
    files: list[Path] = []
    for source in sources:
        if source.is_file():
            files.append(source)
        elif source.is_dir():
            inside = sorted(path for path in source.rglob(pattern) if path.is_file() and not _hidden(path, source))
            named = "" if pattern == "*" else f" called {pattern}"
            files += _require_files(inside, f"the folder contains no files{named}", source)
        elif glob.has_magic(str(source)):
            matches = map(Path, sorted(glob.glob(str(source), recursive=True)))
            files += _require_files([path for path in matches if path.is_file()], "no file matches the pattern", source)
        else:
            raise DataError("no such file", where=str(source), remedy="give the path of the downloaded file")
    return files


def _hidden(path: Path, folder: Path) -> bool:
    """Whether a path is a marker file of a writer such as Spark: _SUCCESS, .part-0.crc."""
    return any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)


def _require_files(paths: list[Path], what: str, where: Path) -> list[Path]:
    if not paths:
        raise DataError(what, where=str(where), remedy="give the files of the log, or their folder")
    return paths


def detect_format(source: Path, encoding: str) -> LogFormat:
    """Format of a file, from its content."""
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
    """Format of all files of a log. Mixed formats are an error."""
    formats = {source: detect_format(source, encoding) for source in sources}
    first = sources[0]
    for source, kind in formats.items():
        if kind != formats[first]:
            what = f"the log mixes formats: {first.name} is {formats[first]}, {source.name} is {kind}"
            raise DataError(what, where=str(source), remedy="give files of one format")
    return formats[first]


def open_text(source: Path) -> pa.NativeFile:
    """Open a text file; decompress it by its file extension."""
    return pa.input_stream(str(source), compression="detect")


def stream_size(stream: pa.NativeFile) -> int | None:
    """Size in bytes; None for a compressed stream, whose size is unknown until it is read."""
    return stream.size() if stream.seekable() else None


def read_head(source: Path, encoding: str) -> str:
    """The first characters of a text file."""
    with open_text(source) as stream:
        raw = stream.read(_HEAD)
    return codecs.getincrementaldecoder(encoding)().decode(raw).removeprefix("\ufeff")


class CsvHeader(NamedTuple):
    """Column names of a text file and its style."""

    names: list[str]
    lines: int
    """Number of header lines; a quoted name may contain a line break."""
    style: CsvStyle


def read_header(source: Path, style: CsvStyle, columns: Sequence[str]) -> CsvHeader:
    """Read the header. Without a separator, choose the one that finds most of `columns`, then most fields."""
    text = read_head(source, style.encoding)
    if not text:
        raise DataError("the file is empty", where=str(source), remedy="remove it from the log, or fetch it again")
    if style.separator:
        return _split(text, style)
    headers = [_split(text, style._replace(separator=separator)) for separator in _SEPARATORS]
    best = max(headers, key=lambda header: (len(set(columns) & set(header.names)), len(header.names)))
    if best.style.separator != ",":
        shown = {"\t": "tabs", ";": "';'", "|": "'|'"}[best.style.separator]
        info_once(f"fields are separated by {shown} according to the header of {source.name}; --separator overrides")
    return best


def _split(text: str, style: CsvStyle) -> CsvHeader:
    quoting = csv.QUOTE_MINIMAL if style.quote else csv.QUOTE_NONE
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=style.separator, quotechar=style.quote or None, quoting=quoting
    )
    return CsvHeader(next(reader, []), reader.line_num, style)


LINE = CsvStyle("\x01", "")
"""A style that does not split lines: its separator occurs in no log."""


class TextLog:
    """Converts one text file to Parquet."""

    def __init__(self, source: Path, target: Path, quarantine: Quarantine, *, name: str) -> None:
        self._source, self._target, self._quarantine, self._name = source, target, quarantine, name

    def read_csv(self, style: CsvStyle, columns: ColumnUses, *, names: Sequence[str] = ()) -> pl.LazyFrame:
        """Read columns. `names`: names of all columns, for a file without a header."""
        try:
            head = CsvHeader(list(names), 0, style) if names else read_header(self._source, style, list(columns))
            require_columns(columns, head.names, self._source)
            with output_errors(self._target), _without_traceback():
                self._convert(head, list(columns))
        except (pa.ArrowException, OSError, UnicodeError, LookupError) as error:
            what, remedy = f"the log cannot be read: {reason(error)}", "check the file, --separator and --encoding"
            raise DataError(what, where=str(self._source), remedy=remedy) from error
        return pl.scan_parquet(self._target)

    def read_lines(self, encoding: str = "utf-8") -> pl.LazyFrame:
        """Read whole lines into column `line`."""
        return self.read_csv(LINE._replace(encoding=encoding), {"line": "the lines"}, names=["line"])

    def read_json(self, encoding: str, columns: ColumnUses) -> pl.LazyFrame:
        """Read fields of one JSON object per line. On a line that is not an object they are null."""
        lines = self.read_lines(encoding)
        require_columns(columns, _json_names(lines.select("line").head(_JSON_SAMPLE).collect()["line"]), self._source)
        line = pl.col("line")
        return lines.select(
            LOG_NUMBER, *(line.str.json_path_match(f"$[{json.dumps(name)}]").alias(name) for name in columns)
        )

    def _convert(self, head: CsvHeader, selected: Sequence[str]) -> None:
        style, numbering = head.style, _LineNumbering(head.lines + 1)
        parse = arrow_csv.ParseOptions(
            delimiter=style.separator,
            quote_char=style.quote or False,
            newlines_in_values=bool(style.quote),
            ignore_empty_lines=False,  # they count as lines
            invalid_row_handler=numbering.on_invalid_row,
        )
        # Columns are renamed, because a log may repeat a name. One thread: otherwise Arrow reports no record numbers.
        columns = [str(number) for number in range(len(head.names))]
        read = arrow_csv.ReadOptions(
            use_threads=False, encoding=style.encoding, column_names=columns, skip_rows=head.lines
        )
        convert = arrow_csv.ConvertOptions(column_types=dict.fromkeys(columns, pa.string()), strings_can_be_null=True)
        indices = [head.names.index(name) for name in selected]
        schema = pa.schema([(LOG_NUMBER, pa.int64()), *((name, pa.string()) for name in selected)])
        with (
            open_text(self._source) as stream,
            arrow_csv.open_csv(stream, read, parse, convert) as text,
            pq.ParquetWriter(self._target, schema, **_parquet_options(selected)) as out,
            progress(f"reading {self._source.name}", total=stream_size(stream), unit="B") as bar,
        ):
            for batch in text:
                bar.advance(batch.nbytes) if stream_size(stream) is None else bar.update(stream.tell())
                breaks = _line_breaks(batch.columns) if style.quote else np.zeros(batch.num_rows, np.int64)
                lines = numbering.lines(breaks)
                self._report(numbering.ragged)
                records = pa.record_batch([pa.array(lines), *(batch.column(index) for index in indices)], schema)
                if all(column.null_count for column in batch.columns):
                    records = records.filter(pa.array(~_empty(batch.columns)))
                out.write_batch(self._without_open_quotes(records) if breaks.any() else records)
            self._report(numbering.rest())

    def _without_open_quotes(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Reject records in which a selected field spans lines, because a quote is not closed."""
        spans = _line_breaks(batch.columns[1:]) > 0
        for line in batch.column(0).filter(pa.array(spans)).to_pylist():
            what, remedy = "a field spans several lines", "close its quote, or give the right --quote"
            self._quarantine.reject(Location(self._name, line=line), "malformed line", what, remedy=remedy)
        return batch.filter(pa.array(~spans))

    def _report(self, ragged: list[tuple[int, arrow_csv.InvalidRow]]) -> None:
        for line, row in ragged:
            what = f"the line has {row.actual_columns} fields instead of {row.expected_columns}"
            remedy = "fix that line, or give the right --separator and --quote"
            self._quarantine.reject(Location(self._name, line=line), "malformed line", what, remedy=remedy)
        ragged.clear()


@contextmanager
def _without_traceback() -> Iterator[None]:
    """Suppress the traceback that Arrow prints for an undecodable line. The error itself is reported."""
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
    """Converts Arrow's record numbers to line numbers.

    Malformed records are in no batch, and a record with line breaks inside quotes takes several lines.
    """

    def __init__(self, first: int) -> None:
        self._next = first  # record number
        self._extra = 0  # lines minus records so far
        self._pending: list[arrow_csv.InvalidRow] = []
        self.ragged: list[tuple[int, arrow_csv.InvalidRow]] = []
        """Malformed records, with the line at which each begins."""

    def on_invalid_row(self, row: arrow_csv.InvalidRow) -> str:
        """Arrow's callback for a malformed record, before the batch that would contain it."""
        self._pending.append(row)
        return "skip"

    def lines(self, breaks: Ints) -> Ints:
        """First line of each record of the next batch, from the number of line breaks inside each."""
        if not len(breaks):
            return breaks
        numbers = np.arange(self._next, self._next + len(breaks) + len(self._pending))
        kept = numbers[np.isin(numbers, [row.number for row in self._pending], invert=True)][: len(breaks)]
        return self._advance(int(kept[-1]) + 1, kept, breaks)

    def rest(self) -> list[tuple[int, arrow_csv.InvalidRow]]:
        """Number the malformed records after the last batch."""
        if self._pending:
            empty = np.zeros(0, np.int64)
            self._advance(self._pending[-1].number + 1, empty, empty)
        return self.ragged

    def _advance(self, end: int, kept: Ints, breaks: Ints) -> Ints:
        ragged = [row for row in self._pending if row.number < end]
        self._pending = self._pending[len(ragged) :]
        inside = np.zeros(end - self._next, np.int64)
        inside[kept - self._next] = breaks
        inside[[row.number - self._next for row in ragged]] = [row.text.count("\n") for row in ragged]
        line = np.arange(self._next, end) + self._extra + np.cumsum(inside) - inside
        self.ragged += [(int(line[row.number - self._next]), row) for row in ragged]
        lines = line[kept - self._next]
        self._extra, self._next = self._extra + int(inside.sum()), end
        return lines


def _empty(columns: Sequence[pa.Array]) -> NDArray[np.bool_]:
    """Mask of records without any field, from blank lines."""
    return np.logical_and.reduce([column.is_null().to_numpy(zero_copy_only=False) for column in columns])


def _line_breaks(columns: Sequence[pa.Array]) -> Ints:
    """Number of line breaks inside the fields of each record."""
    total = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        if pc.call_function("any", [pc.call_function("match_substring", [column], _BREAK)]).as_py():
            breaks = pc.call_function("count_substring", [column], _BREAK)
            total += breaks.fill_null(0).to_numpy(zero_copy_only=False)
    return total


def _parquet_options(columns: Sequence[str]) -> dict[str, Any]:
    """Parquet options for ascending line numbers and repetitive text."""
    encoding = {LOG_NUMBER: "DELTA_BINARY_PACKED"}
    return {"compression": "lz4", "use_dictionary": list(columns), "column_encoding": encoding}


def _json_names(lines: pl.Series) -> list[str]:
    """Keys that occur in the lines."""
    names: dict[str, None] = {}
    for line in lines.drop_nulls():
        try:
            fields = json.loads(line)
        except ValueError:  # reported later, when its fields are missing
            continue
        if isinstance(fields, dict):
            names |= dict.fromkeys(fields)
    return list(names)


def require_columns(columns: ColumnUses, present: Sequence[str], source: Path) -> None:
    """Raise unless a file has every column exactly once."""
    for name, use in columns.items():
        if name not in present:
            what = f"the file has no column '{name}' for {use}"
            raise DataError(what, where=str(source), remedy=suggest(name, present))
        if present.count(name) > 1:
            what = f"the file has {present.count(name)} columns '{name}'"
            raise DataError(what, where=str(source), remedy="rename all but one of them")
