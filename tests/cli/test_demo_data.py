"""`freescale train tiny` needs no data: it generates a synthetic log, says so, and uses it again."""

from pathlib import Path

import pytest

from tests.support.in_process import freescale

SMALL = ["--train.max-steps", "1", "--train.evaluate-every", "0", "--quiet"]


def test_tiny_without_data_generates_a_log_once_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert freescale(["train", "tiny", *SMALL, "--restarts", "0"]) == 0
    assert "generated a synthetic log with MovieLens-like lengths in data/demo" in capsys.readouterr().err
    manifest = (tmp_path / "data" / "demo" / "manifest.json").read_bytes()
    assert freescale(["train", "tiny", *SMALL, "--restarts", "0", "--out", "runs/again"]) == 0
    assert "training on data/demo" in capsys.readouterr().err
    assert (tmp_path / "data" / "demo" / "manifest.json").read_bytes() == manifest


def test_other_recipes_without_data_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert freescale(["train", "hstu-ml1m"]) == 2
    assert "no data is given" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_wrong_flag_is_refused_before_data_is_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        freescale(["train", "tiny", "--train.epohcs", "3"])
    assert not list(tmp_path.iterdir())
