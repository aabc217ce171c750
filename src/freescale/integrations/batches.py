"""Converts the batches of other trainers, nested dicts and dataclasses of tensors, to jagged features and back.

A tensor has a row per sample. Padded rows are cut to the length of their sample, and padded again to the longest sample
of the new batch. `Events` are jagged already. Numbers and strings belong to no sample and stay as they are. Anything
else is refused, because it could not move with its samples.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from freescale.data.batch import Events
from freescale.errors import DataError

B = TypeVar("B")
Leaf = Tensor | Events
_SCALARS = (bool, int, float, str)
LENGTHS, SAMPLES = "/length", "/sample"
"""Groups of every batch beside its `Events`: padded features, and features with one row per sample."""
_LOSS_WEIGHT = "loss_weight"


class BatchFormat:
    """The format of a loader's batches. `pad_values`: padded tensors by name, with their padding."""

    def __init__(self, pad_values: Mapping[str, float]) -> None:
        self._pad_values = pad_values

    def to_jagged(self, batch: Any, lengths: Tensor) -> dict[str, Events]:
        """Return a batch as groups of features with common lengths."""
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        groups = {LENGTHS: Events(offsets, {}), SAMPLES: Events(torch.arange(len(lengths) + 1), {})}

        def collect(path: str, leaf: Leaf) -> Leaf:
            _require_rows(path, leaf.offsets[1:] if isinstance(leaf, Events) else leaf, len(lengths))
            if isinstance(leaf, Events):
                groups[path] = leaf
            elif path in self._pad_values:
                groups[LENGTHS].features[path] = _remove_padding(path, leaf, lengths, self._pad_values[path])
            else:
                groups[SAMPLES].features[path] = leaf
            return leaf

        map_tensors(batch, collect)
        if missing := [name for name in self._pad_values if name not in groups[LENGTHS].features]:
            what = f"pad_values names '{missing[0]}', which the batch does not have"
            raise DataError(what, remedy="name tensors by their path, such as 'features.item'")
        return groups

    def from_jagged(self, like: B, groups: Mapping[str, Events]) -> B:
        """Return a batch like another one, with these features."""

        def restore(path: str, leaf: Leaf) -> Leaf:
            if isinstance(leaf, Events):
                return groups[path]
            padded = path in self._pad_values
            values = _pad(groups[LENGTHS], path, self._pad_values[path]) if padded else groups[SAMPLES][path]
            return values.pin_memory() if leaf.is_pinned() else values

        return map_tensors(like, restore)


def empty_like(batch: B) -> B:
    """Return a batch of the same format without samples."""
    return map_tensors(batch, lambda _, leaf: leaf.slice(0, 0) if isinstance(leaf, Events) else leaf[:0])


def describe_format(groups: Mapping[str, Events]) -> str:
    """Return what the batches of all ranks must have in common: names, types and shapes of features."""
    tensors = {f"{group}.{name}": x for group, events in groups.items() for name, x in events.features.items()}
    kinds = {name: f"{str(x.dtype).removeprefix('torch.')}{list(x.shape[1:]) or ''}" for name, x in tensors.items()}
    return ", ".join(f"{name}: {kind}" for name, kind in kinds.items())


def map_tensors(value: B, change: Callable[[str, Leaf], Leaf], path: str = "") -> B:
    """Return a batch with changed tensors. `change` gets the path of each, such as `features.item`."""
    inside = f"{path}." if path else ""
    if isinstance(value, Leaf):
        _refuse_nested(path, value)
        return change(path, value)  # type: ignore[return-value]
    if isinstance(value, Mapping):
        return {name: map_tensors(item, change, f"{inside}{name}") for name, item in value.items()}  # type: ignore[return-value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        changed = {name: map_tensors(getattr(value, name), change, f"{inside}{name}") for name in names}
        return dataclasses.replace(value, **changed)
    if isinstance(value, (tuple, list)) and not any(isinstance(item, _SCALARS) for item in value):
        parts = [map_tensors(item, change, f"{inside}{index}") for index, item in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)  # type: ignore[return-value]
    if value is None or isinstance(value, _SCALARS):
        return value
    what = f"'{path}' of a batch is of type {type(value).__name__}, which cannot move with its samples"
    raise DataError(what, remedy="use tensors with a row per sample, or Events")


def with_loss_weight(batch: B, weight: float) -> B:
    """Return a batch with its loss weight: another key of a dict, or the field `loss_weight` of a dataclass."""
    require_place_for_loss_weight(batch)
    value = torch.tensor(weight, dtype=torch.float64)  # a tensor, so that it moves to a device with the others
    if isinstance(batch, Mapping):
        return {**batch, _LOSS_WEIGHT: value}  # type: ignore[return-value]
    return dataclasses.replace(batch, **{_LOSS_WEIGHT: value})  # type: ignore[type-var]


