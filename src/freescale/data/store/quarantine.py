"""What happens to input that cannot be used: an error at once, or a counted line in a quarantine file.

Thread-safe, because readers run in several threads.
"""

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

from freescale.errors import DataError, FreeScaleError, reason


class Place(NamedTuple):
    """Where in a data set or a log something is.

    Text is numbered by lines as editors do: from 1, with the header, blank lines and line breaks inside of quotes.
    Parquet is numbered by rows as its readers do: from 0, in the row group where one is given, else in the file.
    """

    file: str
    row_group: int | None = None
    row: int | None = None
    line: int | None = None

    def __str__(self) -> str:
        inside = {"row group": self.row_group, "row": self.row, "line": self.line}
        return ", ".join([self.file, *(f"{name} {number}" for name, number in inside.items() if number is not None)])


class Quarantine:
    """The policy for bad input and the record of what was set aside."""

    def __init__(self, on_bad: Literal["stop", "skip"] = "stop", path: str | Path | None = None) -> None:
        self.counts: Counter[str] = Counter()
        """Rows set aside, by kind of fault."""
        self._skip = on_bad == "skip"
        self._path = Path(path) if path else None
        self._seen: set[Place] = set()
        self._lock = threading.Lock()

    @property
    def rows(self) -> int:
        """How many rows were set aside."""
        return sum(self.counts.values())

    def bad(
        self, place: Place, kind: str, what: str, *, remedy: str, rows: int = 1, cause: Exception | None = None
    ) -> None:
        """Report bad input: raise, or count it and return. The same place counts once, also over many epochs."""
        if not self._skip:
            remedy = f"{remedy}, or go on without it: on_bad = skip (--on-bad skip)"
            raise DataError(what, where=str(place), remedy=remedy) from cause
        with self._lock:
            if place in self._seen:
                return
            self._seen.add(place)
            self.counts[kind] += rows
            if self._path:
                line = place._asdict() | {"rows": rows, "what": what}
                self._record(self._path, json.dumps(line))

    def _record(self, path: Path, line: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            what, remedy = (
                f"the quarantine file cannot be written: {reason(error)}",
                "free space, or allow writing there",
            )
            raise FreeScaleError(what, where=str(path), remedy=remedy) from error

    def summary(self) -> str:
        """Say in one line what was set aside, or nothing."""
        if not self.counts:
            return ""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.counts.most_common())
        return f"{self.rows:,} rows set aside ({kinds})" + (f"; see {self._path}" if self._path else "")
