"""Copies many tensors to a device at once, through pinned memory: one launch, and the host does not wait."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_ALIGNED = 16
"""Bytes; every dtype can be viewed at a multiple of them."""


def to_device(value: T, device: torch.device) -> T:
    """Copy all tensors of the host in nested dataclasses, tuples, lists and dicts to a device, by one transfer.

    Other values stay as they are, and so do tensors of the device. Cached properties of dataclasses are copied too.
    """
    if device.type == "cpu":
        return value
    found: dict[int, Tensor] = {}
    _map(value, lambda tensor: found.setdefault(id(tensor), tensor))
    on_host = {key: tensor for key, tensor in found.items() if tensor.device.type == "cpu"}
    copies = dict(zip(on_host, _copy_together([*on_host.values()], device), strict=True))
    return _map(value, lambda tensor: copies.get(id(tensor), tensor))


def numbers_to_device(rows: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Copy rows of integers to a device by one transfer."""
    return to_device([torch.tensor(row, dtype=torch.int64) for row in rows], device)


def _copy_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    ends = list(accumulate(-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors))
    begins = [0, *ends[:-1]]
    staged = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8, pin_memory=True)
    for tensor, begin in zip(tensors, begins, strict=True):
        _part(staged, begin, tensor).copy_(tensor)
    copied = staged.to(device, non_blocking=True)
    return [_part(copied, begin, tensor) for tensor, begin in zip(tensors, begins, strict=True)]


def _part(memory: Tensor, begin: int, like: Tensor) -> Tensor:
    """Return the bytes from `begin` on as a tensor with the dtype and shape of another one."""
    return memory[begin : begin + like.nbytes].view(like.dtype).view(like.shape)


def _map(value: Any, function: Any) -> Any:
    """Apply a function to all tensors of a nested value, and return a copy of it with the results."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: _map(entry, function) for name, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(entry, function) for entry in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(entry, function) for entry in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        vars(copied).update({name: _map(entry, function) for name, entry in vars(value).items()})
        return copied
    return value
