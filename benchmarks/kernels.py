"""Compiles the kernels for GPUs ahead of time and counts their resources and work.

    python benchmarks/kernels.py [--archs 80 90 100] [--widths 25 32 50 64 128 256] [--out FILE.json]

Registers, shared memory and spills come from NVIDIA's assembler; the absence of TF32 and of float atomics from the PTX;
work per program, products and bytes from the tile schedule of `heavy` and `kuairand` lengths: histories alone, with
candidates that see the whole history, and with 20 targets that see evenly spaced parts of it. Needs no GPU. Does not
measure speed.
"""

import argparse
import json
import re
import subprocess
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

import record
from freescale.data import synthetic
from freescale.models import fused_kernels, fused_launch
from freescale.models.attention import triton_kernels
from freescale.models.attention.triton_launch import KernelConfig, TileSchedule, attention_schedule, split_into_blocks
from freescale.models.jagged import JaggedLayout, is_visible

KERNELS = ("forward", "backward_rows", "backward_columns", "join")
RECIPES = {25: 2, 32: 1, 50: 1, 64: 4}
"""Width of a head in a recipe, and how many it has."""
PRODUCTS = {"forward": 2, "backward_rows": 3, "backward_columns": 4}
"""Of matrices, for each tile: scores are computed anew in both passes of backward."""
TARGETS = 20
"""Of each history, at evenly spaced anchors."""
PROCESSORS = {"A100": 108, "H100": 132, "B200": 148}
FUSED_KERNELS = ("dropout", "token_losses", "row_gradients")
NEGATIVES = 128
"""Of the sampled softmax, as by default."""
_FUSED = {
    "fp32": ("rows", "loss", "scores", "log_total", "error", "weight", "gradient", "d_rows"),
    "i64": ("token_keys", "positive", "negatives", "order", "offsets"),
    "i32": ("sampled",),
}
"""Types of pointers; those of outputs and of their gradients vary."""
_POINTERS = {
    "fp32": ("parts", "more_parts", "d_position", "d_time", "position", "by_cell", "time"),
    "i64": ("spans", "limits", "query_time", "event_time"),
    "i32": ("bucket_of_cell", "items", "joins"),
}
_NUMBERS = {
    "q_stride": "i32",
    "k_stride": "i32",
    "v_stride": "i32",
    "turns": "i32",
    "max_distance": "i32",
    "weight": "fp32",
}


