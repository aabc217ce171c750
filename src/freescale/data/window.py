"""The samples of one window that one rank holds, packed in the order in which steps will take them.

All the work on samples is done here, once a window: order, split, truncation, unknown items. A step is then a slice,
and a slice costs nothing. Works on numpy, without torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from freescale.data.columns import CANDIDATE, Group, Kind, is_candidate
from freescale.data.cursor import Share
from freescale.data.split import Split
from freescale.data.vocabulary import KnownItems

Ints = NDArray[np.int64]
Values = NDArray[Any]
_LONG = 256


@dataclass(frozen=True)
class Packed:
    """Features of events: sample i owns values offsets[i] to offsets[i + 1] of each."""

    offsets: Ints
    features: dict[str, Values]

    def slice(self, begin: int, end: int) -> "Packed":
        """Samples [begin, end), without a copy of their values."""
        low, high = int(self.offsets[begin]), int(self.offsets[end])
        return Packed(self.offsets[begin : end + 1] - low, {n: v[low:high] for n, v in self.features.items()})


@dataclass(frozen=True)
class Window:
    """Samples of one rank, in the order of the epoch."""

    position: Ints
    sample_id: Ints
    scalars: dict[str, Values]
    history: Packed
    candidates: Packed | None
    targets: Packed | None

    def between(self, begin: int, end: int) -> "Window":
        """Samples at positions [begin, end) of the epoch."""
        low, high = np.searchsorted(self.position, [begin, end]).tolist()
        return Window(
            self.position[low:high],
            self.sample_id[low:high],
            {name: values[low:high] for name, values in self.scalars.items()},
            self.history.slice(low, high),
            self.candidates.slice(low, high) if self.candidates else None,
            self.targets.slice(low, high) if self.targets else None,
        )


def prepare(
    share: Share,
    groups: Sequence[Group],
    kinds: Mapping[str, Kind],
    *,
    split: Split,
    max_history: int,
    known: KnownItems,
) -> tuple[Window, int]:
    """Pack a rank's share of a window. Also gives the number of events whose item is outside the vocabulary."""
    usable = _end_to_end([group.usable for group in groups], bool)[share.source]
    rows = share.source[usable]
    listed = [name for name, kind in kinds.items() if kind.listed and not is_candidate(name)]
    offered = [name for name, kind in kinds.items() if kind.listed and is_candidate(name)]

    begin, end = (edge[rows] for edge in _edges(groups, "item_id"))
    cut = _end_to_end([_cut(group, split) for group in groups], np.int64)[rows] + begin
    packer = _Packer(groups, known)
    window = Window(
        position=share.position[usable],
        sample_id=share.sample_id[usable],
        scalars={
            n: _end_to_end([g.columns[n].values for g in groups], k.dtype)[rows]
            for n, k in kinds.items()
            if not k.listed
        },
        history=packer.pack(listed, np.maximum(begin, cut - max_history), cut),
        candidates=packer.pack(offered, *(edge[rows] for edge in _edges(groups, CANDIDATE))) if offered else None,
        targets=packer.pack(listed, cut, end) if split.holds_out else None,
    )
    return window, packer.unknown


def _cut(group: Group, split: Split) -> Ints:
    """How many events of each row come before its cut."""
    begin, end = group.columns["item_id"].bounds
    return split.cut(begin, end, group.columns["timestamp"].values) - begin


def _edges(groups: Sequence[Group], name: str) -> tuple[Ints, Ints]:
    """Where the values of each row begin and end, were the groups laid end to end."""
    bounds = [group.columns[name].bounds for group in groups]
    first = _starts([len(group.columns[name].values) for group in groups])
    shifted = [(begin + f, end + f) for (begin, end), f in zip(bounds, first, strict=True)]
    return _end_to_end([b for b, _ in shifted], np.int64), _end_to_end([e for _, e in shifted], np.int64)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][: len(sizes)]


def _end_to_end(pieces: Sequence[Values], dtype: DTypeLike) -> NDArray[Any]:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype)


class _Packer:
    """Gathers the values that rows own out of several groups, and maps unknown items on the way."""

    def __init__(self, groups: Sequence[Group], known: KnownItems) -> None:
        self._groups, self._known = groups, known
        self.unknown = 0

    def pack(self, names: Sequence[str], begin: Ints, end: Ints) -> Packed:
        features = {}
        gather = _gatherer(begin, end)
        for name in names:
            values = gather([group.columns[name].values for group in self._groups])
            if name in ("item_id", CANDIDATE):
                values, unknown = self._known.fold(values)
                self.unknown += unknown
            features[name] = values
        return Packed(np.concatenate([[0], np.cumsum(end - begin)]), features)


def _gatherer(begin: Ints, end: Ints) -> Callable[[list[Values]], Values]:
    """How to fetch the values [begin, end) of each row out of pieces laid end to end: what copies least."""
    lengths = end - begin
    total = int(lengths.sum())
    if len(begin) and np.array_equal(begin[1:], end[:-1]):
        return partial(_one_span, begin=int(begin[0]), end=int(end[-1]))
    if total > _LONG * len(begin):  # then a copy for each row is cheaper than an index for each value
        return partial(_spans, begin=begin, end=end)
    index = np.arange(total)
    index += np.repeat(begin - (np.cumsum(lengths) - lengths), lengths)
    return lambda pieces: np.concatenate(pieces)[index] if pieces else np.empty(0, dtype=np.int64)


def _one_span(pieces: list[Values], *, begin: int, end: int) -> Values:
    first = _starts([len(piece) for piece in pieces])
    inside = [p[max(0, begin - f) : max(0, end - f)] for p, f in zip(pieces, first, strict=True)]
    inside = [piece for piece in inside if len(piece)] or inside[:1]
    return inside[0] if len(inside) == 1 else np.concatenate(inside)


def _spans(pieces: list[Values], *, begin: Ints, end: Ints) -> Values:
    first = np.array(_starts([len(piece) for piece in pieces]))
    which = np.searchsorted(first, begin, side="right") - 1
    local = zip(which.tolist(), (begin - first[which]).tolist(), (end - first[which]).tolist(), strict=True)
    return np.concatenate([pieces[w][b:e] for w, b, e in local])
