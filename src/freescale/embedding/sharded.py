"""Tables whose rows are dealt over all ranks, as a step uses them: the exchange and the own rows together."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from freescale.config import RunConfig
from freescale.embedding.exchange import Exchange, Route
from freescale.embedding.plain import PlainShard, plain_shard
from freescale.embedding.shard import Shard
from freescale.embedding.tables import Table
from freescale.embedding.unique import Wanted
from freescale.log import warning_once
from freescale.transport.base import Transport
from freescale.transport.world import World


class ShardedTables:
    """The own rows, and what moves rows: an exchange per lane."""

    def __init__(self, tables: Sequence[Table], shard: Shard, transport: Transport) -> None:
        self.tables, self.shard = list(tables), shard
        self.exchanges = {"urgent": Exchange(tables, transport)}
        state = shard.state()
        self._rows_like = {table.name: state[table.name][:0] for table in tables}

    def add_lane(self, name: str, transport: Transport) -> None:
        """Let rows travel apart from what is urgent."""
        self.exchanges[name] = Exchange(self.tables, transport)

    def look_up(self, route: Route) -> dict[str, Tensor]:
        """Read the rows that all ranks asked this one for."""
        return self.shard.look_up(route.local)

    def update(self, route: Route, gradients: dict[str, Tensor], *, lr: Mapping[str, float]) -> None:
        """Change those rows."""
        self.shard.update(route.local, gradients, lr=lr)

    def room(self, wanted: Mapping[str, Wanted]) -> dict[str, Tensor]:
        """Where rows of distinct ids will lie."""
        like = self._rows_like
        return {t.name: like[t.name].new_empty(len(wanted[t.name].unique), t.dim) for t in self.tables}

    def read(self, wanted: Mapping[str, Wanted]) -> dict[str, Tensor]:
        """Rows of distinct ids, when nothing will be updated. Every rank must take part."""
        exchange = self.exchanges["urgent"]
        route = exchange.send_ids(wanted)
        return exchange.send_rows(route, self.look_up(route)).wait()


def shard_tables(
    tables: Sequence[Table], config: RunConfig, world: World, transport: Transport, dtype: torch.dtype
) -> ShardedTables:
    """Build the own rows and fill them: in FBGEMM, or as plain torch where FBGEMM has no such precision.

    On a CPU, FBGEMM's rows are changed by torch too: the same arithmetic, in a seventh of the time.
    """
    if dtype == torch.float32:
        from freescale.embedding.fused import fused_shard  # torchrec takes seconds to import

        shard: Shard = fused_shard(tables, config.tables, world.group, world.device)
        if world.device.type == "cpu":
            shard = PlainShard(shard.state(), config.tables)
    else:
        warning_once(f"tables are plain torch: FBGEMM keeps none in {str(dtype).removeprefix('torch.')}")
        shard = plain_shard(tables, config.tables, rank=world.rank, world_size=world.world_size, dtype=dtype)
    fill(tables, shard.state(), config, world)
    return ShardedTables(tables, shard, transport)


def fill(tables: Sequence[Table], own: Mapping[str, Tensor], config: RunConfig, world: World) -> None:
    """Give this rank's rows what they begin as."""
    for table in tables:
        first = table.owned(world.rank, world.world_size).start
        table.fill(own[table.name], first, seed=config.seed, deviation=config.tables.init)
