"""Measures zero-collision tables: ids without a slot, slots that FBGEMM finds, and time beside a lookup of rows.

    python benchmarks/zero_collision.py [--slots 4194304] [--queries 10000000] [--rounds 20] [--out FILE.json]

`load`: ids without a slot of their own at a load, and ids that share a row under plain hashing into as many rows.
`fbgemm`: slots that FBGEMM's read-only `zero_collision_hash` finds, of present and absent ids, after evictions by time
to live. `time`: CPU time of one thread against `torch.unique` + `index_select` of the same batch, whose rows are 64
wide. A round measures each once, in turns, and fills the caches with other data before. `baseline again` is the A/A
range. To initialize is to compute and write the rows of new ids.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fbgemm_gpu  # noqa: F401  registers its operators
import torch
from torch import Tensor

import record
from freescale.embedding.zero_collision_ids import DynamicIds, fbgemm_arguments, initial_rows
from freescale.embedding.zero_collision_layout import EMPTY, BucketLayout, EvictionPolicy

DIM = 64
CHUNK = 1 << 18
STEPS = 24


def draw(count: int, seed: int) -> Tensor:
    """Distinct ids in random order."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-(2**62), 2**62, (count,), generator=generator).unique()
    return ids[torch.randperm(len(ids), generator=generator)]


