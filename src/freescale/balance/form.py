"""Batches of any trainer as the exchange wants them, and back: mappings and dataclasses of tensors, nested at will.

A tensor has a row per sample. Rows of a padded one are cut to the length of their sample, and padded again to the
longest of those that come together. `Events` are jagged already. What is no tensor is not of samples, and stays.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from freescale.data.batch import Events
from freescale.errors import DataError

B = TypeVar("B")
Leaf = Tensor | Events
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
            if isinstance(leaf, Events):
                groups[path] = leaf
            elif path in self._padded:
                groups[LENGTH].features[path] = leaf[_held(path, leaf, lengths)]
            else:
                groups[SAMPLE].features[path] = _of_samples(path, leaf, len(lengths))
            return leaf

        mapped(batch, sort)
        _require_known(self._padded, groups[LENGTH].features)
        return groups

    def joined(self, like: B, groups: Mapping[str, Events]) -> B:
        """The other way round."""

        def find(path: str, leaf: Leaf) -> Leaf:
            if isinstance(leaf, Events):
                return groups[path]
            if path in self._padded:
                return _padded_again(groups[LENGTH], path, self._padded[path])
            return groups[SAMPLE][path]

        return mapped(like, find)


def without_samples(batch: B) -> B:
    """A batch of the same form that holds nothing."""
    return mapped(batch, lambda _, leaf: leaf.between(0, 0) if isinstance(leaf, Events) else leaf[:0])


def described(groups: Mapping[str, Events]) -> str:
    """What the batches of all ranks must have in common."""
    return ", ".join(
        f"{group}.{name}: {str(values.dtype).removeprefix('torch.')}{list(values.shape[1:]) or ''}"
        for group, events in groups.items()
        for name, values in events.features.items()
    )


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
    if isinstance(value, (tuple, list)):
        parts = [mapped(one, change, f"{inside}{place}") for place, one in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)  # type: ignore[return-value]
    return value


def scaled(batch: B, scale: float) -> B:
    """A batch that knows its loss scale."""
    if isinstance(batch, Mapping):
        return {**batch, "loss_scale": scale}  # type: ignore[return-value]
    if dataclasses.is_dataclass(batch) and not hasattr(type(batch), "__slots__"):
        object.__setattr__(batch, "loss_scale", scale)
        return batch
    raise DataError(
        f"a batch of type {type(batch).__name__} cannot carry its loss scale",
        remedy="let the loader's collate_fn give a dict or a dataclass of tensors, a row per sample",
    )


def _of_samples(path: str, values: Tensor, samples: int) -> Tensor:
    if not values.dim() or len(values) != samples:
        raise DataError(
            f"'{path}' of a batch of {samples} samples has the shape {list(values.shape)}",
            remedy="tensors of a batch have a row per sample; give what is no sample's as a number, or as Events",
        )
    return values


def _held(path: str, values: Tensor, lengths: Tensor) -> Tensor:
    """Where a padded tensor holds something."""
    _of_samples(path, values, len(lengths))
    width = values.shape[1] if values.dim() > 1 else 0
    longest = int(lengths.max()) if len(lengths) else 0
    if longest > width:
        raise DataError(
            f"'{path}' is padded to {width}, but a sample has the length {longest}",
            remedy="let `length` give how many entries of a row are no padding",
        )
    return torch.arange(width) < lengths[:, None]


def _padded_again(events: Events, path: str, value: float) -> Tensor:
    lengths, values = events.lengths, events[path]
    longest = int(lengths.max()) if len(lengths) else 0
    rows = values.new_full((len(lengths), longest, *values.shape[1:]), value)
    rows[torch.arange(longest) < lengths[:, None]] = values
    return rows


def _require_known(padded: Mapping[str, float], found: Mapping[str, Tensor]) -> None:
    for name in padded:
        if name not in found:
            raise DataError(
                f"padded names '{name}', which the batch does not have", remedy="name tensors by their path"
            )
