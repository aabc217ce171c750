"""Replicates the most popular rows of tables: `tables.replicated_rows`, by the counts of the data's vocabularies."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.config import RunConfig
from freescale.data.vocabulary import VOCABULARY_FILE, feature_vocabulary_file
from freescale.embedding.popularity import Replication, Requesters, choose_replicated
from freescale.embedding.replicated_rows import ReplicatedRows
from freescale.embedding.sharded import ShardedTables
from freescale.storage import StorageFolder
from freescale.transport.host_layout import HostLayout
from freescale.transport.world import World

Ints = NDArray[np.int64]
_AUTO = "tables.replicated_rows = auto"


def replicate_rows(
    config: RunConfig, world: World, tables: ShardedTables | None, layout: HostLayout | None, *, events: float
) -> list[str]:
    """Give every rank a copy of the rows that the config replicates; return them as human-readable lines. Collective.

    `events`: of an average batch on one rank. `layout`: the hosts; None if no rows move.
    """
    rows = config.tables.replicated_rows
    if tables is None or rows == 0:
        return []
    counts, lines = {table.name: int(rows) for table in tables.tables} if rows != "auto" else {}, list[str]()
    if rows == "auto":
        requesters, reason = _requesters(config, layout, events)
        if requesters is None:
            return [f"{_AUTO}: no rows are replicated, since {reason}"]
        for name, of_rows in table_counts(config).items():
            samples = name == "item" and config.task.kind == "retrieval"
            drawn = config.task.negatives / max(1, len(of_rows)) if samples else 0.0
            chosen = choose_replicated(of_rows / max(1, int(of_rows.sum())), requesters, drawn=drawn)
            counts[name] = chosen.rows
            lines.append(_describe(name, chosen))
        lines = lines or [f"{_AUTO}: no rows are replicated, since the data has no vocabulary with counts"]
    if not any(counts.values()):
        return lines
    tables.replicated = ReplicatedRows(tables, counts, config.tables, world.transport)
    return [*lines, *tables.replicated.describe()]


def _requesters(config: RunConfig, layout: HostLayout | None, events: float) -> tuple[Requesters | None, str]:
    """Return who requests rows of other hosts, or why replication would not save bytes between hosts."""
    if layout is None or len(layout.ranks) == 1:
        return None, "all ranks are on one host"
    if config.tables.exchange != "flat":
        return None, f'with tables.exchange = "{config.tables.exchange}" a host may request each row once'
    ranks, hosts = len(layout.host_of), len(layout.ranks)
    return Requesters(hosts, ranks / hosts, events, ranks), ""


def _describe(table: str, chosen: Replication) -> str:
    share = f"{chosen.saved:,.0f} of {chosen.sent:,.0f} rows and row gradients per step"
    return f"{_AUTO}: {chosen.rows:,} rows of table {table}, so that a host is expected to send {share} less"


def table_counts(config: RunConfig) -> dict[str, Ints]:
    """Return how often each row of a table occurs in the log, for tables whose vocabulary counts that."""
    files = [("item", VOCABULARY_FILE, 0)]
    files += [
        (feature.table or name, feature_vocabulary_file(feature.column or name), feature.rows)
        for name, feature in config.features.items()
        if feature.kind in ("id", "set")
    ]
    store, found = StorageFolder(config.data.path), dict[str, Ints]()
    for table, file, rows in files:
        counts = _read_counts(store, file)
        if counts is not None:
            counts, earlier = counts[: rows or None], found.get(table, np.zeros(0, dtype=np.int64))
            longest = max(len(counts), len(earlier))
            found[table] = sum(np.pad(part, (0, longest - len(part))) for part in (counts, earlier))
    return found


def _read_counts(store: StorageFolder, file: str) -> Ints | None:
    raw = store.read(file)
    if raw is None:
        return None
    vocabulary = pq.read_table(pa.BufferReader(raw))
    return vocabulary["count"].to_numpy() if "count" in vocabulary.schema.names else None
