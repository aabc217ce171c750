"""A command does what its help says, raises only our errors, and exits with a documented code."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from freescale.balance.assign import tolerance_curve
from freescale.balance.cost import Cost
from freescale.cli.main import COMMANDS, main
from freescale.errors import INTERRUPTED
from freescale.log import logger
from tests.support.datasets import histories, write_dataset


def test_the_help_of_every_command_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit) if name != "config" else _nothing() as caught:
            main([*name.split(), "--help"])
        assert caught is None or caught.value.code == 0
        assert f"freescale {name} " in capsys.readouterr().out


class _nothing:  # noqa: N801  a context, like its neighbour
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["trian"], 2, "no command is called 'trian'"),
        (["data", "stat"], 2, "did you mean 'data stats'"),
        (["data", "stats", "/no/such"], 3, "no Parquet files here"),
        (["data", "import", "events", "only-one-path"], 2, "target folder is missing"),
        (["data", "synth", "x", "--users", "0", "--seed", "-1"], 2, "--users 0 is below 1; --seed -1 is below 0"),
        (["config", "tinny"], 2, "did you mean 'tiny'"),
        (["data", "synth", "bad-\udcff", "--users", "20"], 2, r"'bad-\udcff'"),
    ],
)
def test_a_mistake_is_reported_with_remedy_and_exit_code(
    words: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    told = capsys.readouterr().err
    assert says in told
    assert "remedy:" in told


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "simulate --from-data no-such --gpus 0 8 --steps 3 --cluster h1000",
            ["no Parquet files here", "no cluster is called 'h1000'", "--gpus 0 is below 1; --steps 3 is below 5"],
        ),
        ("simulate no-such --steps 3", ["there is no run in this folder", "--steps 3 is below 5"]),
        ("simulate --from-data no-such --batch -2", ["no Parquet files here", "--batch -2 is below 1"]),
        (
            "data stats no-such --ranks 0 --batch 0",
            ["no Parquet files here", "--ranks 0 is below 1; --batch 0 is below 1"],
        ),
        ("predict no-such out --k 0", ["there is no run in this folder", "--k 0 is below 1"]),
    ],
)
def test_no_error_hides_another(
    words: str, says: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    told = capsys.readouterr().err
    assert [text for text in says if text not in told] == []
    assert told.count("error: ") == told.count("remedy:") == len(says)


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m freescale config tiny | head -1; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("words", [["--version"], ["train", "--help"], ["trian"]])
def test_ctrl_c_while_the_process_ends_prints_no_traceback(words: list[str]) -> None:
    pressed = "import atexit, os, sys; atexit.register(os.kill, os.getpid(), 2)"
    program = f"{pressed}; from freescale.cli.main import main; sys.exit(main())"
    ended = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert ended.returncode == (2 if words == ["trian"] else 0)
    assert "KeyboardInterrupt" not in ended.stderr


def test_ctrl_c_while_an_error_is_printed_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(logger, "error", pressed)
    assert main(["trian"]) == INTERRUPTED


def test_stats_match_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [1 + i % 50 for i in range(500)]
    table = histories(lengths, items=40)
    write_dataset(tmp_path / "data", table, rows_per_group=16, items=40)
    assert main(["data", "stats", str(tmp_path / "data"), "--ranks", "2", "16", "--batch", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    items = table["item_id"].combine_chunks().flatten().to_numpy()
    popular = np.sort(np.bincount(items))[::-1]
    assert (found["histories"], found["events"], found["items"]) == (500, sum(lengths), len(set(items)))
    assert found["length"]["mean"] == pytest.approx(np.mean(lengths))
    assert found["length"]["variation"] == pytest.approx(np.std(lengths) / np.mean(lengths))
    for share, value in found["length"]["quantiles"].items():
        assert value == np.quantile(lengths, float(share), method="inverted_cdf")
    assert found["popularity"]["0.1"] == pytest.approx(popular[:4].sum() / popular.sum())
    assert [row["world_size"] for row in found["random_batches"]] == [2, 16]
    assert 0 < found["random_batches"][0]["straggler_share"] < found["random_batches"][1]["straggler_share"] < 1
    (values, counts), cost = np.unique(lengths, return_counts=True), Cost.hstu(dim=256, layers=8, heads=4)
    for size in (2, 16):
        curve = tolerance_curve(values, cost.of(values), counts, world_size=size, batch=8)
        shown = [row for row in found["balanced_batches"] if row["world_size"] == size]
        assert shown == [{"world_size": size} | point._asdict() for point in curve]


def test_stats_warn_about_files_without_checksums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(histories([3] * 50), tmp_path / "foreign.parquet")
    assert main(["data", "stats", str(tmp_path)]) == 0
    assert (
        "1 files without page checksums (foreign.parquet first): flipped bits cannot be detected"
        in capsys.readouterr().err
    )


def test_a_log_is_imported_and_its_bad_lines_are_quarantined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n1,a,5\n1,b,x\n2,a,6\n")
    target = tmp_path / "new" / "set"
    words = ["data", "import", "events", str(tmp_path / "log.csv"), str(target), "--on-bad", "skip", "--json"]
    assert main(words) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == {
        "users": 2,
        "items": 1,
        "events": 2,
        "unknown_events": 0,
        "samples": 2,
        "set_aside": {"incomplete event": 1},
    }
    assert "1 rows skipped (1 incomplete event)" in told.err
    assert (tmp_path / "new" / "set.quarantine.jsonl").read_text().count("\n") == 1
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["set", "set.quarantine.jsonl"], (
        "no scratch left"
    )


def test_an_import_with_another_vocabulary_warns_about_unknown_items(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, items in (("first", "ab"), ("second", "bcd")):
        lines = [f"1,{item},{time}\n" for time, item in enumerate(items)]
        (tmp_path / f"{name}.csv").write_text("user_id,item_id,timestamp\n" + "".join(lines))
    words = ["data", "import", "events", str(tmp_path / "second.csv"), str(tmp_path / "second")]
    assert main(["data", "import", "events", str(tmp_path / "first.csv"), str(tmp_path / "first")]) == 0
    assert "outside the vocabulary" not in capsys.readouterr().err
    assert main([*words, "--vocabulary", str(tmp_path / "first")]) == 0
    assert "2 events have items outside the vocabulary; they share a few table rows" in capsys.readouterr().err


def test_the_table_of_transports_is_in_milliseconds() -> None:
    from freescale.cli import bench
    from freescale.transport.selection import TransportTiming

    timing = TransportTiming("c10d", sent_bytes=64 << 10, seconds=0.0025, lost_compute_seconds=0.0005)
    page = bench._transport_page([timing], [], {})
    assert re.findall("<td.*?>(.*?)</td>", page)[:4] == ["c10d", "64", "2.50", "0.50"]
    assert "c10d: 64, 2.5<" in page, "as in the curve"


def test_one_seed_gives_one_synthetic_log(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert main(["data", "synth", str(tmp_path / name), "--users", "300", "--seed", str(seed)]) == 0
    read = {name: b"".join(f.read_bytes() for f in sorted((tmp_path / name).glob("*.parquet"))) for name in "abc"}
    assert read["a"] == read["b"] != read["c"]


def test_a_width_that_torchrec_does_not_support_is_refused_before_measuring(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "step", "hstu-ml1m", "--data", str(tmp_path)]) == 2
    assert "--model.dim 52" in capsys.readouterr().err
