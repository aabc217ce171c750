"""Selects Triton kernels or torch operators for what is computed besides attention."""

import importlib.util
from functools import lru_cache

from torch import Tensor

from freescale.log import info_once, warning_once


def uses_kernels(x: Tensor, name: str) -> bool:
    """Return whether Triton kernels compute `name` on the device of a tensor. Logs the choice, except on a CPU."""
    if x.device.type == "cpu":
        return False
    if has_triton():
        info_once(f"{name}: Triton kernels")
        return True
    warning_once(f"{name}: torch operators, because Triton for {x.device.type} is not installed; kernels launch less")
    return False


@lru_cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
