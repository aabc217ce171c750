"""Counts the terms of the loss: a run that has none trains nothing, and must not succeed."""

from freescale.errors import DataError
from freescale.train.saving import Parts


class LossTerms:
    """Terms of the loss over all ranks, step by step."""

    def __init__(self, parts: Parts) -> None:
        self._task, self._data = parts.config.task.kind, parts.config.data
        self._enough = min(len(parts.loader), parts.steps)
        self._steps = self._empty = 0

    def count(self, terms: int) -> None:
        """Count a step. Raises where a whole epoch, or a run that is shorter, had no term."""
        self._steps += 1
        self._empty += not terms
        if self._empty == self._steps >= self._enough:
            raise self._nothing()

    def report(self) -> list[str]:
        """Steps whose samples were all too short."""
        return [f"{self._empty:,} of {self._steps:,} steps had no loss term"] if self._empty else []

    def _nothing(self) -> DataError:
        if self._task == "ranking":
            why, remedy = "no history has a candidate", "give a data set with candidates and labels"
        else:
            held_out = " after the held-out ones" if self._data.split != "none" else ""
            why = f"no history has two events{held_out}, and the loss is that of the next event"
            remedy = 'give a log with longer histories, or data.split = "none"'
        what = f"the training data has no loss term in {self._steps:,} steps: {why}"
        return DataError(what, where=self._data.path, remedy=remedy)
