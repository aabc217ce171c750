"""Measures a step on jagged sequences, against the same model on sequences padded to the longest.

    python benchmarks/jagged.py [--batch 128] [--longest 1024] [--dim 64] [--repeats 3] [--out FILE.json]

Forward and backward of HSTU and SASRec on lengths of the preset `heavy`, one thread, both in turns. Padded: every
sample is computed at the length of the longest one, padding included.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

import record
from freescale.config import ModelConfig
from freescale.data import synthetic
from freescale.models.encoders import HSTU, SASRec
from freescale.models.jagged import EventTimes, JaggedLayout


def step(model: torch.nn.Module, lengths: list[int], dim: int) -> float:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    event = JaggedLayout(offsets).position * 60
    layout = JaggedLayout(offsets, times=EventTimes(event, event))
    x = torch.randn(layout.tokens, dim, requires_grad=True)
    begin = time.perf_counter()
    model(x, layout).square().sum().backward()
    return time.perf_counter() - begin


def compare(name: str, options: argparse.Namespace) -> dict[str, object]:
    torch.manual_seed(0)
    config = ModelConfig(dim=options.dim, layers=2, heads=1, dropout=0.0)
    model = {"hstu": HSTU, "sasrec": SASRec}[name](config, max_seq_len=options.longest)
    drawn = synthetic.draw_lengths("heavy", options.batch, np.random.default_rng(0))
    lengths = np.minimum(drawn, options.longest).tolist()
    padded = [max(lengths)] * len(lengths)
    step(model, lengths, options.dim)
    pairs = [(step(model, lengths, options.dim), step(model, padded, options.dim)) for _ in range(options.repeats)]
    return {
        "model": name,
        "dim": options.dim,
        "tokens": sum(lengths),
        "tokens_padded": sum(padded),
        "jagged_ms": round(1e3 * statistics.median(a for a, _ in pairs), 1),
        "padded_ms": round(1e3 * statistics.median(b for _, b in pairs), 1),
        "ratio_median": round(statistics.median(a / b for a, b in pairs), 4),
        "ratio_range": [round(min(a / b for a, b in pairs), 4), round(max(a / b for a, b in pairs), 4)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [compare(name, options) for name in ("hstu", "sasrec")]
    for result in results:
        print(json.dumps(result), flush=True)
    record.save(options.out, results)


if __name__ == "__main__":
    main()
