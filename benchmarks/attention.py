"""Measures time and memory of HSTU attention on a CPU, against dense matrix products with the same FLOPs.

    python benchmarks/attention.py [--batch 128] [--longest 2048] [--widths 256 128 64 50 32] [--rounds 5]
                                   [--memory 2048 8192] [--out FILE.json]

Forward and backward on lengths of the preset `heavy`, one thread, in turns: with pairs in C, with pairs in torch
operators (the fallback without a compiler), and the dense products. Memory: the peak that the call adds for one sample
of each length, in a separate process.
"""

import argparse
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import record
from freescale.bench import attention
from freescale.data import synthetic
from freescale.models.attention import blocks
from freescale.models.attention.reference import AttentionProblem


def problem(lengths: list[int], width: int) -> AttentionProblem:
    return AttentionProblem.random(lengths, heads=1, width=width, dtype=torch.float32, device=torch.device("cpu"))


def without_compiler(of: AttentionProblem) -> None:
    with mock.patch.object(blocks, "load_library", return_value="the benchmark disables it"):
        attention.run_operator(of)


def time(lengths: list[int], width: int, rounds: int) -> dict[str, object]:
    of = problem(lengths, width)
    competitors: dict[str, Callable[[AttentionProblem], None]] = {
        "pairs_in_c": attention.run_operator,
        "pairs_by_torch": without_compiler,
        "pairs_in_c_again": attention.run_operator,
    }
    found = {one.name: one for one in attention.compare(of, competitors, rounds=rounds)}
    ratios = {f"{name}_over_dense": round(1 / found[name].of_dense, 3) for name in competitors}
    return {
        "width": width,
        "tokens": of.layout.tokens,
        "dense_ms": round(1e3 * found["dense"].seconds, 1),
        "dense_gflops": round(found["dense"].flops_per_second / 1e9, 1),
        **ratios,
    }


def added_peak_mb(length: int, width: int) -> float:
    """Return the megabytes that one forward and backward adds to the peak, beyond its operands."""
    torch.set_num_threads(1)
    attention.run_operator(problem([64], width))  # loads libraries
    of = problem([length], width)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak_mb()
    attention.run_operator(of)
    return peak_mb() - before


def peak_mb() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def memory(lengths: list[int], width: int) -> dict[str, object]:
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = {length: round(pool.apply(added_peak_mb, (length, width)), 1) for length in lengths}
    return {"width": width, "memory_mb": found, "one_matrix_of_pairs_mb": {n: n * n * 4 >> 20 for n in lengths}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 128, 64, 50, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    drawn = synthetic.draw_lengths("heavy", options.batch, np.random.default_rng(0))
    lengths = np.minimum(drawn, options.longest).tolist()
    results = [time(lengths, width, options.rounds) for width in options.widths]
    results.append(memory(options.memory, 128))
    for result in results:
        print(json.dumps(result), flush=True)
    record.save(options.out, results)


if __name__ == "__main__":
    main()
