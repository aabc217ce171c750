"""What prioritized embeddings win: time that a step waits for ids, rows and their gradients.

    python benchmarks/embedding.py --out benchmarks/results/embedding.json

Two hosts (network namespaces) with a shaped link, one rank each, one and the same TorchRec model. Four ways to train
it take turns over the same batches: TorchRec's plain loop, its SparseDist pipeline, our loop with distinct ids, one
thing after another, and prioritized; then the plain loop again, as the floor. Exposed time is the ledger's. All train
on ids of which 4% are in the batch before too, on `production` popularity, and on shares from 0 to 50%, on emulated
compute; last with real compute.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from numpy.typing import NDArray
from tests.support.lab import INTERFACE, lab
from tests.support.torchrec_model import outputs
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from freescale.bench.emulated import emulate_passes
from freescale.bench.torchrec_loops import record_transfers
from freescale.bubbles.records import IntervalRecord, read_intervals
from freescale.bubbles.step_profiler import StepProfiler
from freescale.bubbles.summary import summarize
from freescale.config import TransportConfig
from freescale.data import synthetic
from freescale.data.order import Permutation, derive_key
from freescale.integrations.pipeline import PrioritizedPipeline
from freescale.integrations.torchrec import PrioritizedEmbeddingSharder
from freescale.transport.world import World
from processes import on_ranks
from record import save

RANKS, DIM = 2, 64
CATALOGUE, TOKENS = 1_000_000, 16_384
FEATURES = ("clicked", "bought", "seen")
EMBEDDING = ("ids", "urgent rows", "deferred rows", "row gradients")
PLAIN, SPARSE_DIST, SERIAL, PRIORITIZED, AGAIN = "torchrec", "sparse_dist", "serial", "prioritized", "torchrec_again"
Ints = NDArray[np.int64]


@dataclass
class Batch(Pipelineable):
    """A rank's part of a step."""

    ids: KeyedJaggedTensor

    def to(self, *_: Any, **__: Any) -> "Batch":
        return self

    def record_stream(self, stream: Any) -> None:
        """Asked for by TorchRec's pipeline."""

    def pin_memory(self) -> "Batch":
        return self


@dataclass
class Scene:
    """What is trained on and what computes: the same for all ways to train."""

    ids: Callable[[int], Ints]
    """Of a step, on this rank."""
    compute: Callable[[nn.Module, list[Tensor]], Tensor]
    steps: int
    begin: int = 0

    def __iter__(self) -> Iterator[Batch]:
        """The batches of a turn, and one more in front that is not counted."""
        for step in range(self.begin, self.begin + self.steps + 1):
            ids = self.ids(step)
            parts = [torch.from_numpy(ids[ids % len(FEATURES) == feature]) for feature in range(len(FEATURES))]
            lengths = torch.tensor([len(part) for part in parts])
            yield Batch(KeyedJaggedTensor(keys=list(FEATURES), values=torch.cat(parts), lengths=lengths))


@dataclass(frozen=True)
class Colliding:
    """Distinct ids, a share of which the same rank's batch before has too."""

    rank: int
    share: float
    count: int

    def __call__(self, step: int) -> Ints:
        shared = round(self.share * self.count)
        return np.concatenate([self._own(step - 1)[:shared], self._own(step)[: self.count - shared]])

    def _own(self, step: int) -> Ints:
        """Numbers that no other rank and no step nearby has."""
        first = ((step + 1) * RANKS + self.rank) * self.count
        return Permutation(CATALOGUE, derive_key(7))((first + np.arange(self.count)) % CATALOGUE)


@dataclass(frozen=True)
class Popular:
    """Ids as `production` logs have them."""

    rank: int

    def __call__(self, step: int) -> Ints:
        return synthetic.draw_items(TOKENS, CATALOGUE, "production", np.random.default_rng([step, self.rank]))


@dataclass(frozen=True)
class Waiting:
    """Compute as a wait of a given length."""

    seconds: float

    def __call__(self, dense: nn.Module, rows: list[Tensor]) -> Tensor:
        return emulate_passes(rows, dense.parameters(), forward=self.seconds / 3, backward=self.seconds * 2 / 3)


@dataclass(frozen=True)
class Computing:
    """Compute as products of matrices, over all rows so many times."""

    rounds: int

    def __call__(self, dense: nn.Module, rows: list[Tensor]) -> Tensor:
        x = torch.cat(rows)
        for _ in range(self.rounds):
            x = torch.tanh(dense(x))
        return x.square().mean()


class Dense(nn.Module):
    """The dense part of a user's model."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(8)])
        self._scene = scene

    def forward(self, rows: list[Tensor]) -> Tensor:
        return self._scene.compute(self.layers, rows)


class UserModel(nn.Module):
    """A user's model: rows of three features over two tables, and a dense part."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        tables = [("item", ["clicked", "bought"]), ("shop", ["seen"])]
        configs = [
            EmbeddingConfig(name=name, num_embeddings=CATALOGUE, embedding_dim=DIM, feature_names=features)
            for name, features in tables
        ]
        self.rows = EmbeddingCollection(device=torch.device("meta"), tables=configs)
        self.dense = Dense(scene)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        found = self.rows(batch.ids)
        loss = self.dense([found[feature].values() for feature in FEATURES])
        return loss, loss.detach()


