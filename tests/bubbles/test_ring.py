"""Promise: what a rank did last is known, however it ended."""

import os
import signal
from pathlib import Path

import pytest

from freescale.bubbles import ring
from freescale.bubbles.recorder import Recorder
from freescale.errors import DataError


def test_a_killed_process_leaves_its_last_operations(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        recorder = Recorder(3, ring=ring.Ring(tmp_path, 3))
        for step in range(1000):
            with recorder.during("forward"):
                recorder.arrive("rows").on_complete()
            recorder.cut(step)
        with recorder.during("backward"):
            recorder.arrive("gradients of rows, a name that is longer than what is kept of it")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    notes = ring.read(tmp_path)
    assert list(notes) == [3]
    assert len(notes[3]) == 512
    assert [(n.step, n.phase, n.what[:9]) for n in notes[3][-3:]] == [
        (999, "out", "forward"),
        (1000, "in", "backward"),
        (1000, "in", "gradients"),
    ]
    ((rank, step, begun, _),) = ring.stuck(notes)
    assert (rank, step) == ("3", "1000")
    assert begun.startswith("backward, gradients of rows")


def test_a_start_that_was_lost_is_remembered_through_the_next_and_a_good_end_leaves_nothing(tmp_path: Path) -> None:
    ring.Ring(tmp_path, 0).note(7, "in", "lost")
    following = ring.Ring(tmp_path, 0)
    following.note(1, "in", "fine")
    assert [note.what for note in ring.read(tmp_path)[0]] == ["fine"]
    following.remove()
    assert [note.what for note in ring.read(tmp_path)[0]] == ["lost"]
    assert ring.read(tmp_path / "elsewhere") == {}


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / ring.FOLDER).mkdir()
    (tmp_path / ring.FOLDER / "rank-00000.ring").write_bytes(b"something else")
    with pytest.raises(DataError, match="no flight record"):
        ring.read(tmp_path)
