"""Promise: what ranks say is read, whole, once, and even if they are killed a moment later."""

import os
import signal
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest

from freescale.launch.voices import Voices, speaker

_LONG = "a text longer than a pipe holds " * 10_000


def _speak(mouth: Connection, texts: Sequence[str], torn: bool) -> None:
    speak = speaker(mouth)
    for text in texts:
        speak(text)
    if torn:
        os.write(mouth.fileno(), (1000).to_bytes(4, "big") + b"the beginning of a text")
    os.kill(os.getpid(), signal.SIGKILL)


def heard(capfd: pytest.CaptureFixture[str], *ranks: Sequence[str], torn: bool = False) -> list[str]:
    """Which lines come out of ranks that say texts and are killed."""
    voices, context = Voices(len(ranks)), get_context("fork")
    killed = [
        context.Process(target=_speak, args=(mouth, texts, torn))
        for mouth, texts in zip(voices.mouths, ranks, strict=True)
    ]
    for process in killed:
        process.start()
    voices.begin()
    for process in killed:
        process.join(30)
        assert process.exitcode == -signal.SIGKILL
    voices.end()
    return capfd.readouterr().err.splitlines()


def test_each_text_is_read_once_and_none_is_missing(capfd: pytest.CaptureFixture[str]) -> None:
    lines = heard(capfd, ["of all", "of the first"], ["of all", _LONG], ["of all", "of the last"])
    assert sorted(lines) == sorted(["of all", "of the first", "of the last", _LONG])


def test_a_path_that_is_no_text_is_told_all_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    assert heard(capfd, [os.fsdecode(b"no run in runs/\xff")]) == [r"no run in runs/\udcff"]


def test_a_text_that_was_never_ended_disturbs_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    assert sorted(heard(capfd, ["one"], ["two"], torn=True)) == ["one", "two"]


def test_who_lives_on_with_the_pipe_of_a_rank_is_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    voices = Voices(1)
    speaker(voices.mouths[0])("the last word")
    held = os.dup(voices.mouths[0].fileno())
    voices.begin()
    voices.end()
    os.close(held)
    assert capfd.readouterr().err == "the last word\n"
