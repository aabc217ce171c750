"""Compares the simulator with real runs of 2 and 4 ranks over shaped links.

    python benchmarks/simulator.py --out benchmarks/results/simulator.json

Every rank has its own host (a network namespace), or `--local` ranks share one. With emulated compute, runs with
nothing, balance, priority, both and nothing again take turns over the same samples, at two link rates. It fits the
speed of ranks and links to the run with nothing, and predicts the others: the step, and every cause above 5% of it. The
same with real compute on two ranks is added.

`--two-level` adds runs in which hosts request each row once, with nothing and with both. `--group-ranks` places
samples in groups of so many ranks. What ranks of one host pass to each other has the rate of `--near`:

python benchmarks/simulator.py --ranks 4 --local 2 --mbit 200 --negatives 128 --two-level --no-real
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from tests.support.lab import Lab, lab

import lab_speed
from freescale.balance.cost import Cost
from freescale.bench.emulated import EmulatedModel
from freescale.bubbles.records import read_intervals, read_samples
from freescale.bubbles.summary import Summary, summarize
from freescale.config import RunConfig, resolve
from freescale.data import synthetic
from freescale.data.dataset import Dataset, compute_stats
from freescale.data.loader import Loader
from freescale.models.protocol import Inputs
from freescale.simulate import cluster
from freescale.simulate.cluster import Cluster, Figure
from freescale.simulate.lookups import sample_data
from freescale.simulate.whatif import Scenario, Techniques, simulate_steps
from freescale.simulate.workload import ModelCost, SampledStep, plan_step
from freescale.train.build import build
from freescale.train.sharded_model import build_model
from freescale.transport.world import World
from processes import on_ranks
from record import save

SAMPLES, STEP, COST = 8, 0.01, Cost(token=4e-5, pair=2e-7)
"""Samples of a rank; seconds of emulated compute: of a step, and of its samples."""
WORTH = 0.05
"""Of a step: causes below are noise."""


class Turn(NamedTuple):
    """A run of the comparison."""

    techniques: Techniques
    two_level: bool = False


def turns(options: argparse.Namespace) -> dict[str, Turn]:
    """The runs, in their order."""
    nothing, both = Techniques(False, False, False), Techniques(True, True, False)
    of_levels = {"two-level": Turn(nothing, True), "two-level, both": Turn(both, True)} if options.two_level else {}
    return {
        "nothing": Turn(nothing),
        "balance": Turn(Techniques(True, False, False)),
        "priority": Turn(Techniques(False, True, False)),
        "both": Turn(both),
        **of_levels,
        "nothing again": Turn(nothing),
    }


def settings(options: argparse.Namespace, ranks: int, turn: Turn) -> RunConfig:
    fields = {
        "data.path": options.data,
        "data.max-history": 1024,
        "data.global-batch": SAMPLES * ranks,
        "data.split": "none",
        "model.dim": options.dim,
        "model.layers": 1,
        "task.negatives": options.negatives,
        "tables.optimizer": "sgd",
        "tables.overlap": "on" if turn.techniques.priority else "off",
        "balance.mode": "on" if turn.techniques.balance else "off",
        "balance.group-ranks": options.group_ranks,
        "transport.urgent": "c10d",
        "transport.deferred": "c10d",
        "train.max-steps": options.steps,
        "train.epochs": 100,
        "train.save-every": 10**9,
        "train.log-every": 10**6,
    }
    if turn.two_level:
        fields["tables.exchange"] = "two_level"
    words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    return resolve("tiny", [*words, "--balance.cost", *map(str, COST.constants)])


class Recording:
    """Emulated compute that records the lengths of its samples."""

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []

    def seconds(self, inputs: Inputs) -> tuple[float, float]:
        lengths = inputs.layout.lengths.numpy()  # type: ignore[attr-defined]
        self.lengths.append(lengths.tolist())
        whole = STEP + float(COST.of(lengths).sum())
        return whole / 3, whole * 2 / 3


def trained(world: World, options: argparse.Namespace, folder: Path, emulated: bool) -> list[list[list[int]]]:
    """All runs; gives the lengths of every rank's samples, step by step, where nothing was moved."""
    found: list[list[list[int]]] = []
    for name, turn in turns(options).items():
        config, recording = settings(options, world.world_size, turn), Recording()
        items = Loader(config.data, seed=0).vocabulary.rows
        model = EmulatedModel(build_model(config, items=items), recording.seconds) if emulated else None
        trainer = build(config, world, folder / name, model=model)
        trainer.fit()
        trainer.close()
        if name == "nothing":
            found = [[] for _ in range(world.world_size)]
            dist.all_gather_object(found, recording.lengths)
    return found


