"""The last operations of a rank can be read, however it ended."""

import os
import signal
from pathlib import Path

import pytest

from freescale.bubbles import flight_recorder
from freescale.bubbles.recorder import Recorder
from freescale.errors import DataError


def test_a_killed_process_leaves_its_last_operations(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        recorder = Recorder(3, flight_recorder=flight_recorder.FlightRecorder(tmp_path, 3))
        for step in range(1000):
            with recorder.record("forward"):
                recorder.begin_collective("rows").on_complete()
            recorder.end_step(step)
        with recorder.record("backward"):
            recorder.begin_collective("gradients of rows, a name that is longer than what is kept of it")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    notes = flight_recorder.read(tmp_path)
    assert list(notes) == [3]
    assert len(notes[3]) == 512
    assert [(n.step, n.phase, n.operation[:9]) for n in notes[3][-3:]] == [
        (999, "out", "forward"),
        (1000, "in", "backward"),
        (1000, "in", "gradients"),
    ]
    ((rank, step, begun, _),) = flight_recorder.unfinished_operations(notes)
    assert (rank, step) == ("3", "1000")
    assert begun.startswith("backward, gradients of rows")


def test_a_failed_start_is_kept_through_the_next_and_a_successful_end_removes_its_record(tmp_path: Path) -> None:
    flight_recorder.FlightRecorder(tmp_path, 0).record(7, "in", "lost")
    following = flight_recorder.FlightRecorder(tmp_path, 0)
    following.record(1, "in", "fine")
    assert [note.operation for note in flight_recorder.read(tmp_path)[0]] == ["fine"]
    following.remove()
    assert [note.operation for note in flight_recorder.read(tmp_path)[0]] == ["lost"]
    assert flight_recorder.read(tmp_path / "elsewhere") == {}


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / flight_recorder.FOLDER).mkdir()
    (tmp_path / flight_recorder.FOLDER / "rank-00000.ring").write_bytes(b"something else")
    with pytest.raises(DataError, match="no flight record"):
        flight_recorder.read(tmp_path)
