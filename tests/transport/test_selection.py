"""All ranks select the transport that measures best, and an unavailable one is refused with the reason."""

import sys
from collections.abc import Iterator

import pytest
import torch

from freescale.config import TransportConfig
from freescale.errors import ConfigError
from freescale.transport.selection import (
    TransportFactory,
    TransportTiming,
    best_transport,
    explain,
    probe,
    select_transports,
)
from freescale.transport.world import _visible_index
from tests.support.lab import lab
from tests.support.ranks import Ranks, World
from tests.support.training import joined

MS = 1e-3
TABLE = [
    TransportTiming("c10d", 1 << 20, 1.0 * MS, 0.5 * MS),
    TransportTiming("host_staged", 1 << 20, 2.0 * MS, 0.2 * MS),
    TransportTiming("shared_memory", 1 << 20, 0.4 * MS, 0.4 * MS),
]


def selection_reasons(world: World, urgent: str, deferred: str) -> list[str]:
    config, one = TransportConfig(urgent=urgent, deferred=deferred), joined(world)  # type: ignore[arg-type]
    reasons = select_transports(one, config, deferred=True).reasons
    one.transport.sum(0, name="all are connected")  # a rank that returns closes its groups
    return reasons


def refused(world: World) -> str:
    try:
        TransportFactory(joined(world)).create("copy_engine")
    except ConfigError as error:
        return str(error)
    return "created"


def timings(world: World) -> list[TransportTiming]:
    one = joined(world)
    return probe({"c10d": one.transport}, one.transport, one.device, sizes=[1 << 10, 1 << 16], rounds=1)


def across_hosts(world: World) -> tuple[list[str], bool]:
    """Return the transports of two hosts with two ranks each, and whether rows arrive by shared memory and gloo."""
    factory = TransportFactory(joined(world))
    transport = factory.create("shared_memory")
    counts = [5 + rank for rank in range(world.ranks)]
    rows = torch.cat([torch.full((n,), 10 * world.rank + to) for to, n in enumerate(counts)])
    receive = [counts[world.rank]] * world.ranks
    got = transport.all_to_all(rows, counts, receive, name="rows").wait()
    expected = torch.arange(world.ranks).mul(10).add(world.rank).repeat_interleave(counts[world.rank])
    return factory.available, torch.equal(got, expected)


def loads_copy_engine(world: World) -> bool:
    """Return whether creating every available transport imports the CUDA-only one."""
    factory = TransportFactory(joined(world))
    for name in factory.available:
        factory.create(name)
    return "freescale.transport.copy_engine" in sys.modules


def alone_on_its_host(world: World) -> str:
    return TransportFactory(joined(world)).unavailable["shared_memory"]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.close()


def test_urgent_uses_the_fastest_transport_and_deferred_the_one_that_costs_the_least_compute() -> None:
    assert best_transport(TABLE, "urgent") == "shared_memory"
    assert best_transport(TABLE, "deferred") == "host_staged"
    assert "1024 KiB" in explain("urgent", "shared_memory", TABLE)


def test_c10d_stays_unless_another_transport_is_clearly_faster() -> None:
    close = [TransportTiming("c10d", 1, 1.0, 1.0), TransportTiming("shared_memory", 1, 0.95, 0.95)]
    assert {best_transport(close, lane) for lane in ("urgent", "deferred")} == {"c10d"}
    assert best_transport([], "urgent") == "c10d"


def test_all_ranks_select_alike_and_give_the_reason(two: Ranks) -> None:
    one, other = two.run(selection_reasons, "auto", "auto")
    assert one == other
    assert len(one) == 2, "one for each lane"
    assert "transport: urgent by" in one[0]
    assert "shared_memory" in one[0]
    assert two.run(selection_reasons, "shared_memory", "host_staged")[0] == [
        "transport: urgent by shared_memory",
        "transport: deferred by host_staged",
    ]


def test_all_ranks_select_by_the_same_timings(two: Ranks) -> None:
    one, other = two.run(timings)
    assert one == other


def test_an_unavailable_transport_is_refused_with_the_reason(two: Ranks) -> None:
    for text in two.run(refused):
        assert "copy_engine is not possible here: the rows are not on a GPU" in text
        assert "choose auto or one of c10d, host_staged, shared_memory" in text


def test_ranks_of_one_host_use_shared_memory_and_fall_back_between_hosts() -> None:
    with lab(2) as hosts:
        ranks = Ranks(4, hosts)
        try:
            for available, arrived in ranks.run(across_hosts):
                assert available == ["c10d", "host_staged", "shared_memory"]
                assert arrived
        finally:
            ranks.close()


def test_ranks_on_separate_hosts_share_no_memory() -> None:
    with lab(2) as hosts:
        ranks = Ranks(2, hosts)
        try:
            assert set(ranks.run(alone_on_its_host)) == {"every rank has a host of its own"}
        finally:
            ranks.close()


def test_copy_engine_is_not_imported_without_a_gpu(two: Ranks) -> None:
    assert two.run(loads_copy_engine) == [False, False]


def test_a_rank_that_sees_only_its_own_gpu_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, expected in ((1, 0), (4, 3), (8, 3)):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda visible=visible: visible)
        assert _visible_index(3) == expected
