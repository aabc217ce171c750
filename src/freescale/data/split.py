"""Where the history of a sample ends and what is held out begins. Pure.

`last`: the last event of each user is held out. `time`: all events from a moment on. Training sees the events before
the cut; evaluation sees the same and is asked for the events after it.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Split(NamedTuple):
    """A way to cut histories, and which side of it is wanted."""

    kind: Literal["none", "last", "time"] = "none"
    time: int = 0
    part: Literal["train", "test"] = "train"
    """test: the events after the cut are wanted too."""

    def cut(self, begin: Ints, end: Ints, timestamps: NDArray[Any]) -> Ints:
        """Where each row's held-out part begins; rows are [begin, end) of the packed timestamps, in time order."""
        if self.kind == "last":
            return np.maximum(begin, end - 1)
        if self.kind == "time":
            before = np.concatenate([[0], np.cumsum(timestamps < self.time)])
            return begin + before[end] - before[begin]
        return end
