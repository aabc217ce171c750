"""An input or output that cannot be used is an error that names it, before torch is imported if possible."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from freescale import config as configs
from freescale.checkpoint.run_folder import RunLock
from freescale.cli.main import main
from freescale.data import synthetic

WITHOUT_TORCH = """
import json, sys
from freescale.cli.main import main
codes = [main(words) for words in json.loads(sys.argv[1])]
print(json.dumps([codes, "torch" in sys.modules]))
"""
Refused = Callable[..., str]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "data"
    synthetic.write_log(path, "ml1m", users=20, catalogue=50, seed=1)
    return path


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that looks trained to who does not open its checkpoint."""
    path = tmp_path_factory.mktemp("runs") / "run"
    (path / "checkpoints" / "step-00000003").mkdir(parents=True)
    (path / "checkpoints" / "step-00000003" / "facts.json").touch()
    configs.save(configs.resolve("tiny", ["--data.path", str(data)]), path / "config.toml")
    return path


def test_checks_without_torch_run_before_it_is_imported(data: Path, run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    train = ["train", "tiny", "--data", str(data)]
    commands = [
        (3, ["train", "tiny", "--data", str(tmp_path / "missing")]),
        (3, [*train, "--data.test-path", str(tmp_path / "missing")]),
        (3, ["bench", "step", "tiny", "--data", str(tmp_path / "missing")]),
        (2, [*train, "--out", str(run)]),
        (2, [*train, "--out", str(tmp_path / "new"), "--resume"]),
        (2, [*train, "--out", str(tmp_path / "new"), "--nproc", "0"]),
        (7, [*train, "--out", str(tmp_path / "file" / "run")]),
        (7, [*train, "--out", "/proc/run", "--nproc", "2"]),
        (2, ["evaluate", str(tmp_path / "new")]),
        (3, ["evaluate", str(run), "--data", str(tmp_path / "missing")]),
        (2, ["evaluate", str(run), "--nproc", "0"]),
        (7, ["predict", str(run), str(tmp_path / "file" / "top")]),
        (7, ["export", str(run), "/proc/model"]),
        (2, ["selftest", "--nproc", "-1"]),
        (2, ["bench", "transport", "--nproc", "0"]),
        (2, ["bench", "transport", "--kib", "0"]),
        (2, ["bench", "attention", "--batch", "0"]),
    ]
    words = json.dumps([words for _, words in commands])
    ended = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, words], capture_output=True, text=True, check=True)
    codes, imported = json.loads(ended.stdout)
    assert codes == [code for code, _ in commands], ended.stderr
    assert not imported
    assert ended.stderr.count("error: ") == ended.stderr.count("remedy: ") == len(commands)
    assert not (tmp_path / "new").exists(), "a command that is refused leaves no folder behind"


def test_two_commands_do_not_write_into_one_folder(
    data: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLock(tmp_path / "out") as other:
        other.acquire()
        for words in (
            ["train", "tiny", "--data", data, "--out", tmp_path / "out", "--nproc", "2"],
            ["train", "tiny", "--data", data, "--out", tmp_path / "out", "--restarts", "0"],
            ["predict", run, tmp_path / "out"],
            ["export", run, tmp_path / "out"],
            ["bench", "step", "tiny", "--data", data, "--out", tmp_path / "out.html"],
        ):
            assert main(list(map(str, words))) == 2
            assert f"{tmp_path / 'out'} is in use: process " in capsys.readouterr().err


def test_an_unwritable_output_is_named_with_a_remedy(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n1,2,3\n1,3,4\n")
    for out in (tmp_path / "file" / "below", Path("/proc/new")):
        for words in (
            ["data", "synth", out, "--users", "5"],
            ["data", "import", "events", tmp_path / "log.csv", out],
            ["data", "stats", data, "--page", out / "page.html"],
            [
                "simulate",
                "--from-data",
                data,
                "--gpus",
                "2",
                "--steps",
                "5",
                "--cluster",
                "cpu",
                "--out",
                out / "a.html",
            ],
        ):
            assert main(list(map(str, words))) in (1, 7)
            said = capsys.readouterr().err
            assert said.startswith("error: ")
            assert str(out.parent) in said
            assert "remedy: " in said
