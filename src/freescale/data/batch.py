"""Batch."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from freescale.data.order import WindowShare, concat_ranges
from freescale.data.validation import CANDIDATE, ColumnType, RowGroup, is_candidate
from freescale.data.vocabulary import ItemVocabulary

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


Values = NDArray[Any]


class PackedFeatures(NamedTuple):
    """Features of events: sample i owns values offsets[i] to offsets[i + 1] of each."""

    offsets: Ints
    features: dict[str, Values]

    def slice(self, begin: int, end: int) -> "PackedFeatures":
        """Samples [begin, end), without a copy of their values."""
        low, high = int(self.offsets[begin]), int(self.offsets[end])
        return PackedFeatures(self.offsets[begin : end + 1] - low, {n: v[low:high] for n, v in self.features.items()})


class Window(NamedTuple):
    """Samples of one rank, in the order of the epoch."""

    position: Ints
    groups: dict[str, PackedFeatures]
    """Features that share their lengths, as `Batch.groups` has them."""

    def slice(self, begin: int, end: int) -> "Window":
        """Samples at positions [begin, end) of the epoch."""
        low, high = np.searchsorted(self.position, [begin, end]).tolist()
        return Window(self.position[low:high], {name: some.slice(low, high) for name, some in self.groups.items()})


def pack_window(
    share: WindowShare,
    groups: Sequence[RowGroup],
    kinds: dict[str, ColumnType],
    *,
    split: Split,
    max_history: int,
    vocabulary: ItemVocabulary,
) -> tuple[Window, int]:
    """Pack a rank's share of a window. Also gives the number of events whose item is outside the vocabulary."""
    usable = _end_to_end([group.usable for group in groups], bool)[share.source]
    packer = _Packer(groups, kinds, vocabulary, share.source[usable])
    listed = [name for name, kind in kinds.items() if kind.is_list and not is_candidate(name)]
    offered = [name for name, kind in kinds.items() if kind.is_list and is_candidate(name)]
    bounds = [group.columns["item_id"].bounds for group in groups]
    cuts = [split.cut(b, e, g.columns["timestamp"].values) for g, (b, e) in zip(groups, bounds, strict=True)]
    seen = [(np.maximum(begin, cut - max_history), cut) for (begin, _), cut in zip(bounds, cuts, strict=True)]
    held = [(cut, end) for (_, end), cut in zip(bounds, cuts, strict=True)]
    scalars = {name: packer.pick(name) for name, kind in kinds.items() if not kind.is_list}
    alone = PackedFeatures(np.arange(usable.sum() + 1), {"": share.sample_id[usable], **scalars})
    packed = {"sample": alone, "history": packer.pack(listed, seen)}
    if offered:
        packed["candidates"] = packer.pack(offered, [group.columns[CANDIDATE].bounds for group in groups])
    if split.part == "test":
        packed["targets"] = packer.pack(listed, held)
    return Window(share.position[usable], packed), packer.unknown


class _Packer:
    """Brings values of several groups into the order of the epoch, and maps unknown items on the way."""

    def __init__(
        self, groups: Sequence[RowGroup], kinds: Mapping[str, ColumnType], vocabulary: ItemVocabulary, rows: Ints
    ) -> None:
        self._groups, self._kinds, self._vocabulary, self._rows = groups, kinds, vocabulary, rows
        self.unknown = 0
        sizes = [len(group.usable) for group in groups]
        place = np.full(sum(sizes), -1, dtype=np.int64)  # of each row in the order of the epoch; -1: left out
        place[rows] = np.arange(len(rows))
        self._places = np.split(place, list(accumulate(sizes))[:-1]) if groups else []

    def pick(self, name: str) -> Values:
        """A scalar of each row."""
        values = [group.columns[name].values for group in self._groups]
        return _end_to_end(values, self._kinds[name].dtype)[self._rows]

    def pack(self, names: Sequence[str], bounds: Sequence[tuple[Ints, Ints]]) -> PackedFeatures:
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
            features[name], unknown = self._vocabulary.map_unknown(features[name])
            self.unknown += unknown
        return PackedFeatures(offsets, features)


def _end_to_end(pieces: Sequence[Values], dtype: DTypeLike = np.int64) -> NDArray[Any]:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype)


def _selector(begin: Ints, end: Ints) -> slice | Ints:
    """Which values rows own: a slice where the rows follow each other, else their indices."""
    if np.array_equal(begin[1:], end[:-1]):
        return slice(int(begin[0]), int(end[-1])) if len(begin) else slice(0, 0)
    return concat_ranges(begin, end - begin)


