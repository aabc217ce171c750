"""The starts of a run, from its journal: a run that was resumed or restarted has several. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from freescale.train.journal import figure

_LATEST = 1e11
"""Unix seconds that no clock has reached."""


@dataclass
class Start:
    """From one start of the ranks to the next."""

    step: int
    """Steps that were done before."""
    world_size: int
    """0 where the journal does not say."""
    reason: str
    began: float
    """Unix seconds; 0 where the journal does not say."""
    until: float
    """When it last noted something."""
    reached: int
    """The last step that it noted, also if that was computed again later."""

    @property
    def seconds(self) -> float:
        """How long it trained, as far as is known."""
        return max(0.0, self.until - self.began) if self.began else 0.0


def starts_of(noted: Iterable[Mapping[str, Any]]) -> list[Start]:
    """All starts in order. A journal whose beginning is missing has one that nothing is known of."""
    found: list[Start] = []
    for entry in noted:
        step, at = entry["step"], _time(entry)
        if entry["kind"] == "start":
            world_size, reason = int(figure(entry, "world_size", 0)), str(entry.get("reason", ""))
            found.append(Start(step, world_size, reason, at, at, step))
            continue
        if not found:
            found.append(Start(0, 0, "", 0.0, 0.0, 0))
        last = found[-1]
        last.reached = max(last.reached, step, int(figure(entry, "reached", 0)))
        last.until = max(last.until, at)
    return found


def _time(entry: Mapping[str, Any]) -> float:
    at = figure(entry, "time", 0.0)
    return at if 0.0 < at < _LATEST else 0.0


def repeated_steps(noted: Iterable[Mapping[str, Any]]) -> int:
    """Steps that were computed again after a restart or a rollback, as far as they had been noted."""
    rewinds = (entry for entry in noted if entry["kind"] == "rewind")
    return sum(max(0, int(figure(entry, "reached", 0)) - entry["step"]) for entry in rewinds)
