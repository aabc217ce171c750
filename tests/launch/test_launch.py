"""Who starts ranks, and who is one."""

import pytest

from freescale.launch import launched_instead
from freescale.launch.hosts import Hosts

WORDS = ["--version"]


def test_a_task_of_slurm_is_a_rank_unless_it_is_told_where_agents_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-4]")
    assert launched_instead(WORDS, ranks=8) is None
    assert launched_instead(WORDS, ranks=2, hosts=Hosts()) == 0, "the ranks that it started have ended"
