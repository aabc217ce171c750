"""Jagged batches: split, truncate and pack samples with numpy once per window, then slice a torch batch per step.

Slices share memory with the window, so a step copies nothing unless it spans two windows.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from freescale.config import TaskConfig
from freescale.data.columns import CANDIDATE, ColumnType
from freescale.data.device_copy import to_device
from freescale.data.feature_schema import ANCHOR, FeatureSchema
from freescale.data.order import WindowShare, concat_ranges
from freescale.data.partitions import IS_TARGET
from freescale.data.validation import RowGroup
from freescale.data.vocabulary import ItemVocabulary
from freescale.visibility import Visibility

Ints = NDArray[np.int64]
Values = NDArray[Any]
_SOURCE = "_source"  # temporary feature of anchors: their events among those of the window


class Split(NamedTuple):
    """Where each history is cut into training events and held-out events.

    `last` holds out the last event of each user, `time` all from a timestamp on, `targets` all from the first one that
    a partition adds, but not the first of a user. Evaluation reads the events after the cut as targets.
    """

    kind: Literal["none", "last", "time", "targets"] = "none"
    time: int = 0
    part: Literal["train", "test"] = "train"
    """test: also return the held-out events."""

    def cut(self, group: RowGroup) -> Ints:
        """Start of the held-out part of each row."""
        begin, end = group.columns["item_id"].bounds
        if self.kind == "last":
            return np.maximum(begin, end - 1)
        if self.kind == "targets":
            targets = np.append(np.flatnonzero(group.columns[IS_TARGET].values), end.max(initial=0))
            return np.minimum(np.maximum(targets[np.searchsorted(targets, begin)], begin + 1), end)
        if self.kind == "time":
            before = np.concatenate([[0], np.cumsum(group.columns["timestamp"].values < self.time)])
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
    vocabularies: Mapping[str, ItemVocabulary],
    schema: FeatureSchema = FeatureSchema(),  # noqa: B008  immutable
) -> tuple[Window, Counter[str]]:
    """Pack a rank's share of a window. Also returns how many ids of each column are outside its vocabulary."""
    usable = _concat([group.usable for group in groups], bool)[share.source]
    packer = _Packer(groups, kinds, vocabularies, share.source[usable])
    bounds, cuts = [group.columns["item_id"].bounds for group in groups], [split.cut(group) for group in groups]
    held_out = [(cut, end) for (_, end), cut in zip(bounds, cuts, strict=True)]
    ends = [end for _, end in bounds] if schema.anchored and split.part == "test" else cuts
    visible = [(np.maximum(begin, end - max_history), end) for (begin, _), end in zip(bounds, ends, strict=True)]
    packed = packer.pack_samples(share.sample_id[usable]) | packer.pack("history", visible)
    if any(kind.group == "candidates" for kind in kinds.values()):
        packed |= packer.pack("candidates", [group.columns[CANDIDATE].bounds for group in groups])
    if schema.anchored:
        first = packer.counts([np.maximum(c - b, 0) for (b, _), c in zip(visible, cuts, strict=True)])
        tested = split.part == "test" and split.kind != "none"
        packed["candidates"] = _anchors(packed["history"], schema.task, first if tested else None)
    elif split.part == "test":
        packed |= packer.pack("history", held_out, name="targets")
    return Window(share.position[usable], _copy_columns(packed, schema)), packer.unknown


