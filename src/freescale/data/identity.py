"""What a model depends on in its data: the vocabulary, which gives item numbers their meaning, and the columns.

Checkpoints record it. A data set with the same number of other items would otherwise be accepted, and its items would
read the rows of others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freescale.data.store.dataset import Dataset
from freescale.data.store.manifest import checksum
from freescale.errors import DataError
from freescale.log import warning_once

_REIMPORT = "import it with `freescale data import ... --vocabulary FOLDER`, where FOLDER is the training data set"


@dataclass(frozen=True)
class DataIdentity:
    """The fingerprint of a data set, as far as a trained model depends on it."""

    vocabulary: str
    """Digest of the item keys in the order of their numbers; empty where the data set does not record it."""
    items: int
    columns: dict[str, str]
    """Type of each column that is read."""
    contents: str
    """Checksum of the whole data set: another log over the same items is another one."""

    @staticmethod
    def of(dataset: Dataset) -> "DataIdentity":
        """The identity of an open data set."""
        columns = {name: _type_name(*kind) for name, kind in dataset.columns.items()}
        if dataset.manifest is None:
            return DataIdentity("", 0, columns, "")
        return DataIdentity(dataset.manifest.vocabulary, dataset.manifest.items, columns, checksum(dataset.manifest))

    def require(self, recorded: "DataIdentity", *, where: str) -> None:
        """Refuse this data set for a model that was trained on another vocabulary or on other column types."""
        if self.vocabulary != recorded.vocabulary:
            same = "other items" if self.items == recorded.items else f"{self.items:,} items"
            what = f"the data set has {same}, but the model was trained on a vocabulary of {recorded.items:,}"
            raise DataError(what, where=where, remedy=_REIMPORT)
        for name in sorted(self.columns.keys() & recorded.columns.keys()):
            if self.columns[name] != recorded.columns[name]:
                what = f"column '{name}' is {self.columns[name]}; the model was trained on {recorded.columns[name]}"
                raise DataError(what, where=where, remedy="convert the column, or import the log again")


def require_recorded(recorded: Mapping[str, Any] | None, found: DataIdentity, *, where: str) -> None:
    """Compare a data set with what a checkpoint recorded; checkpoints of earlier versions recorded nothing."""
    if recorded is None:
        warning_once(f"the checkpoint records no vocabulary: whether {where} has the same items is not checked")
        return
    found.require(DataIdentity(**recorded), where=where)


def _type_name(listed: bool, dtype: object) -> str:
    return f"list<{dtype}>" if listed else str(dtype)
