"""Tables whose rows are dealt over all ranks, as a step uses them: the exchange and the own rows together."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.config import TablesConfig
from freescale.embedding.exchange import Exchange, Route
from freescale.embedding.plain import PlainShard
from freescale.embedding.shard import Shard
from freescale.embedding.tables import Table
from freescale.embedding.unique import Wanted
from freescale.log import notice
from freescale.transport.c10d import C10d


class ShardedTables:
    """A step calls the methods in the order in which they stand here."""

    def __init__(self, tables: Sequence[Table], shard: Shard, transport: C10d) -> None:
        self.tables, self.shard = list(tables), shard
        self._exchange = Exchange(tables, transport)

    def send_ids(self, wanted: Mapping[str, Wanted]) -> Route:
        """Ask the owners for rows."""
        return self._exchange.send_ids(wanted)

    def look_up(self, route: Route) -> dict[str, Tensor]:
        """Read the rows that all ranks asked this one for."""
        return self.shard.look_up(route.local)

    def send_rows(self, route: Route, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Give them to who asked, and get one's own."""
        return self._exchange.send_rows(route, rows)

    def send_gradients(self, route: Route, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Send the gradients of the rows to their owners."""
        return self._exchange.send_gradients(route, gradients)

    def update(self, route: Route, gradients: dict[str, Tensor], *, lr: float) -> None:
        """Change the rows."""
        self.shard.update(route.local, gradients, lr=lr)

    def read(self, wanted: Mapping[str, Wanted]) -> dict[str, Tensor]:
        """Rows of distinct ids, when nothing will be updated. Every rank must take part."""
        route = self.send_ids(wanted)
        return self.send_rows(route, self.look_up(route))


def shard_tables(
    tables: Sequence[Table],
    config: TablesConfig,
    transport: C10d,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> ShardedTables:
    """Build the own rows and fill them: in FBGEMM, or as plain torch where FBGEMM has no such precision."""
    rank, ranks = transport.peers.rank, transport.peers.ranks
    if dtype == torch.float32:
        from freescale.embedding.fused import FusedShard  # torchrec takes seconds to import

        shard: Shard = FusedShard(tables, config, group, device)
    else:
        notice(f"tables are plain torch and slow: FBGEMM keeps none in {str(dtype).removeprefix('torch.')}")
        shard = PlainShard(tables, config, rank=rank, ranks=ranks, dtype=dtype)
    state = shard.state()
    for table in tables:
        table.fill(state[table.name], table.owned(rank, ranks).start, seed=seed, deviation=config.init)
    return ShardedTables(tables, shard, transport)
