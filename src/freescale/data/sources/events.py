"""A log, opened: one lazy table of events, and where in its files each event stands."""

from pathlib import Path
from typing import Literal, NamedTuple

import polars as pl

from freescale.data.store.quarantine import Place

ORDER, FILE, NUMBER = "_order", "_file", "_number"
"""Columns of the table that describe the event's place: in the whole log, which file, and its line or row there."""


class Columns(NamedTuple):
    """Which columns of a log mean what."""

    user: str = "user_id"
    item: str = "item_id"
    time: str | None = "timestamp"
    """None: the log has no time, and the order of its lines stands for it."""
    features: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    """Of impressions: columns of numbers from 0 to 1, or of true and false."""

    @property
    def names(self) -> list[str]:
        """Every column that is read, once."""
        return list(dict.fromkeys(filter(None, (self.user, self.item, self.time, *self.features, *self.labels))))


class Events(NamedTuple):
    """Events of a log."""

    table: pl.LazyFrame
    """`user_id` and `item_id` (the log's own keys), `timestamp` in ticks (where the log has a time), features or
    `label_*` columns, and the three columns above. What cannot be used is null."""
    files: tuple[str, ...]
    counts: Literal["line", "row"]
    """What NUMBER counts: lines of text, or rows of Parquet."""
    ticks: int = 1
    """Ticks of `timestamp` per second. Events are sorted by ticks; a data set stores whole seconds."""

    @property
    def name(self) -> str:
        """The log in an error or a note."""
        names = [Path(file).name for file in self.files]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def place(self, file: int, number: int) -> Place:
        """Where an event is in its file, for error messages."""
        return Place(self.files[file], **{self.counts: number})
