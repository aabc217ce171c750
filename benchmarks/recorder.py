"""What recording costs: calls per step x cost per call, against a step of 50 ms.

Two ranks train on emulated compute, which says how often each call is made in a step and what the bookkeeping
after it costs, in CPU time of the thread that trains. The marks are too cheap for that and are timed in a loop.

python benchmarks/recorder.py --out benchmarks/results/recorder.json
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from freescale.bench.emulated import EmulatedModel
from freescale.bubbles.recorder import Recorder
from freescale.config import resolve
from freescale.data import synthetic
from freescale.data.loader import Loader
from freescale.train.build import build
from freescale.train.sharded_model import build_model
from freescale.transport.world import World
from processes import on_ranks
from record import save

STEP_MS = 50.0


def microseconds(call: Callable[[], Any], times: int) -> float:
    """Return the CPU time of one call, the median of several rounds."""
    rounds = []
    for _ in range(7):
        before = time.thread_time_ns()
        for _ in range(times):
            call()
        rounds.append((time.thread_time_ns() - before) / times / 1e3)
    return statistics.median(rounds)


def marks() -> dict[str, float]:
    """Return the microseconds of each recording call."""
    recorder = Recorder(0)

    def span() -> None:
        with recorder.record("forward"):
            pass

    def transfer() -> None:
        flight = recorder.begin_collective("rows")
        flight.on_wait()
        flight.on_complete()

    def data() -> None:
        for _ in recorder.iterate("data", (0,)):
            pass

    return {
        "during": microseconds(span, 2000),
        "transfer": microseconds(transfer, 2000),
        "each": microseconds(data, 2000),
    }


def on_rank(world: World, steps: int, folder: str) -> list[tuple[float, int, int]]:
    """Return, per step: microseconds of bookkeeping, spans and transfers."""
    options = ["--data.path", f"{folder}/data", "--train.epochs", "100", "--train.max-steps", str(steps)]
    config = resolve("tiny", [*options, "--train.save-every", str(10**9)])
    model = EmulatedModel(
        build_model(config, items=Loader(config.data, seed=0).vocabulary.rows), lambda _: (STEP_MS / 4e3, STEP_MS / 2e3)
    )
    trainer = build(config, world, Path(folder) / "run", model=model)
    seen: list[tuple[float, int, int]] = []
    profiler = trainer.components.profiler
    end_step, end_recorded_step = profiler.end_step, profiler.recorder.end_step

    def timed_end_step(work: float = 0.0) -> None:
        before = time.thread_time_ns()
        end_step(work)
        seen.append(((time.thread_time_ns() - before) / 1e3, *counts[-1]))

    counts: list[tuple[int, int]] = []

    def counted_end_step(step: int, work: float = 0.0) -> Any:
        marks = end_recorded_step(step, work)
        counts.append((len(marks.spans), len(marks.collectives)))
        return marks

    profiler.end_step, profiler.recorder.end_step = timed_end_step, counted_end_step  # type: ignore[method-assign]
    trainer.fit()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        synthetic.write_log(Path(folder) / "data", "kuairand", users=2000)
        seen = on_ranks(on_rank, 2, options.steps, folder)[5:]
    cost = marks()
    spans, transfers = (statistics.mean(column) for column in list(zip(*seen, strict=True))[1:])
    books = statistics.mean(row[0] for row in seen)
    total = cost["each"] + (spans - 1) * cost["during"] + transfers * cost["transfer"] + books
    result = {
        "steps": len(seen),
        "spans_per_step": round(spans, 1),
        "transfers_per_step": round(transfers, 1),
        "us_per_call": {name: round(value, 2) for name, value in cost.items()},
        "books_us_per_step": round(books, 1),
        "books_us_median": round(statistics.median(row[0] for row in seen), 1),
        "us_per_step": round(total, 1),
        "percent_of_50_ms": round(100 * total / (1e3 * STEP_MS), 3),
    }
    print(json.dumps(result, indent=1))
    save(options.out, [result])


if __name__ == "__main__":
    main()