def lane(options: argparse.Namespace) -> Cluster:
    """The hosts of the lab, before anything is measured: nothing varies."""
    known = {"jitter": 0.0, "contention": 0.0, "message": 0.0, "sm_free": 1.0}
    known |= {"ranks_per_host": float(options.local), "near": options.near}
    found = cluster.load("cpu")
    fixed = {name: Figure(value, value, value, "by design") for name, value in known.items()}
    return replace(found, name="the lab", figures={**found.figures, **fixed})


class Prediction(NamedTuple):
    """A run, and what was thought of it."""

    name: str
    measured: Summary
    predicted: Summary


def predictions(
    folder: Path, options: argparse.Namespace, config: RunConfig, lengths: list[list[list[int]]]
) -> list[Prediction]:
    """What the simulator, which has seen only the first run, thinks of all runs."""
    samples, ranks = read_samples(folder / "nothing"), len(lengths)
    data = Dataset(options.data)
    model = lab_speed.buckets(ModelCost.from_config(config, compute_stats(data), sample_data(config, data)), samples)
    where = lab_speed.linked(lane(options), samples, ranks=ranks)
    machine = lab_speed.measured(samples, model)
    question = Scenario(model, np.empty(0, int), np.empty(0, int), SAMPLES, where, lambda _: machine)
    drawn = [
        SampledStep(np.concatenate(step), np.repeat(np.arange(ranks), [len(of_rank) for of_rank in step]))
        for step in zip(*lengths, strict=True)
    ]
    found = []
    hosts = np.arange(ranks) // options.local
    for name, turn in turns(options).items():
        rules = config.balance if turn.techniques.balance else None
        loads = [
            plan_step(one, model, world_size=ranks, rules=rules, hosts=hosts, two_level=turn.two_level) for one in drawn
        ]
        predicted = simulate_steps(question, where, ranks, turn.techniques, loads, np.random.default_rng(0))
        found.append(Prediction(name, summarize(read_intervals(folder / name)), predicted))
    return found


def judged(found: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Of every run: the step and its causes, measured and predicted, and how far off each is as a share of it."""
    result = []
    for name, measured, predicted in found:
        pairs = {"step": (measured.step_ms, predicted.step_ms)} | {
            a.cause: (a.ms, b.ms) for a, b in zip(measured.lines, predicted.lines, strict=True) if a.share >= WORTH
        }
        line = {cause: [round(a, 1), round(b, 1), f"{b / a - 1:+.1%}"] for cause, (a, b) in pairs.items()}
        result.append({"with": name} | line)
    return result


def measured_in(
    options: argparse.Namespace, hosts: Lab, folder: Path, ranks: int, *, emulated: bool
) -> list[dict[str, Any]]:
    kept = folder.parent / f"lengths-{ranks}.json"
    if not (folder / "nothing again").exists():
        lengths = on_ranks(trained, ranks, options, folder, emulated, lab=hosts)
        if emulated:  # a real model does not write them down, but it is given the same
            kept.write_text(json.dumps(lengths))
    config = settings(options, ranks, turns(options)["nothing"])
    return judged(predictions(folder, options, config, json.loads(kept.read_text())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, nargs="+", default=[100, 250], help="of the links between the hosts")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--local", type=int, default=1, help="ranks of a host")
    parser.add_argument("--near", type=float, default=2e9, help="bytes per second between the ranks of a host")
    parser.add_argument("--two-level", action="store_true", help="add runs with tables.exchange = two_level")
    parser.add_argument("--group-ranks", type=int, default=256, help="balance.group_ranks")
    parser.add_argument("--negatives", type=int, default=1)
    parser.add_argument("--no-real", dest="real", action="store_false", help="leave real compute out")
    parser.add_argument("--users", type=int, default=6000)
    parser.add_argument("--runs", type=Path, help="keep the runs here; those that are there are not trained again")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.runs or Path(temporary)
        options.data = f"{folder}/data"
        if not Path(options.data).exists():
            synthetic.write_log(options.data, "heavy", users=options.users, catalogue=200_000, popularity="production")
        for ranks in options.ranks:
            with lab(ranks // options.local) as hosts:
                for mbit in options.mbit:
                    hosts.shape(mbit)
                    real = options.real and ranks == 2 and options.local == 1 and mbit == options.mbit[0]
                    for emulated in (True, False) if real else (True,):
                        place = folder / f"{ranks}-{mbit}-{emulated}"
                        for line in measured_in(options, hosts, place, ranks, emulated=emulated):
                            compute = "emulated" if emulated else "real"
                            results.append({"ranks": ranks, "mbit": mbit, "compute": compute} | line)
                            print(json.dumps(results[-1]), flush=True)
    save(options.out, results)


if __name__ == "__main__":
    main()
