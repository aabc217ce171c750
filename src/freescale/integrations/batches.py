"""Batches of any trainer as the exchange wants them, and back: mappings and dataclasses of tensors, nested at will.

A tensor has a row per sample. Rows of a padded one, which hold their events first, are cut to the length of their
sample and padded again to the longest of those that come together. `Events` are jagged already. Single numbers and
words are not of samples, and stay. Anything else is refused: it would stay behind when its samples move.
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
_SINGLE = (bool, int, float, str)
LENGTH, SAMPLE = "/length", "/sample"
"""Groups of every batch beside its `Events`: what lengths are of, and one row per sample."""


class Form:
    """How the batches of a loader are built. `padded`: names of padded tensors, and what they are padded with."""

    def __init__(self, padded: Mapping[str, float]) -> None:
        self._padded = padded

    def apart(self, batch: Any, lengths: Tensor) -> dict[str, Events]:
        """A batch as groups of features that share their lengths."""
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        groups = {LENGTH: Events(offsets, {}), SAMPLE: Events(torch.arange(len(lengths) + 1), {})}

        def sort(path: str, leaf: Leaf) -> Leaf:
            _require_rows(path, leaf.offsets[1:] if isinstance(leaf, Events) else leaf, len(lengths))
            if isinstance(leaf, Events):
                groups[path] = leaf
            elif path in self._padded:
                groups[LENGTH].features[path] = _cut(path, leaf, lengths, self._padded[path])
            else:
                groups[SAMPLE].features[path] = leaf
            return leaf

        mapped(batch, sort)
        if missing := [name for name in self._padded if name not in groups[LENGTH].features]:
            what = f"padded names '{missing[0]}', which the batch does not have"
            raise DataError(what, remedy="name tensors by their path")
        return groups

    def joined(self, like: B, groups: Mapping[str, Events]) -> B:
        """The other way round."""

        def find(path: str, leaf: Leaf) -> Leaf:
            if isinstance(leaf, Events):
                return groups[path]
            padded = path in self._padded
            found = _padded_again(groups[LENGTH], path, self._padded[path]) if padded else groups[SAMPLE][path]
            return found.pin_memory() if leaf.is_pinned() else found

        return mapped(like, find)


def without_samples(batch: B) -> B:
    """A batch of the same form that holds nothing."""
    return mapped(batch, lambda _, leaf: leaf.slice(0, 0) if isinstance(leaf, Events) else leaf[:0])


def described(groups: Mapping[str, Events]) -> str:
    """What the batches of all ranks must have in common."""
    found = {f"{group}.{name}": x for group, events in groups.items() for name, x in events.features.items()}
    kinds = {name: f"{str(x.dtype).removeprefix('torch.')}{list(x.shape[1:]) or ''}" for name, x in found.items()}
    return ", ".join(f"{name}: {kind}" for name, kind in kinds.items())


def mapped(value: B, change: Callable[[str, Leaf], Leaf], path: str = "") -> B:
    """The same with other tensors. Each is known by its path, such as `features.item`."""
    inside = f"{path}." if path else ""
    if isinstance(value, Leaf):
        return change(path, value)  # type: ignore[return-value]
    if isinstance(value, Mapping):
        return {name: mapped(one, change, f"{inside}{name}") for name, one in value.items()}  # type: ignore[return-value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        changed = {name: mapped(getattr(value, name), change, f"{inside}{name}") for name in names}
        return dataclasses.replace(value, **changed)
    if isinstance(value, (tuple, list)) and not any(isinstance(one, _SINGLE) for one in value):
        parts = [mapped(one, change, f"{inside}{place}") for place, one in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)  # type: ignore[return-value]
    if value is None or isinstance(value, _SINGLE):
        return value
    what = f"'{path}' of a batch is of type {type(value).__name__}, and would stay behind when samples move"
    raise DataError(what, remedy="give what belongs to samples as tensors with a row per sample, or as Events")


def scaled(batch: B, scale: float) -> B:
    """A batch that knows its loss scale."""
    found = torch.tensor(scale, dtype=torch.float64)  # a tensor, so that it moves to a device with the others
    if isinstance(batch, Mapping):
        return {**batch, "loss_scale": found}  # type: ignore[return-value]
    if dataclasses.is_dataclass(batch) and not hasattr(type(batch), "__slots__"):
        object.__setattr__(batch, "loss_scale", found)
        return batch
    remedy = "let the loader's collate_fn give a dict or a dataclass of tensors, a row per sample"
    raise DataError(f"a batch of type {type(batch).__name__} cannot carry its loss scale", remedy=remedy)


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


def _require_rows(path: str, values: Tensor, samples: int) -> None:
    if values.device.type != "cpu":
        what = f"'{path}' of a batch is on {values.device}, but samples move between CPUs"
        raise DataError(what, remedy="balance batches before they are moved to a device")
    if not values.dim() or len(values) != samples:
        what = f"'{path}' of a batch of {samples} samples has the shape {list(values.shape)}"
        remedy = "tensors of a batch have a row per sample; give what is no sample's as a number, or as Events"
        raise DataError(what, remedy=remedy)


def _cut(path: str, values: Tensor, lengths: Tensor, padding: float) -> Tensor:
    """What a padded tensor holds, without its padding."""
    width = values.shape[1] if values.dim() > 1 else 0
    longest = int(lengths.max()) if len(lengths) else 0
    if longest > width:
        what = f"'{path}' is padded to {width}, but a sample has the length {longest}"
        raise DataError(what, remedy="let `length` give how many entries of a row are no padding")
    held = torch.arange(width) < lengths[:, None]
    if not bool((values[~held] == padding).all()):
        what = f"'{path}' holds something else than its padding of {padding} behind the end of a sample"
        remedy = "rows must hold their events first and the padding that `padded` names behind them"
        raise DataError(what, remedy=remedy)
    return values[held]


def _padded_again(events: Events, path: str, value: float) -> Tensor:
    lengths, values = events.lengths, events[path]
    longest = int(lengths.max()) if len(lengths) else 0
    rows = values.new_full((len(lengths), longest, *values.shape[1:]), value)
    rows[torch.arange(longest) < lengths[:, None]] = values
    return rows
