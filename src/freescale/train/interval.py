"""How often to save: what saving costs against what a failure would lose. Pure but for the clock."""

import math
import time

_FIRST_SECONDS = 60.0
"""Until it is known what saving costs."""


class Interval:
    """Young's rule: with a cost c and a failure every m seconds on average, the least is lost by saving every
    sqrt(2 c m) seconds. The expected failure counts as one that was seen.
    """

    def __init__(self, *, hours_between_failures: float) -> None:
        self._expected = 3600.0 * hours_between_failures
        self._cost, self._failures = 0.0, 0
        self._before, self._since = 0.0, time.monotonic()

    def saved(self, seconds: float) -> None:
        """Training stood still for so long to save."""
        self._cost = seconds

    def failed(self) -> None:
        """A rank was lost."""
        self._failures += 1

    @property
    def seconds(self) -> float:
        """Between two checkpoints."""
        between = (self._expected + self._ran) / (1 + self._failures)
        return math.sqrt(2.0 * self._cost * between) if self._cost else _FIRST_SECONDS

    @property
    def _ran(self) -> float:
        return self._before + time.monotonic() - self._since

    def state_dict(self) -> list[float]:
        """What a resumed run goes on from."""
        return [self._ran, self._failures, self._cost]

    def load_state_dict(self, state: list[float]) -> None:
        """Go on from there."""
        self._before, self._since = state[0], time.monotonic()
        self._failures, self._cost = int(state[1]), state[2]