def require_place_for_loss_weight(batch: Any) -> None:
    """Refuse a batch that cannot hold its loss weight, or has one already."""
    if isinstance(batch, Mapping):
        if _LOSS_WEIGHT in batch:
            what = f"the batch has a '{_LOSS_WEIGHT}' already, which balancing would overwrite"
            raise DataError(what, remedy="rename the entry in the loader's collate_fn")
    elif not dataclasses.is_dataclass(batch) or _LOSS_WEIGHT not in {f.name for f in dataclasses.fields(batch)}:
        remedy = "let collate_fn return a dict, or a dataclass with a field `loss_weight: Tensor | None = None`"
        raise DataError(f"a batch of type {type(batch).__name__} has no place for its loss weight", remedy=remedy)


def events_from_nested(features: Mapping[str, Tensor]) -> Events:
    """Return nested tensors of the jagged layout as `Events`. All must have the same lengths."""
    if wrong := [name for name, nested in features.items() if nested.layout is not torch.jagged]:
        raise DataError(f"'{wrong[0]}' is no nested tensor of the jagged layout", remedy="use layout=torch.jagged")
    offsets: list[Tensor] = [nested.offsets() for nested in features.values()]  # type: ignore[attr-defined]
    if any(not torch.equal(other, offsets[0]) for other in offsets[1:]):
        remedy = "convert features with different lengths one by one"
        raise DataError(f"the lengths of {', '.join(features)} differ", remedy=remedy)
    return Events(offsets[0], {name: nested.values() for name, nested in features.items()})


def nested_from_events(events: Events) -> dict[str, Tensor]:
    """Return the features of `Events` as nested tensors of the jagged layout, without a copy."""
    offsets = events.offsets  # one tensor for all, so that the results are compatible with each other
    return {name: torch.nested.nested_tensor_from_jagged(x, offsets) for name, x in events.features.items()}


def move_to_device(value: Any, device: torch.device) -> Any:
    """Return a batch on a device: tensors, objects with `to` (TorchRec's Pipelineable), and containers of them."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if callable(getattr(value, "to", None)):
        accepted = inspect.signature(value.to).parameters
        non_blocking = "non_blocking" in accepted or any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        return value.to(device, non_blocking=True) if non_blocking else value.to(device)
    if isinstance(value, Mapping):
        return {name: move_to_device(item, device) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [move_to_device(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        moved = {f.name: move_to_device(getattr(value, f.name), device) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **moved)
    return value


def _refuse_nested(path: str, leaf: Leaf) -> None:
    if isinstance(leaf, Tensor) and leaf.is_nested:
        name = path.rpartition(".")[2] or "item"
        remedy = f"convert it in collate_fn: freescale.integrations.ddp.events_from_nested({{'{name}': tensor}})"
        raise DataError(f"'{path}' of a batch is a nested tensor, which cannot be exchanged", remedy=remedy)


def _require_rows(path: str, values: Tensor, samples: int) -> None:
    if values.device.type != "cpu":
        what = f"'{path}' of a batch is on {values.device}, but samples move between CPUs"
        raise DataError(what, remedy="move batches to a device after balancing")
    if not values.dim() or len(values) != samples:
        what = f"'{path}' of a batch of {samples} samples has the shape {list(values.shape)}"
        remedy = "use tensors with a row per sample, Events for jagged features, and numbers for anything else"
        raise DataError(what, remedy=remedy)


def _remove_padding(path: str, values: Tensor, lengths: Tensor, padding: float) -> Tensor:
    """Return the values of a padded tensor without the padding."""
    width = values.shape[1] if values.dim() > 1 else 0
    longest = int(lengths.max()) if len(lengths) else 0
    if longest > width:
        what = f"'{path}' is padded to {width}, but a sample has the length {longest}"
        remedy = "pad every tensor of pad_values to the length that `lengths` returns, or to one width on all ranks"
        raise DataError(what, remedy=f"{remedy} and leave it out of pad_values")
    valid = torch.arange(width) < lengths[:, None]
    if not bool((values[~valid] == padding).all()):
        what = f"'{path}' has other values than its padding of {padding} after the end of a sample"
        remedy = "pad rows on the right with the value that pad_values names, or to one width on all ranks"
        raise DataError(what, remedy=f"{remedy} and leave it out of pad_values: whole rows move then")
    return values[valid]


def _pad(events: Events, path: str, value: float) -> Tensor:
    lengths, values = events.lengths, events[path]
    longest = int(lengths.max()) if len(lengths) else 0
    rows = values.new_full((len(lengths), longest, *values.shape[1:]), value)
    rows[torch.arange(longest) < lengths[:, None]] = values
    return rows
