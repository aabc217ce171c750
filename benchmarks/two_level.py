"""What the two-level exchange does to row traffic between hosts: 4 ranks on 2 hosts (network namespaces).

    python benchmarks/two_level.py [--mbit 200] [--out benchmarks/results/two_level.json]

Retrieval with 128 negatives per event, on emulated compute. Flat and two-level steps take turns on the same batches;
`flat again` gives the noise. Bytes between hosts are counted where the transports hand rows to gloo, and on the links.
`distinct` is what they should be over those of the flat exchange: distinct ids per host over the sum over its ranks.
"""

import argparse
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from tests.support.lab import INTERFACE, lab
from torch import Tensor

from freescale.bench.emulated import EmulatedModel
from freescale.bubbles.records import read_intervals
from freescale.bubbles.summary import summarize
from freescale.config import (
    BalanceConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    TablesConfig,
    TaskConfig,
    TrainConfig,
    TransportConfig,
)
from freescale.data import synthetic
from freescale.data.loader import Loader
from freescale.train.build import build
from freescale.train.sharded_model import build_model_for
from freescale.transport.c10d import C10d
from freescale.transport.pairwise import PairwiseC10d
from freescale.transport.world import World, host_of_each_rank
from processes import on_ranks
from record import save

LANES = {"flat": {"exchange": "flat"}, "two_level": {"exchange": "two_level"}, "flat again": {"exchange": "flat"}}
COMPUTE_SECONDS = 0.1
TRAFFIC = ("ids", "urgent rows", "deferred rows", "row gradients")


class SentBytes:
    """The bytes of rows and row gradients, and the messages, that this rank sends to other hosts."""

    def __init__(self, world: World) -> None:
        layout = host_of_each_rank(world.transport)
        host = layout.host_of[world.rank]
        self.far = [other != host for other in layout.host_of]
        self.is_first = layout.ranks[host][0] == world.rank
        """Of its host: it counts the bytes of the link that all its ranks share."""
        self.bytes, self.messages = 0, Counter[str]()
        for kind in (C10d, PairwiseC10d):
            self._count(kind)

    def _count(self, kind: Any) -> None:
        begin = kind.all_to_all

        def all_to_all(
            transport: C10d, rows: Tensor, send: Sequence[int], receive: Sequence[int], *, name: str, **more: Any
        ) -> Any:
            sent = [count for count, is_far in zip(send, self.far, strict=True) if is_far and count]
            if name.startswith(("rows of width", "row gradients of width")):
                self.bytes += sum(sent) * rows[:1].nbytes
                self.messages[name] += len(sent)
            return begin(transport, rows, send, receive, name=name, **more)

        kind.all_to_all = all_to_all


def link_bytes() -> int:
    """Return what this host has sent over its link."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    return int(line.split(":")[1].split()[8])


def distinct_share(world: World, ids: list[Any]) -> float:
    """Return the distinct ids per host, over the sum of those of its ranks. `ids`: of each batch, on this rank."""
    of_ranks: list[Any] = [None] * world.world_size
    dist.all_gather_object(of_ranks, ids)
    hosts, merged, every = host_of_each_rank(world.transport), 0, 0
    for ranks in hosts.ranks:
        for batch in zip(*(of_ranks[rank] for rank in ranks), strict=True):
            merged, every = merged + len(np.unique(np.concatenate(batch))), every + sum(map(len, batch))
    return merged / every


def measured(
    world: World,
    data: Path,
    out: Path,
    overlap: str,
    turns: int,
    steps: int,
    lanes: dict[str, dict[str, Any]] | None = None,
    negatives: int = 128,
    samples: int = 8,
) -> Any:
    """Train every lane in turns; return the exposed row traffic and the time of a step, and the bytes between hosts.

    `lanes`: what differs in `[tables]`; the others are compared with the first. `samples`: of a rank.
    """
    lanes, sent, ids = lanes or LANES, SentBytes(world), list[Any]()
    first = next(iter(lanes))
    found: dict[str, dict[str, list[float]]] = {name: {} for name in lanes}
    for turn in range(turns):
        for name in lanes if turn % 2 else reversed(lanes):
            config = RunConfig(
                seed=turn,
                data=DataConfig(path=str(data), global_batch=samples * world.world_size, max_history=50, shards=16),
                model=ModelConfig(dim=64, layers=1),
                task=TaskConfig(negatives=negatives),
                balance=BalanceConfig(mode="off"),
                tables=TablesConfig(**lanes[name], overlap=overlap),  # type: ignore[arg-type]
                transport=TransportConfig(urgent="c10d", deferred="c10d"),
                train=TrainConfig(max_steps=steps, save_every=10**9, log_every=1),
            )
            loader = Loader.from_run(config, rank=world.rank, world_size=world.world_size)
            passes = COMPUTE_SECONDS / 3, COMPUTE_SECONDS * 2 / 3
            model = EmulatedModel(build_model_for(config, loader), lambda _, passes=passes: passes)
            folder = out / f"{overlap}-{turn}-{name.replace(' ', '-')}"
            trainer = build(config, world, folder, model=model, quiet=True)
            run = trainer.components.step.run

            def keep(*words: Any, run: Any = run, **more: Any) -> Any:
                state = run(*words, **more)
                ids.append(state.unique_ids[0]["item"].unique.numpy())
                return state

            trainer.components.step.run = keep  # type: ignore[method-assign]
            rows, link = sent.bytes, link_bytes()
            trainer.fit()
            counts = {"row_bytes": sent.bytes - rows, "link_bytes": (link_bytes() - link) * sent.is_first}
            trainer.close()
            totals: list[Any] = [None] * world.world_size
            dist.all_gather_object(totals, counts)
            if world.is_rank_zero:
                summary = summarize(read_intervals(folder))
                exposed = sum(line.ms for line in summary.lines if line.cause in TRAFFIC)
                of_turn = {"exposed_ms": exposed, "step_ms": summary.step_ms}
                of_turn |= {kind: sum(each[kind] for each in totals) / steps for kind in counts}
                for kind, value in of_turn.items():
                    found[name].setdefault(kind, []).append(value)
    share = distinct_share(world, ids)
    if not world.is_rank_zero:
        return None
    over = {
        name: {kind: spread([a / b for a, b in zip(of, found[first][kind], strict=True)]) for kind, of in lane.items()}
        for name, lane in found.items()
        if name != first
    }
    medians = {name: {kind: statistics.median(of) for kind, of in lane.items()} for name, lane in found.items()}
    return {"overlap": overlap, "distinct": share, "per_step": medians, f"over_{first}": over}


def spread(values: list[float]) -> list[float]:
    return [min(values), statistics.median(values), max(values)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=200)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--overlap", default="off,on")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder, lab(options.hosts) as hosts:
        synthetic.write_log(Path(folder) / "data", "ml1m", users=2_000, catalogue=options.items, shorter=4)
        hosts.shape(options.mbit or None)
        for overlap in options.overlap.split(","):
            words = Path(folder) / "data", Path(folder) / "runs", overlap, options.turns, options.steps
            results.append(on_ranks(measured, options.ranks, *words, lab=hosts))
            print(json.dumps(results[-1], indent=1), flush=True)
    save(options.out, results)


if __name__ == "__main__":
    main()
