"""Histories that someone else wrote to Parquet, into a data set: checked, with the items counted, with checksums."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from freescale.data.sources.histories import Imported
from freescale.data.sources.synthetic import listed
from freescale.data.store import writer
from freescale.data.store.columns import CANDIDATE, Group
from freescale.data.store.dataset import Dataset
from freescale.data.store.quarantine import Quarantine
from freescale.errors import DataError


def write(folder: Path, target: str | Path, *, features: Sequence[str], quarantine: Quarantine) -> Imported:
    """Copy the usable histories of a folder, in their order. There are as many items as the largest id asks for."""
    dataset = Dataset(str(folder), features=features, quarantine=quarantine)
    rows, events, items = 0, 0, 0
    users: list[np.ndarray] = []
    for group in _groups(dataset):
        rows, events = rows + int(group.usable.sum()), events + len(group.columns["item_id"].values)
        ids = [group.columns[name].values for name in ("item_id", CANDIDATE) if name in group.columns]
        items = max(items, *(int(some.max(initial=-1)) + 1 for some in ids))
        users.append(np.unique(group.columns["user_id"].values[group.usable]))
    if not rows:
        raise DataError("no usable history is here", where=str(folder), remedy="check the columns of its files")
    size = writer.rows_per_group(rows, events, len(dataset.columns))
    with writer.new_folder(target) as made:
        tables = map(_table, _groups(dataset))
        writer.write(made, tables, rows_per_group=size, items=items, note=f"copied from {folder.name}")
    return Imported(len(np.unique(np.concatenate(users))), items, events, 0, rows)


def _groups(dataset: Dataset) -> Iterator[Group]:
    return map(dataset.read_group, range(dataset.layout.groups))


def _table(group: Group) -> pa.Table:
    """The usable rows of a group; the lists of others are empty already."""
    columns = {
        name: pa.array(column.values) if column.offsets is None else listed(column.offsets, column.values)
        for name, column in group.columns.items()
    }
    return pa.table(columns).filter(pa.array(group.usable))
