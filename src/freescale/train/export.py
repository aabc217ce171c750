"""A trained model out of its run, in files that others read (see `checkpoint.export`)."""

import json
from pathlib import Path

from freescale import config as configs
from freescale.checkpoint import export
from freescale.data.vocabulary import VOCABULARY_FILE as VOCABULARY
from freescale.errors import UsageError
from freescale.train.saved import Saved


def export_model(saved: Saved, folder: Path) -> list[str]:
    """Write model, tables, config and vocabulary, read everything back, and give rank 0 the names of the files."""
    world, tables = saved.world, saved.assembly.tables
    if (folder / export.LIST).exists():
        raise UsageError("there is an export in this folder already", where=str(folder), remedy="choose another folder")
    world.transport.sum(0, name="look at the folder")  # nobody writes before all have looked
    folder.mkdir(parents=True, exist_ok=True)
    mine = {}
    if world.is_rank_zero:
        mine["model.safetensors"] = export.write_tensors(folder / "model.safetensors", saved.assembly.network.named())
    if tables is not None:
        name = f"tables-{world.rank:05d}-of-{world.world_size:05d}.safetensors"
        rows = {f"tables.{table.name}": tables.shard.state()[table.name] for table in tables.tables}
        first = {f"tables.{table.name}": table.owned(world.rank, world.world_size).start for table in tables.tables}
        mine[name] = export.write_tensors(folder / name, rows, first)
    notes = [folder / f"written-{rank:05d}.json" for rank in range(world.world_size)]
    notes[world.rank].write_text(json.dumps(mine))
    world.transport.sum(0, name="write the export")
    if not world.is_rank_zero:
        return []
    configs.save(saved.config, folder / "config.toml")
    listed = {"config.toml": export.describe(folder / "config.toml")}
    for note in notes:
        listed |= json.loads(note.read_text())
        note.unlink()
    vocabulary = Path(saved.config.data.path) / VOCABULARY
    export.write_list(folder, listed, {VOCABULARY: vocabulary} if vocabulary.exists() else {})
    return sorted(listed)
