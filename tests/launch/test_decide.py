"""Promise: what becomes of a run is decided alike every time: start again if that helps, else end and say why."""

import pytest

from freescale.errors import UsageError
from freescale.launch.decide import Seen, Verdict, decide
from freescale.launch.hosts import Hosts


def seen(
    *hosts: list[int | None], silent: tuple[int, ...] = (), pausing: bool = False, restarts: int = 1
) -> Verdict | None:
    return decide(Seen(dict(enumerate(hosts)), set(silent), pausing, restarts))


def test_nothing_is_decided_while_all_is_well() -> None:
    assert seen([None, None], [None]) is None
    assert seen([0, None]) is None
    assert seen([0, 0], [0]) == Verdict(0)


def test_a_lost_rank_starts_all_again_while_restarts_are_left() -> None:
    assert seen([None, -9]) == Verdict(None, "local rank 1 of host 0 ended by signal 9")
    assert seen([5], [5, -9]) == Verdict(None, "local rank 1 of host 1 ended by signal 9"), "5: lost another"
    assert seen([5, None]) == Verdict(None, "local rank 1 of host 0 does not end")
    assert seen([5, -9], restarts=0) == Verdict(1, "local rank 1 of host 0 ended by signal 9")
    assert seen([5, 5], restarts=0) == Verdict(5, "local rank 0 of host 0 ended with exit code 5")


def test_what_would_fail_again_is_not_started_again() -> None:
    for code in (2, 3, 4, 6, 7):
        assert seen([5, code]) == Verdict(code, f"local rank 1 of host 0 ended with exit code {code}")


def test_a_silent_host_gets_no_time_to_end() -> None:
    assert seen([None], [None], silent=(1,)) == Verdict(None, "host 1 does not answer", at_once=True)
    assert seen([None], [None], silent=(1,), restarts=0) == Verdict(5, "host 1 does not answer", at_once=True)


def test_ranks_that_were_asked_to_end_save_first() -> None:
    assert seen([130, None]) is None
    assert seen([130, 130]) == Verdict(130)
    assert seen([130], [None], pausing=True) is None
    assert seen([130], [-15], pausing=True) == Verdict(None, "other hosts join")


def test_what_hosts_and_meet_say_is_read_or_refused() -> None:
    assert Hosts.parse("", "") is None
    assert Hosts.parse("2", "10.0.0.1:29400") == Hosts(2, 2, "10.0.0.1", 29400)
    assert Hosts.parse("2:4", "node:1") == Hosts(2, 4, "node", 1)
    for hosts, meet in (("2", ""), ("", "a:1"), ("0", "a:1"), ("3:2", "a:1"), ("x", "a:1"), ("2", "a")):
        with pytest.raises(UsageError, match="who meets where"):
            Hosts.parse(hosts, meet)
