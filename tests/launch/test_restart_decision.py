"""A command whose ranks fail restarts if that can help, and otherwise ends with the exit code of the cause."""

import pytest

from freescale.errors import UsageError
from freescale.launch import Hosts
from freescale.launch.restart_decision import HostStatus, RestartDecision, decide


def decision(
    *hosts: list[int | None], unresponsive: tuple[int, ...] = (), pausing: bool = False, restarts_left: int = 1
) -> RestartDecision | None:
    return decide(HostStatus(dict(enumerate(hosts)), set(unresponsive), pausing, restarts_left))


def test_no_decision_while_ranks_run() -> None:
    assert decision([None, None], [None]) is None
    assert decision([0, None]) is None
    assert decision([0, 0], [0]) == RestartDecision(0)


def test_a_lost_rank_restarts_all_ranks_while_restarts_are_left() -> None:
    assert decision([None, -9]) == RestartDecision(None, "local rank 1 of host 0 ended by signal 9")
    assert decision([5], [5, -9]) == RestartDecision(None, "local rank 1 of host 1 ended by signal 9"), (
        "5: lost another"
    )
    assert decision([5, None]) == RestartDecision(None, "local rank 1 of host 0 does not end")
    assert decision([5, -9], restarts_left=0) == RestartDecision(1, "local rank 1 of host 0 ended by signal 9")
    assert decision([5, 5], restarts_left=0) == RestartDecision(5, "local rank 0 of host 0 ended with exit code 5")


def test_a_failure_that_would_repeat_is_not_restarted() -> None:
    for code in (2, 3, 4, 6, 7):
        assert decision([5, code]) == RestartDecision(code, f"local rank 1 of host 0 ended with exit code {code}")


def test_an_unresponsive_host_gets_no_time_to_end() -> None:
    assert decision([None], [None], unresponsive=(1,)) == RestartDecision(
        None, "host 1 does not answer", immediately=True
    )
    assert decision([None], [None], unresponsive=(1,), restarts_left=0) == RestartDecision(
        5, "host 1 does not answer", immediately=True
    )


def test_ranks_that_are_asked_to_end_save_first() -> None:
    assert decision([130, None]) is None
    assert decision([130, 130]) == RestartDecision(130)
    assert decision([130], [None], pausing=True) is None
    assert decision([130], [-15], pausing=True) == RestartDecision(None, "other hosts join")


def test_hosts_and_endpoint_are_parsed_or_refused() -> None:
    assert Hosts.parse("", "") is None
    assert Hosts.parse("2", "10.0.0.1:29400") == Hosts(2, 2, "10.0.0.1", 29400)
    assert Hosts.parse("2:4", "node:1") == Hosts(2, 4, "node", 1)
    for hosts, endpoint in (("2", ""), ("", "a:1"), ("0", "a:1"), ("3:2", "a:1"), ("x", "a:1"), ("2", "a")):
        with pytest.raises(UsageError, match="does not name a number of hosts and an address"):
            Hosts.parse(hosts, endpoint)
