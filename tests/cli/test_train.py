"""One command trains under any launcher, Ctrl-C loses nothing, and the trained model can be used."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from freescale.checkpoint import checkpoints, export
from freescale.data import synthetic
from tests.support.warm_python import WarmPython

Freescale = Callable[..., subprocess.CompletedProcess[str]]
FREESCALE = [sys.executable, "-m", "freescale"]
SHORT = ["--train.epochs", "2", "--train.max-steps", "12", "--train.log-every", "4"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "data"
    synthetic.write_log(path, "ml1m", users=600, catalogue=500, seed=1)
    return path


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def freescale(warm: WarmPython) -> Freescale:
    return lambda *words: run(warm.python, "-m", "freescale", *words)


def losses(run: Path) -> list[float]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in entries if entry["kind"] == "train"]


@pytest.fixture(scope="module")
def trained(demo: Path, tmp_path_factory: pytest.TempPathFactory, freescale: Freescale) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    ended = freescale("train", "tiny", "--data", demo, "--nproc", 2, "--out", out, "--tensorboard", *SHORT)
    assert ended.returncode == 0, ended.stderr
    return out


def test_a_run_leaves_config_metrics_checkpoint_and_a_link(trained: Path) -> None:
    assert (trained / "config.toml").exists()
    assert len(losses(trained)) == 3
    assert losses(trained)[-1] < losses(trained)[0]
    assert [path.name for path in checkpoints.complete_checkpoints(trained / "checkpoints")] == [
        "step-00000010",
        "step-00000012",
    ]
    assert (trained.parent / "latest").resolve() == trained.resolve()
    assert sorted(path.name for path in trained.parent.iterdir()) == ["latest", trained.name]
    assert list((trained / "tensorboard").glob("events.*"))


def test_torchrun_and_slurm_start_the_same_run(demo: Path, trained: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "freescale"]
    out = tmp_path / "torchrun"
    ended = run(*torchrun, "train", "tiny", "--data", demo, "--out", out, *SHORT)
    assert ended.returncode == 0, ended.stderr
    assert losses(out) == losses(trained)
    out = tmp_path / "slurm"
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "here"}
    command = [*FREESCALE, "train", "tiny", "--data", str(demo), "--out", str(out), *SHORT]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait(timeout=200) for rank in ranks] == [0, 0]
    assert losses(out) == pytest.approx(losses(trained), rel=1e-6)


@pytest.fixture(scope="module")
def uninterrupted(demo: Path, tmp_path_factory: pytest.TempPathFactory, freescale: Freescale) -> tuple[list[str], Path]:
    """Options of a run, and where it went to its end."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    options = ["train", "tiny", "--data", str(demo), "--nproc", "2", "--train.epochs", "30", "--train.log-every", "1"]
    options += ["--train.max-steps", "30"]
    assert freescale(*options, "--out", out).returncode == 0
    return options, out


