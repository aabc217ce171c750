"""Launches the Triton kernels of HSTU attention: sizes, work lists, and the sums over programs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from freescale.models.attention import kernels
from freescale.models.attention.operands import Gradients, Inputs, like
from freescale.models.attention.work import Dealt, Work, work_of
from freescale.models.sequence import bucket_of_cell

TIME_PADDED = 256
_WIDTHS = (16, 32, 64, 128, 256)
_LAUNCH = {
    **{("forward", False, padded): (4, 1) for padded in _WIDTHS},
    **{("backward_columns", True, padded): (4, 1) for padded in _WIDTHS},
    ("backward_columns", False, 16): (8, 1),
    ("backward_columns", False, 32): (8, 1),
    ("backward_columns", False, 64): (4, 2),
}
"""Warps and stages, by kernel, whether numbers are halves, and padded width; the others have 8 and 2."""
_PER_PROCESSOR = 2  # programs that fit beside each other on one
_INTERPRETED = 8  # programs, where the interpreter runs them on a CPU: enough to have several of each kind


class Sizes(NamedTuple):
    """What a kernel is compiled for."""

    heads: int
    width: int
    half: bool
    """Whether numbers have 16 bits: then tensor cores multiply them."""

    @staticmethod
    def of(q: Tensor) -> "Sizes":
        """Of queries [tokens, heads, width]."""
        _, heads, width = q.shape
        return Sizes(heads, width, q.element_size() == 2)

    @property
    def padded(self) -> int:
        """The width that is computed with."""
        return max(16, triton.next_power_of_2(self.width))

    @property
    def block(self) -> int:
        """Queries and keys of a tile: fewer of wide rows, so that registers hold them."""
        return 32 if self.padded <= (128 if self.half else 64) else 16

    def launch(self, kernel: str) -> dict[str, int]:
        """Warps and stages of a program: what compiles without spilling, as benchmarks/kernels.py shows."""
        warps, stages = _LAUNCH.get((kernel, self.half, self.padded), (8, 2))
        return {"num_warps": warps, "num_stages": stages}

    def constants(self, kernel: str) -> dict[str, Any]:
        """By the names that a kernel knows them by. fp32 is multiplied as fp32, not as TF32."""
        found = {"HEADS": self.heads, "WIDTH": self.width, "PADDED": self.padded, "BLOCK": self.block}
        found |= {} if kernel == "join" else {"PRECISION": "ieee"}
        return found | ({"BUCKETS": TIME_PADDED} if kernel == "backward_rows" else {})


def forward(x: Inputs) -> Tensor:
    """Mix the values that every query sees."""
    if not len(x.q):
        return like(x.v)
    x = _packed(x)
    q, k, v = map(_heads_side_by_side, (x.q, x.k, x.v))
    out, dealt = like(v), _work(x).rows
    with _parts_joined(x, dealt, [out]) as parts:
        _run("forward", x, dealt.items, (q, k, v, out, *parts), (x.position.float(), _by_cell(x)))
    return out


def backward(x: Inputs, d_out: Tensor) -> Gradients:
    """Gradients of all that `forward` reads, from that of what it gives."""
    if not len(x.q):
        return Gradients(*map(torch.zeros_like, (x.q, x.k, x.v, x.position, x.time)))
    x = _packed(x)
    read = (*map(_heads_side_by_side, (x.q, x.k, x.v)), d_out.contiguous())
    d_q, d_k, d_v = map(like, read[:3])
    (rows, columns), position = _work(x), x.position.float()
    programs = len(rows.items) * x.q.shape[1]
    d_position = torch.zeros(programs, len(position), device=d_q.device)
    d_time = torch.empty(programs, TIME_PADDED, device=d_q.device)
    with _parts_joined(x, rows, [d_q]) as parts:
        tables = (position, x.time.float(), bucket_of_cell(d_q.device))
        _run("backward_rows", x, rows.items, (*read, d_q, *parts, d_position, d_time), tables, len(position))
    with _parts_joined(x, columns, [d_k, d_v]) as parts:
        _run("backward_columns", x, columns.items, (*read, d_k, d_v, *parts), (position, _by_cell(x)))
    of_time = d_time.sum(0)[: len(x.time)]
    return Gradients(d_q, d_k, d_v, d_position.sum(0).to(x.position.dtype), of_time.to(x.time.dtype))


def _run(name: str, x: Inputs, items: Tensor, given: Sequence[Tensor], tables: Sequence[Tensor], *longest: int) -> None:
    sizes, strides = Sizes.of(x.q), [one.stride(0) for one in given[:3]]
    getattr(kernels, name)[len(items), sizes.heads](
        *given, x.spans, x.asked, x.event, *tables, items, *strides, items.shape[1], *longest, 1.0 / x.scale,
        **sizes.constants(name), **sizes.launch(name),
    )  # fmt: skip


@contextmanager
def _parts_joined(x: Inputs, dealt: Dealt, outputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Room for the parts of blocks that were cut; afterwards they are joined into `outputs`."""
    sizes, slots = Sizes.of(x.q), len(dealt.joins)
    shape = (slots, sizes.heads, sizes.block, sizes.padded)
    parts = [torch.empty(shape, device=x.q.device) for _ in outputs]
    yield parts
    settings: dict[str, Any] = sizes.constants("join") | sizes.launch("join")
    for one, out in zip(parts, outputs, strict=True):
        kernels.join[slots, sizes.heads](one, out, x.spans, dealt.joins, **settings)


def _work(x: Inputs) -> Work:
    programs = max(1, _programs(x.q.device) // x.q.shape[1])
    return work_of(x.spans, len(x.q), Sizes.of(x.q).block, programs)


@lru_cache
def _programs(device: torch.device) -> int:
    if device.type == "cpu":
        return _INTERPRETED
    return _PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _by_cell(x: Inputs) -> Tensor:
    return x.time.float().index_select(0, bucket_of_cell(x.q.device))


def _packed(x: Inputs) -> Inputs:
    """Of tensors beside q, k and v kernels know no strides."""
    return x._replace(**{name: getattr(x, name).contiguous() for name in ("asked", "event", "position", "time")})


def _heads_side_by_side(x: Tensor) -> Tensor:
    """Kernels read tokens at any stride, but the heads of one token side by side."""
    packed = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if packed else x.contiguous()