class _Packer:
    """Copies values of several row groups into epoch order and maps unknown ids to shared rows."""

    def __init__(
        self,
        groups: Sequence[RowGroup],
        kinds: Mapping[str, ColumnType],
        vocabularies: Mapping[str, ItemVocabulary],
        rows: Ints,
    ) -> None:
        self._groups, self._kinds, self._vocabularies, self._rows = groups, kinds, vocabularies, rows
        self.unknown: Counter[str] = Counter()
        sizes = [len(group.usable) for group in groups]
        place = np.full(sum(sizes), -1, dtype=np.int64)  # of each row in epoch order; -1: not usable
        place[rows] = np.arange(len(rows))
        self._places = np.split(place, list(accumulate(sizes))[:-1]) if groups else []

    def counts(self, per_group: Sequence[Ints]) -> Ints:
        """One integer per row of each group, in epoch order."""
        return _concat(per_group)[self._rows]

    def pack_samples(self, sample_id: Ints) -> dict[str, PackedFeatures]:
        """The sample ids and the columns with one value per row; sets per row have a group of their own."""
        features, sets = {"": sample_id}, {}
        for name, kind in self._kinds.items():
            if kind.group != "sample":
                continue
            columns = [group.columns[name] for group in self._groups]
            if kind.is_set:
                values = self._pack([name], [column.bounds for column in columns])
                sets[set_group("sample", name)] = PackedFeatures(values.offsets, {"": values.features[name]})
                features[name] = np.diff(values.offsets)
            else:
                features[name] = self._known(name, _concat([c.values for c in columns], kind.dtype)[self._rows])
        return {"sample": PackedFeatures(np.arange(len(sample_id) + 1), features)} | sets

    def pack(self, group: str, bounds: Sequence[tuple[Ints, Ints]], *, name: str = "") -> dict[str, PackedFeatures]:
        """The entries [begin, end) of each row of a group; `bounds` has one entry per row group.

        `name`: of the packed group. The ids of a set are a group of their own, their number per entry is the feature.
        """
        target = name or group
        of_group = [column for column, kind in self._kinds.items() if kind.group == group]
        sets = [column for column in of_group if self._kinds[column].is_set]
        packed = self._pack([column for column in of_group if column not in sets], bounds)
        result = {target: packed}
        for column in sets:
            inner = [rows.columns[column].inner for rows in self._groups]
            ids = self._pack([column], [(of[b], of[e]) for of, (b, e) in zip(inner, bounds, strict=True)])  # type: ignore[index]
            result[set_group(target, column)] = PackedFeatures(ids.offsets, {"": ids.features[column]})
            packed.features[column] = self._set_sizes(column, bounds, packed.offsets)
        return result

    def _set_sizes(self, name: str, bounds: Sequence[tuple[Ints, Ints]], offsets: Ints) -> Ints:
        """Number of ids of each packed entry of a set column."""
        sizes = np.empty(offsets[-1], np.int64)
        for group, place, (begin, end) in zip(self._groups, self._places, bounds, strict=True):
            kept, inner = place >= 0, group.columns[name].inner
            assert inner is not None
            target = _selector(offsets[place[kept]], offsets[place[kept] + 1])
            sizes[target] = np.diff(inner)[_selector(begin[kept], end[kept])]
        return sizes

    def _pack(self, names: Sequence[str], bounds: Sequence[tuple[Ints, Ints]]) -> PackedFeatures:
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
        return PackedFeatures(offsets, {name: self._known(name, values) for name, values in features.items()})

    def _known(self, name: str, values: Values) -> Values:
        """Map ids outside the vocabulary of their column to its shared rows."""
        if name not in self._vocabularies:
            return values
        values, unknown = self._vocabularies[name].map_unknown(values)
        self.unknown[name] += unknown
        return values


def set_group(group: str, name: str) -> str:
    """Name of the group that holds the ids of a set feature of another group."""
    return f"{group}/{name}"


def _anchors(history: PackedFeatures, task: TaskConfig, first: Ints | None) -> PackedFeatures:
    """Return the events of the history that are targets: those from `first` on, or those that the task names."""
    lengths = np.diff(history.offsets)
    event = np.arange(history.offsets[-1]) - np.repeat(history.offsets[:-1], lengths)
    chosen = ~np.isnan(np.stack([history.features[label] for label in task.labels])).all(0)
    if first is not None:
        chosen &= event >= np.repeat(first, lengths)
    elif task.anchors == "every":
        chosen &= event % task.anchor_step == task.anchor_step - 1
    elif task.anchors == "after":
        chosen &= history.features["timestamp"] >= task.anchor_time
    before = np.concatenate([[0], np.cumsum(chosen)])
    index = np.flatnonzero(chosen)
    return PackedFeatures(before[history.offsets], {ANCHOR: event[index], _SOURCE: index})


