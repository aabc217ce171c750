"""A full or read-only disk is reported as such, not as a fault of the log, and leaves no files."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

CHILD = """
import json, os, subprocess, sys
from contextlib import redirect_stderr
from io import StringIO
from freescale.cli.main import main

for number, (options, words) in enumerate(json.loads(sys.argv[2])):
    disk = f"{sys.argv[1]}/{number}"
    os.mkdir(disk)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], check=True)
    with redirect_stderr(StringIO()) as told:
        code = main([word.replace("DISK", disk) for word in words])
    print(json.dumps([code, told.getvalue(), sorted(os.listdir(disk))]))
"""


def imports_on_a_small_disk(place: Path, cases: list[tuple[str, list[str]]]) -> list[tuple[int, str, list[str]]]:
    """Exit code, output and remaining files of commands on a disk with these mount options."""
    (place / "disk").mkdir()
    command = ["unshare", "--mount", sys.executable, "-c", CHILD, str(place / "disk"), json.dumps(cases)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("logs"), np.random.default_rng(0)
    columns = {"user_id": 2000, "item_id": 10**12, "timestamp": 10**9}
    log = pl.DataFrame({name: rng.integers(0, most, 50_000) for name, most in columns.items()})
    log.write_csv(folder / "log.csv")
    log.write_parquet(folder / "log.parquet")
    (folder / "bad.csv").write_text("user_id,item_id,timestamp\n1,2\n1,2,3\n")
    return folder


def test_a_full_or_read_only_disk_is_reported_at_every_stage(logs: Path, tmp_path: Path) -> None:
    def words(name: str) -> list[str]:
        return ["data", "import", "events", str(logs / name), "DISK/data"]

    synth = ["data", "synth", "DISK/data", "--users", "2000", "--items", "100"]
    text = [("size=300k", words("log.csv")), ("size=2m", words("log.csv"))]
    parquet = [(f"size={size}", words("log.parquet")) for size in ("100k", "700k", "1500k")]
    others = [("size=300k", synth), ("size=9m,ro", words("log.csv")), ("size=9m,ro", synth)]
    cases = [*text, *parquet, *others]
    for (options, given), (code, output, left) in zip(cases, imports_on_a_small_disk(tmp_path, cases), strict=True):
        assert code == (7 if "ro" in options else 1), (options, given, output)
        assert "the output cannot be written: " in output
        assert ("Read-only" if "ro" in options else "No space left") in output
        assert "/disk" in output.split("where:")[1]
        assert "choose" in output.split("remedy:")[1]
        assert left == [], (options, given)


def test_a_folder_that_cannot_be_created_is_an_error_with_a_remedy(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from freescale.cli.main import main

    (tmp_path / "file").touch()
    for target in (tmp_path / "file" / "data", tmp_path / ("x" * 300)):
        assert main(["data", "import", "events", str(logs / "log.csv"), str(target)]) == 7
        assert "the output cannot be written" in capsys.readouterr().err


def test_a_quarantine_that_cannot_be_written_is_an_error(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from freescale.cli.main import main

    (tmp_path / "data.quarantine.jsonl").mkdir()
    words = ["data", "import", "events", str(logs / "bad.csv"), str(tmp_path / "data"), "--on-bad", "skip"]
    assert main(words) == 1
    assert "quarantine file cannot be written" in capsys.readouterr().err