def fill(table: DynamicIds, ids: Tensor) -> None:
    for step, part in enumerate(ids.split(-(-len(ids) // STEPS))):
        table.assign(part.sort().values, step=step, time=10 * step)


def measure_load(layout: BucketLayout, load: float) -> dict[str, Any]:
    slots = layout.buckets * layout.slots
    table, ids = DynamicIds(layout), draw(int(load * slots), seed=1)
    fill(table, ids)
    rows = table.lookup(ids)
    own = rows[table.is_slot(rows)]
    hashed = ids.remainder(slots).bincount(minlength=slots)
    return {
        "kind": "load",
        "load": load,
        "slots_per_bucket": layout.slots,
        "ids": len(ids),
        "percent_without_slot": 100 * (1 - len(own) / len(ids)),
        "collisions_among_slots": len(own) - len(own.unique()),
        "percent_sharing_a_row_when_hashed": 100 * (1 - int((hashed > 0).sum()) / len(ids)),
    }


def measure_fbgemm(layout: BucketLayout, queries: int) -> dict[str, Any]:
    """Fill a table beyond its slots, so that ids expire, free expired slots, and compare lookups."""
    table = DynamicIds(layout, policy=EvictionPolicy("ttl", ttl=60))
    ids = draw(layout.buckets * layout.slots * 3 // 2, seed=2)
    fill(table, ids)
    holes = table.expire(step=STEPS + 4, time=10 * STEPS)
    present = table.arrays.ids[table.arrays.ids != EMPTY]
    different = looked_up = found = 0
    for number in range(-(-queries // CHUNK)):
        generator = torch.Generator().manual_seed(number)
        half = present[torch.randint(0, len(present), (CHUNK // 2,), generator=generator)]
        asked = torch.cat([half, torch.randint(-(2**62), 2**62, (CHUNK // 2,), generator=generator)])
        rows = table.lookup(asked)
        theirs, _ = torch.ops.fbgemm.zero_collision_hash(
            asked,
            table.identities(),
            layout.window,
            True,
            -1,
            True,
            *fbgemm_arguments(asked, layout),
            None,
            False,
            True,
        )
        different += int((torch.where(table.is_slot(rows), rows, -1) != theirs).sum())
        found += int(table.is_slot(rows).sum())
        looked_up += len(asked)
    return {"kind": "fbgemm", "ids": looked_up, "found": found, "different": different, "freed_slots": holes}


def batches(ids: Tensor, rounds: int, size: int) -> Iterator[Tensor]:
    """Batches of popular and rare ids."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(rounds):
        yield ids[(len(ids) * torch.rand(size, generator=generator) ** 4).long()]


def timed(work: Callable[[], Any]) -> float:
    torch.rand(8 << 20)  # 32 MB of other data
    begin = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - begin)


class Timing:
    """Tables of one size, and the work that is measured on them."""

    def __init__(self, layout: BucketLayout) -> None:
        slots = layout.buckets * layout.slots
        self.ids = draw(slots * 3 // 4, seed=1)
        self.weight = torch.rand(layout.rows, DIM)
        self.table, self.full, self.evicting = (
            DynamicIds(layout, policy=policy)
            for policy in (EvictionPolicy(), EvictionPolicy(), EvictionPolicy("lru", protected=3))
        )
        fill(self.table, self.ids)
        for table in (self.full, self.evicting):
            fill(table, draw(2 * slots, seed=4))
        self.step = 1000

    def round(self, batch: Tensor) -> dict[str, float]:
        """Return milliseconds of each."""
        self.step += 5
        unique = batch.unique()
        rows, step = self.table.lookup(unique), self.step
        absent = draw(len(unique), seed=step).sort().values
        kept = unique[torch.randperm(len(unique))[: len(unique) * 9 // 10]]
        mixed, again = (torch.cat([kept, draw(len(unique) - len(kept), seed=step + new)]).unique() for new in (1, 2))
        works: dict[str, Callable[[], Any]] = {
            "baseline": lambda: self.baseline(batch, rows),
            "baseline again": lambda: self.baseline(batch, rows),
            "lookup": lambda: self.table.lookup(unique),
            "assign, no new ids": lambda: self.table.assign(unique, step=step, time=0),
            "assign, 10% new": lambda: self.table.assign(mixed, step=step + 1, time=0),
            "assign and initialize, 10% new": lambda: self.assign_and_initialize(again),
            "lookup, absent, full table": lambda: self.full.lookup(absent),
            "assign, absent, full table": lambda: self.full.assign(absent, step=step, time=0),
            "assign, absent, full table, all evict by lru": lambda: self.evicting.assign(absent, step=step, time=0),
        }
        return {name: timed(work) for name, work in works.items()} | {"distinct": float(len(unique))}

    def baseline(self, batch: Tensor, rows: Tensor) -> Tensor:
        torch.unique(batch, return_inverse=True)
        return self.weight.index_select(0, rows)

    def assign_and_initialize(self, ids: Tensor) -> None:
        assigned = self.table.assign(ids, step=self.step + 2, time=0)
        new = initial_rows(ids[assigned.new], DIM, table="item", seed=0, deviation=0.01)
        self.weight[assigned.rows[assigned.new]] = new.to(self.weight)


def measure_time(layout: BucketLayout, rounds: int, size: int) -> dict[str, Any]:
    timing = Timing(layout)
    measured = [timing.round(batch) for batch in batches(timing.ids, rounds + 1, size)][1:]
    names = [name for name in measured[0] if name not in ("baseline", "distinct")]
    ratios = {name: sorted(one[name] / one["baseline"] for one in measured) for name in names}
    return {
        "kind": "time",
        "slots": layout.buckets * layout.slots,
        "batch": size,
        "distinct": int(statistics.median(one["distinct"] for one in measured)),
        "baseline_ms": round(statistics.median(one["baseline"] for one in measured), 2),
        "ratio_median": {name: round(statistics.median(values), 3) for name, values in ratios.items()},
        "ratio_range": {name: [round(values[0], 3), round(values[-1], 3)] for name, values in ratios.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=1 << 22)
    parser.add_argument("--queries", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    layout, results = BucketLayout.of(options.slots), []
    for measure in (
        lambda: measure_load(layout, 0.75),
        lambda: measure_load(layout, 0.9),
        lambda: measure_fbgemm(layout, options.queries),
        lambda: measure_time(layout, options.rounds, options.batch),
    ):
        results.append(measure())
        print(json.dumps(results[-1]), flush=True)
    record.save(options.out, results)


if __name__ == "__main__":
    main()
