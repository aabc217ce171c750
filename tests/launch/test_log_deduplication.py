"""Log records of ranks are written whole and once, even if the ranks are killed a moment later."""

import os
import signal
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest

from freescale.launch.local_ranks import LogCollector, PipeHandler
from freescale.log import ConsoleHandler, handled_by, logger

_LONG = "a text longer than a pipe holds " * 10_000


def _send(sender: Connection, texts: Sequence[str], torn: bool) -> None:
    with handled_by(PipeHandler(sender)):
        for text in texts:
            logger.info(text)
    if torn:
        os.write(sender.fileno(), (1000).to_bytes(4, "big") + b"the beginning of a text")
    os.kill(os.getpid(), signal.SIGKILL)


def written(capfd: pytest.CaptureFixture[str], *ranks: Sequence[str], torn: bool = False) -> list[str]:
    """The lines that are written if ranks log texts and are killed."""
    collector, context = LogCollector(len(ranks)), get_context("fork")
    killed = [
        context.Process(target=_send, args=(sender, texts, torn))
        for sender, texts in zip(collector.senders, ranks, strict=True)
    ]
    for process in killed:
        process.start()
    with handled_by(ConsoleHandler()):
        collector.start()
        for process in killed:
            process.join(30)
            assert process.exitcode == -signal.SIGKILL
        collector.stop()
    return capfd.readouterr().err.splitlines()


def test_each_distinct_text_is_written_once_and_none_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    lines = written(capfd, ["of all", "of the first"], ["of all", _LONG], ["of all", "of the last"])
    assert sorted(lines) == sorted(["of all", "of the first", "of the last", _LONG])


def test_a_path_that_is_not_utf8_is_written_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    assert written(capfd, [os.fsdecode(b"no run in runs/\xff")]) == [r"no run in runs/\udcff"]


def test_a_truncated_text_does_not_affect_other_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert sorted(written(capfd, ["one"], ["two"], torn=True)) == ["one", "two"]


def test_a_child_that_keeps_the_pipe_of_a_rank_open_does_not_block(capfd: pytest.CaptureFixture[str]) -> None:
    collector = LogCollector(1)
    with handled_by(PipeHandler(collector.senders[0])):
        logger.warning("the last text")
    held = os.dup(collector.senders[0].fileno())
    with handled_by(ConsoleHandler()):
        collector.start()
        collector.stop()
    os.close(held)
    assert capfd.readouterr().err == "warning: the last text\n"
