"""What the slots of dynamic ids in a checkpoint hold: load, age, and the most and least used ids."""

from pathlib import Path
from typing import Any

from freescale.checkpoint import checkpoints
from freescale.checkpoint.run_folder import require_complete
from freescale.checkpoint.tensor_files import LocalRows, stored_rows
from freescale.embedding.row_order import RowOrder
from freescale.embedding.zero_collision_layout import EMPTY, BucketLayout, SlotArrays, event_time
from freescale.errors import UsageError

_SHOWN = 5


def summarize_tables(run: Path) -> dict[str, Any]:
    """Return the step of the newest checkpoint of a run, and a summary of each table with dynamic ids."""
    newest = require_complete(run)
    facts = checkpoints.read_facts(newest)
    dynamic = facts.get("buckets", {})
    if not dynamic:
        remedy = 'set ids = "dynamic" in a [features.NAME] table, and train anew'
        raise UsageError("this run has no table with dynamic ids", where=str(run), remedy=remedy)
    return {"step": facts["step"], "tables": {name: _summarize(newest, name, facts) for name in dynamic}}


def _summarize(checkpoint: Path, table: str, facts: dict[str, Any]) -> dict[str, Any]:
    buckets, step = facts["buckets"][table], facts["step"]
    layout = BucketLayout(buckets, stored_rows(checkpoint, facts["ranks"])[f"tables.{table}.ids"].rows // buckets - 1)
    slots = SlotArrays.empty(layout.buckets, layout.slots)
    rows = {n: LocalRows(a.view(-1), 0, RowOrder(layout.rows, shards=1)) for n, a in slots._asdict().items()}
    checkpoints.load(checkpoint, {f"tables.{table}.{name}": local for name, local in rows.items()})
    used = slots.ids.view(-1) != EMPTY
    ids, last_step, time, count = (array.view(-1)[used] for array in slots)
    per_bucket = (slots.ids != EMPTY).sum(1)
    summary: dict[str, Any] = {
        "slots": layout.buckets * layout.slots,
        "ids": len(ids),
        "load": len(ids) / (layout.buckets * layout.slots),
        "fullest_bucket": float(per_bucket.max()) / layout.slots,
    }
    if not len(ids):
        return summary
    age, times = (step - 1 - last_step).double(), event_time(time)
    summary |= {"steps_since_use": [float(age.median()), float(age.max())], "latest_event": int(times.max())}
    most = count.long().argsort(descending=True, stable=True)[:_SHOWN]
    least = last_step.long().argsort(stable=True)[:_SHOWN]
    return summary | {
        "hottest": [[int(ids[i]), int(count[i])] for i in most],
        "coldest": [[int(ids[i]), int(age[i])] for i in least],
    }
