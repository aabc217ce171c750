"""Selects the fastest of several equivalent settings by timing training steps. Pure: takes seconds, returns a setting.

All settings give bitwise the same training result, so a run can change them at any step. A trial gives each setting two
turns of a few steps, in the first steps of a run and again every `repeat_every` steps, since load and batches change.
The first and the last step of a turn do not count: an overlapped schedule has nothing prefetched in its first step, and
prefetches nothing in its last. All ranks record the same steps and decide from the same figures.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

TRIAL_STEPS = 30
_TURNS = 2
_FEWEST_STEPS = 4
_MARGIN = 0.98
"""Another setting must take less than this share of the time of the selected one; a smaller gain is noise."""


class Setting(NamedTuple):
    """One way to run a step."""

    overlap: bool
    """Whether embedding rows are exchanged while compute runs."""
    deferred: str = ""
    """Transport of the deferred lane; empty without overlap."""
    exchange: str = "flat"
    """How rows are exchanged: see `config.TablesConfig.exchange`."""

    def __str__(self) -> str:
        if self.exchange != "flat":
            return f"overlap {'on' if self.overlap else 'off'} in two levels"
        return f"overlap on over {self.deferred}" if self.overlap else "overlap off"


class Autotuner:
    """Tells which setting each step uses."""

    def __init__(self, settings: Sequence[Setting], *, repeat_every: int = 2000) -> None:
        self.settings, self._repeat_every = list(settings), repeat_every
        self._plan = _trial(len(self.settings))
        self._seconds: list[float] = []
        """Of the steps of the current trial; a trial ends with as many as its plan."""
        self._selected: int | None = None
        self._steps_left = 0
        """Until the next trial; 0 during a trial."""

    @property
    def setting(self) -> Setting:
        """The setting of the next step."""
        index = self._plan[len(self._seconds)] if self._in_trial else self._selected
        return self.settings[index or 0]

    @property
    def keeps_setting(self) -> bool:
        """Whether the step after the next one has the same setting, so that the next one may prefetch for it."""
        now, following = self._plan[len(self._seconds) :][:1], self._plan[len(self._seconds) + 1 :][:1]
        return not self._in_trial or now == following

    def record(self, seconds: float) -> list[float] | None:
        """Record a step. At the end of a trial, return the median seconds of each setting on this rank."""
        if not self._in_trial:
            self._steps_left = max(0, self._steps_left - 1)
            return None
        self._seconds.append(seconds)
        return self._medians() if len(self._seconds) == len(self._plan) else None

    def decide(self, seconds: Sequence[float]) -> Setting:
        """Select the fastest setting. `seconds`: of each setting, the same on all ranks."""
        fastest = min(range(len(seconds)), key=lambda index: seconds[index])
        if self._selected is None or seconds[fastest] < _MARGIN * seconds[self._selected]:
            self._selected = fastest
        self._seconds, self._steps_left = [], self._repeat_every
        return self.settings[self._selected]

    @property
    def _in_trial(self) -> bool:
        return self._steps_left == 0 and len(self.settings) > 1

    def _medians(self) -> list[float]:
        inner = zip(pairwise(self._plan), pairwise(self._plan[1:]), self._seconds[1:], strict=False)
        counted = [(b, seconds) for (a, b), (_, c), seconds in inner if a == b == c]
        return [median(s for index, s in counted if index == setting) for setting in range(len(self.settings))]

    def state_dict(self) -> dict[str, Any]:
        """Return the selected setting, and after how many steps it is measured again."""
        selected = None if self._selected is None else list(self.settings[self._selected])
        return {"setting": selected, "steps_left": self._steps_left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a selected setting. One that is not possible here is measured anew."""
        self._seconds, selected = [], None if state["setting"] is None else Setting(*state["setting"])
        if selected in self.settings:
            self._selected, self._steps_left = self.settings.index(selected), int(state["steps_left"])


def _trial(settings: int) -> list[int]:
    """Return the setting of each step of a trial."""
    steps = max(_FEWEST_STEPS, TRIAL_STEPS // (_TURNS * settings))
    return [setting for _ in range(_TURNS) for setting in range(settings) for _ in range(steps)]
