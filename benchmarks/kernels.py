"""Compiles the kernels for GPUs ahead of time and counts their resources and work.

    python benchmarks/kernels.py [--archs 80 90 100] [--widths 25 32 50 64 128 256] [--operands 16-bit tf32 fp32]
                                 [--out FILE.json]

Compiles the tiles of the built-in table. Registers, shared memory and spills come from NVIDIA's assembler; matrix
instructions and the absence of float atomics from the PTX; occupancy from these and the limits of the architecture;
work per program, products and bytes from the tile schedule of `heavy` and `kuairand` lengths: histories alone, with
candidates that see the whole history, and with 20 targets that see evenly spaced parts of it. Needs no GPU. Does not
measure speed.
"""

import argparse
import contextlib
import io
import itertools
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import record
from freescale.data import synthetic
from freescale.embedding import row_update, row_update_kernel, zero_collision_kernels
from freescale.models import fused_kernels, fused_launch
from freescale.models.attention import triton_kernels
from freescale.models.attention.tiles import KERNELS, Operands, Tile, TileKey, table_tile
from freescale.models.attention.triton_launch import (
    JOIN_WARPS,
    KernelConfig,
    TileSchedule,
    attention_schedule,
    padded_width,
)
from freescale.models.attention.visited_tiles import split_into_blocks
from freescale.models.jagged import JaggedLayout, is_visible

Shape = tuple[int, int]
RECIPES = {25: 2, 32: 1, 50: 1, 64: 4}
"""Width of a head in a recipe, and how many it has."""
PRODUCTS = {"forward": 2, "backward_rows": 3, "backward_columns": 4}
"""Of matrices, for each tile: scores are computed anew in both passes of backward."""
TARGETS = 20
"""Of each history, at evenly spaced anchors."""
PRESETS: tuple[synthetic.Preset, ...] = ("heavy", "kuairand")
SHAPES: tuple[Shape, ...] = ((32, 32), (64, 32), (64, 64))
"""Blocks and tiles of the table."""
H100_PROCESSORS = 132
SHARED_KIB = {80: 164, 90: 228, 100: 228}
"""Shared memory of a processor, from NVIDIA's CUDA C programming guide, as the three limits of `occupancy`."""
INSTRUCTIONS = {"wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma\b", "mma": r"\bmma\.sync"}
FUSED_KERNELS = ("dropout", "token_losses", "row_gradients", "update_rows")
SLOT_KERNELS = ("find_slots", "insert_ids", "initialize_rows")
NEGATIVES = 128
"""Of the sampled softmax, as by default."""
_FUSED = {
    "fp32": ("rows", "loss", "scores", "log_total", "error", "weight", "gradient", "d_rows", "weights", "sums"),
    "i64": ("token_keys", "positive", "negatives", "order", "offsets", "ordered"),
    "i32": ("sampled",),
}
"""Types of pointers; those of outputs and of their gradients vary."""
_POINTERS = {
    "fp32": ("parts", "more_parts", "d_position", "d_time", "position", "by_cell", "time"),
    "i64": ("spans", "limits", "begins", "query_time", "event_time"),
    "i32": ("bucket_of_cell", "items", "far_tiles", "joins"),
}
_NUMBERS = {
    "q_stride": "i32",
    "k_stride": "i32",
    "v_stride": "i32",
    "turns": "i32",
    "max_distance": "i32",
    "head_keys": "i32",
    "segment": "i32",
    "period": "i32",
    "weight": "fp32",
}


def table_config(kernel: str, width: int, operands: Operands, arch: int) -> KernelConfig:
    """Return what the kernels run with on an architecture."""
    tile = table_tile(TileKey(kernel, operands, padded_width(width)), arch)
    return KernelConfig(kernel, RECIPES.get(width, 1), width, operands, tile)