def _copy_columns(packed: dict[str, PackedFeatures], schema: FeatureSchema) -> dict[str, PackedFeatures]:
    """Copy to the candidates what they take from events or rows, and drop what nothing else reads."""
    candidates = packed.get("candidates")
    if candidates is None:
        return packed
    for column, (group, source) in schema.copied().items():
        if group == "history":
            index = candidates.features[_SOURCE]
        else:
            index = np.repeat(np.arange(len(candidates.offsets) - 1), np.diff(candidates.offsets))
        candidates.features[column] = packed[group].features[source][index]
        if (ids := packed.get(set_group(group, source))) is not None:
            packed[set_group("candidates", column)] = _take_sets(packed[group], source, ids, index, candidates.offsets)
    candidates.features.pop(_SOURCE, None)
    for column in schema.only_copied():
        packed["history"].features.pop(column, None)
        packed.pop(set_group("history", column), None)
    return packed


def _take_sets(entries: PackedFeatures, name: str, ids: PackedFeatures, index: Ints, offsets: Ints) -> PackedFeatures:
    """The ids of the sets at these entries, with offsets per sample; `offsets`: of the chosen entries."""
    sizes = entries.features[name]
    end = np.cumsum(sizes)
    taken = concat_ranges((end - sizes)[index], sizes[index])
    total = np.concatenate([[0], np.cumsum(sizes[index])])
    return PackedFeatures(total[offsets], {"": ids.features[""][taken]})


def _concat(pieces: Sequence[Values], dtype: DTypeLike = np.int64) -> NDArray[Any]:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype)


def _selector(begin: Ints, end: Ints) -> slice | Ints:
    """Values of these rows: a slice if the rows are contiguous, else indices."""
    if np.array_equal(begin[1:], end[:-1]):
        return slice(int(begin[0]), int(end[-1])) if len(begin) else slice(0, 0)
    return concat_ranges(begin, end - begin)


def index_ranges(first: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Concatenate the ranges [first, first + count)."""
    total = int(count.sum())
    shift = (first - (count.cumsum(0) - count)).repeat_interleave(count, output_size=total)
    return torch.arange(total, device=first.device) + shift


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

    def row_indices(self, samples: torch.Tensor) -> torch.Tensor:
        """Indices of the values of these samples."""
        return index_ranges(self.offsets[samples], self.lengths[samples])

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
    """candidate_id, labels and other features per candidate, for ranking. `candidate_anchor`: events that it sees."""
    targets: Events | None
    """Held-out events, for evaluation."""
    sets: dict[str, Events] = field(default_factory=dict)
    """Ids of set features, per sample, by `set_group`; the feature itself is the number of ids of each entry."""
    host: "Batch | None" = None
    """The batch on the host that this one was copied from: reading it does not wait for the device."""

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.sample_id)

    def visible_events(self, visibility: Visibility | None = None) -> torch.Tensor | None:
        """Number of events, or of tokens by a rule, that all candidates of a sample see; None: the whole history."""
        if self.candidates is None or ANCHOR not in self.candidates.features:
            return None
        seen = self.candidates[ANCHOR] if visibility is None else visibility.seen(self.candidates[ANCHOR])
        return torch.cat([torch.zeros(1, dtype=torch.int64), seen.cumsum(0)])[self.candidates.offsets].diff()

    @property
    def step_key(self) -> int:
        """One integer for (epoch, step), equal on all ranks; it keys random draws."""
        return self.epoch << 32 | self.step

    @property
    def latest_time(self) -> int:
        """Time of its latest event; 0 without events."""
        times = self.history["timestamp"]
        return int(times.max()) if len(times) else 0

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.sample_id.device

    @property
    def on_host(self) -> "Batch":
        """The same batch on the host."""
        return self if self.host is None else self.host

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device by one transfer. The host does not wait for it."""
        if self.device == device:
            return self
        return replace(self.with_groups(to_device(self.groups(), device)), host=self)

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
        jagged = {"history": self.history, "candidates": self.candidates, "targets": self.targets, **self.sets}
        return {"sample": scalars} | {name: events for name, events in jagged.items() if events is not None}

    def with_groups(self, groups: Mapping[str, Events]) -> "Batch":
        """A batch of the same step with these feature groups."""
        return Batch.from_groups(self.epoch, self.step, groups)

    @staticmethod
    def from_groups(epoch: int, step: int, groups: Mapping[str, Events]) -> "Batch":
        """Build a batch from feature groups, the inverse of `groups`."""
        scalars, others = dict(groups["sample"].features), (groups.get("candidates"), groups.get("targets"))
        sets = {name: events for name, events in groups.items() if "/" in name}
        return Batch(epoch, step, scalars.pop(""), scalars, groups["history"], *others, sets)


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