@dataclass(frozen=True)
class Events:
    """Features of events, packed: sample i owns values offsets[i] to offsets[i + 1] of each."""

    offsets: torch.Tensor
    features: dict[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.features[name]

    @property
    def lengths(self) -> torch.Tensor:
        """Events of each sample."""
        return self.offsets.diff()

    def to(self, device: torch.device) -> "Events":
        """The same on another device."""
        features = {name: values.to(device, non_blocking=True) for name, values in self.features.items()}
        return Events(self.offsets.to(device, non_blocking=True), features)

    def row_indices(self, samples: torch.Tensor) -> torch.Tensor:
        """Where the values of some samples stand."""
        lengths = self.lengths[samples]
        before = lengths.cumsum(0) - lengths
        return (self.offsets[samples] - before).repeat_interleave(lengths) + torch.arange(int(lengths.sum()))

    def select(self, samples: torch.Tensor) -> "Events":
        """Those of some samples."""
        rows, lengths = self.row_indices(samples), self.lengths[samples]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return Events(offsets, {name: values[rows] for name, values in self.features.items()})

    def slice(self, begin: int, end: int) -> "Events":
        """Those of samples [begin, end), without a copy of their values."""
        low, high = int(self.offsets[begin]), int(self.offsets[end])
        return Events(self.offsets[begin : end + 1] - low, {n: v[low:high] for n, v in self.features.items()})


@dataclass(frozen=True)
class Batch:
    """What one rank holds of one step's global batch. It may be empty."""

    epoch: int
    step: int
    sample_id: torch.Tensor
    """Stable 64-bit number of each sample: its row in the log."""
    scalars: dict[str, torch.Tensor]
    """user_id and further features per sample."""
    history: Events
    """item_id, timestamp and further features per event, oldest first."""
    candidates: Events | None
    """candidate_id and its labels, for ranking."""
    targets: Events | None
    """The held-out events, when the batch is for evaluation."""

    def __len__(self) -> int:
        return len(self.sample_id)

    @property
    def step_key(self) -> int:
        """One number for (epoch, step), the same on all ranks."""
        return self.epoch << 32 | self.step

    def to(self, device: torch.device) -> "Batch":
        """The same on another device."""
        if self.sample_id.device == device:
            return self
        return self.with_groups({name: events.to(device) for name, events in self.groups().items()})

    def split(self, count: int) -> list["Batch"]:
        """Cut into so many batches of about equally many samples, some of them maybe empty."""
        if count == 1:
            return [self]
        groups, cuts = self.groups(), [len(self) * i // count for i in range(count + 1)]
        parts = [{name: e.slice(*ends) for name, e in groups.items()} for ends in itertools.pairwise(cuts)]
        return [self.with_groups(part) for part in parts]

    def exclude(self, sample_ids: Collection[int]) -> "Batch":
        """All samples but some, wherever they are."""
        if not sample_ids:
            return self
        kept = ~torch.isin(self.sample_id, torch.tensor(sorted(sample_ids), dtype=torch.int64))
        samples = kept.nonzero()[:, 0]
        return self if kept.all() else self.with_groups({n: e.select(samples) for n, e in self.groups().items()})

    def groups(self) -> dict[str, Events]:
        """Its features, as groups that share their lengths: one value per sample, per event, and so on."""
        alone = Events(torch.arange(len(self) + 1), {"": self.sample_id, **self.scalars})
        several = {"history": self.history, "candidates": self.candidates, "targets": self.targets}
        return {"sample": alone} | {name: events for name, events in several.items() if events is not None}

    def with_groups(self, groups: Mapping[str, Events]) -> "Batch":
        """A batch of the same step with other samples."""
        return Batch.from_groups(self.epoch, self.step, groups)

    @staticmethod
    def from_groups(epoch: int, step: int, groups: Mapping[str, Events]) -> "Batch":
        """A batch with these samples, given as `groups` gives them."""
        scalars, others = dict(groups["sample"].features), (groups.get("candidates"), groups.get("targets"))
        return Batch(epoch, step, scalars.pop(""), scalars, groups["history"], *others)


def build_batch(pieces: Sequence[Window], *, epoch: int, step: int) -> Batch:
    """Join what a step takes from one window or, where windows meet, from several. One piece is not copied."""
    groups = {name: _events([piece.groups[name] for piece in pieces]) for name in pieces[0].groups}
    return Batch.from_groups(epoch, step, groups)


def _events(pieces: Sequence[PackedFeatures]) -> Events:
    lengths = np.concatenate([np.zeros(1, dtype=np.int64), *(np.diff(p.offsets) for p in pieces)])
    names = pieces[0].features
    return Events(torch.from_numpy(np.cumsum(lengths)), {n: _tensor([p.features[n] for p in pieces]) for n in names})


def _tensor(pieces: Sequence[NDArray[Any]]) -> torch.Tensor:
    return torch.from_dlpack(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