def compiled(config: KernelConfig, arch: int, *, join: bool = False, rule: bool = False) -> tuple[Any, str]:
    """Return a compiled kernel, or the one that joins its parts, and what the assembler says."""
    kernel = triton_kernels.join if join else getattr(triton_kernels, config.kernel)
    constants = config.sizes if join else config.constants | {"RULE": rule}
    pointers = {one: f"*{kind}" for kind, names in _POINTERS.items() for one in names}
    data = "*bf16" if config.operands == "16-bit" else "*fp32"
    signature = {
        one: "constexpr" if one in constants else _NUMBERS.get(one) or pointers.get(one, data)
        for one in kernel.arg_names
    }
    at = {one: (place,) for place, one in enumerate(kernel.arg_names)}
    # As at run time: q, k and v are chunks of one linear layer, so the width decides how they are aligned.
    size, whole = 2 if config.operands == "16-bit" else 4, config.heads * config.width
    even = {one for one, kind in signature.items() if kind.startswith("*")}
    even -= {"q", "k", "v"} if whole * size % 16 else set()
    even |= {"q_stride", "k_stride", "v_stride"} & set(signature) if 4 * whole % 16 == 0 else set()
    aligned = {at[one]: [["tt.divisibility", 16]] for one in even}
    source = ASTSource(kernel, signature, {at[one]: value for one, value in constants.items()}, aligned)
    return compile_for(source, arch, {"num_warps": JOIN_WARPS} if join else config.launch)


def compile_for(source: ASTSource, arch: int, options: dict[str, Any]) -> tuple[Any, str]:
    """Return a compiled kernel, and what the assembler says."""
    with contextlib.redirect_stdout(io.StringIO()) as log:  # Triton prints the log of the assembler
        found = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return found, log.getvalue()


def usage(config: KernelConfig, arch: int, *, join: bool = False) -> dict[str, object]:
    """Return what a kernel of attention takes on a GPU."""
    tile = Tile(config.tile.block, config.tile.block, JOIN_WARPS, 1) if join else config.tile
    return {
        "kernel": "join" if join else config.kernel,
        "arch": f"sm_{arch}",
        "type": {"16-bit": "bf16"}.get(config.operands, config.operands),
        "heads": config.heads,
        "width": config.width,
        **tile._asdict(),
        **resources(*compiled(config, arch, join=join), arch, tile.warps),
    }


def resources(found: Any, said: str, arch: int, warps: int) -> dict[str, object]:
    """Return the resources of a kernel, its matrix instructions, and whether it has float atomics."""
    ptx = found.asm["ptx"]
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.search(r"Used (\d+) registers", said)
    assert spilled is not None, said
    assert registers is not None, said
    return {
        "registers": int(registers[1]),
        "shared_bytes": int(found.metadata.shared),
        "spilled_bytes": int(spilled[1]) + int(spilled[2]),
        "occupancy": occupancy(arch, warps, int(registers[1]), int(found.metadata.shared)),
        "matrix_instructions": {
            name: len(matches) for name, text in INSTRUCTIONS.items() if (matches := re.findall(text, ptx))
        },
        "tf32": "tf32" in ptx,
        "float_atomics": bool(re.search(r"\b(atom|red)\.[\w.]*\.f(16|32|64)|\b(atom|red)\.[\w.]*bf16", ptx)),
    }


def fused_usage(name: str, dtype: str, dim: int, arch: int) -> dict[str, object]:
    """Return what a kernel of keyed randomness, of the sampled softmax or of the row update takes on a GPU."""
    kernel = getattr(row_update_kernel if name == "update_rows" else fused_kernels, name)
    pointers = {n: f"*{kind}" for kind, names in _FUSED.items() for n in names}
    options: dict[str, Any] = {"WIDTH": dim, "WORDS": fused_launch.DROPOUT_WORDS, "BLOCK": fused_launch.HASH_BLOCK}
    options["num_warps"] = fused_launch.DROPOUT_WARPS
    if name in ("token_losses", "row_gradients"):
        options = {**fused_launch.launch_options(name, dim=dim, negatives=NEGATIVES), "INVERSE_TEMPERATURE": 20.0}
    if name == "update_rows":
        options = row_update.launch_options("rowwise_adagrad", dim=dim, eps=1e-8)
    constants = {argument: options[argument] for argument in kernel.arg_names if argument in options}
    numbers = dict.fromkeys(("count", "words", "salt", "threshold"), "i32") | {"rate_bits": "i64"}
    signature = {
        argument: "constexpr" if argument in constants else numbers.get(argument) or pointers.get(argument, f"*{dtype}")
        for argument in kernel.arg_names
    }
    at = {argument: (place,) for place, argument in enumerate(kernel.arg_names)}
    aligned = {at[a]: [["tt.divisibility", 16]] for a, kind in signature.items() if kind.startswith("*")}
    source = ASTSource(kernel, signature, {at[a]: value for a, value in constants.items()}, aligned)
    launch = {option: value for option, value in options.items() if option.islower()}
    found = resources(*compile_for(source, arch, launch), arch, options["num_warps"])
    return {"kernel": name, "arch": f"sm_{arch}", "type": dtype, "width": dim, **found}


