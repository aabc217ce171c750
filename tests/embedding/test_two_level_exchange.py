"""A two-level exchange delivers the rows and the sums of the flat one, with one message per pair of hosts and width."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from freescale.embedding.exchange import AllToAllPlan, EmbeddingExchange
from freescale.embedding.ids import UniqueIds, split
from freescale.embedding.sharded import sum_by_host
from freescale.embedding.tables import Table
from freescale.embedding.two_level_exchange import TwoLevelExchange
from freescale.transport.c10d import C10d
from freescale.transport.host_layout import HostLayout
from tests.embedding.test_tables import TABLES, served, value_of, wanted_of
from tests.support.ranks import Ranks, World
from tests.transport.transports import TIMEOUT, two_level

LAYOUTS = ([0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 1, 2], [0, 1, 2, 3], [0, 0, 0, 0])


class Traffic(NamedTuple):
    """What this rank has sent to other hosts, by the name of the transfer."""

    messages: dict[str, int]
    rows: dict[str, int]


def counted(transport: Any, layout: HostLayout, rank: int) -> Traffic:
    """Count what a transport sends to ranks of other hosts from now on."""
    traffic, begin = Traffic(defaultdict(int), defaultdict(int)), transport.all_to_all

    def all_to_all(rows: Tensor, send: Sequence[int], receive: Sequence[int], *, name: str, **more: Any) -> Any:
        far = [n for other, n in enumerate(send) if layout.host_of[other] != layout.host_of[rank]]
        traffic.messages[name.removesuffix(" between hosts")] += sum(n > 0 for n in far)
        traffic.rows[name.removesuffix(" between hosts")] += sum(far)
        return begin(rows, send, receive, name=name, **more)

    transport.all_to_all = all_to_all
    return traffic


def both(world: World, hosts: list[int], name: str) -> tuple[EmbeddingExchange, Traffic, TwoLevelExchange, Traffic]:
    """Return a flat and a two-level exchange, and what each sends. `name`: memory is shared once per name."""
    assert dist.group.WORLD is not None
    group, layout = C10d(dist.group.WORLD, world.store, timeout=TIMEOUT), HostLayout.of(hosts)
    relayed = two_level(world, group, layout, name=f"{name} {hosts}")
    of_flat, of_two = counted(group, layout, world.rank), counted(relayed.far, layout, world.rank)
    return EmbeddingExchange(TABLES, group), of_flat, TwoLevelExchange(TABLES, relayed), of_two


def sums(plan: AllToAllPlan, gradients: dict[str, Tensor], layout: HostLayout) -> dict[str, Tensor]:
    """Return the sum of the gradients of each local row, as the update of a shard adds them."""
    found = {}
    for place, (name, rows) in enumerate(plan.local_rows.items()):
        of_table = gradients[name]
        if plan.of_host is None and layout.sums:
            rows, of_table = sum_by_host(rows, rows, of_table, [counts[place] for counts in plan.served], layout)
        found[name] = torch.zeros(200, of_table.shape[1]).index_add_(0, rows, of_table)
    return found


def exchanged(world: World, hosts: list[int], seeds: range) -> tuple[list[str], Traffic, Traffic]:
    """Exchange random rows and gradients part by part in both ways; return what differs, and what was sent."""
    flat, of_flat, two, of_two = both(world, hosts, "exchanged")
    layout, wrong = HostLayout.of(hosts), list[str]()
    for seed in seeds:
        wanted = [wanted_of(world.rank, seed), wanted_of(world.rank, seed + 1)]
        found: list[list[dict[str, Tensor]]] = []
        for exchange in (flat, two):
            this, following = (exchange.send_ids(ids, time=seed + world.rank) for ids in wanted)
            splits = exchange.send_split(this, following, split(this.keys, following.keys))
            found.append([])
            for ids, plans in zip(wanted, zip((this, following), *zip(*splits, strict=True), strict=True), strict=True):
                for plan in plans:
                    got = exchange.send_rows(plan, served(world, plan)).wait()
                    requested = {t.name: ids[t.name].unique[plan.index_by_table[t.name]] for t in TABLES}
                    wrong += [
                        f"{seed}: rows" for t in TABLES if not torch.equal(got[t.name], value_of(t, requested[t.name]))
                    ]
                    torch.manual_seed(seed)
                    noise = {t.name: torch.randn(2, t.rows, t.dim)[world.rank % 2] * 1e3**world.rank for t in TABLES}
                    gradients = {name: noise[name][of_table] for name, of_table in requested.items()}
                    found[-1].append(sums(plan, exchange.send_gradients(plan, gradients).wait(), layout))
            if this.latest != seed + world.ranks - 1:
                wrong.append(f"{seed}: latest")
        for one, other in zip(*found, strict=True):
            wrong += [f"{seed}: sums of {name}" for name in one if not torch.equal(one[name], other[name])]
    return wrong, of_flat, of_two


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
def test_rows_and_sums_are_bitwise_those_of_the_flat_exchange(groups: dict[int, Ranks], hosts: list[int]) -> None:
    results = groups[4].run(exchanged, hosts, range(0, 12, 2))
    assert [wrong for wrong, *_ in results] == [[]] * 4
    rows_flat, rows_two = (
        sum(n for *_, traffic in [result[: 2 + which] for result in results] for n in traffic.rows.values())
        for which in (0, 1)
    )
    if len(set(hosts)) == 4:
        assert rows_two == rows_flat, "a host with one rank has nothing to merge"
    elif len(set(hosts)) > 1:
        assert rows_two < rows_flat
    else:
        assert rows_two == 0


def requested_rows(world: World, hosts: list[int]) -> tuple[dict[str, list[int]], Traffic, Traffic]:
    """Request many rows once, in both ways; return the ids of this rank, and what was sent."""
    flat, of_flat, two, of_two = both(world, hosts, "requested")
    torch.manual_seed(world.rank)
    ids = {t.name: torch.randint(0, t.rows, (60,)).unique() for t in TABLES}
    wanted = {name: UniqueIds(of_table, torch.arange(len(of_table))) for name, of_table in ids.items()}
    for exchange in (flat, two):
        plan = exchange.send_ids(wanted)
        got = exchange.send_rows(plan, served(world, plan)).wait()
        exchange.send_gradients(plan, got).wait()
    return {name: of_table.tolist() for name, of_table in ids.items()}, of_flat, of_two


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 1, 2], [0, 1, 1, 1]], ids=str)
def test_each_pair_of_hosts_exchanges_one_message_and_each_row_once(groups: dict[int, Ranks], hosts: list[int]) -> None:
    results, layout = groups[4].run(requested_rows, hosts), HostLayout.of(hosts)
    for dim in {table.dim for table in TABLES}:
        for name in (f"rows of width {dim}", f"row gradients of width {dim}"):
            for ranks in layout.ranks:
                messages = sum(results[rank][2].messages[name] for rank in ranks)
                assert messages == len(layout.ranks) - 1, (name, ranks)
    expected = 0
    for host, ranks in enumerate(layout.ranks):
        for table in (t for t in TABLES if t.dim == 8):
            ids = torch.tensor(sorted({i for rank in ranks for i in results[rank][0][table.name]}))
            expected += sum(layout.host_of[owner] != host for owner in owners(table, ids))
    for name in ("rows of width 8", "row gradients of width 8"):
        assert sum(of_two.rows[name] for *_, of_two in results) == expected
        assert sum(of_flat.rows[name] for _, of_flat, _ in results) > expected


def owners(table: Table, ids: Tensor) -> list[int]:
    """Return the owner of each row among four ranks."""
    owner = {}
    for rank in range(4):
        rows = table.order.rows_at(torch.tensor(list(table.owned(rank, 4)), dtype=torch.int64).numpy())
        owner |= dict.fromkeys(rows.tolist(), rank)
    return [owner[i] for i in ids.tolist()]
