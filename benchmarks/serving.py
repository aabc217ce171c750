"""Times what an exported model answers, beside the model in training: `freescale export --format pt2` and `aoti`.

    python benchmarks/serving.py [--rounds 10] [--repeats 30] [--out FILE.json]

On one thread, with the recipe `tiny` after two steps. Requests have the lengths of the log. Both sides take turns:
batches of 1 and of 64 by the programs, and by the modules in training (`eager`), from columns to user vectors. Also the
time to trace or compile and to load, and 1,000 candidates of a ranking model after one kept history, by one call and by
ten. A ratio is the median over rounds, with its range; `eager again` is eager against itself.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import record
from freescale.data.loader import Loader
from freescale.models.retrieval import Retrieval
from freescale.serving import serve
from freescale.serving.package import Format, write_package
from freescale.train.trained_model import TrainedModel, load_config, load_trained_model
from freescale.transport.world import destroy_world, init_world

CANDIDATES, CALLS = 1_000, 10


def freescale(*words: object) -> None:
    """Run a command."""
    command = [sys.executable, "-m", "freescale", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def seconds_of(work: Callable[[], Any], repeats: int) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times)


def compare(sides: dict[str, Callable[[], Any]], base: str, *, rounds: int, repeats: int) -> dict[str, Any]:
    """Time all sides in turns; return milliseconds, and the ratios over `base` as least, median and largest."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, work in sides.items():
            found[name].append(1e3 * seconds_of(work, repeats))
    found = {name: times[1:] for name, times in found.items()}  # the first round warms up
    ratios = {name: sorted(np.divide(times, found[base]).tolist()) for name, times in found.items() if name != base}
    return {
        "ms": {name: round(median(times), 3) for name, times in found.items()},
        f"over {base}": {n: [round(r, 3) for r in (of[0], median(of), of[-1])] for n, of in ratios.items()},
    }


def load_run(run: Path) -> TrainedModel:
    """Return the trained model of a run on one rank."""
    return load_trained_model(run, load_config(run), init_world(timeout=600))


def requests_of(trained: TrainedModel, count: int) -> tuple[list[dict[str, Any]], Callable[[], Any]]:
    """Return requests, and the call that computes the vectors of the same users in training."""
    module, model = trained.sharded.module, trained.sharded.module.model
    assert isinstance(model, Retrieval)
    batch = next(iter(Loader.from_run(trained.config)))
    chosen = batch.select(torch.arange(count))
    history = chosen.history
    requests = []
    for sample in range(count):
        events = history.slice(sample, sample + 1)
        requests.append({name: events[name].tolist() for name in ("item_id", "timestamp")})

    @torch.no_grad()
    def eager() -> Any:
        inputs = model.prepare_query(chosen)
        return model.encode_query(inputs, module.read_rows(inputs.ids))

    return requests, eager


def measure_retrieval(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Compare batches of users, and take the times of both formats."""
    freescale("data", "synth", place / "data", "--users", 2000, "--items", 10_000)
    words = ["--data", place / "data", "--out", place / "run", "--train.max-steps", 2, "--quiet"]
    freescale("train", "tiny", *words)
    trained, models, found = load_run(place / "run"), {}, {}
    formats: tuple[Format, ...] = ("pt2", "aoti")
    for form in formats:
        began = time.perf_counter()
        write_package(trained, place / form, form)
        exported = time.perf_counter()
        models[form] = serve.Recommender(place / form)
        loaded = time.perf_counter()
        models[form].check()
        found[form] = {"export_seconds": round(exported - began, 1), "load_seconds": round(loaded - exported, 2)}
    for count in (1, 64):
        requests, eager = requests_of(trained, count)
        for form, model in models.items():
            off = (model.query(requests) - eager()).abs().max().item()
            found[form][f"largest_difference_of_{count}"] = off
        sides: dict[str, Callable[[], Any]] = {"eager": eager, "eager again": eager}
        sides |= {form: (lambda m=model, r=requests: m.query(r)) for form, model in models.items()}
        found[f"batch of {count}"] = compare(sides, "eager", rounds=options.rounds, repeats=options.repeats)
    destroy_world()
    return found


def measure_candidates(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Compare one call with many candidates and ten calls with a tenth each, of programs of both formats."""
    freescale("data", "synth", place / "rank", "--preset", "kuairand-ranking", "--users", 300, "--shorter", 64)
    words = ["--data", place / "rank", "--out", place / "ranked", "--train.max-steps", 2, "--quiet"]
    freescale("train", "tiny", *words, "--task.kind", "ranking", "--task.labels", "label_like")
    trained, found = load_run(place / "ranked"), {}
    formats: tuple[Format, ...] = ("pt2", "aoti")
    for form in formats:
        write_package(trained, place / f"ranking-{form}", form)
        found[form] = compare_calls(serve.Recommender(place / f"ranking-{form}"), options)
    destroy_world()
    return found


def compare_calls(model: serve.Recommender, options: argparse.Namespace) -> dict[str, Any]:
    """Compare one call with calls of a tenth of its candidates."""
    example = model.facts["example"]["request"]
    columns = [name for name in example if name.startswith("candidate_")]
    request = example | {name: example[name][:1] * CANDIDATES for name in columns}
    request |= {"candidate_id": np.random.default_rng(0).integers(0, 256, CANDIDATES).tolist()}
    kept, size = model.encode([request]), CANDIDATES // CALLS
    parts = [request | {name: request[name][i : i + size] for name in columns} for i in range(0, CANDIDATES, size)]
    sides = {
        "one call": lambda: model.score(kept, [request]),
        "one call again": lambda: model.score(kept, [request]),
        "ten calls": lambda: [model.score(kept, [part]) for part in parts],
    }
    together = model.score(kept, [request])[0]
    apart = [model.score(kept, [part])[0] for part in parts]
    off = max(float(np.abs(np.concatenate([one[n] for one in apart]) - values).max()) for n, values in together.items())
    timed = compare(sides, "one call", rounds=options.rounds, repeats=max(1, options.repeats // 5))
    return timed | {"largest_difference": off}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = measure_retrieval(Path(folder), options)
        result["1,000 candidates after a kept history"] = measure_candidates(Path(folder), options)
    print(json.dumps(result, indent=1))
    record.save(options.out, [result])


if __name__ == "__main__":
    main()