def sharded(model: nn.Module, sharder: EmbeddingCollectionSharder, world: World) -> DistributedModelParallel:
    constraint = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world.world_size, compute_device="cpu"),
        constraints=dict.fromkeys(("item", "shop"), constraint),
    )
    sharders: list[Any] = [sharder]
    plan = planner.collective_plan(model, sharders, world.group)
    return DistributedModelParallel(model, plan=plan, sharders=sharders, device=torch.device("cpu"))


class PausableProfiler(StepProfiler):
    """Counts no step while it is paused."""

    paused = False

    def end_step(self, work: float = 0.0) -> None:
        if self.paused:
            self.restart_step()
        else:
            super().end_step(work)


class Way:
    """One way to train."""

    def __init__(self, name: str, world: World, scene: Scene, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.turns: list[tuple[str, int]] = []
        """Of each turn: what was trained on, and the bytes that a step sent."""
        self._scene = scene
        self._bubbles = PausableProfiler(folder, steps=0, every=scene.steps, timeout=120.0)
        fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.01}
        kind = PrioritizedEmbeddingSharder if name in (SERIAL, PRIORITIZED) else EmbeddingCollectionSharder
        self._model = sharded(UserModel(scene), kind(fused_params=fused), world)
        dense = [p for n, p in self._model.named_parameters() if "rows." not in n]
        self._optimizer = torch.optim.SGD(dense, lr=1e-3)
        self._pipeline: Any = None
        if name == SPARSE_DIST:
            self._pipeline = TrainPipelineSparseDist(self._model, self._optimizer, torch.device("cpu"))
        elif name in (SERIAL, PRIORITIZED):
            overlap = name == PRIORITIZED
            gloo = TransportConfig(urgent="c10d", deferred="c10d")  # as TorchRec's: only the schedule differs
            self._pipeline = PrioritizedPipeline(
                self._model, self._optimizer, profiler=self._bubbles, overlap=overlap, transport=gloo
            )

    def turn(self, label: str) -> None:
        """Train for a turn. The first step, whose rows nobody could fetch ahead, is not counted."""
        steps = iter(self._steps())
        self._bubbles.paused = True
        next(steps)
        self._bubbles.paused = False
        before = bytes_sent()
        for _ in steps:
            pass
        self.turns.append((label, (bytes_sent() - before) // self._scene.steps))

    def close(self) -> list[tuple[str, int, IntervalRecord]]:
        """Of each turn: what was trained on, bytes per step, and where time went."""
        self._bubbles.close()
        dist.barrier()
        found = read_intervals(self.folder)
        return [(label, sent, one) for (label, sent), one in zip(self.turns, found, strict=True)]

    def _steps(self) -> Iterator[Any]:
        if isinstance(self._pipeline, PrioritizedPipeline):
            yield from outputs(self._pipeline, self._scene)
            return
        with record_transfers(self._bubbles):
            for out in self._plainly() if self._pipeline is None else self._sparse_dist(self._pipeline):
                self._bubbles.end_step()
                yield out

    def _plainly(self) -> Iterator[Any]:
        for batch in self._scene:
            with self._bubbles.record("forward"):
                self._optimizer.zero_grad()
                loss, out = self._model(batch)
            with self._bubbles.record("backward"):
                loss.backward()
            with self._bubbles.record("optimizer"):
                self._optimizer.step()
            yield out

    def _sparse_dist(self, pipeline: TrainPipelineSparseDist[Any, Any]) -> Iterator[Any]:
        batches = iter(self._scene)
        while True:
            try:
                with self._bubbles.record("forward"):
                    out = pipeline.progress(batches)
            except StopIteration:
                return
            yield out


def bytes_sent() -> int:
    """That left this host by its link."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (line,) = [line for line in lines if line.strip().startswith(f"{INTERFACE}:")]
    return int(line.split()[9])


def exposed(interval: IntervalRecord) -> dict[str, float]:
    """Milliseconds of a step: all of it, and what embeddings leave uncovered."""
    found = summarize([interval])
    ms = {line.cause: line.ms for line in found.lines}
    return {"step": found.step_ms, "exposed": sum(ms.get(cause, 0.0) for cause in EMBEDDING)}


def collisions(ids: Callable[[int, int], Ints], steps: int) -> float:
    """Share of a step's distinct ids, of all ranks, that the step before has too."""
    sets = [np.unique(np.concatenate([ids(rank, step) for rank in range(RANKS)])) for step in range(steps + 1)]
    shares = [len(np.intersect1d(a, b)) / len(b) for a, b in itertools.pairwise(sets)]
    return round(statistics.mean(shares), 4)


def compared(turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Of each way the median; ratios are within a turn, beside the plain loop against itself."""
    plain = turns[PLAIN]

    def falls(way: str, against: str) -> float:
        pairs = zip(turns[way], turns[against], strict=True)
        return round(statistics.median(1 - a["exposed"] / b["exposed"] for a, b in pairs), 4)

    result: dict[str, Any] = {
        f"{name}_{what}_ms": round(statistics.median(turn[what] for turn in of_way), 2)
        for name, of_way in turns.items()
        for what in ("exposed", "step")
    }
    others = [name for name in (PLAIN, SPARSE_DIST, SERIAL) if name in turns]
    result |= {f"exposed_falls_by_against_{name}": falls(PRIORITIZED, name) for name in others}
    result |= {
        f"step_over_{name}": round(
            statistics.median(a["step"] / b["step"] for a, b in zip(turns[PRIORITIZED], turns[name], strict=True)), 3
        )
        for name in others
    }
    if AGAIN in turns:
        again = [a["exposed"] / b["exposed"] for a, b in zip(turns[AGAIN], plain, strict=True)]
        result["exposed_plain_again_over_plain"] = [round(value, 3) for value in (min(again), max(again))]
    result["bytes_over_torchrec"] = round(
        sum(turn["sent"] for turn in turns[PRIORITIZED]) / sum(turn["sent"] for turn in plain), 3
    )
    return result


def train_in_turns(world: World, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All scenes, all ways in turns; what was found of each scene."""
    waiting, rank = Waiting(options.seconds), world.rank
    scene = Scene(Colliding(rank, 0.0, options.ids), waiting, options.steps)
    ways = [Way(name, world, scene, folder / name) for name in (PLAIN, SPARSE_DIST, SERIAL, PRIORITIZED, AGAIN)]
    ends = [way for way in ways if way.name in (PLAIN, PRIORITIZED)]
    few, popular, turns = Colliding(rank, 0.04, options.ids), Popular(rank), options.sweep_turns
    scenes: list[tuple[str, Any, Any, list[Way], int]] = [
        ("4%", few, waiting, ways, options.turns),
        ("production", popular, waiting, ways, options.turns),
        *((f"{share:.0%} swept", Colliding(rank, share, options.ids), waiting, ends, turns) for share in options.sweep),
        ("4% real", few, Computing(options.rounds), ways, options.turns),
        ("production real", popular, Computing(options.rounds), ways, options.turns),
    ]
    for label, ids, compute, who, turns in scenes:
        scene.ids, scene.compute = ids, compute
        if isinstance(compute, Computing):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # threads that move bytes go first
        for turn in range(turns):
            scene.begin = turn * (options.steps + 1)
            for way in who:
                way.turn(label)
    found = {way.name: way.close() for way in ways}
    results = []
    for label, ids, _, who, _ in scenes:
        turns_of = {
            way.name: [exposed(one) | {"sent": sent} for of, sent, one in found[way.name] if of == label] for way in who
        }
        measured = collisions(lambda rank, step, ids=ids: replace(ids, rank=rank)(step), 4)
        results.append({"ids": label, "collisions": measured} | compared(turns_of))
    return results


def linear_fit(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Exposed time over the share of shared ids, as a line; and what it predicts for `production` popularity."""
    swept = [result for result in results if "swept" in result["ids"]]
    share, exposed_ms = (
        np.array([result[name] for result in swept]) for name in ("collisions", "prioritized_exposed_ms")
    )
    slope, base = np.polyfit(share, exposed_ms, 1)
    off = exposed_ms - (base + slope * share)
    few, popular = (next(r for r in results if r["ids"] == label) for label in ("4%", "production"))
    part = slope / few["serial_exposed_ms"]  # of what is exposed when everything is waited for
    return {
        "base_ms": round(float(base), 2),
        "ms_per_percent": round(float(slope) / 100, 3),
        "r_squared": round(1 - float((off**2).sum() / ((exposed_ms - exposed_ms.mean()) ** 2).sum()), 4),
        "production_predicted_ms": round(float(base + part * popular["collisions"] * popular["serial_exposed_ms"]), 2),
        "production_measured_ms": popular["prioritized_exposed_ms"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.2, help="of compute, in a step")
    parser.add_argument("--rounds", type=int, default=2, help="of the dense part, with real compute")
    parser.add_argument("--ids", type=int, default=8192, help="distinct ones of a rank and a step")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--sweep", type=float, nargs="+", default=[0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    parser.add_argument("--sweep-turns", type=int, default=3)
    parser.add_argument("--mbit", type=float, default=200, help="of the link between the hosts")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with lab(RANKS) as hosts, tempfile.TemporaryDirectory() as folder:
        hosts.shape(options.mbit)
        results = on_ranks(train_in_turns, RANKS, options, Path(folder), lab=hosts)
    results.append({"linear_fit": linear_fit(results)})
    for result in results:
        print(json.dumps(result))
    save(options.out, results)


if __name__ == "__main__":
    main()
