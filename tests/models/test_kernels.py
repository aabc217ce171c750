"""The Triton kernels equal the reference. Triton's interpreter runs them on a CPU.

The interpreter cannot check the compiled code: benchmarks/kernels.py reads from it that fp32 stays fp32 and that there
are no float atomics.
"""

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freescale.models.attention.triton_launch import TileSchedule, attention_schedule, schedule_tiles, split_into_blocks
from freescale.models.jagged import JaggedLayout, is_visible
from tests.models.attention_cases import Batch, batches, errors, inputs, layout_of, upstream
from tests.support.vgpu import standins

SHAPES = [(1, 50), (2, 25), (1, 32), (4, 64)]
"""Heads and widths of the recipes."""
EDGES = [31, 32, 33, 63, 64, 65, 96]


def by_kernels(batch: Batch, heads: int, width: int, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Return the relative errors of the kernels: output and every gradient."""
    from freescale.models.attention import triton_launch

    torch.set_num_threads(1)
    layout = layout_of(*batch)
    x = inputs(layout, heads=heads, width=width, dtype=dtype, longest=max([1, *batch.lengths]))
    return errors(triton_launch.forward(x), triton_launch.backward(x, upstream(x.v)), x, layout)


def require_within(found: dict[str, float], limit: float) -> None:
    assert all(error <= limit for error in found.values()), found


@pytest.mark.parametrize(("heads", "width"), SHAPES)
def test_kernels_equal_the_reference_on_any_batch(
    interpreter: ProcessPoolExecutor, whole_form: bool, heads: int, width: int
) -> None:
    @settings(max_examples=75 if whole_form else 2, suppress_health_check=list(HealthCheck))
    @given(batch=batches(edges=EDGES if whole_form else EDGES[:3], most=100 if whole_form else 70, samples=4))
    def prove(batch: Batch) -> None:
        require_within(interpreter.submit(by_kernels, batch, heads, width).result(), 1e-5)

    prove()


def test_kernels_equal_the_reference_on_one_long_sample_among_short_ones(
    interpreter: ProcessPoolExecutor, whole_form: bool
) -> None:
    lengths = [4097, 1, 0, 3] if whole_form else [200, 1, 0, 3]
    far = lengths[0] - 20  # anchors are further apart than a band of distances, or close together
    cases = [
        Batch(lengths),
        Batch(lengths, [share * n // 4 for n, share in zip(lengths, (1, 1, 0, 2), strict=True)]),
        Batch(lengths, [20, 0, 0, 2], [0, 0, 1, *range(far // 3, far // 3 + 12), *[far - 70] * 3, far - 1, far, 0, 1]),
    ]
    for found in [interpreter.submit(by_kernels, batch, 1, 32) for batch in cases]:
        require_within(found.result(), 1e-5)


def test_kernels_equal_the_reference_in_fp16(interpreter: ProcessPoolExecutor) -> None:
    """bf16 runs the same code, but the interpreter of Triton 3.9 multiplies its bits instead of its values."""
    require_within(interpreter.submit(by_kernels, Batch([130, 7], [9, 2]), 1, 32, torch.float16).result(), 1e-3)


def sums_of_halves(length: int) -> dict[str, tuple[float, float]]:
    """Sums over all tiles of a row or column: by the kernels, and as they should be.

    1024 comes first, -1024 last, and 1/128 in between. In fp16 a tile of those is less than half an ulp of 1024, and
    is lost. All scores and all their gradients are the same: what varies stands in columns that meet only zeros.
    """
    from freescale.models.attention import triton_launch

    torch.set_num_threads(1)
    added = torch.full((length,), 1 / 128, dtype=torch.float16)
    added[0], added[-1] = 1024, -1024

    def rows(column: int) -> torch.Tensor:
        made = torch.zeros(length, 1, 32, dtype=torch.float16)
        made[:, 0, 0], made[:, 0, column] = 1, added
        return made

    x = inputs(layout_of([length]), heads=1, width=32, dtype=torch.float16, longest=length)
    x = x._replace(q=rows(1), k=rows(2), v=rows(1), position=0 * x.position, time=0 * x.time)
    out, gradients = triton_launch.forward(x), triton_launch.backward(x, rows(2))
    opened = torch.sigmoid(torch.ones((), dtype=torch.float64))
    total = (length - 2) / 128 / x.scale
    weight, slope = float(total * opened), float(total * opened * (2 - opened))
    return {
        "out": (float(out[-1, 0, 1]), weight),
        "q": (float(gradients.q[-1, 0, 2]), slope),
        "k": (float(gradients.k[0, 0, 1]), slope),
        "v": (float(gradients.v[0, 0, 2]), weight),
    }


def test_kernels_accumulate_fp16_in_fp32(interpreter: ProcessPoolExecutor) -> None:
    for name, (found, meant) in interpreter.submit(sums_of_halves, 130).result().items():
        assert found == pytest.approx(meant, rel=0.01), name


@settings(max_examples=60)
@given(batch=batches(edges=EDGES, most=900, samples=12), programs=st.integers(1, 40))
def test_every_visible_tile_is_scheduled_once_and_evenly(batch: Batch, programs: int) -> None:
    layout, block = layout_of(*batch), 32
    if not batch.lengths:
        return
    work = attention_schedule(layout.spans, layout.limits, block, programs)
    for dealt, by_row in ((work.rows, True), (work.columns, False)):
        assert sorted(visited_tiles(dealt, by_row=by_row)) == visible_tiles(layout, block)
        items = dealt.items
        loads = ((items[..., 3] - items[..., 2]) * (items[..., 0] >= 0)).sum(1)
        assert loads.max() <= 1.25 * loads.double().mean() + 1, by_row


def visited_tiles(schedule: TileSchedule, *, by_row: bool) -> list[tuple[int, int, int]]:
    """Return sample, block of queries and block of keys of all tiles, as the kernels read them from a schedule."""
    tiles = []
    for sample, block, begin, end, _, near, jump in schedule.items.flatten(0, 1).tolist():
        for tile in range(begin, end) if sample >= 0 else ():
            other = tile + (0 if tile < near else jump)
            tiles.append((sample, block, other) if by_row else (sample, block + other, block))
    return tiles


def visible_tiles(layout: JaggedLayout, block: int) -> list[tuple[int, int, int]]:
    """Return the tiles with a visible pair, pair by pair."""
    tiles = []
    for sample, (first, length, _) in enumerate(layout.spans.tolist()):
        place = torch.arange(-(-length // block) * block)
        limit = F.pad(layout.limits[first : first + length], (0, len(place) - length))
        seen = is_visible(place[:, None], place[None, :], limit[:, None]) & (place[:, None] < length)
        seen = seen.unflatten(0, (-1, block)).unflatten(2, (-1, block)).any(3).any(1)
        tiles += [(sample, *tile) for tile in seen.nonzero().tolist()]
    return tiles


def test_anchors_out_of_order_cost_tiles_but_lose_none() -> None:
    layout = layout_of([300], [100], [180] * 40 + [3] * 60)
    work = attention_schedule(layout.spans, layout.limits, 32, 8)
    for schedule, by_row in ((work.rows, True), (work.columns, False)):
        assert set(visited_tiles(schedule, by_row=by_row)) >= set(visible_tiles(layout, 32))


def test_the_schedule_follows_the_limits_of_a_batch_that_has_the_same_spans() -> None:
    whole, anchored = layout_of([300], [100]), layout_of([300], [100], [3] * 100)
    counts = [
        len(visited_tiles(attention_schedule(whole.spans, limits, 32, 8).columns, by_row=False))
        for limits in (whole.limits, anchored.limits, whole.limits)
    ]
    assert counts[0] == counts[2] > counts[1]


def test_parts_of_a_split_block_are_joined_once_each() -> None:
    layout = layout_of([2000, 5])
    blocks = split_into_blocks(layout.spans, layout.limits, block_size=32)
    dealt = schedule_tiles(blocks, blocks.rows, programs=64)
    slots = dealt.items[..., 4][dealt.items[..., 0] >= 0]
    joined = [
        slot + part
        for slot, (sample, _, count) in enumerate(dealt.joins.tolist())
        if sample >= 0
        for part in range(count)
    ]
    assert sorted(slots[slots >= 0].tolist()) == joined
    assert len(joined) > 64


def compared_with_stand_in(batch: Batch) -> tuple[dict[str, float], dict[str, int]]:
    """Return the differences between the kernels and their stand-in on virtual GPUs, and the launches of each."""
    from freescale.models.attention import blocks, triton_kernels, triton_launch

    class Counting:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            launches[-1] += 1
            return self._kernel[grid]

    for name in ("forward", "backward_rows", "backward_columns", "join"):
        setattr(triton_kernels, name, Counting(getattr(triton_kernels, name)))
    torch.set_num_threads(1)
    layout = layout_of(*batch)
    x = inputs(layout, heads=2, width=25, longest=max(batch.lengths), dtype=torch.float32)
    launches = [0]
    result = {"forward": triton_launch.forward(x) - blocks.forward(x)}
    launches.append(0)
    pairs = zip(triton_launch.backward(x, upstream(x.v)), blocks.backward(x, upstream(x.v)), strict=True)
    result |= {f"backward {number}": kernel - other for number, (kernel, other) in enumerate(pairs)}
    of_kernel = dict(zip(("forward", "backward"), launches, strict=True))
    return {name: float(difference.abs().max()) for name, difference in result.items()}, of_kernel


def test_the_stand_in_on_virtual_gpus_computes_what_the_kernels_do_and_counts_their_launches(
    interpreter: ProcessPoolExecutor,
) -> None:
    differences, launches = interpreter.submit(compared_with_stand_in, Batch([65, 3, 130])).result()
    assert max(differences.values()) < 1e-4, differences
    counted = {
        entry.replaces.rpartition(".")[2]: entry.launches for entry in standins.TABLE if "attention" in entry.replaces
    }
    assert counted == launches