def slot_usage(name: str, arch: int) -> dict[str, object]:
    """Return what a kernel of dynamic ids takes on a GPU, for 4 million slots and rows of 64."""
    kernel = getattr(zero_collision_kernels, name)
    constants = {"BITS": 12, "BUCKETS": 1 << 12, "SLOTS": 1024, "WINDOW": 128, "PADDED": 128, "DIM": 64, "SUMS": 1}
    constants = {one: value for one, value in constants.items() if one in kernel.arg_names}
    constants |= {"KIND": zero_collision_kernels.LFU} if name == "insert_ids" else {}
    kinds = {
        "*i32": ("last_step", "times", "uses"),
        "*i1": ("is_wanted", "is_new"),
        "*fp32": ("weights", "sums"),
        "i32": ("first", "owned", "count", "step", "time", "ttl", "protected"),
        "i64": ("key", "scale_bits"),
    }
    kind_of = {argument: kind for kind, names in kinds.items() for argument in names}
    signature = {one: "constexpr" if one in constants else kind_of.get(one, "*i64") for one in kernel.arg_names}
    at = {one: (place,) for place, one in enumerate(kernel.arg_names)}
    source = ASTSource(kernel, signature, {at[one]: value for one, value in constants.items()})
    found = resources(*compile_for(source, arch, {"num_warps": 4, "enable_fp_fusion": False}), arch, 4)
    return {"kernel": name, "arch": f"sm_{arch}", "type": "i64", **found}


