"""`freescale simulate` predicts other machines from a data set alone and writes a self-contained page."""

import json
from pathlib import Path

import pytest

from freescale.cli.main import main
from freescale.data import synthetic


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("simulate") / "data"
    synthetic.write_log(path, "heavy", users=300, catalogue=5_000)
    return str(path)


def asked(data: str, out: Path, *words: str) -> list[str]:
    return ["simulate", "--from-data", data, "--model", "tiny", "--steps", "6", "--out", str(out), *words]


def test_every_size_and_technique_has_a_line_a_bar_and_a_band(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(asked(data, page, "--gpus", "4", "2", "--json")) == 0
    outcomes = json.loads(capsys.readouterr().out)["outcomes"]
    assert [(one["world_size"], one["with"]) for one in outcomes[:6]] == [
        (2, "nothing"),
        (2, "balance"),
        (2, "priority"),
        (2, "priority, sm-free"),
        (2, "balance, priority"),
        (2, "everything"),
    ]
    for one in outcomes:
        assert sum(one["causes_ms"].values()) == pytest.approx(one["step_ms"])
        assert one["bubble_percent_band"][0] <= one["bubble_percent_band"][1]
    text = page.read_text()
    assert "A step on 4 ranks" in text
    assert "NVIDIA H100 SXM data sheet" in text
    assert "<script" not in text


def test_techniques_can_be_left_out_and_the_basis_is_printed(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    words = ["--gpus", "2", "--without", "balance", "--batch", "8", "--max-history", "64", "--cluster", "cpu"]
    assert main(asked(data, tmp_path / "page.html", *words)) == 0
    shown = capsys.readouterr().out
    assert "priority, sm-free" in shown
    assert "everything" not in shown
    assert "Compute by the figures of cpu, since there is no run." in shown
    assert "8 samples per rank, histories up to 64" in shown


def test_wrong_use_is_reported_with_a_remedy(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 2
    assert main(["simulate", str(tmp_path)]) == 2
    assert main(asked(data, tmp_path / "p.html", "--cluster", "h1000")) == 2
    assert "no cluster is called 'h1000'" in capsys.readouterr().err
