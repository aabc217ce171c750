"""`freescale runs` lists trainings with state, last loss and best metric, whatever their files hold."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from freescale.bubbles.flight_recorder import FlightRecorder
from freescale.cli.main import main


def note(run: Path, *noted: dict[str, Any], at: int = 0) -> None:
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in noted))
    os.utime(run / "metrics.jsonl", (at, at))


def step(number: int, loss: Any) -> dict[str, Any]:
    return {"kind": "train", "step": number, "loss": loss}


def evaluation(number: int, **metrics: Any) -> dict[str, Any]:
    return {"kind": "evaluate", "step": number, **metrics}


def end(number: int, finished: bool) -> dict[str, Any]:
    return {"kind": "end", "step": number, "finished": finished}


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["runs", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_runs_are_listed_the_newest_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = [step(10, 2.5), evaluation(5, **{"ndcg@10": 0.2}), evaluation(10, **{"ndcg@10": 0.1}), end(10, True)]
    note(tmp_path / "done", *done, at=300)
    note(tmp_path / "stopped", step(4, 3.0), end(4, False), at=200)
    note(
        tmp_path / "ranked",
        evaluation(1, **{"ne/click": 0.9}),
        evaluation(2, **{"ne/click": 0.8}),
        end(2, True),
        at=100,
    )
    (tmp_path / "latest").symlink_to("done")
    (tmp_path / "no run").mkdir()
    found = listed(tmp_path, capsys)
    assert [(one["name"], one["state"], one["step"], one["loss"], one["best"]) for one in found] == [
        ("ranked", "done", 0, None, "ne/click 0.8000"),
        ("stopped", "stopped", 4, 3.0, ""),
        ("done", "done", 10, 2.5, "ndcg@10 0.2000"),
    ]


def test_a_running_run_is_distinguished_from_a_lost_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("goes on", "lost"):
        note(tmp_path / name, step(4, 3.0), end(4, False), step(5, 2.9), at=100 + len(name))
    FlightRecorder(tmp_path / "goes on", 0).record(5, "in", "forward")
    assert [(one["name"], one["state"]) for one in listed(tmp_path, capsys)] == [
        ("lost", "lost"),
        ("goes on", "running"),
    ]


def test_a_damaged_run_does_not_keep_others_from_being_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note(tmp_path / "strange", step(1, "low"), evaluation(1, **{"ndcg@10": [1]}), {"kind": "end", "step": 1})
    (one,) = listed(tmp_path, capsys)
    assert (one["state"], one["loss"], one["best"]) == ("stopped", None, "")


def test_an_empty_folder_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == 0
    assert "no runs in" in capsys.readouterr().out
