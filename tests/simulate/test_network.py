"""The time of transfers follows from their bytes, their links and concurrent transfers."""

from pathlib import Path

import numpy as np
import pytest

from freescale.errors import ConfigError
from freescale.simulate import cluster
from freescale.simulate.cluster import Cluster
from freescale.simulate.network import Flow, NetworkModel, Topology, TransferCost

RNG = np.random.default_rng(0)
LINK = {
    "near": 1e9,
    "far": 1e8,
    "ranks_per_host": 2,
    "hosts_per_leaf": 2,
    "oversubscription": 4.0,
    "latency": 0.0,
    "ring": 1.0,
}


def hosts(**changes: float) -> Cluster:
    return cluster.load("h100").with_values({**LINK, "message": 0.0, **changes})


def ends(*flows: Flow) -> list[float]:
    network = NetworkModel()
    for flow in flows:
        network.add(flow)
    found = {}
    for _ in flows:
        flow = network.next_end()
        found[flow] = network.now
    return [found[flow] for flow in flows]


def far(
    seconds: float, begin: float = 0.0, *, deferred: bool = False, latency: float = 0.0, grace: float = 0.0
) -> Flow:
    return Flow(TransferCost(latency, (0.0, seconds, 0.0)), begin, deferred, grace=grace)


def test_bytes_inside_a_host_use_no_host_link_and_bytes_between_leaves_share_the_spine() -> None:
    alone = Topology(hosts(), 2, RNG).all_to_all(np.full(2, 8e6))
    assert alone.levels == pytest.approx((4e6 / 1e9, 0.0, 0.0))
    wide = Topology(hosts(), 8, RNG).all_to_all(np.full(8, 8e6))
    # Of 8 MB, 1 MB goes to the neighbour; 2 ranks send 6 MB each beyond their host, and 4 MB beyond the switch.
    assert wide.levels == pytest.approx((1e6 / 1e9, 2 * 6e6 / 1e8, 2 * 4e6 / 1e8 * 4.0))


def test_a_ring_sends_nearly_every_byte_twice() -> None:
    assert Topology(hosts(), 8, RNG).all_reduce(8e6).levels[1] == pytest.approx(2 * 8e6 * 7 / 8 / 1e8)
    assert Topology(hosts(), 2, RNG).all_reduce(8e6).levels[1] == 0.0


def test_ranks_that_receive_less_finish_earlier_and_all_wait_for_the_largest_sender() -> None:
    one_each = hosts(ranks_per_host=1, oversubscription=0.0)
    size = np.array([1e6, 1e6, 1e6, 4e6])
    incoming = Topology(one_each, 4, RNG).all_to_all(size, incoming=True)
    assert incoming.shares == pytest.approx([0.25, 0.25, 0.25, 1.0])
    goes = Topology(one_each, 4, RNG).all_to_all(size)
    assert goes.shares is not None
    assert (goes.shares[:3] == 1.0).all()
    assert goes.shares[3] < 1.0


def test_gloo_transfers_between_two_ranks_are_half_duplex() -> None:
    lab = hosts(ranks_per_host=1, oversubscription=0.0, one_way=1.0)
    whole = Topology(lab, 2, RNG).all_to_all(np.full(2, 2e6), incoming=True)
    cut = Topology(lab, 2, RNG).all_to_all(np.full(2, 2e6), incoming=True, chunked=True)
    assert max(whole.levels) == pytest.approx(2 * max(cut.levels))
    assert sorted(whole.shares.tolist()) == [0.5, 1.0]  # type: ignore[union-attr]


def test_concurrent_transfers_share_a_link() -> None:
    assert ends(far(1.0), far(1.0)) == pytest.approx([2.0, 2.0])
    assert ends(far(1.0), far(2.0)) == pytest.approx([2.0, 3.0])
    assert ends(far(1.0), far(1.0, begin=0.5)) == pytest.approx([1.5, 2.0])
    near = Flow(TransferCost(0.0, (1.0, 0.0, 0.0)), 0.0, deferred=False)
    assert ends(far(1.0), near) == pytest.approx([1.0, 1.0])


def test_deferred_transfers_stop_during_urgent_ones() -> None:
    assert ends(far(1.0, deferred=True), far(0.5, begin=0.25)) == pytest.approx([1.5, 0.75])
    assert ends(far(1.0, latency=0.1)) == pytest.approx([1.1])
    # Chunks of 0.1 s are already in flight and share the link until they arrive.
    assert ends(far(1.0, deferred=True, grace=0.1), far(0.5, begin=0.25)) == pytest.approx([1.5, 0.85])


@pytest.mark.parametrize("name", cluster.names())
def test_every_figure_of_a_cluster_has_a_source_and_lies_in_its_range(name: str) -> None:
    found = cluster.load(name)
    for figure in found.figures.values():
        assert figure.source
        assert figure.low <= figure.value <= figure.high
    drawn = found.draw(np.random.default_rng(1))
    assert all(f.low <= drawn.figures[n].value <= f.high for n, f in found.figures.items())


def test_a_custom_cluster_is_loaded_and_its_errors_are_named(tmp_path: Path) -> None:
    shipped = (cluster._package_folder() / "h100.toml").read_text()
    mine = tmp_path / "mine.toml"
    mine.write_text(shipped.replace('value = 400e9, source = "', 'value = 100e9, source = "measured, '))
    assert cluster.load(str(mine)).far == 100e9
    mine.write_text(shipped.replace("jitter", "jiter"))
    with pytest.raises(ConfigError, match="jiter"):
        cluster.load(str(mine))
    mine.write_text(shipped.replace('{ value = 8, source = "eight GPUs in a DGX" }', "8"))
    with pytest.raises(ConfigError, match="'ranks_per_host' has no value or no source"):
        cluster.load(str(mine))
    for wrong in ("0", "-1", '"much"', "10, low = 20"):
        mine.write_text(shipped.replace("value = 400e9", f"value = {wrong}"))
        with pytest.raises(ConfigError, match="figure 'far' cannot be used"):
            cluster.load(str(mine))
    with pytest.raises(ConfigError, match="no cluster is called 'h10'"):
        cluster.load("h10")
