"""Jagged batches: split, truncate and pack samples with numpy once per window, then slice a torch batch per step.

Slices share memory with the window, so a step copies nothing unless it spans two windows.
"""

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
Values = NDArray[Any]


class Split(NamedTuple):
    """Where each history is cut into training events and held-out events.

    `last` holds out the last event of each user, `time` all events from a timestamp on. Training and evaluation both
    read the events before the cut; evaluation also reads the events after it as targets.
    """

    kind: Literal["none", "last", "time"] = "none"
    time: int = 0
    part: Literal["train", "test"] = "train"
    """test: also return the held-out events."""

    def cut(self, begin: Ints, end: Ints, timestamps: NDArray[Any]) -> Ints:
        """Start of the held-out part of each row; row i is [begin, end) of the packed timestamps, in time order."""
        if self.kind == "last":
            return np.maximum(begin, end - 1)
        if self.kind == "time":
            before = np.concatenate([[0], np.cumsum(timestamps < self.time)])
            return begin + before[end] - before[begin]
        return end


class PackedFeatures(NamedTuple):
    """Jagged features as numpy arrays: sample i owns values offsets[i] to offsets[i + 1] of each feature."""

    offsets: Ints
    features: dict[str, Values]

    def slice(self, begin: int, end: int) -> "PackedFeatures":
        """Samples [begin, end), without copying their values."""
        low, high = int(self.offsets[begin]), int(self.offsets[end])
        return PackedFeatures(self.offsets[begin : end + 1] - low, {n: v[low:high] for n, v in self.features.items()})


class Window(NamedTuple):
    """The samples of one window on one rank, in epoch order."""

    position: Ints
    groups: dict[str, PackedFeatures]
    """Features that share offsets, keyed as in `Batch.groups`."""

    def slice(self, begin: int, end: int) -> "Window":
        """Samples at epoch positions [begin, end)."""
        low, high = np.searchsorted(self.position, [begin, end]).tolist()
        return Window(self.position[low:high], {name: packed.slice(low, high) for name, packed in self.groups.items()})


def pack_window(
    share: WindowShare,
    groups: Sequence[RowGroup],
    kinds: dict[str, ColumnType],
    *,
    split: Split,
    max_history: int,
    vocabulary: ItemVocabulary,
) -> tuple[Window, int]:
    """Pack a rank's share of a window. Also returns the number of events whose item is outside the vocabulary."""
    usable = _concat([group.usable for group in groups], bool)[share.source]
    packer = _Packer(groups, kinds, vocabulary, share.source[usable])
    event_columns = [name for name, kind in kinds.items() if kind.is_list and not is_candidate(name)]
    candidate_columns = [name for name, kind in kinds.items() if kind.is_list and is_candidate(name)]
    bounds = [group.columns["item_id"].bounds for group in groups]
    cuts = [split.cut(b, e, g.columns["timestamp"].values) for g, (b, e) in zip(groups, bounds, strict=True)]
    visible = [(np.maximum(begin, cut - max_history), cut) for (begin, _), cut in zip(bounds, cuts, strict=True)]
    held_out = [(cut, end) for (_, end), cut in zip(bounds, cuts, strict=True)]
    scalars = {name: packer.pick(name) for name, kind in kinds.items() if not kind.is_list}
    scalar_group = PackedFeatures(np.arange(usable.sum() + 1), {"": share.sample_id[usable], **scalars})
    packed = {"sample": scalar_group, "history": packer.pack(event_columns, visible)}
    if candidate_columns:
        packed["candidates"] = packer.pack(candidate_columns, [group.columns[CANDIDATE].bounds for group in groups])
    if split.part == "test":
        packed["targets"] = packer.pack(event_columns, held_out)
    return Window(share.position[usable], packed), packer.unknown


class _Packer:
    """Copies values of several row groups into epoch order and maps unknown items to shared rows."""

    def __init__(
        self, groups: Sequence[RowGroup], kinds: Mapping[str, ColumnType], vocabulary: ItemVocabulary, rows: Ints
    ) -> None:
        self._groups, self._kinds, self._vocabulary, self._rows = groups, kinds, vocabulary, rows
        self.unknown = 0
        sizes = [len(group.usable) for group in groups]
        place = np.full(sum(sizes), -1, dtype=np.int64)  # of each row in epoch order; -1: not usable
        place[rows] = np.arange(len(rows))
        self._places = np.split(place, list(accumulate(sizes))[:-1]) if groups else []

    def pick(self, name: str) -> Values:
        """One scalar per row."""
        values = [group.columns[name].values for group in self._groups]
        return _concat(values, self._kinds[name].dtype)[self._rows]

    def pack(self, names: Sequence[str], bounds: Sequence[tuple[Ints, Ints]]) -> PackedFeatures:
        """The values [begin, end) of each row; `bounds` has one entry per group."""
        lengths = _concat([end - begin for begin, end in bounds])[self._rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        features = {name: np.empty(offsets[-1], self._kinds[name].dtype) for name in names}
        for group, place, (begin, end) in zip(self._groups, self._places, bounds, strict=True):
            kept = place >= 0
            source = _selector(begin[kept], end[kept])
            target = _selector(offsets[place[kept]], offsets[place[kept] + 1])
            for name in names:
                values = group.columns[name].values[source]
                if len(self._groups) == 1 and isinstance(target, slice):
                    features[name] = values  # already in order: no copy
                else:
                    features[name][target] = values
        for name in {"item_id", CANDIDATE} & features.keys():
            features[name], unknown = self._vocabulary.map_unknown(features[name])
            self.unknown += unknown
        return PackedFeatures(offsets, features)


def _concat(pieces: Sequence[Values], dtype: DTypeLike = np.int64) -> NDArray[Any]:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype)


