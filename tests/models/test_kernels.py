"""The Triton kernels equal the reference. Triton's interpreter runs them on a CPU.

The interpreter cannot check the compiled code: benchmarks/kernels.py reads from it that fp32 stays fp32 and that there
are no float atomics.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from freescale.bench.attention_tuning import TileTiming, fastest_tiles
from freescale.models.attention.reference import AttentionGradients, AttentionInputs, AttentionProblem
from freescale.models.attention.tiles import KERNELS, WIDTHS, Operands, Tile, TileKey, table_tile
from freescale.models.attention.triton_launch import TileSchedule, attention_schedule, schedule_tiles
from freescale.models.attention.visited_tiles import holds_far, split_into_blocks
from freescale.models.jagged import JaggedLayout, is_visible
from freescale.visibility import FarKeys, Visibility
from tests.models.attention_cases import (
    Batch,
    as_tf32,
    batches,
    errors,
    inputs,
    layout_of,
    random_anchors,
    relative_error,
    rounded_result,
    rules,
    upstream,
)
from tests.support.vgpu import standins

SHAPES = [(1, 50), (2, 25), (1, 32), (4, 64)]
"""Heads and widths of the recipes."""
EDGES = [31, 32, 33, 63, 64, 65, 96]


def by_kernels(
    batch: Batch, heads: int, width: int, dtype: torch.dtype = torch.float32, tile: Tile | None = None
) -> dict[str, float]:
    """Return the relative errors of the kernels: output and every gradient; `tile`: by default that of the table."""
    from freescale.models.attention import triton_launch

    torch.set_num_threads(1)
    layout = layout_of(*batch)
    x = inputs(layout, heads=heads, width=width, dtype=dtype, longest=max([1, *batch.lengths]))
    if not layout.tokens:
        return errors(triton_launch.forward(x), triton_launch.backward(x, upstream(x.v)), x, layout)
    d_q, d_position, d_time = triton_launch.backward_rows(x, upstream(x.v), tile)
    d_k, d_v = triton_launch.backward_columns(x, upstream(x.v), tile)
    return errors(triton_launch.forward(x, tile), AttentionGradients(d_q, d_k, d_v, d_position, d_time), x, layout)


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


SHAPES_OF_TILES = sorted(
    {
        table_tile(TileKey(kernel, operands, width), architecture)[:2]
        for kernel, operands, width, architecture in product(KERNELS, get_args(Operands), WIDTHS, (80, 90, 100, 120))
    }
)


@pytest.mark.parametrize("shape", SHAPES_OF_TILES)
def test_every_tile_of_the_table_equals_the_reference(
    interpreter: ProcessPoolExecutor, whole_form: bool, shape: tuple[int, int]
) -> None:
    tile = Tile(*shape, 4, 1)
    anchored = Batch([140, 7, 0, 70], [30, 2, 0, 70], random_anchors([140, 7, 0, 70], [30, 2, 0, 70], seed=1))
    kinds = [(torch.float32, 1e-5), (torch.float16, 1e-2)]
    cases = list(product((Batch([300, 1, 65]), anchored), WIDTHS, kinds)) if whole_form else [(anchored, 16, kinds[0])]
    runs = [
        (interpreter.submit(by_kernels, batch, 1, width, dtype, tile), limit) for batch, width, (dtype, limit) in cases
    ]
    for run, limit in runs:
        require_within(run.result(), limit)


@pytest.mark.parametrize(
    ("rounded", "limit"),
    [
        pytest.param(lambda x: x.half().double(), 1e-3, id="fp16"),
        pytest.param(lambda x: x.bfloat16().double(), 8e-3, id="bf16"),
        pytest.param(as_tf32, 2e-3, id="tf32"),
    ],
)
def test_rounded_operands_of_tensor_cores_cost_few_digits(rounded: Callable[[Tensor], Tensor], limit: float) -> None:
    """The interpreter runs neither bf16 nor TF32, so their errors are those of rounded operands in fp64."""
    layout = layout_of([200, 9], [20, 3])
    x = inputs(layout, heads=2, width=64, dtype=torch.float32, longest=200)
    found = errors(*rounded_result(x, layout, rounded), x, layout)
    require_within(found, limit)
    assert max(found.values()) > limit / 20  # some are rounded
    require_within(errors(*rounded_result(x, layout, lambda x: x), x, layout), 1e-12)


def rounding_of_kernels(batch: Batch) -> dict[str, float]:
    """Return how far the kernels in fp16 are from fp64 with operands rounded to fp16."""
    from freescale.models.attention import triton_launch

    torch.set_num_threads(1)
    layout = layout_of(*batch)
    x = inputs(layout, heads=1, width=32, dtype=torch.float16, longest=max(batch.lengths))
    out, gradients = rounded_result(x, layout, lambda x: x.half().double())
    found = triton_launch.backward(x, upstream(x.v))
    pairs = {"out": (triton_launch.forward(x), out), "q": (found.q, gradients.q), "k": (found.k, gradients.k)}
    return {name: relative_error(*(one.half().double() for one in pair)) for name, pair in pairs.items()}


def test_kernels_round_operands_only(interpreter: ProcessPoolExecutor) -> None:
    """Results are those of rounded operands, apart from neighbouring values of fp16 where fp32 sums differ."""
    require_within(interpreter.submit(rounding_of_kernels, Batch([130, 7], [9, 2])).result(), 1e-4)


def tuned_in_the_interpreter(usable: list[Tile], broken: Tile) -> list[TileTiming]:
    """Time tiles on a tiny batch, among them one with a wrong forward pass."""
    from freescale.bench import attention_tuning
    from freescale.models.attention import triton_launch

    right = triton_launch.forward

    def forward(x: AttentionInputs, tile: Tile | None = None) -> Tensor:
        return right(x, tile) * (1.01 if tile == broken else 1)

    triton_launch.forward = forward
    sizes = {"heads": 1, "width": 16, "dtype": torch.float32, "device": torch.device("cpu")}
    problem = AttentionProblem.random([20, 3], **sizes)  # type: ignore[arg-type]
    try:
        return attention_tuning.tune(problem, rounds=1, tiles=lambda _: [*usable, broken])
    finally:
        triton_launch.forward = right


def test_tuning_times_tiles_and_leaves_out_those_that_fail(interpreter: ProcessPoolExecutor) -> None:
    usable, broken, impossible = Tile(16, 16, 4, 1), Tile(64, 32, 4, 1), Tile(48, 48, 4, 1)
    timings = interpreter.submit(tuned_in_the_interpreter, [usable, impossible], broken).result()
    failures = {(timing.key.kernel, timing.tile): timing.failure for timing in timings}
    assert "off by 1e-02" in failures["forward", broken]
    assert all(failures[kernel, impossible] for kernel in KERNELS)
    assert not any(failures[kernel, usable] for kernel in KERNELS)
    assert all((timing.seconds < float("inf")) == (not timing.failure) for timing in timings)
    assert {key.kernel for key in fastest_tiles(timings)} == set(KERNELS)


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
@given(
    batch=batches(edges=EDGES, most=900, samples=12),
    programs=st.integers(1, 40),
    sizes=st.sampled_from([(16, 16), (32, 32), (64, 32), (64, 64), (128, 32), (128, 64), (128, 128)]),
    visibility=st.none() | rules(),
)
def test_every_visible_tile_is_scheduled_once_and_evenly(
    batch: Batch, programs: int, sizes: tuple[int, int], visibility: Visibility | None
) -> None:
    layout = layout_of(*batch, visibility)
    if not batch.lengths:
        return
    work = attention_schedule(layout.spans, layout.limits, *sizes, programs, layout.begins, layout.far)
    for dealt, by_row in ((work.rows, True), (work.columns, False)):
        visited = visited_tiles(dealt, sizes, by_row=by_row, far=layout.far)
        visible = visible_tiles(layout, sizes, by_row=by_row)
        assert len(visited) == len(set(visited))
        if visibility is None:
            assert sorted(visited) == visible
        else:  # a tile of queries that holds both ends of the visible ones is visited, too
            assert set(visited) >= set(visible)
            spare = len(visited) - len(visible)
            assert spare <= 3 * len({tile[:2] for tile in visited}), "few tiles per block have no visible pair"
        items = dealt.items
        loads = ((items[..., 3] - items[..., 2]) * (items[..., 0] >= 0)).sum(1)
        assert loads.max() <= 1.25 * loads.double().mean() + 1, by_row


def visited_tiles(
    schedule: TileSchedule, sizes: tuple[int, int], *, by_row: bool, far: FarKeys | None = None
) -> list[tuple[int, int, int]]:
    """Return sample, block and tile of all visits, as the kernels read them from a schedule; `sizes`: of both."""
    holds = [] if far is None else holds_far(far, 2000, sizes[1], torch.device("cpu")).nonzero().flatten().tolist()
    tiles = []
    for sample, block, begin, end, _, near, jump, count, shift in schedule.items.flatten(0, 1).tolist():
        own = 0 if by_row else block * sizes[0] // sizes[1]
        for tile in range(begin, end) if sample >= 0 else ():
            place = holds[tile] if tile < count else tile + shift + (0 if tile < near else jump)
            tiles.append((sample, block, own + place))
    return tiles


def visible_tiles(layout: JaggedLayout, sizes: tuple[int, int], *, by_row: bool) -> list[tuple[int, int, int]]:
    """Return sample, block and tile of all visits that have a visible pair, pair by pair."""
    tiles = []
    for sample, (first, length, _) in enumerate(layout.spans.tolist()):
        place = torch.arange(-(-length // sizes[0]) * sizes[0])
        limit = F.pad(layout.limits[first : first + length], (0, len(place) - length))
        begin = (
            None if layout.begins is None else F.pad(layout.begins[first : first + length], (0, len(place) - length))
        )
        seen = is_visible(
            place[:, None], place[None, :], limit[:, None], None if begin is None else begin[:, None], layout.far
        )
        seen &= place[:, None] < length
        seen = seen if by_row else seen.T
        seen = seen.unflatten(0, (-1, sizes[0])).unflatten(2, (-1, sizes[1])).any(3).any(1)
        tiles += [(sample, *tile) for tile in seen.nonzero().tolist()]
    return tiles


@pytest.mark.parametrize("sizes", [(32, 32), (64, 32)])
def test_anchors_out_of_order_cost_tiles_but_lose_none(sizes: tuple[int, int]) -> None:
    layout = layout_of([300], [100], [180] * 40 + [3] * 60)
    work = attention_schedule(layout.spans, layout.limits, *sizes, 8)
    for schedule, by_row in ((work.rows, True), (work.columns, False)):
        visited = set(visited_tiles(schedule, sizes, by_row=by_row))
        assert visited >= set(visible_tiles(layout, sizes, by_row=by_row))


def test_the_schedule_follows_the_limits_of_a_batch_that_has_the_same_spans() -> None:
    whole, anchored = layout_of([300], [100]), layout_of([300], [100], [3] * 100)
    counts = [
        len(visited_tiles(attention_schedule(whole.spans, limits, 32, 32, 8).columns, (32, 32), by_row=False))
        for limits in (whole.limits, anchored.limits, whole.limits)
    ]
    assert counts[0] == counts[2] > counts[1]


def test_parts_of_a_split_block_are_joined_once_each() -> None:
    layout = layout_of([2000, 5])
    blocks = split_into_blocks(layout.spans, layout.limits, block=32, tile=32)
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
