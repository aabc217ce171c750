"""The files of a log: which they are, what is in them, and how their fields are separated."""

import codecs
import csv
import glob
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow as pa

from freescale.errors import DataError, UsageError
from freescale.log import info_once

Kind = Literal["parquet", "jsonl", "csv"]
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


def expand(sources: Sequence[Path]) -> list[Path]:
    """The files of a log: those given, those that fit a glob, and those below a folder but hidden ones, by name."""
    found: list[Path] = []
    for source in sources:
        if source.is_file():
            found.append(source)
        elif source.is_dir():
            inside = sorted(path for path in source.rglob("*") if path.is_file() and not _hidden(path, source))
            found += _some(inside, "the folder holds no files", source)
        elif glob.has_magic(str(source)):
            matches = map(Path, sorted(glob.glob(str(source), recursive=True)))
            found += _some([path for path in matches if path.is_file()], "no file fits the pattern", source)
        else:
            raise DataError("no such file", where=str(source), remedy="give the path of the downloaded file")
    return found


def _hidden(path: Path, folder: Path) -> bool:
    """Whether writers such as Spark leave it beside the data: _SUCCESS, .part-0.crc."""
    return any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)


def _some(paths: list[Path], what: str, where: Path) -> list[Path]:
    if not paths:
        raise DataError(what, where=str(where), remedy="give the files of the log, or their folder")
    return paths


def kind_of(source: Path, encoding: str) -> Kind:
    """What a file holds, by its content."""
    with source.open("rb") as file:
        magic = file.read(4)
    if source.suffix == ".parquet" or magic == b"PAR1":
        return "parquet"
    if magic == b"PK\x03\x04":
        remedy = "unpack it, or export the sheet as CSV"
        raise DataError("this is an archive or a spreadsheet", where=str(source), remedy=remedy)
    begin = head(source, encoding).lstrip()[:1]
    if begin == "[":
        remedy = "write one object per line, for example with `jq -c '.[]'`"
        raise DataError("this is one JSON array, not JSON Lines", where=str(source), remedy=remedy)
    return "jsonl" if begin == "{" else "csv"


def one_kind(sources: Sequence[Path], encoding: str) -> Kind:
    """What all files of a log hold; files of several kinds are refused."""
    kinds = {source: kind_of(source, encoding) for source in sources}
    first = sources[0]
    for source, kind in kinds.items():
        if kind != kinds[first]:
            what = f"the log mixes formats: {first.name} is {kinds[first]}, {source.name} is {kind}"
            raise DataError(what, where=str(source), remedy="give files of one format")
    return kinds[first]


def open_text(source: Path) -> pa.NativeFile:
    """A stream of a text file, decompressed if its name says so."""
    return pa.input_stream(str(source), compression="detect")


def size(stream: pa.NativeFile) -> int | None:
    """Bytes of a text; None of a compressed one, which has no size until it is read."""
    return stream.size() if stream.seekable() else None


def head(source: Path, encoding: str) -> str:
    """The first characters of a text file."""
    with open_text(source) as stream:
        raw = stream.read(_HEAD)
    return codecs.getincrementaldecoder(encoding)().decode(raw).removeprefix("\ufeff")


class Header(NamedTuple):
    """The names of a text file's columns, and how they are written."""

    names: list[str]
    lines: int
    """Lines that the header takes; a quoted name may hold a line break."""
    style: CsvStyle


def header(source: Path, style: CsvStyle, wanted: Sequence[str]) -> Header:
    """Read the header. Without a separator, take the one that yields the wanted columns, else the most columns."""
    text = head(source, style.encoding)
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


def _split(text: str, style: CsvStyle) -> Header:
    quoting = csv.QUOTE_MINIMAL if style.quote else csv.QUOTE_NONE
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=style.separator, quotechar=style.quote or None, quoting=quoting
    )
    return Header(next(reader, []), reader.line_num, style)
