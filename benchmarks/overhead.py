"""What does the trainer cost beyond the step itself?

    python benchmarks/overhead.py [--ranks 2] [--blocks 12] [--steps 20] [--out FILE.json]

The tiny recipe, trained by the trainer and by a bare hand-written loop over the same batches, model and tables, in turn
in the same processes: a block of steps of each. The loop has what any loop has: prepare, exchange, forward, backward,
update. CPU time is that of the whole process, all threads. A second bare loop gives the floor of the measurement.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import record
from freescale.config import resolve
from freescale.data import synthetic
from freescale.data.batch import Batch
from freescale.data.loader import Loader
from freescale.embedding.ids import UniqueIds, deduplicate
from freescale.train.build import build
from freescale.train.sharded_model import build_model, build_sharded_model, data_parallel
from freescale.train.trainer import Trainer
from freescale.transport.c10d import C10d
from freescale.transport.world import World
from processes import on_ranks


def bare_loop(config: Any, world: World, items: int) -> Callable[[Batch], None]:
    """Return a step of a plain PyTorch loop."""
    assembly = build_sharded_model(config, world, build_model(config, items=items))
    network, tables = assembly.module, assembly.tables
    assert tables is not None
    exchange, parallel = tables.exchanges["urgent"], data_parallel(network, world)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0)

    def step(batch: Batch) -> None:
        inputs = network.model.prepare(batch)
        count = world.transport.sum(inputs.count, name="bare count")
        unique, index = deduplicate(inputs.ids["item"], rows=items)
        wanted = {"item": UniqueIds(unique, index)}
        route = exchange.send_ids(wanted)
        rows = exchange.send_rows(route, tables.look_up(route)).wait()["item"].requires_grad_()
        (parallel(inputs, wanted, {"item": rows}) / count).backward()
        assert rows.grad is not None
        tables.update(route, exchange.send_gradients(route, {"item": rows.grad}).wait(), lr={"item": 0.05})
        optimizer.step()
        optimizer.zero_grad()

    return step


class Alternating:
    """Batches for the trainer; before each block, both bare loops run theirs."""

    def __init__(self, batches: list[Batch], loader: Loader, bare: list[Callable[[Batch], None]], blocks: int) -> None:
        self.batches, self._loader, self._bare, self._blocks = batches, loader, bare, blocks
        self.seconds: dict[str, list[tuple[float, float]]] = {"trainer": [], "bare 0": [], "bare 1": []}

    def __len__(self) -> int:
        return len(self.batches) * self._blocks

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self._blocks):
            for number, step in enumerate(self._bare):
                with self._timed(f"bare {number}"):
                    for batch in self.batches:
                        step(batch)
            with self._timed("trainer"):
                yield from self.batches

    def state_dict(self) -> dict[str, int | str]:
        """As the loader's."""
        return self._loader.state_dict()

    def report(self) -> list[str]:
        """Return no lines."""
        return []

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.seconds[name].append((time.process_time() - cpu, time.perf_counter() - wall))


def on_rank(world: World, options: argparse.Namespace, folder: str) -> dict[str, list[tuple[float, float]]]:
    """Return CPU and wall seconds of each block of steps."""
    overrides = ["--data.path", f"{folder}/data", "--train.save-every", str(10**9), "--train.max-steps", "0"]
    config = resolve("tiny", [*overrides, "--data.split", "none"])
    loader = Loader(config.data, seed=0, rank=world.rank, world_size=options.ranks)
    batches = [batch for batch, _ in zip(loader, range(options.steps), strict=False)]
    unwatched = replace(world, transport=C10d(world.group, world.transport.peers.store))
    bare = [bare_loop(config, unwatched, loader.vocabulary.rows) for _ in range(2)]
    trainer = build(config, world, Path(folder) / "run")
    source = Alternating(batches, loader, bare, options.blocks)
    parts = replace(trainer.components, loader=source, steps=len(source))  # type: ignore[arg-type]
    Trainer(parts, Path(folder) / "run", trainer._metrics).fit()
    return source.seconds


def summary(seconds: dict[str, list[tuple[float, float]]], steps: int) -> dict[str, Any]:
    """Return ratios of neighbouring blocks, without the first (warm-up) and the last (shutdown)."""
    kept = {name: blocks[1:] for name, blocks in seconds.items()}
    found: dict[str, Any] = {}
    for place, kind in enumerate(("cpu", "wall")):
        bare, again, ours = ([block[place] for block in kept[name]] for name in ("bare 0", "bare 1", "trainer"))
        beyond = [o / ((a + b) / 2) - 1 for o, a, b in zip(ours, bare, again, strict=False)]
        floor = [b / a - 1 for a, b in zip(bare, again, strict=False)]
        found |= {
            f"bare_{kind}_ms_per_step": round(1e3 * statistics.median(bare) / steps, 2),
            f"{kind}_beyond_bare_percent": round(100 * statistics.median(beyond), 2),
            f"{kind}_beyond_bare_quartiles": [round(100 * q, 2) for q in statistics.quantiles(beyond, n=4)[::2]],
            f"{kind}_floor_percent": round(100 * statistics.median(floor), 2),
            f"{kind}_floor_quartiles": [round(100 * q, 2) for q in statistics.quantiles(floor, n=4)[::2]],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        synthetic.write_log(f"{folder}/data", "ml1m", users=64 * options.steps, catalogue=20_000)
        seconds = on_ranks(on_rank, options.ranks, options, folder)
    result = {"ranks": options.ranks, "blocks": options.blocks, **summary(seconds, options.steps)}
    print(json.dumps(result))
    record.save(options.out, [result])


if __name__ == "__main__":
    main()
