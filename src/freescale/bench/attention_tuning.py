"""Measures tiles of the attention kernels on a device, and chooses the fastest of each kernel.

Not Triton's autotuner: the schedule of a batch depends on the tile and is made before the launch, and a choice at the
first launch would let every rank and every run add in another order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from torch import Tensor

from freescale.bench.attention import timed_seconds
from freescale.errors import reason
from freescale.models.attention import triton_launch
from freescale.models.attention.reference import AttentionProblem
from freescale.models.attention.tiles import (
    KERNELS,
    Operands,
    Tile,
    TileKey,
    candidates,
    device_profile,
    fastest_tile,
    table_tile,
)
from freescale.models.attention.triton_launch import KernelConfig, padded_width
from freescale.progress import track

_LIMITS: dict[Operands, float] = {"fp32": 1e-5, "tf32": 1e-2, "16-bit": 2e-2}
"""Relative difference between the results of two tiles."""


@dataclass(frozen=True)
class TileTiming:
    """The result of a tile."""

    key: TileKey
    tile: Tile
    seconds: float
    """Median; infinite if the tile cannot be used."""
    failure: str = ""
    """Why it cannot be used."""


def tune(
    problem: AttentionProblem, *, rounds: int, tiles: Callable[[TileKey], Sequence[Tile]] = candidates
) -> list[TileTiming]:
    """Time all tiles of all kernels, in turns. A tile fails if it does not fit, or if its result is wrong."""
    profile, timings = device_profile(problem.q.device), []
    for kernel in KERNELS:
        config = KernelConfig.for_queries(kernel, problem.q)
        key = TileKey(kernel, config.operands, padded_width(config.width))
        default = table_tile(key, profile.architecture)
        timings += _time_kernel(problem, key, [default, *(t for t in tiles(key) if t != default)], rounds)
    return timings


def _time_kernel(problem: AttentionProblem, key: TileKey, tiles: Sequence[Tile], rounds: int) -> list[TileTiming]:
    """Time tiles of a kernel; the result of the first is what the others are compared with."""
    run, device = _runner(problem, key.kernel), problem.q.device
    expected = run(tiles[0])
    failures = {
        tile: _failure(run, tile, expected, _LIMITS[key.operands]) for tile in track(tiles, f"tiles: {key.kernel}")
    }
    usable = [tile for tile, failure in failures.items() if not failure]
    turns = [(tile, timed_seconds(lambda tile=tile: run(tile), device)) for _ in range(rounds) for tile in usable]
    seconds = {tile: median(time for other, time in turns if other == tile) for tile in usable}
    return [TileTiming(key, tile, seconds.get(tile, float("inf")), failures[tile]) for tile in tiles]


def _runner(problem: AttentionProblem, kernel: str) -> Callable[[Tile], Sequence[Tensor]]:
    x, d_out = problem.inputs, problem.d_out
    runners: dict[str, Callable[[Tile], Sequence[Tensor]]] = {
        "forward": lambda tile: [triton_launch.forward(x, tile)],
        "backward_rows": lambda tile: triton_launch.backward_rows(x, d_out, tile),
        "backward_columns": lambda tile: triton_launch.backward_columns(x, d_out, tile),
    }
    return runners[kernel]


def _failure(run: Callable[[Tile], Sequence[Tensor]], tile: Tile, expected: Sequence[Tensor], limit: float) -> str:
    """Run a tile, which compiles it, and return why it cannot be used."""
    try:
        found = run(tile)
    except Exception as error:  # of the compiler or the driver: too many registers, too much shared memory
        return reason(error)
    errors = [
        float((a - b).double().norm() / b.double().norm().clamp(min=1e-30))
        for a, b in zip(found, expected, strict=True)
    ]
    return "" if max(errors) <= limit else f"its result is off by {max(errors):.0e}"


def fastest_tiles(timings: Sequence[TileTiming]) -> dict[TileKey, Tile]:
    """Return the tile of each kernel to store. The first of a kernel is that of the table, and preferred."""
    by_key: dict[TileKey, dict[Tile, float]] = {}
    for timing in timings:
        by_key.setdefault(timing.key, {})[timing.tile] = timing.seconds
    return {key: fastest_tile(seconds, next(iter(seconds))) for key, seconds in by_key.items()}
