"""Which items have a table row of their own, and where the others go.

On disk a vocabulary is `vocabulary.parquet`: row i holds the original key of item i and how often it was seen. In a
batch, ids outside it are folded into a few rows behind it by a hash, so that a new item trains something stable.
"""

import hashlib
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from freescale.data.order.permute import mix

FILE = "vocabulary.parquet"


def fingerprint(keys: pa.Array) -> str:
    """Digest of item keys in the order of their numbers: equal only where every number means the same item."""
    digest = hashlib.sha256(b"integer" if pa.types.is_integer(keys.type) else b"text")
    texts = keys.cast(pa.large_string())
    offsets = np.frombuffer(texts.buffers()[1], dtype="<i8")[texts.offset : texts.offset + len(texts) + 1]
    digest.update(np.diff(offsets).tobytes())
    digest.update(memoryview(texts.buffers()[2] or b"")[offsets[0] : offsets[-1]])
    return digest.hexdigest()


def numbered_fingerprint(items: int) -> str:
    """Digest of a catalogue whose items are their numbers, as in a synthetic log."""
    return hashlib.sha256(b"numbers %d" % items).hexdigest()


class KnownItems(NamedTuple):
    """Item ids below `items` are known; `items` = 0 means that nobody counted, and every id is taken as it is."""

    items: int
    oov_rows: int

    @property
    def rows(self) -> int:
        """Table rows that a model needs."""
        return self.items + self.oov_rows

    def fold(self, ids: NDArray[Any]) -> tuple[NDArray[Any], int]:
        """Map unknown ids to the shared rows, and count them. Known ids are not copied."""
        unknown = ids >= self.items if self.items else np.zeros(0, dtype=bool)
        count = int(np.count_nonzero(unknown))
        if not count:
            return ids, 0
        shared = self.items + (mix(ids) % np.uint64(self.oov_rows)).astype(np.int64)
        return np.where(unknown, shared, ids), count
