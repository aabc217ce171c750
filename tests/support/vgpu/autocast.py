"""Autocast of the virtual GPU, as CUDA's: products to 16 bits, sums and exponentials to fp32."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LOWERED = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "addmv", "mv", "einsum")
_KEPT = ("layer_norm", "softmax.int", "log_softmax.int", "logsumexp", "norm.Scalar", "exp", "log", "sum")
_KEPT += ("pow.Tensor_Scalar", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits")
_library = torch.library.Library("_", "IMPL")
_aten = torch.library.Library("aten", "IMPL")


def register(device: str) -> None:
    """Register the casts of a device type."""
    _library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, lowered in ((_LOWERED, True), (_KEPT, False)):
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            _aten.impl(op, _casting(op, device, lowered=lowered), "AutocastPrivateUse1")


def _casting(op: Any, device: str, *, lowered: bool) -> Callable[..., Any]:
    def cast(value: Any) -> Any:
        if isinstance(value, list):
            return [cast(entry) for entry in value]
        is_cast = isinstance(value, Tensor) and value.device.type == device and value.is_floating_point()
        if is_cast and value.dtype != torch.float64:
            return value.to(torch.get_autocast_dtype(device) if lowered else torch.float32)
        return value

    def kernel(*args: Any, **options: Any) -> Any:
        excluded = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(*map(cast, args), **options)

    return kernel
