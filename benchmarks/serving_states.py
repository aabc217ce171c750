"""Measures states of users: an event that is appended against the history encoded anew, equal answers, and bytes.

    python benchmarks/serving_states.py [--events 4000] [--rounds 10] [--out FILE.json]

HSTU with random weights, one thread, programs of torch.export. Both in turns; "again" is a second append. The histories
are encoded in chunks whose work follows the visible pairs, so encoding anew is no straw man. Answers: the user vector
of 20 events that are appended one by one against that of the history encoded at once.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from freescale.config import DataConfig, ModelConfig, RunConfig, TablesConfig, TaskConfig
from freescale.data import writer
from freescale.data.loader import Loader
from freescale.data.synthetic import list_array
from freescale.serving import states
from freescale.serving.package import write_package
from freescale.train.build import build
from freescale.train.sharded_model import ShardedModel
from freescale.train.trained_model import TrainedModel
from freescale.transport.world import destroy_world, init_world
from record import save

ITEMS, MORE = 1000, 20
RULES: dict[str, dict[str, Any]] = {
    "segments": {"memory": "segments", "segment": 512, "summaries": 16},
    "local": {"memory": "local", "window": 512, "first": 64},
}


def export(folder: Path, events: int, rule: dict[str, Any]) -> states.StatefulRecommender:
    """Export a model that was not trained."""
    offsets, item = np.array([0, 50, 100]), np.arange(100) % ITEMS
    columns = {"item_id": list_array(offsets, item), "timestamp": list_array(offsets, item * 60)}
    writer.write_dataset(
        folder / "data", [pa.table({"user_id": pa.array([0, 1]), **columns})], rows_per_group=1, items=ITEMS
    )
    config = RunConfig(
        data=DataConfig(path=str(folder / "data"), global_batch=2, shards=1, max_history=events + MORE),
        model=ModelConfig(dim=64, layers=2, **rule),
        task=TaskConfig(seen="allow"),
        tables=TablesConfig(placement="replicated"),
    )
    world = init_world(timeout=60)
    parts = build(config, world, folder / "run", quiet=True).components
    model = TrainedModel(
        config, world, ShardedModel(parts.module, parts.tables, []), Loader.from_run(config).vocabulary.items, 0
    )
    write_package(model, folder / "model", "pt2")
    destroy_world()
    return states.StatefulRecommender(folder / "model")


def compare(name: str, events: int, rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    item, at = rng.integers(0, ITEMS, events + MORE), np.cumsum(rng.integers(1, 10**5, events + MORE))

    def request(begin: int, end: int) -> list[dict[str, Any]]:
        return [{"item_id": item[begin:end].tolist(), "timestamp": at[begin:end].tolist()}]

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model = export(Path(folder), events, RULES[name])
        before = state = model.encode(request(0, events))
        calls = {
            "anew": lambda: model.encode(request(0, events + 1)),
            "append": lambda: model.append(before, request(events, events + 1)),
            "again": lambda: model.append(before, request(events, events + 1)),
        }
        took: dict[str, list[float]] = {call: [] for call in calls}
        for turn in range(rounds + 1):
            for call, run in calls.items():
                begin = time.thread_time()
                run()
                if turn:  # the first warms up
                    took[call].append(time.thread_time() - begin)
        difference = 0.0
        for place in range(events, events + MORE):
            state = model.append(state, request(place, place + 1))
            anew = model.encode(request(0, place + 1))
            vectors = [model.query_from(one, [{"time": int(at[place]) + 9}]) for one in (state, anew)]
            difference = max(difference, float((vectors[0] - vectors[1]).abs().max()))
        stored = len(model.dump(state[0]))
    ratios = [a / b for a, b in zip(took["append"], took["anew"], strict=True)]
    return {
        "memory": name,
        "events": events,
        "anew_ms": round(1e3 * statistics.median(took["anew"]), 2),
        "append_ms": round(1e3 * statistics.median(took["append"]), 2),
        "append_over_anew": round(statistics.median(ratios), 4),
        "append_over_anew_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "again_over_append": round(statistics.median(took["again"]) / statistics.median(took["append"]), 3),
        "largest_difference": difference,
        "kept_tokens": state[0].kept["place"].numel(),
        "bytes_of_a_user": stored,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for name in RULES:
        results.append(compare(name, options.events, options.rounds))
        print(json.dumps(results[-1]), flush=True)
    save(options.out, results)


if __name__ == "__main__":
    main()
