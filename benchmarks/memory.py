"""Measures the rules of `model.memory` against attention to all earlier events: visible pairs, time and peak memory.

    python benchmarks/memory.py [--events 1000 4000 16000] [--peak 4000 16000 64000] [--rounds 3] [--out FILE.json]

Forward and backward of an HSTU layer over one history, one thread, all rules in turns; "again" is full attention a
second time. Times are CPU time of the thread. The linear part is the same layer without attention. The bound: 1.25 of
the linear part of a rule's tokens plus the share of pairs of the time of full attention. Peak memory: what a fresh
process holds during forward and backward beyond the layer and its input.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import record
from freescale.config import ModelConfig
from freescale.models import encoders
from freescale.models.jagged import EventTimes, JaggedLayout
from freescale.visibility import Visibility

SEGMENTS = {"memory": "segments", "segment": 512, "summaries": 16}
LOCAL = {"memory": "local", "window": 512, "first": 64}
RULES: dict[str, dict[str, Any]] = {"full": {}, "again": {}, "segments": SEGMENTS, "local": LOCAL}


class Layer:
    """One layer and one history."""

    def __init__(self, rule: dict[str, Any], events: int, dim: int) -> None:
        torch.manual_seed(0)
        config = ModelConfig(dim=dim, layers=1, dropout=0.0, **rule)
        visibility = Visibility.of_model(config)
        tokens = events if visibility is None else visibility.tokens(events)
        layout = JaggedLayout(torch.tensor([0, tokens]), visibility=visibility)
        event = layout.position * 60
        self.layout = JaggedLayout(layout.offsets, times=EventTimes(event, event), visibility=visibility).computed()
        self.model = encoders.build_encoder(config, max_seq_len=tokens)
        self.x = torch.randn(tokens, dim, requires_grad=True)

    def seconds(self) -> float:
        """Return the time of forward and backward."""
        begin = time.thread_time()
        self.model(self.x, self.layout).square().sum().backward()
        return time.thread_time() - begin

    def linear_seconds(self) -> float:
        """Return the same without attention."""
        with mock.patch.object(encoders, "hstu_attention", _values):
            return self.seconds()


def _values(q: Tensor, k: Tensor, v: Tensor, layout: JaggedLayout, **_: object) -> Tensor:  # noqa: ARG001  as attention
    return v


def compare(events: int, dim: int, rounds: int) -> list[dict[str, Any]]:
    layers = {name: Layer(rule, events, dim) for name, rule in RULES.items()}
    for layer in layers.values():
        layer.seconds()
    times = [{name: layer.seconds() for name, layer in layers.items()} for _ in range(rounds)]
    linear = {name: min(layer.linear_seconds() for _ in range(rounds)) for name, layer in layers.items()}
    results: list[dict[str, Any]] = []
    for name, layer in layers.items():
        share = layer.layout.pairs / layers["full"].layout.pairs
        attention = statistics.median(one["full"] for one in times) - linear["full"]
        expected = share * attention + linear[name]
        ratios = [one[name] / one["full"] for one in times]
        took = statistics.median(one[name] for one in times)
        results.append(
            {
                "events": events,
                "dim": dim,
                "memory": name,
                "tokens": layer.layout.tokens,
                "pairs": layer.layout.pairs,
                "pair_share": round(share, 4),
                "ms": round(1e3 * took, 2),
                "linear_ms": round(1e3 * linear[name], 2),
                "over_full": round(statistics.median(ratios), 4),
                "over_full_range": [round(min(ratios), 4), round(max(ratios), 4)],
                "over_expected": round(took / expected, 3),
            }
        )
    return results


def peak(rule: dict[str, Any], events: int, dim: int) -> dict[str, Any]:
    """Return the peak memory of forward and backward in this process."""
    torch.set_num_threads(1)
    layer = Layer(rule, events, dim)
    Layer(rule, 100, dim).seconds()  # compiles and loads
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident("VmRSS")
    layer.seconds()
    held = _resident("VmHWM") - before
    return {
        "events": events,
        "memory": rule.get("memory", "full"),
        "tokens": layer.layout.tokens,
        "peak_mb": round(held / 1e6, 1),
        "peak_bytes_per_token": round(held / layer.layout.tokens),
    }


def _resident(name: str) -> int:
    """Return a field of the status of this process, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--peak", type=int, nargs="*", default=[4000, 16000, 64000])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [result for events in options.events for result in compare(events, options.dim, options.rounds)]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        tasks = [(rule, events, options.dim) for rule in ({}, SEGMENTS, LOCAL) for events in options.peak]
        results += pool.starmap(peak, tasks, chunksize=1)
    for result in results:
        print(json.dumps(result), flush=True)
    record.save(options.out, results)


if __name__ == "__main__":
    main()
