"""The samples of one window that one rank holds, packed in the order in which steps will take them.

All the work on samples is done here, once a window: order, split, truncation, unknown items. A step is then a slice,
and a slice costs nothing. Works on numpy, without torch.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from freescale.data.order.cursor import Share
from freescale.data.order.layout import ranges
from freescale.data.split import Ints, Split
from freescale.data.store.columns import CANDIDATE, Group, Kind, is_candidate
from freescale.data.vocabulary import KnownItems

Values = NDArray[Any]


class Packed(NamedTuple):
    """Features of events: sample i owns values offsets[i] to offsets[i + 1] of each."""

    offsets: Ints
    features: dict[str, Values]

    def slice(self, begin: int, end: int) -> "Packed":
        """Samples [begin, end), without a copy of their values."""
        low, high = int(self.offsets[begin]), int(self.offsets[end])
        return Packed(self.offsets[begin : end + 1] - low, {n: v[low:high] for n, v in self.features.items()})


class Window(NamedTuple):
    """Samples of one rank, in the order of the epoch."""

    position: Ints
    groups: dict[str, Packed]
    """Features that share their lengths, as `Batch.groups` has them."""

    def between(self, begin: int, end: int) -> "Window":
        """Samples at positions [begin, end) of the epoch."""
        low, high = np.searchsorted(self.position, [begin, end]).tolist()
        return Window(self.position[low:high], {name: some.slice(low, high) for name, some in self.groups.items()})


def prepare(
    share: Share, groups: Sequence[Group], kinds: dict[str, Kind], *, split: Split, max_history: int, known: KnownItems
) -> tuple[Window, int]:
    """Pack a rank's share of a window. Also gives the number of events whose item is outside the vocabulary."""
    usable = _end_to_end([group.usable for group in groups], bool)[share.source]
    packer = _Packer(groups, kinds, known, share.source[usable])
    listed = [name for name, kind in kinds.items() if kind.listed and not is_candidate(name)]
    offered = [name for name, kind in kinds.items() if kind.listed and is_candidate(name)]
    bounds = [group.columns["item_id"].bounds for group in groups]
    cuts = [split.cut(b, e, g.columns["timestamp"].values) for g, (b, e) in zip(groups, bounds, strict=True)]
    seen = [(np.maximum(begin, cut - max_history), cut) for (begin, _), cut in zip(bounds, cuts, strict=True)]
    held = [(cut, end) for (_, end), cut in zip(bounds, cuts, strict=True)]
    scalars = {name: packer.pick(name) for name, kind in kinds.items() if not kind.listed}
    alone = Packed(np.arange(usable.sum() + 1), {"": share.sample_id[usable], **scalars})
    packed = {"sample": alone, "history": packer.pack(listed, seen)}
    if offered:
        packed["candidates"] = packer.pack(offered, [group.columns[CANDIDATE].bounds for group in groups])
    if split.part == "test":
        packed["targets"] = packer.pack(listed, held)
    return Window(share.position[usable], packed), packer.unknown


class _Packer:
    """Brings values of several groups into the order of the epoch, and maps unknown items on the way."""

    def __init__(self, groups: Sequence[Group], kinds: Mapping[str, Kind], known: KnownItems, rows: Ints) -> None:
        self._groups, self._kinds, self._known, self._rows = groups, kinds, known, rows
        self.unknown = 0
        sizes = [len(group.usable) for group in groups]
        place = np.full(sum(sizes), -1, dtype=np.int64)  # of each row in the order of the epoch; -1: left out
        place[rows] = np.arange(len(rows))
        self._places = np.split(place, list(accumulate(sizes))[:-1]) if groups else []

    def pick(self, name: str) -> Values:
        """A scalar of each row."""
        values = [group.columns[name].values for group in self._groups]
        return _end_to_end(values, self._kinds[name].dtype)[self._rows]

    def pack(self, names: Sequence[str], bounds: Sequence[tuple[Ints, Ints]]) -> Packed:
        """The values [begin, end) of each row, `bounds` by group."""
        lengths = _end_to_end([end - begin for begin, end in bounds])[self._rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        features = {name: np.empty(offsets[-1], self._kinds[name].dtype) for name in names}
        for group, place, (begin, end) in zip(self._groups, self._places, bounds, strict=True):
            kept = place >= 0
            source = _selector(begin[kept], end[kept])
            target = _selector(offsets[place[kept]], offsets[place[kept] + 1])
            for name in names:
                values = group.columns[name].values[source]
                if len(self._groups) == 1 and isinstance(target, slice):
                    features[name] = values  # in order already, so as Arrow decoded it
                else:
                    features[name][target] = values
        for name in {"item_id", CANDIDATE} & features.keys():
            features[name], unknown = self._known.fold(features[name])
            self.unknown += unknown
        return Packed(offsets, features)


def _end_to_end(pieces: Sequence[Values], dtype: DTypeLike = np.int64) -> NDArray[Any]:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype)


def _selector(begin: Ints, end: Ints) -> slice | Ints:
    """Which values rows own: a slice where the rows follow each other, else their indices."""
    if np.array_equal(begin[1:], end[:-1]):
        return slice(int(begin[0]), int(end[-1])) if len(begin) else slice(0, 0)
    return ranges(begin, end - begin)
