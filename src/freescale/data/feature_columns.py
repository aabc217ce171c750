"""Columns of a log or of a side table: keys, features and labels, and how their values are converted.

A feature has one of four kinds. Values of an *id* and of a *set* become text keys, which `numbering` replaces by ids. A
*number* stays a number. *bits* is an integer whose bits are actions. Null and empty text are missing values and become
null. A value that does not convert also becomes null, and `ColumnConversion.fails` tells the two apart.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, NoReturn, get_args

import polars as pl

from freescale.data.columns import REQUIRED, is_candidate
from freescale.errors import DataError
from freescale.log import info_once, warning_once

Kind = Literal["id", "set", "number", "bits"]
SAMPLE = 10_000
"""Number of values by which the type of a text column is inferred."""
KEY = "_key"
"""Column of a side table with the key of an item or user."""
UNUSABLE = "_unusable_"
"""Prefix of temporary columns that mark events whose value does not convert."""
_NONCANONICAL_NUMBER = r"^(\+|-?0\d|-0$)"
_SCALAR = r'("([^"\\]|\\.)*"|-?\d+(\.\d+)?([eE][+-]?\d+)?|true|false|null)'
_JSON_LIST = rf"^\[\s*({_SCALAR}(\s*,\s*{_SCALAR})*)?\s*\]$"
_LONGEST_NAME = 200  # bytes; file systems allow 255
_FLAGS = {"true": "1", "True": "1", "TRUE": "1", "false": "0", "False": "0", "FALSE": "0"}


class FeatureColumn(NamedTuple):
    """A feature column as requested."""

    name: str
    kind: Kind | None = None
    """None: text becomes an id, a list a set, and numbers stay numbers."""
    separator: str = "|"
    """Separates the elements of a set in text."""

    @property
    def use(self) -> str:
        """What the column is for, for messages."""
        kinds = f" (a kind is one of {', '.join(get_args(Kind))})" if ":" in self.name else ""
        return f"feature '{self.name}'{kinds}"

    @staticmethod
    def parse(text: str, separator: str = "|") -> "FeatureColumn":
        """Parse `NAME` or `NAME:KIND`. Anything else after a colon belongs to the name."""
        name, _, kind = text.rpartition(":")
        for known in get_args(Kind):
            if name and kind == known:
                return FeatureColumn(name, known, separator)
        return FeatureColumn(text, None, separator)


class ColumnConversion(NamedTuple):
    """How the values of one column are converted."""

    name: str
    values: pl.Expr
    fails: pl.Expr | None
    """Whether a value is present but does not convert, or None if every value does."""
    expected: str
    """What a value must be, for messages."""
    kind: Kind = "number"


class SideTable(NamedTuple):
    """Features of items or of users, by their key."""

    rows: pl.DataFrame
    """KEY, once per item or user, and the features. Ids and sets are text keys."""
    kinds: Mapping[str, Kind]


def refuse_names(features: Iterable[FeatureColumn]) -> None:
    """Raise if a feature has a reserved name or the name of another feature."""
    counts = Counter(feature.name for feature in features)
    for name, count in counts.items():
        if name in REQUIRED or is_candidate(name) or name.startswith("_"):
            remedy = "rename that column, or leave it out of the features"
            raise DataError(f"a feature cannot be called '{name}': the name is reserved", remedy=remedy)
        if count > 1:
            what = f"{count} features are called '{name}'"
            raise DataError(what, remedy="name each column once, and rename columns of side tables")


def convert_key(sample: pl.Series) -> pl.Expr:
    """Integer keys if the whole sample is integers without leading zeros or plus signs; else text."""
    column, text = pl.col(sample.name), sample.cast(pl.String)
    if sample.dtype.is_integer():
        return column.cast(pl.Int64, strict=False)
    if not text.count() or not text.cast(pl.Int64, strict=False).cast(pl.String).equals(text):
        return column.cast(pl.String, strict=False)
    return integer_key(column.cast(pl.String))


def integer_key(text: pl.Expr) -> pl.Expr:
    """Integer from text. Null if other text would give the same integer, so that two keys never become one."""
    return pl.when(~text.str.contains(_NONCANONICAL_NUMBER)).then(text.cast(pl.Int64, strict=False))


def convert_feature(feature: FeatureColumn, sample: pl.Series, *, json: bool = False) -> ColumnConversion:
    """How a feature is converted, from its first values. `json`: text that is a JSON list is a set."""
    kind = feature.kind or _infer_kind(sample)
    if kind == "id":
        return _convert_id(sample)
    if kind == "set":
        return _convert_set(feature, sample, json=json)
    return _convert_number(sample) if kind == "number" else _convert_bits(sample)


def convert_label(sample: pl.Series, *, optional: bool) -> ColumnConversion:
    """A label of an event (a number, `optional`) or of an impression (a number from 0 to 1, always present).

    `true` and `false` are 1 and 0.
    """
    column, present = pl.col(sample.name), _present(sample)
    if _is_text(sample):
        column = column.cast(pl.String).replace(_FLAGS)
    elif not (sample.dtype.is_numeric() or sample.dtype == pl.Boolean):
        raise DataError(f"label '{sample.name}' has type {sample.dtype}", remedy="give it numbers from 0 to 1")
    number = column.cast(pl.Float32, strict=False)
    name = sample.name if sample.name.startswith("label_") else f"label_{sample.name}"
    if optional:
        return ColumnConversion(name, number, present & number.is_null(), "a label is a number")
    bounded = pl.when(number.is_between(0, 1)).then(number)
    return ColumnConversion(name, bounded, bounded.is_null(), "a label is a number from 0 to 1")


def _infer_kind(sample: pl.Series) -> Kind:
    """Kind of a column without a stated kind. Text is a number if most of its values are."""
    if sample.dtype.is_nested():
        return "set"
    if not _is_text(sample):
        return "number"
    frame = sample.cast(pl.String).to_frame()
    present, numbers = frame.select(p=_present(sample).sum(), n=_parse(sample.name, pl.Float64).count()).row(0)
    if 2 * numbers >= present:
        return "number"
    info_once(f"feature '{sample.name}' is text and becomes ids; {sample.name}:set or :number states another kind")
    return "id"


def _convert_id(sample: pl.Series) -> ColumnConversion:
    if not (_is_text(sample) or sample.dtype.is_integer() or sample.dtype == pl.Boolean):
        _refuse_kind(sample, "an id", f"{sample.name}:number keeps it, or convert it to integers or text")
    values = pl.when(_present(sample)).then(pl.col(sample.name).cast(pl.String))
    return ColumnConversion(sample.name, values, None, "an id", "id")


def _convert_set(feature: FeatureColumn, sample: pl.Series, *, json: bool) -> ColumnConversion:
    column, element = pl.col(sample.name), pl.element()
    kind = sample.dtype
    if isinstance(kind, pl.List | pl.Array):
        if kind.inner.is_float() or kind.inner.is_nested():
            _refuse_kind(sample, "a set", "convert its elements to integers or text")
        elements = column.cast(pl.List(pl.String))
    elif _is_text(sample) or kind.is_integer():
        text = pl.when(_present(sample)).then(column.cast(pl.String))
        elements = text.str.split(feature.separator)
        if json:
            is_list = text.str.contains(_JSON_LIST)
            listed = pl.when(is_list).then(text).str.json_decode(pl.List(pl.String))
            elements = pl.when(is_list).then(listed).otherwise(elements)
        _warn_about_separator(feature, sample, json=json)
    else:
        _refuse_kind(sample, "a set", f"{sample.name}:number keeps it, or convert it to text or lists")
    stripped = elements.list.eval(element.str.strip_chars())
    values = stripped.list.eval(element.filter(element != "")).list.unique(maintain_order=True)
    return ColumnConversion(sample.name, values, None, "a set", "set")


def _warn_about_separator(feature: FeatureColumn, sample: pl.Series, *, json: bool) -> None:
    """Warn if no value of a set contains the separator: it is probably another one."""
    text = sample.cast(pl.String)
    texts = text.filter(~text.str.contains(_JSON_LIST)) if json else text
    if texts.count() and not texts.str.contains(feature.separator, literal=True).any():
        name, checked = feature.name, f"none of the first {len(texts):,} values of column '{feature.name}'"
        what = f"feature '{name}': the separator '{feature.separator}' occurs in {checked}"
        warning_once(f"{what}, so every set has one element; --set-separator states another")


def _convert_number(sample: pl.Series) -> ColumnConversion:
    """Numbers as stored; text as integers if that loses nothing, else as 32-bit floats."""
    column, name = pl.col(sample.name), sample.name
    if sample.dtype.is_decimal():
        return ColumnConversion(name, column.cast(pl.Float64), None, "a number")
    if sample.dtype.is_numeric() or sample.dtype == pl.Boolean:
        return ColumnConversion(name, column, None, "a number")
    if not _is_text(sample):
        _refuse_kind(sample, "a number", "leave it out of the features, or convert it to numbers")
    whole, real = _parse(name, pl.Int64), _parse(name, pl.Float32)
    wholes, reals = sample.cast(pl.String).to_frame().select(w=whole.count(), r=real.count()).row(0)
    _require_some(sample, reals, "a number", f"{name}:id numbers its values")
    values = whole if wholes == reals else real
    expected = f"feature '{name}' is a number; {name}:id numbers any text"
    return ColumnConversion(name, values, _present(sample) & values.is_null(), expected)


def _convert_bits(sample: pl.Series) -> ColumnConversion:
    if not (_is_text(sample) or sample.dtype.is_integer()):
        _refuse_kind(sample, "bits", f"{sample.name}:number keeps it, or convert it to integers")
    values = _parse(sample.name, pl.Int64)
    parsed = sample.cast(pl.String).to_frame().select(values.count()).item()
    _require_some(sample, parsed, "bits", f"{sample.name}:id numbers its values")
    expected = f"feature '{sample.name}' is a 64-bit integer"
    return ColumnConversion(sample.name, values, _present(sample) & values.is_null(), expected, "bits")


def _parse(name: str, kind: type[pl.DataType]) -> pl.Expr:
    return pl.col(name).cast(pl.String).cast(kind, strict=False)


def _present(sample: pl.Series) -> pl.Expr:
    """Whether a value is there: neither null nor empty text."""
    column = pl.col(sample.name)
    return column.is_not_null() & (column.cast(pl.String) != "") if _is_text(sample) else column.is_not_null()


def _is_text(sample: pl.Series) -> bool:
    return sample.dtype in (pl.String, pl.Categorical, pl.Enum, pl.Null)


def _require_some(sample: pl.Series, parsed: int, what: str, remedy: str) -> None:
    """Raise if the sample holds text and none of it converts."""
    texts = sample.cast(pl.String).drop_nulls()
    texts = texts.filter(texts != "")
    if len(texts) and not parsed:
        held = f"column '{sample.name}' holds text such as '{texts[0][:40]}'"
        raise DataError(f"feature '{sample.name}' cannot be {what}: {held}", remedy=remedy)


def _refuse_kind(sample: pl.Series, what: str, remedy: str) -> NoReturn:
    held = f"column '{sample.name}' has type {sample.dtype}"
    raise DataError(f"feature '{sample.name}' cannot be {what}: {held}", remedy=remedy)


def conversion_columns(conversions: Sequence[ColumnConversion]) -> list[pl.Expr]:
    """Expressions of the converted columns, and of the marks of values that do not convert."""
    values = [conversion.values.alias(conversion.name) for conversion in conversions]
    marks = [c.fails.alias(f"{UNUSABLE}{c.name}") for c in conversions if c.fails is not None]
    return [*values, *marks]


def categories(conversions: Iterable[ColumnConversion]) -> dict[str, Kind]:
    """Kinds of the columns that need a vocabulary. The name of each must be usable in a file name."""
    kinds: dict[str, Kind] = {
        conversion.name: conversion.kind for conversion in conversions if conversion.kind in ("id", "set")
    }
    for name in kinds:
        if "/" in name or "\0" in name or len(name.encode()) > _LONGEST_NAME:
            what = f"feature '{name}' cannot have a vocabulary: the name of column '{name}' cannot be in a file name"
            raise DataError(what, remedy="rename that column")
    return kinds
