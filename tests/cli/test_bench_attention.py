"""`freescale bench attention` checks attention against the reference before it times it."""

import json
import subprocess

import pytest
import torch

from freescale.cli.main import main
from freescale.models.attention import blocks
from tests.support.warm_python import WarmPython

OPTIONS = ["bench", "attention", "--batch", "8", "--longest", "64", "--width", "16", "--rounds", "1"]


def test_attention_is_compared_with_the_reference_and_timed(warm: WarmPython) -> None:
    ended = subprocess.run(
        [warm.python, "-m", "freescale", *OPTIONS, "--json"], capture_output=True, text=True, check=True
    )
    found = json.loads(ended.stdout)
    assert found["right"]
    assert max(found["errors"].values()) < 1e-5
    assert {one["name"] for one in found["timed"]} >= {"ours", "padded to the longest", "dense"}
    assert all(one["seconds"] > 0 for one in found["timed"])
    assert "backward on CPU" in found["left_out"]["flex attention"]


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = blocks.forward
    monkeypatch.setattr(blocks, "forward", lambda x: right(x) * 1.01)
    assert main(OPTIONS) == 1
    assert "nothing was timed" in capsys.readouterr().out


@pytest.mark.parametrize("asked", [["--tune"], ["--precision", "tf32"]])
def test_what_only_a_gpu_can_do_is_an_error_on_a_cpu(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OPTIONS, *asked]) == 2
    assert f"{' '.join(asked)} needs a GPU" in capsys.readouterr().err


def test_a_missing_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*OPTIONS, "--device", "cuda"]) == 2
    assert "this machine has no GPU" in capsys.readouterr().err
