"""Item vocabulary: which items have their own table row, where other items go, and whether data fits a trained model.

On disk a vocabulary is `vocabulary.parquet`: row i holds the original key of item i and how often it occurs. In a
batch, ids outside the vocabulary are hashed to a few shared rows after it, so that a new item always has the same row.
Every categorical column has a file of that form: `vocabulary-COLUMN.parquet`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from freescale.data.columns import MISSING
from freescale.data.dataset import Dataset
from freescale.data.manifest import manifest_checksum
from freescale.data.order import splitmix64
from freescale.errors import DataError
from freescale.log import warning_once

VOCABULARY_FILE = "vocabulary.parquet"
"""Vocabulary of the items, beside the data."""
RAW_IDS = "raw ids"
"""Instead of the digest of a vocabulary: item ids mean the same in all such data sets."""
MISSING_ID = -2
"""Among dynamic ids, that of missing values."""
FIRST_SLOT = -3
"""Among requests for dynamic items: slot n is requested as FIRST_SLOT - n."""
_REIMPORT = "import it with `freescale data import ... --vocabulary FOLDER`, where FOLDER is the training data set"


def feature_vocabulary_file(column: str) -> str:
    """Name of the file with the vocabulary of a categorical column."""
    return f"vocabulary-{column}.parquet"


def fingerprint(keys: pa.Array) -> str:
    """Digest of the item keys in id order: equal only if every id means the same item."""
    digest = hashlib.sha256(b"integer" if pa.types.is_integer(keys.type) else b"text")
    texts = keys.cast(pa.large_string())
    offsets = np.frombuffer(texts.buffers()[1], dtype="<i8")[texts.offset : texts.offset + len(texts) + 1]
    digest.update(np.diff(offsets).tobytes())
    digest.update(memoryview(texts.buffers()[2] or b"")[offsets[0] : offsets[-1]])
    return digest.hexdigest()


def numbered_fingerprint(items: int) -> str:
    """Digest of a vocabulary in which every key equals its id, as in a synthetic log."""
    return hashlib.sha256(b"numbers %d" % items).hexdigest()


class ItemVocabulary(NamedTuple):
    """Ids below `items` are known. `items` = 0: the vocabulary size is unknown and all ids stay as they are."""

    items: int
    oov_rows: int
    missing: bool = False
    """Whether missing values have a row of their own, the last one."""
    dynamic: bool = False
    """Whether ids get rows in training, `items` of them at a time: they stay as they are, and missing values are one
    more id."""

    @property
    def rows(self) -> int:
        """Table rows that the model needs."""
        return self.items if self.dynamic else self.items + self.oov_rows + self.missing

    def map_unknown(self, ids: NDArray[Any]) -> tuple[NDArray[Any], int]:
        """Map out-of-vocabulary ids to the shared rows, and count them. Copies only if there are any."""
        if self.dynamic:
            return (np.where(ids == MISSING, MISSING_ID, ids) if self.missing else ids), 0
        unknown = ids >= self.items if self.items else np.zeros(0, dtype=bool)
        count, mapped = int(np.count_nonzero(unknown)), ids
        if count:
            shared = self.items + (splitmix64(ids) % np.uint64(self.oov_rows)).astype(np.int64)
            mapped = np.where(unknown, shared, ids)
        if self.missing and ids.min(initial=0) == MISSING:
            mapped = np.where(ids == MISSING, self.rows - 1, mapped)
        return mapped, count


@dataclass(frozen=True)
class DataIdentity:
    """What a trained model depends on in its data: item ids and column types. Checkpoints record it.

    Without it, a data set with equally many but different items would be accepted and would read wrong table rows.
    """

    vocabulary: str
    """Digest of the item keys in id order; empty if the data set does not record it."""
    items: int
    columns: dict[str, str]
    """Type of each column that the loader reads."""
    contents: str
    """Checksum of the whole data set."""
    vocabularies: dict[str, int] = field(default_factory=dict)
    """Size of the vocabulary of each column of ids that the loader reads."""
    partitions: list[str] = field(default_factory=list)
    """Checksum of each partition."""

    @staticmethod
    def from_dataset(dataset: Dataset) -> "DataIdentity":
        """Identity of an open data set."""
        columns = {name: str(kind) for name, kind in dataset.columns.items()}
        if dataset.manifest is None:
            return DataIdentity("", 0, columns, "")
        manifest = dataset.manifest
        sizes = {name: size for name, size in manifest.features.items() if name in columns}
        partitions = [] if dataset.partitioned is None else [one.checksum for one in dataset.partitioned.partitions]
        contents = manifest_checksum(manifest)
        return DataIdentity(manifest.vocabulary, manifest.items, columns, contents, sizes, partitions)

    def continues(self, recorded: Mapping[str, Any]) -> bool:
        """Whether the data is that of a recorded identity, or differs in partitions at its end alone."""
        both = min(len(self.partitions), len(before := recorded.get("partitions", [])))
        return self.contents == recorded["contents"] or (both > 0 and self.partitions[:both] == before[:both])

    def require_same(self, recorded: "DataIdentity", *, where: str) -> None:
        """Raise if a model was trained on another vocabulary or on other column types."""
        if self.vocabulary != recorded.vocabulary:
            items = "other items" if self.items == recorded.items else f"{self.items:,} items"
            what = f"the data set has {items}, but the model was trained on a vocabulary of {recorded.items:,}"
            raise DataError(what, where=where, remedy=_REIMPORT)
        for name in sorted(self.vocabularies.keys() & recorded.vocabularies.keys()):
            if self.vocabularies[name] != recorded.vocabularies[name]:
                sizes = f"{self.vocabularies[name]:,} ids; the model was trained on {recorded.vocabularies[name]:,}"
                raise DataError(f"column '{name}' has {sizes}", where=where, remedy=_REIMPORT)
        for name in sorted(self.columns.keys() & recorded.columns.keys()):
            if self.columns[name] != recorded.columns[name]:
                what = f"column '{name}' is {self.columns[name]}; the model was trained on {recorded.columns[name]}"
                raise DataError(what, where=where, remedy="convert the column, or import the log again")


def check_recorded_identity(recorded: Mapping[str, Any] | None, current: DataIdentity, *, where: str) -> None:
    """Compare a data set with the identity in a checkpoint. Checkpoints of early versions have none."""
    if recorded is None:
        warning_once(f"the checkpoint records no vocabulary, so {where} is not checked for the same items")
        return
    current.require_same(DataIdentity(**recorded), where=where)
