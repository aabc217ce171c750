"""Continuous training: which partitions of a growing data set a run trains on next."""

from dataclasses import replace
from pathlib import Path

from freescale.checkpoint import checkpoints
from freescale.checkpoint.tensor_files import CheckpointError
from freescale.config import RunConfig
from freescale.data.dataset import Dataset
from freescale.data.order import Cursor
from freescale.data.partitions import PARTITIONS_FILE, PartitionList, parse_partitions
from freescale.errors import DataError
from freescale.storage import StorageFolder
from freescale.transport.c10d import C10d


def select_partitions(config: RunConfig, until: str, transport: C10d) -> RunConfig:
    """Return the config with the last partition to train. All ranks use those that rank 0 sees."""
    config.require_continuous()
    listed = _list_partitions(config.data.path)
    selected = listed if until == "now" else listed.until(until)
    count = transport.sum(len(selected.partitions) if transport.peers.rank == 0 else 0, name="partitions")
    if not count:
        remedy = "append one with `freescale data import ... --append NAME`"
        raise DataError(f"there is no partition up to {until}", where=config.data.path, remedy=remedy)
    last = _list_partitions(config.data.path).partitions[count - 1].name  # read after rank 0 has
    return replace(config, data=replace(config.data, until=last))


def is_trained(config: RunConfig, checkpoint: Path) -> bool:
    """Whether a checkpoint contains all partitions of a config. A damaged one contains none."""
    try:
        cursor = checkpoints.read_facts(checkpoint)["cursor"]
    except CheckpointError:
        return False
    dataset, data = Dataset(config.data.path, until=config.data.until), config.data
    now = Cursor(config.seed, data.order, data.global_batch, data.shards, dataset.rows, dataset.ends)
    now.load_state_dict(cursor)
    return now.epoch > 0


def _list_partitions(address: str) -> PartitionList:
    raw = StorageFolder(address).read(PARTITIONS_FILE)
    if raw is None:
        remedy = "create them with `freescale data import ... --append NAME`"
        raise DataError("this data set has no partitions, which --until needs", where=address, remedy=remedy)
    return parse_partitions(raw, f"{address}/{PARTITIONS_FILE}")