def compiled(name: str, sizes: KernelConfig, arch: int) -> Any:
    kernel, constants = getattr(triton_kernels, name), sizes.constants(name)
    pointers = {one: f"*{kind}" for kind, names in _POINTERS.items() for one in names}
    data = "*bf16" if sizes.half else "*fp32"
    signature = {
        one: "constexpr" if one in constants else _NUMBERS.get(one) or pointers.get(one, data)
        for one in kernel.arg_names
    }
    at = {one: (place,) for place, one in enumerate(kernel.arg_names)}
    # As at run time: q, k and v are chunks of one linear layer, so the width decides how they are aligned.
    size, whole = 2 if sizes.half else 4, sizes.heads * sizes.width
    even = {one for one, kind in signature.items() if kind.startswith("*")}
    even -= {"q", "k", "v"} if whole * size % 16 else set()
    even |= {"q_stride", "k_stride", "v_stride"} & set(signature) if 4 * whole % 16 == 0 else set()
    aligned = {at[one]: [["tt.divisibility", 16]] for one in even}
    source = ASTSource(kernel, signature, {at[one]: value for one, value in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=sizes.launch(name))


def usage(name: str, sizes: KernelConfig, arch: int) -> dict[str, object]:
    """Return what a kernel of attention takes on a GPU."""
    shape = {"type": "bf16" if sizes.half else "fp32", "heads": sizes.heads, "width": sizes.width}
    return {"kernel": name, "arch": f"sm_{arch}", **shape, **resources(compiled(name, sizes, arch), arch)}


def resources(found: Any, arch: int) -> dict[str, object]:
    """Return the output of the assembler, and whether the PTX has TF32 or float atomics."""
    ptx = found.asm["ptx"]
    tool = get_ptxas(arch).path
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        built = Path(folder) / "kernel.cubin"
        command = [tool, "-v", "--regAllocOptLevel=2", f"--gpu-name={target[1]}", source, "-o", built]  # as Triton does
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.search(r"Used (\d+) registers", said)
    assert spilled is not None, said
    assert registers is not None, said
    return {
        "registers": int(registers[1]),
        "shared_bytes": int(found.metadata.shared),
        "spilled_bytes": int(spilled[1]) + int(spilled[2]),
        "tf32": "tf32" in ptx,
        "float_atomics": bool(re.search(r"\b(atom|red)\.[\w.]*\.f(16|32|64)|\b(atom|red)\.[\w.]*bf16", ptx)),
    }


def fused_usage(name: str, dtype: str, dim: int, arch: int) -> dict[str, object]:
    """Return what a kernel of keyed randomness or of the sampled softmax takes on a GPU."""
    kernel, pointers = getattr(fused_kernels, name), {n: f"*{kind}" for kind, names in _FUSED.items() for n in names}
    options: dict[str, Any] = {"WIDTH": dim, "WORDS": fused_launch.DROPOUT_WORDS, "BLOCK": fused_launch.HASH_BLOCK}
    options["num_warps"] = fused_launch.DROPOUT_WARPS
    if name in ("token_losses", "row_gradients"):
        options = {**fused_launch.launch_options(name, dim=dim, negatives=NEGATIVES), "INVERSE_TEMPERATURE": 20.0}
    constants = {argument: options[argument] for argument in kernel.arg_names if argument in options}
    numbers = dict.fromkeys(("count", "words", "salt", "threshold"), "i32")
    signature = {
        argument: "constexpr" if argument in constants else numbers.get(argument) or pointers.get(argument, f"*{dtype}")
        for argument in kernel.arg_names
    }
    at = {argument: (place,) for place, argument in enumerate(kernel.arg_names)}
    aligned = {at[a]: [["tt.divisibility", 16]] for a, kind in signature.items() if kind.startswith("*")}
    source = ASTSource(kernel, signature, {at[a]: value for a, value in constants.items()}, aligned)
    found = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": options["num_warps"]})
    return {"kernel": name, "arch": f"sm_{arch}", "type": dtype, "width": dim, **resources(found, arch)}


def load(dealt: TileSchedule) -> torch.Tensor:
    """Return the tiles of each program."""
    items = dealt.items
    return ((items[..., 3] - items[..., 2]) * (items[..., 0] >= 0)).sum(1).double()


def grid(preset: synthetic.Preset, batch: int, heads: int, processors: int, *, targets: int = 0) -> dict[str, object]:
    """Return the balance of a batch's work over the programs that a GPU runs at a time."""
    block, programs = KernelConfig(heads, 64, True).block, 2 * processors // heads
    worst = {"rows": 0.0, "columns": 0.0}
    for seed in range(3):
        lengths = synthetic.draw_lengths(preset, batch, np.random.default_rng(seed)).tolist()
        layout = anchored_layout(lengths, targets) if targets else layout_of(lengths)
        work = attention_schedule(layout.spans, layout.limits, block, programs)
        for side, dealt in zip(worst, work, strict=True):
            loads = load(dealt)
            worst[side] = max(worst[side], float(loads.max() / loads.mean()))
    return {
        "preset": preset,
        "batch": batch,
        "targets": targets,
        "heads": heads,
        "processors": processors,
        **{f"{side}_max_over_mean": round(value, 3) for side, value in worst.items()},
    }


def layout_of(lengths: list[int], candidates: list[int] | None = None) -> JaggedLayout:
    return JaggedLayout(torch.tensor([0, *lengths]).cumsum(0), None if candidates is None else torch.tensor(candidates))


def anchored_layout(histories: list[int], targets: int) -> JaggedLayout:
    """Return histories that are each followed by targets at evenly spaced anchors, the last at the end."""
    anchors = [n * (each + 1) // targets for n in histories for each in range(targets)]
    layout = layout_of([n + targets for n in histories], [targets] * len(histories))
    return replace(layout, anchors=torch.tensor(anchors))


def counted(preset: synthetic.Preset, share: float, heads: int, width: int, *, targets: int = 0) -> dict[str, object]:
    """Products and bytes of the kernels, against the tiles that hold at least one pair that is seen."""
    drawn = synthetic.draw_lengths(preset, 128, np.random.default_rng(0))
    lengths = np.minimum(drawn, 2048).tolist()  # the least is counted pair by pair
    sizes, candidates = KernelConfig(heads, width, True), [int(share * n) for n in lengths]
    layout = anchored_layout(lengths, targets) if targets else layout_of(lengths, candidates)
    work = attention_schedule(layout.spans, layout.limits, sizes.block, 2 * PROCESSORS["H100"] // heads)
    tile = 2 * sizes.block**2 * sizes.padded * heads
    least_tiles = sum(seen_tiles(layout, sample, sizes.block) for sample in range(len(lengths)))
    tiles = {"forward": load(work.rows), "backward_rows": load(work.rows), "backward_columns": load(work.columns)}
    blocks = split_into_blocks(layout.spans, layout.limits, block_size=sizes.block)
    whole = int((blocks.rows.count > 0).sum())
    parts = int((work.rows.items[..., 4] >= 0).sum())
    operand = sizes.block * width * heads * 2
    # A tile reads keys and values (or queries and gradients) and the times of its events; a block, its own two.
    least_bytes = least_tiles * (2 * operand + 8 * sizes.block) + whole * 2 * operand
    extra = parts * 2 * sizes.block * sizes.padded * heads * 4 + int(tiles["forward"].sum()) * 2 * sizes.block * 4
    return {
        "preset": preset,
        "candidates": share,
        "targets": targets,
        "heads": heads,
        "width": width,
        "flops": int(sum(PRODUCTS[name] * float(one.sum()) for name, one in tiles.items()) * tile),
        "flops_over_least": round(
            sum(PRODUCTS[name] * float(one.sum()) for name, one in tiles.items())
            / (sum(PRODUCTS.values()) * least_tiles),
            4,
        ),
        "bytes_over_least": round((float(tiles["forward"].sum()) / least_tiles * least_bytes + extra) / least_bytes, 4),
    }


def seen_tiles(layout: JaggedLayout, sample: int, block: int) -> int:
    """Tiles of a sample in which some query sees some key, found pair by pair."""
    first, length, _ = layout.spans[sample].tolist()
    places = torch.arange(-(-length // block) * block)
    limits = F.pad(layout.limits[first : first + length], (0, len(places) - length))
    seen = is_visible(places[:, None], places[None, :], limits[:, None]) & (places[:, None] < length)
    return int(seen.unflatten(0, (-1, block)).unflatten(2, (-1, block)).any(3).any(1).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--widths", type=int, nargs="+", default=[*RECIPES, 128, 256])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    results: list[dict[str, object]] = []
    presets: tuple[synthetic.Preset, ...] = ("heavy", "kuairand")
    for preset in presets:
        results += [grid(preset, 128, heads, PROCESSORS["H100"]) for heads in (1, 2, 4)]
        results += [grid(preset, 128, heads, PROCESSORS["H100"], targets=TARGETS) for heads in (1, 2, 4)]
        results += [counted(preset, share, 4, 64) for share in (0.0, 0.2)]
        results += [counted(preset, 0.0, 4, 64, targets=TARGETS)]
    for width in options.widths:
        sizes = [KernelConfig(RECIPES.get(width, 1), width, half) for half in (True, False)]
        results += [usage(name, one, arch) for one in sizes for arch in options.archs for name in KERNELS]
    fused = [("splitmix64", "i64", 1)]
    fused += [(name, dtype, dim) for dim in options.widths for dtype in ("bf16", "fp32") for name in FUSED_KERNELS]
    results += [fused_usage(*kernel, arch) for kernel in fused for arch in options.archs]
    for result in results:
        print(json.dumps(result), flush=True)
    record.save(options.out, results)


if __name__ == "__main__":
    main()