def _selector(begin: Ints, end: Ints) -> slice | Ints:
    """Values of these rows: a slice if the rows are contiguous, else indices."""
    if np.array_equal(begin[1:], end[:-1]):
        return slice(int(begin[0]), int(end[-1])) if len(begin) else slice(0, 0)
    return concat_ranges(begin, end - begin)


@dataclass(frozen=True)
class Events:
    """Jagged features as tensors: sample i owns values offsets[i] to offsets[i + 1] of each feature."""

    offsets: torch.Tensor
    features: dict[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.features[name]

    @property
    def lengths(self) -> torch.Tensor:
        """Number of events of each sample."""
        return self.offsets.diff()

    def to(self, device: torch.device) -> "Events":
        """Copy to a device."""
        features = {name: values.to(device, non_blocking=True) for name, values in self.features.items()}
        return Events(self.offsets.to(device, non_blocking=True), features)

    def row_indices(self, samples: torch.Tensor) -> torch.Tensor:
        """Indices of the values of these samples."""
        lengths = self.lengths[samples]
        before = lengths.cumsum(0) - lengths
        return (self.offsets[samples] - before).repeat_interleave(lengths) + torch.arange(int(lengths.sum()))

    def select(self, samples: torch.Tensor) -> "Events":
        """These samples, copied."""
        rows, lengths = self.row_indices(samples), self.lengths[samples]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return Events(offsets, {name: values[rows] for name, values in self.features.items()})

    def slice(self, begin: int, end: int) -> "Events":
        """Samples [begin, end), as views."""
        low, high = int(self.offsets[begin]), int(self.offsets[end])
        return Events(self.offsets[begin : end + 1] - low, {n: v[low:high] for n, v in self.features.items()})


@dataclass(frozen=True)
class Batch:
    """One rank's part of a step's global batch. It may be empty."""

    epoch: int
    step: int
    sample_id: torch.Tensor
    """Stable 64-bit id of each sample: its row in the log."""
    scalars: dict[str, torch.Tensor]
    """user_id and other features with one value per sample."""
    history: Events
    """item_id, timestamp and other features per event, oldest first."""
    candidates: Events | None
    """candidate_id and labels, for ranking."""
    targets: Events | None
    """Held-out events, for evaluation."""

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.sample_id)

    @property
    def step_key(self) -> int:
        """One integer for (epoch, step), equal on all ranks; it keys random draws."""
        return self.epoch << 32 | self.step

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device."""
        if self.sample_id.device == device:
            return self
        return self.with_groups({name: events.to(device) for name, events in self.groups().items()})

    def select(self, samples: torch.Tensor) -> "Batch":
        """These samples, copied. The batch must be on the CPU."""
        return self.with_groups({name: events.select(samples) for name, events in self.groups().items()})

    def exclude(self, sample_ids: Collection[int]) -> "Batch":
        """Drop the samples with these ids."""
        if not sample_ids:
            return self
        kept = ~torch.isin(self.sample_id, torch.tensor(sorted(sample_ids), dtype=torch.int64))
        return self if kept.all() else self.select(kept.nonzero()[:, 0])

    def groups(self) -> dict[str, Events]:
        """Features grouped by shared offsets: per sample, per history event, per candidate, per target."""
        scalars = Events(torch.arange(len(self) + 1), {"": self.sample_id, **self.scalars})
        jagged = {"history": self.history, "candidates": self.candidates, "targets": self.targets}
        return {"sample": scalars} | {name: events for name, events in jagged.items() if events is not None}

    def with_groups(self, groups: Mapping[str, Events]) -> "Batch":
        """A batch of the same step with these feature groups."""
        return Batch.from_groups(self.epoch, self.step, groups)

    @staticmethod
    def from_groups(epoch: int, step: int, groups: Mapping[str, Events]) -> "Batch":
        """Build a batch from feature groups, the inverse of `groups`."""
        scalars, others = dict(groups["sample"].features), (groups.get("candidates"), groups.get("targets"))
        return Batch(epoch, step, scalars.pop(""), scalars, groups["history"], *others)


def build_batch(pieces: Sequence[Window], *, epoch: int, step: int) -> Batch:
    """Build a batch from slices of one or more windows. A single slice is not copied."""
    groups = {name: _events([piece.groups[name] for piece in pieces]) for name in pieces[0].groups}
    return Batch.from_groups(epoch, step, groups)


def _events(pieces: Sequence[PackedFeatures]) -> Events:
    lengths = np.concatenate([np.zeros(1, dtype=np.int64), *(np.diff(p.offsets) for p in pieces)])
    names = pieces[0].features
    return Events(torch.from_numpy(np.cumsum(lengths)), {n: _tensor([p.features[n] for p in pieces]) for n in names})


def _tensor(pieces: Sequence[NDArray[Any]]) -> torch.Tensor:
    return torch.from_dlpack(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