def occupancy(arch: int, warps: int, registers: int, shared: int) -> float:
    """Return the share of the 64 warps of a processor that run at a time."""
    by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = (SHARED_KIB[arch] << 10) // (shared + 1024)  # the driver reserves 1 KiB
    return min(by_registers, by_shared, 64 // warps, 32) * warps / 64


def load(dealt: TileSchedule) -> torch.Tensor:
    """Return the tiles of each program."""
    items = dealt.items
    return ((items[..., 3] - items[..., 2]) * (items[..., 0] >= 0)).sum(1).double()


def grid(
    preset: synthetic.Preset, heads: int, *, shape: Shape, targets: int = 0, batch: int = 128
) -> dict[str, object]:
    """Return the balance of a batch's work over the programs that an H100 runs at a time."""
    programs = 2 * H100_PROCESSORS // heads
    worst = {"rows": 0.0, "columns": 0.0}
    for seed in range(3):
        lengths = synthetic.draw_lengths(preset, batch, np.random.default_rng(seed)).tolist()
        layout = anchored_layout(lengths, targets) if targets else layout_of(lengths)
        work = attention_schedule(layout.spans, layout.limits, *shape, programs)
        for side, dealt in zip(worst, work, strict=True):
            loads = load(dealt)
            worst[side] = max(worst[side], float(loads.max() / loads.mean()))
    return {
        "preset": preset,
        "batch": batch,
        "targets": targets,
        "heads": heads,
        "block": shape[0],
        "tile": shape[1],
        "processors": H100_PROCESSORS,
        **{f"{side}_max_over_mean": round(value, 3) for side, value in worst.items()},
    }


def layout_of(lengths: list[int], candidates: list[int] | None = None) -> JaggedLayout:
    return JaggedLayout(torch.tensor([0, *lengths]).cumsum(0), None if candidates is None else torch.tensor(candidates))


def anchored_layout(histories: list[int], targets: int) -> JaggedLayout:
    """Return histories that are each followed by targets at evenly spaced anchors, the last at the end."""
    anchors = [n * (each + 1) // targets for n in histories for each in range(targets)]
    layout = layout_of([n + targets for n in histories], [targets] * len(histories))
    return replace(layout, anchors=torch.tensor(anchors))


def counted(preset: synthetic.Preset, share: float, *, shape: Shape, targets: int = 0) -> dict[str, object]:
    """Products and bytes of bf16 kernels with 4 heads of 64, against the tiles that hold at least one visible pair."""
    heads, width, (block, tile) = 4, 64, shape
    drawn = synthetic.draw_lengths(preset, 128, np.random.default_rng(0))
    lengths = np.minimum(drawn, 2048).tolist()  # the least is counted pair by pair
    candidates = [int(share * n) for n in lengths]
    layout = anchored_layout(lengths, targets) if targets else layout_of(lengths, candidates)
    work = attention_schedule(layout.spans, layout.limits, *shape, 2 * H100_PROCESSORS // heads)
    sides = {"forward": work.rows, "backward_rows": work.rows, "backward_columns": work.columns}
    tiles = {name: int(load(side).sum()) for name, side in sides.items()}
    rows, columns = visible_tiles(layout, shape)
    least = {"forward": rows, "backward_rows": rows, "backward_columns": columns}
    blocks = int((split_into_blocks(layout.spans, layout.limits, block=block, tile=tile).rows.count > 0).sum())
    token = width * heads * 2
    # A tile reads keys and values (or queries and gradients) and the times of its events; a block, its own two.
    per_tile, own = 2 * tile * token + 8 * tile, blocks * 2 * block * token
    parts = int((work.rows.items[..., 4] >= 0).sum())
    extra = parts * 2 * block * width * heads * 4 + tiles["forward"] * 2 * tile * 4
    products = {
        name: sum(PRODUCTS[kernel] * n for kernel, n in of.items()) for name, of in (("done", tiles), ("least", least))
    }
    return {
        "preset": preset,
        "candidates": share,
        "targets": targets,
        "heads": heads,
        "width": width,
        "block": block,
        "tile": tile,
        "flops": products["done"] * 2 * block * tile * width * heads,
        "flops_over_least": round(products["done"] / products["least"], 4),
        "bytes_over_least": round((tiles["forward"] * per_tile + own + extra) / (rows * per_tile + own), 4),
    }


def visible_tiles(layout: JaggedLayout, shape: Shape) -> tuple[int, int]:
    """Count the tiles in which some query sees some key, pair by pair: of blocks of queries, and of blocks of keys."""
    (block, tile), rows, columns = shape, 0, 0
    for first, length, _ in layout.spans.tolist():
        places = torch.arange(-(-length // block) * block, dtype=torch.int32)
        limits = F.pad(layout.limits[first : first + length], (0, len(places) - length)).int()
        seen = is_visible(places[:, None], places[None, :], limits[:, None])
        seen[length:] = False
        rows += nonempty_tiles(seen, block, tile)
        columns += nonempty_tiles(seen, tile, block)
    return rows, columns


def nonempty_tiles(seen: torch.Tensor, height: int, width: int) -> int:
    """Count the tiles that hold at least one visible pair."""
    words = seen.view(torch.int64) != 0  # eight keys each
    return int(words.unflatten(0, (-1, height)).unflatten(2, (-1, width // 8)).any(3).any(1).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--widths", type=int, nargs="+", default=[*RECIPES, 128, 256])
    parser.add_argument("--operands", nargs="+", default=list(get_args(Operands)))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
    results: list[dict[str, object]] = []
    for preset, shape in itertools.product(PRESETS, SHAPES):
        for targets in (0, TARGETS):
            results += [grid(preset, heads, shape=shape, targets=targets) for heads in (1, 2, 4)]
        results += [counted(preset, share, shape=shape) for share in (0.0, 0.2)]
        results += [counted(preset, 0.0, shape=shape, targets=TARGETS)]
    for width, operands, arch in itertools.product(options.widths, options.operands, options.archs):
        configs = [table_config(kernel, width, operands, arch) for kernel in KERNELS]
        results += [usage(config, arch) for config in configs]
        results += [usage(configs[0], arch, join=True)]
    fused = [("splitmix64", "i64", 1)]
    types = {name: ("fp32",) if name == "update_rows" else ("bf16", "fp32") for name in FUSED_KERNELS}
    fused += [(name, dtype, dim) for dim in options.widths for name in FUSED_KERNELS for dtype in types[name]]
    results += [fused_usage(*kernel, arch) for kernel in fused for arch in options.archs]
    results += [slot_usage(kernel, arch) for kernel in SLOT_KERNELS for arch in options.archs]
    for result in results:
        print(json.dumps(result), flush=True)
    record.save(options.out, results)


if __name__ == "__main__":
    main()
