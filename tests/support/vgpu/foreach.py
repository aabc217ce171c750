"""Operators on lists of tensors: one launch for all, as on CUDA. Torch's default would launch one per tensor."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_NAMES = ("norm.Scalar", "add_.Scalar", "add_.List", "sub_.List", "mul_.Scalar", "mul_.Tensor", "zero_")
_library = torch.library.Library("aten", "IMPL")


def register(run_operator: Callable[..., Any]) -> None:
    """Register the operators that FreeScale and torch's optimizers use."""
    for name in _NAMES:
        packet, _, overload = f"_foreach_{name}".partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        _library.impl(op, partial(run_operator, op), "PrivateUse1")
