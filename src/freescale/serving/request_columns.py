"""The columns of a request: which input of a program each becomes, and what it may hold."""

import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from freescale.data.columns import CANDIDATE, MISSING
from freescale.data.feature_schema import Feature, candidate_column
from freescale.data.vocabulary import MISSING_ID, ItemVocabulary
from freescale.models.ranking import Ranking
from freescale.models.retrieval import Retrieval

MOST_CANDIDATES = 1 << 15
_MOST_MEMBERS = 256
"""Ids of a set."""
RAW = ".raw"
"""Ends the name of an input that has the dynamic ids themselves, not their rows. Crosses hash them."""


class RequestColumn(NamedTuple):
    """A column of a request that is an input of a program."""

    name: str
    entries: str = ""
    """events, candidates, or empty: one value per request."""
    feature: Feature | None = None
    raw: bool = False

    @property
    def kind(self) -> str:
        """The kind of its feature; else id or time."""
        if self.feature is not None:
            return self.feature.config.kind
        return "id" if self.name in ("item_id", "user_id", CANDIDATE) else "time"

    @property
    def dtype(self) -> torch.dtype:
        """Of the input."""
        return torch.float64 if self.kind == "number" else torch.int64

    @property
    def sizes(self) -> tuple[str, ...]:
        """The name of the size of each dimension of the input."""
        members = (f"members_{self.name}",) if self.kind == "set" else ()
        return ("samples", *((self.entries,) if self.entries else ()), *members)


def history_columns(model: Retrieval | Ranking) -> dict[str, RequestColumn]:
    """Return the columns of a history by input. The first is a list."""
    columns = {"item": RequestColumn("item_id", "events"), "timestamp": RequestColumn("timestamp", "events")}
    if isinstance(model, Retrieval):
        columns["time"] = RequestColumn("time")
    for feature in model.features.applicable("history"):
        columns[feature.column] = RequestColumn(feature.column, "events", feature)
    for feature in model.features.applicable("sample"):
        columns[feature.column] = RequestColumn(feature.column, "", feature)
    return columns


def candidate_columns(model: Ranking, *, dynamic_items: bool) -> dict[str, RequestColumn]:
    """Return the columns of candidates by input. The first is a list."""
    columns = {CANDIDATE: RequestColumn(CANDIDATE, "candidates"), "time": RequestColumn("time")}
    per_event = {column.name for column in history_columns(model).values() if column.entries}
    features = model.features.applicable("candidates")
    by_name = {feature.name: feature for feature in [*model.features.applicable("sample"), *features]}
    for feature in features:
        if has_column(feature):
            columns[candidate_column(feature.column)] = _of_candidates(feature, per_event)
    for name in [name for feature in features for name in feature.config.cross]:  # what crosses read besides these
        part = by_name.get(name)
        if name == "user":
            columns["user_id"] = RequestColumn("user_id")
        elif part is None:
            if dynamic_items:
                columns[CANDIDATE + RAW] = RequestColumn(CANDIDATE, "candidates", raw=True)
        elif part.config.scope == "user":
            columns[part.column] = RequestColumn(part.column, "", part, raw=True)
        elif part.config.ids == "dynamic":
            columns[candidate_column(part.column) + RAW] = _of_candidates(part, per_event)._replace(raw=True)
    return columns


def has_column(feature: Feature) -> bool:
    """Whether candidates have a column of a feature. Crosses read others; the time of the request is known."""
    return feature.config.kind != "cross" and (feature.config.scope, feature.column) != ("context", "timestamp")


def _of_candidates(feature: Feature, per_event: Collection[str]) -> RequestColumn:
    """Return the column of a feature of candidates; the context of a request has one value."""
    if feature.config.scope == "context":
        return RequestColumn(_free(feature.column, per_event), "", feature)
    return RequestColumn(candidate_column(feature.column), "candidates", feature)


def _free(column: str, taken: Collection[str]) -> str:
    """Return the name of a context column; that of events may be another column of the same request."""
    return candidate_column(column) if column in taken else column


def describe(column: RequestColumn, items: ItemVocabulary, *, max_history: int) -> dict[str, Any]:
    """Return what `serve.py` has to know of a column."""
    feature, is_number = column.feature, column.kind == "number"
    nullable = column.name == "time" or (feature is not None and feature.config.missing == "default")
    vocabulary, table = _vocabulary(column, items)
    known, shared = (0, 1) if vocabulary is None or vocabulary.dynamic else (vocabulary.items, vocabulary.oov_rows)
    most = {"events": [max_history], "candidates": [MOST_CANDIDATES], "": []}[column.entries]
    is_set = column.kind == "set"
    return {
        "column": column.name,
        "kind": column.kind,
        "means": _meaning(column, most, nullable=nullable),
        "most": [*most, _MOST_MEMBERS] if is_set else most,
        "per_entry": bool(most),
        "range": [-sys.float_info.max, sys.float_info.max] if is_number else [0, (1 << 63) - 1],
        "nullable": nullable,
        "missing": _missing(column, vocabulary),
        "empty": [[], None][: 1 + nullable] if is_set else [],
        "padding": -1 if is_set else 0,
        "table": table,
        "known": known,
        "shared": shared,
    }


def _vocabulary(column: RequestColumn, items: ItemVocabulary) -> tuple[ItemVocabulary | None, str]:
    """Return the vocabulary of a column of ids, and the table with its dynamic ids."""
    feature = column.feature
    if feature is None:
        vocabulary, table = items if column.name in ("item_id", CANDIDATE) else None, "item"
    else:
        mapped = feature.config.kind in ("id", "set") and (feature.column != "user_id" or feature.vocabulary.dynamic)
        vocabulary, table = feature.vocabulary if mapped else None, feature.table
    is_dynamic = vocabulary is not None and vocabulary.dynamic and not column.raw
    return vocabulary, table if is_dynamic else ""


def _missing(column: RequestColumn, vocabulary: ItemVocabulary | None) -> int:
    """Return what stands for null: the row or id of missing values. -1: the time of the last event."""
    if column.name == "time" and column.feature is None:
        return -1
    if vocabulary is None:
        return MISSING
    return MISSING_ID if vocabulary.dynamic else vocabulary.rows - 1


def _meaning(column: RequestColumn, most: list[int], *, nullable: bool) -> str:
    """Return what a request has to hold, for messages."""
    noun = "finite numbers" if column.kind == "number" else "integers from 0 to 2^63 - 1"
    if column.kind == "set":
        sets = f"of at most {_MOST_MEMBERS} {noun}"
        text = f"a list of 1 to {most[0]} lists, each {sets}" if most else f"a list {sets}"
    elif most:
        text = f"a list of 1 to {most[0]} {noun}"
    else:
        text = "a finite number" if column.kind == "number" else "an integer from 0 to 2^63 - 1"
    return f"{text}; null is allowed" if nullable else text


def example_value(facts: Mapping[str, Any]) -> Any:
    """Return what a request may hold in a column: 3 entries, sets of 0 to 2 ids. Null: the time of the last event."""
    if facts["kind"] == "time" and not facts["most"]:
        return None
    values: list[Any] = [0.5, 1.5, 2.5] if facts["kind"] == "number" else [1, 5, 1 << 40]
    if facts["kind"] in ("time", "timestamp"):
        values = [1_700_000_000, 1_700_000_060, 1_700_090_000]
    if facts["padding"]:  # sets
        values = [values[:2], [], values[2:]]
    return values[: facts["most"][0]] if facts["per_entry"] else values[0]