def test_a_stopped_run_saves_and_resumes_to_the_same_result(
    uninterrupted: tuple[list[str], Path], tmp_path: Path, freescale: Freescale
) -> None:
    (options, whole), out = uninterrupted, tmp_path / "stopped"
    running = subprocess.Popen(
        [*FREESCALE, *options, "--out", str(out), "--autoresume"],  # there is nothing to resume yet
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith("step 5/"):
            break
    assert json.loads((out / "run.lock").read_text())["pid"] == running.pid, "the launcher holds the folder"
    os.killpg(running.pid, signal.SIGINT)  # a terminal sends Ctrl-C to all of them
    said = running.stderr.read()
    assert running.wait(timeout=60) == 130, said
    assert "asked to stop: saving step" in said
    assert "death signal" not in said, "the launcher is quiet"
    (saved,) = checkpoints.complete_checkpoints(out / "checkpoints")[-1:]
    assert 5 <= int(saved.name.split("-")[1]) < 30
    ended = freescale(*options, "--out", out, "--autoresume")
    assert ended.returncode == 0, ended.stderr
    assert f"resumed from {saved}" in ended.stderr
    assert losses(out) == losses(whole)


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def killed(command: list[str], *, at: str) -> tuple[int, str]:
    """Kill the last rank of a run when it says a line; gives its exit code and what it said afterwards."""
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith(at):
            break
    ranks = [rank for child in children(running.pid) for rank in children(child)]
    os.kill(ranks[-1], signal.SIGKILL)
    said = running.stderr.read()
    return running.wait(timeout=60), said


def test_a_lost_rank_ends_the_run_soon_without_restarts(demo: Path, tmp_path: Path) -> None:
    options = ["train", "tiny", "--data", str(demo), "--nproc", "2", "--train.epochs", "99", "--train.log-every", "1"]
    begin = time.monotonic()
    code, said = killed([*FREESCALE, *options, "--out", str(tmp_path / "run"), "--restarts", "0"], at="step 3/")
    assert code == 1
    assert "ranks that do not answer: 1" in said
    assert "local rank 1 of host 0 ended by signal 9; no restarts are left" in said
    assert time.monotonic() - begin < 120


def test_ranks_restart_after_a_loss_and_no_step_is_lost(uninterrupted: tuple[list[str], Path], tmp_path: Path) -> None:
    (options, whole), out = uninterrupted, tmp_path / "killed"
    code, said = killed([*FREESCALE, *options, "--out", str(out)], at="step 15/")
    assert code == 0, said
    assert "resumed from" in said
    assert "stale" not in said, "the run kept its lock"
    assert not (out / "run.lock").exists()
    assert losses(out) == losses(whole)
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    (recovery,) = [entry for entry in entries if entry["kind"] == "recovery"]
    assert recovery["why"] == "local rank 1 of host 0 ended by signal 9"
    assert 0 < recovery["seconds"] < 120


def test_a_run_is_not_overwritten_and_resume_needs_a_checkpoint(
    demo: Path, trained: Path, tmp_path: Path, freescale: Freescale
) -> None:
    again = freescale("train", "tiny", "--data", demo, "--out", trained, *SHORT)
    assert again.returncode == 2
    assert "add --resume, or choose another --out" in again.stderr
    nothing = freescale("train", "tiny", "--data", demo, "--out", tmp_path / "new", "--resume", *SHORT)
    assert nothing.returncode == 2
    assert "no complete checkpoint" in nothing.stderr
    assert freescale("evaluate", tmp_path / "new").returncode == 2


def test_a_run_resumes_through_its_link_and_never_with_another_model(
    demo: Path, trained: Path, tmp_path: Path, freescale: Freescale
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "latest").symlink_to("run")
    resume = ["train", "tiny", "--data", demo, "--out", tmp_path / "latest", "--resume", *SHORT]
    other = freescale(*resume, "--model.layers", 3)
    assert other.returncode == 2, other.stderr
    assert "ranks restart" not in other.stderr, "a failure that would repeat is not restarted"
    ended = freescale(*resume, "--restarts", 0)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "latest").resolve() == tmp_path / "run"


def test_a_trained_model_is_evaluated_the_same_on_any_number_of_ranks(trained: Path, freescale: Freescale) -> None:
    found = [json.loads(freescale("evaluate", trained, "--json", "--nproc", n).stdout) for n in (1, 2)]
    assert found[0] == pytest.approx(found[1])
    entries = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    (last,) = [entry for entry in entries if entry["kind"] == "evaluate"]
    assert last["hr@10"] == pytest.approx(found[0]["hr@10"])


def test_a_run_is_simulated_with_the_compute_that_it_measured(
    trained: Path, tmp_path: Path, freescale: Freescale
) -> None:
    words = ["--cluster", "cpu", "--gpus", 2, "--steps", 6, "--out", tmp_path / "page.html", "--json"]
    found = json.loads(freescale("simulate", trained, *words).stdout)
    assert "Compute as measured on cpu" in found["said"][0]
    assert found["said"][1].startswith("32 samples per rank")
    other = json.loads(freescale("simulate", trained, *words, "--cluster", "a100").stdout)
    assert other["said"][0] == "Compute by the figures of A100, since the run was on cpu."


def test_predictions_are_unseen_items_for_every_user_best_first(
    demo: Path, trained: Path, tmp_path: Path, freescale: Freescale
) -> None:
    assert freescale("predict", trained, tmp_path / "top", "--k", 5, "--nproc", 2).returncode == 0
    top = pq.read_table(tmp_path / "top").to_pylist()
    rows = pq.read_table(sorted(demo.glob("part-*.parquet")), columns=["user_id", "item_id"]).to_pylist()
    log = {row["user_id"]: set(row["item_id"][-64:]) for row in rows}
    assert sorted(row["user"] for row in top) == sorted(row["user_id"] for row in top) == sorted(log)
    for row in top:
        assert len(row["item_id"]) == 5
        assert row["item"] == row["item_id"]  # the numbers of a synthetic log are its keys
        assert row["score"] == sorted(row["score"], reverse=True)
        assert not set(row["item_id"]) & log[row["user_id"]]
    assert freescale("predict", trained, tmp_path / "top").returncode == 2


def test_an_export_holds_the_trained_weights_on_any_number_of_ranks(
    trained: Path, tmp_path: Path, freescale: Freescale
) -> None:
    for ranks in (1, 2):
        ended = freescale("export", trained, tmp_path / str(ranks), "--nproc", ranks)
        assert ended.returncode == 0, ended.stderr
    one, two = export.read(tmp_path / "1"), export.read(tmp_path / "2")
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name].numpy(), two[name].numpy()) for name in one)
    assert one["tables.item"].shape == (516, 32)
    assert len({path.stat().st_mode for path in (tmp_path / "2").iterdir()}) == 1, "all files have the same permissions"
