"""Log formats: open public data sets and generic event logs, and copy existing histories."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from freescale.data import public_logs, writer
from freescale.data.columns import CANDIDATE
from freescale.data.dataset import Dataset
from freescale.data.event_log import LOG_NUMBER, EventLog, LogColumns
from freescale.data.feature_columns import FeatureColumn, refuse_names
from freescale.data.histories import ImportSummary
from freescale.data.log_reader import LogSpec, read_files, to_event_log, with_side_tables
from freescale.data.synthetic import list_array
from freescale.data.text_log import find_log_files
from freescale.data.validation import Quarantine, RowGroup
from freescale.errors import DataError, UsageError, reason, suggest


def open_log(name: str, job: LogSpec) -> EventLog:
    """Open a log in a named format."""
    if name not in FORMATS:
        raise UsageError(f"no format is called '{name}'", remedy=suggest(name, FORMATS))
    job = job._replace(sources=find_log_files(job.sources, _LOG_FILES.get(name, "*")))
    try:
        refuse_names([*job.columns.features, *job.items.features, *job.users.features])
        return FORMATS[name](job)
    except DataError as error:
        error.where = error.where or ", ".join(map(str, job.sources))
        raise
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, UnicodeError, LookupError) as error:
        where, remedy = ", ".join(map(str, job.sources)), "check its format and --encoding, or fetch it again"
        raise DataError(f"the log cannot be read: {reason(error)}", where=where, remedy=remedy) from error


def _lists(job: LogSpec) -> EventLog:
    """Lines of `user item item ...`, or one line per event."""
    line = pl.col("line").str.strip_chars()
    words = line.str.split(" ")
    parts = []
    for number, source in enumerate(job.sources):
        lines = job.text(number, source).read_lines()
        users = lines.filter(line != "").select(LOG_NUMBER, user=words.list.first(), item=words.list.slice(1))
        parts.append(users.explode("item").filter(pl.col("item").is_not_null()))  # users without items
    return to_event_log(job.with_columns(LogColumns("user", "item", None), "auto"), parts)


def _generic(job: LogSpec) -> EventLog:
    """Files of one format with user-defined columns."""
    parts, form = read_files(job, job.columns.uses)
    return with_side_tables(job, to_event_log(job, parts, form))


FORMATS: dict[str, Callable[[LogSpec], EventLog]] = {
    "ml-1m": public_logs.ml1m,
    "ml-20m": public_logs.movielens,
    "ml-latest": public_logs.movielens,
    "amazon": _lists,
    "kuairand": public_logs.kuairand,
    "yambda": public_logs.yambda,
    "events": _generic,
}
_LOG_FILES = {"kuairand": "log_standard*.csv"}
"""Which files of a folder are the log, where it also holds other files."""


def copy_histories(
    folder: Path, target: str | Path, *, features: Sequence[FeatureColumn], quarantine: Quarantine
) -> ImportSummary:
    """Validate and copy Parquet histories in their order. The size of a vocabulary is the largest id plus 1."""
    dataset = Dataset(str(folder), features=[feature.name for feature in features], quarantine=quarantine)
    sizes = {feature.name: 0 for feature in features if feature.kind in ("id", "set")}
    for name in sizes:
        if dataset.columns[name].dtype.kind != "i":
            what = f"feature '{name}' cannot be an id: column '{name}' holds {dataset.columns[name].dtype}"
            raise DataError(what, where=str(folder), remedy=f"give {name}:number, or convert it to integers")
    rows, events, items = 0, 0, 0
    users: list[np.ndarray] = []
    for group in _row_groups(dataset):
        rows, events = rows + int(group.usable.sum()), events + len(group.columns["item_id"].values)
        items = max(items, _largest(group, "item_id", CANDIDATE) + 1)
        sizes = {name: max(size, _largest(group, name, f"candidate_{name}") + 1) for name, size in sizes.items()}
        users.append(np.unique(group.columns["user_id"].values[group.usable]))
    if not rows:
        raise DataError("no usable history", where=str(folder), remedy="check the columns of its files")
    size = writer.rows_per_group(rows, events, len(dataset.columns))
    with writer.atomic_folder(target) as created:
        tables = map(_table, _row_groups(dataset))
        note = f"copied from {folder.name}"
        writer.write_dataset(created, tables, rows_per_group=size, items=items, note=note, features=sizes)
    return ImportSummary(len(np.unique(np.concatenate(users))), items, events, 0, rows)


def _largest(group: RowGroup, *names: str) -> int:
    """The largest id of some columns, or -1."""
    present = [group.columns[name].values for name in names if name in group.columns]
    return max(int(values.max(initial=-1)) for values in present)


def _row_groups(dataset: Dataset) -> Iterator[RowGroup]:
    return map(dataset.read_group, range(dataset.layout.groups))


def _table(group: RowGroup) -> pa.Table:
    """The usable rows of a row group."""
    columns = {
        name: pa.array(column.values) if column.offsets is None else list_array(column.offsets, column.values)
        for name, column in group.columns.items()
    }
    return pa.table(columns).filter(pa.array(group.usable))
