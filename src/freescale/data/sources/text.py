"""Text logs into Parquet files of strings, every record with the number of its line.

Arrow's CSV reader reports every line that it cannot split; nothing may get lost without a word. Fields stay text here:
what does not convert later is bad, not guessed. Lines without any field are skipped.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import csv

from freescale.data.sources.events import NUMBER
from freescale.data.sources.files import CsvStyle, Header, header, open_text, size
from freescale.data.store.quarantine import Place, Quarantine
from freescale.data.store.writer import output_errors
from freescale.errors import DataError, nearest, reason
from freescale.progress import progress

Ints = NDArray[np.int64]
LINE = CsvStyle("\x01", "")
"""A style that splits nothing: a separator that no log holds."""
_JSON_SAMPLE = 1000
_BREAK = pc.MatchSubstringOptions("\n")


class TextFile:
    """One text file on its way to Parquet."""

    def __init__(self, source: Path, target: Path, quarantine: Quarantine, *, name: str) -> None:
        self._source, self._target, self._quarantine, self._name = source, target, quarantine, name

    def read_csv(self, style: CsvStyle, wanted: Sequence[str], *, names: Sequence[str] = ()) -> pl.LazyFrame:
        """Read the wanted columns. `names`: those of all columns, for a file without a header."""
        try:
            head = Header(list(names), 0, style) if names else header(self._source, style, wanted)
            _require(wanted, head.names, self._source)
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
        _require(wanted, _json_names(lines.select("line").head(_JSON_SAMPLE).collect()["line"]), self._source)
        line = pl.col("line")
        return lines.select(
            NUMBER, *(line.str.json_path_match(f"$[{json.dumps(name)}]").alias(name) for name in wanted)
        )

    def _convert(self, head: Header, wanted: Sequence[str]) -> None:
        style, numbering = head.style, _Numbering(head.lines + 1)
        parse = csv.ParseOptions(
            delimiter=style.separator,
            quote_char=style.quote or False,
            newlines_in_values=bool(style.quote),
            ignore_empty_lines=False,  # they count
            invalid_row_handler=numbering.set_aside,
        )
        # Names of our own, since a log may use one twice. One thread: only then does Arrow know a record's number.
        columns = [str(number) for number in range(len(head.names))]
        read = csv.ReadOptions(use_threads=False, encoding=style.encoding, column_names=columns, skip_rows=head.lines)
        convert = csv.ConvertOptions(column_types=dict.fromkeys(columns, pa.string()), strings_can_be_null=True)
        places = [head.names.index(name) for name in wanted]
        schema = pa.schema([(NUMBER, pa.int64()), *((name, pa.string()) for name in wanted)])
        with (
            open_text(self._source) as stream,
            csv.open_csv(stream, read, parse, convert) as text,
            pq.ParquetWriter(self._target, schema, **_packed(wanted)) as out,
            progress(f"reading {self._source.name}", total=size(stream), unit="B") as bar,
        ):
            for batch in text:
                bar.advance(batch.nbytes) if size(stream) is None else bar.update(stream.tell())
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
            self._quarantine.bad(Place(self._name, line=line), "malformed line", what, remedy=remedy)
        return batch.filter(pa.array(~spans))

    def _report(self, ragged: list[tuple[int, csv.InvalidRow]]) -> None:
        for line, row in ragged:
            what = f"the line has {row.actual_columns} fields instead of {row.expected_columns}"
            remedy = "mend that line, or give the right --separator and --quote"
            self._quarantine.bad(Place(self._name, line=line), "malformed line", what, remedy=remedy)
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


class _Numbering:
    """Numbers of lines from Arrow's numbers of records.

    Records that cannot be split are in no batch, and a record with line breaks inside quotes takes several lines.
    """

    def __init__(self, first: int) -> None:
        self._next = first  # record
        self._more = 0  # lines than records so far
        self._pending: list[csv.InvalidRow] = []
        self.ragged: list[tuple[int, csv.InvalidRow]] = []
        """Records that cannot be split, with the lines they begin at."""

    def set_aside(self, row: csv.InvalidRow) -> str:
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

    def rest(self) -> list[tuple[int, csv.InvalidRow]]:
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
    encoding = {NUMBER: "DELTA_BINARY_PACKED"}
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


def _require(wanted: Sequence[str], present: Sequence[str], source: Path) -> None:
    for name in wanted:
        if name not in present:
            raise DataError(f"the log has no column '{name}'", where=str(source), remedy=nearest(name, present))
        if present.count(name) > 1:
            what = f"the log has {present.count(name)} columns '{name}'"
            raise DataError(what, where=str(source), remedy="rename all but one of them")
