"""A trained model is used only with the items it was trained on, and a run resumes only as itself."""

import importlib.util
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from freescale.checkpoint.run_folder import complete_checkpoints
from freescale.config import load
from tests.support.in_process import freescale

COLUMNS = ["--user", "user", "--item", "item", "--time", "time"]
TRAIN = ["train", "tiny", "--restarts", "0", "--train.epochs", "4", "--train.max-steps", "3"]


def write_log(path: Path, *, items: str, users: int = 40, seed: int = 0) -> Path:
    """A log in which users return to items; keys are text."""
    rng = random.Random(seed)
    lines = [
        f"user-{user},{items}-{rng.randint(0, 11)},{100 * user + event}\n"
        for user in range(users)
        for event in range(rng.randint(3, 12))
    ]
    # Every item once, so that all logs have the same number of them.
    lines += [f"user-all,{items}-{item},{item}\n" for item in range(12)]
    path.write_text("user,item,time\n" + "".join(lines))
    return path


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data: a log. other: one of as many other items. fitting: other users, the vocabulary of data. run: trained."""
    folder = tmp_path_factory.mktemp("model")
    log, other, fitting = (folder / f"{name}.csv" for name in ("data", "other", "fitting"))
    write_log(log, items="film")
    write_log(other, items="song")
    write_log(fitting, items="film", seed=1)
    for source, more in ((log, []), (other, []), (fitting, ["--vocabulary", str(folder / "data")])):
        assert freescale(["data", "import", "events", str(source), str(folder / source.stem), *COLUMNS, *more]) == 0
    assert freescale([*TRAIN, "--data", str(folder / "data"), "--out", str(folder / "run")]) == 0
    return folder


@pytest.fixture
def run(work: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(work / "run", tmp_path / "run"))


def resume(run: Path, *more: object) -> int:
    return freescale([*TRAIN, "--out", str(run), "--resume", *map(str, more)])


def predictions(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder).to_pylist()


def test_predictions_use_the_keys_of_the_log_and_leave_out_seen_items(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert freescale(["predict", str(work / "run"), str(tmp_path / "top"), "--k", "50"]) == 0
    printed = capsys.readouterr().out
    history: dict[str, set[str]] = {}
    for line in (work / "data.csv").read_text().splitlines()[1:]:
        user, item, _ = line.split(",")
        history.setdefault(user, set()).add(item)
    rows = {row["user"]: row for row in predictions(tmp_path / "top")}
    assert rows.keys() == history.keys()
    for user, seen in history.items():
        assert set(rows[user]["item"]) == {f"film-{n}" for n in range(12)} - seen
        assert len(rows[user]["item"]) == len(rows[user]["item_id"]) == len(rows[user]["score"])
        assert all(score > -2 for score in rows[user]["score"])
    assert f"up to 50 items for each of {len(history)} users; for {len(history)} of them fewer" in printed


def test_evaluation_and_prediction_share_the_rule_for_seen_items(
    work: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert freescale(["evaluate", str(run), "--json"]) == 0
    told = capsys.readouterr()
    excluded = json.loads(told.out)
    assert excluded["seen_targets"] > 0.1
    assert f"{excluded['seen_targets']:.1%} of the held-out items are already in the user's history" in told.err
    assert excluded["hr@50"] == pytest.approx(1 - excluded["seen_targets"])
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('seen = "exclude"', 'seen = "allow"'))
    assert freescale(["evaluate", str(run), "--json"]) == 0
    allowed = json.loads(capsys.readouterr().out)
    assert (allowed["seen_targets"], allowed["hr@50"]) == (0.0, 1.0)
    assert freescale(["predict", str(run), str(tmp_path / "top"), "--k", "12"]) == 0
    assert all(len(row["item"]) == 12 for row in predictions(tmp_path / "top"))


def test_a_data_set_with_equally_many_other_items_is_refused(
    work: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, fitting = str(work / "other"), str(work / "fitting")
    commands = {
        "evaluate": ["evaluate", str(run)],
        "predict": ["predict", str(run), str(tmp_path / "top")],
        "export": ["export", str(run), str(tmp_path / "model")],
        "resume": [*TRAIN, "--out", str(run), "--resume"],
        "test data": [*TRAIN, "--out", str(tmp_path / "new"), "--data.test-path", other],
    }
    for name, words in commands.items():
        data = str(work / "data") if name == "test data" else other
        assert freescale([*words, "--data", data]) == 3, name
        error = capsys.readouterr().err
        assert "the data set has other items, but the model was trained on a vocabulary of 12" in error, name
        assert "--vocabulary" in error, name
    assert freescale([*commands["evaluate"], "--data", fitting]) == 0
    assert freescale([*commands["predict"], "--data", fitting]) == 0


def test_a_resume_that_changes_the_training_result_is_refused_unless_asked_for(
    work: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", work / "data"]
    before = (run / "config.toml").read_text()
    longer = ["--train.max-steps", 4]
    for key, value in (("train.lr", 0.5), ("tables.lr", 0.5), ("model.dropout", 0.5), ("model.layers", 3)):
        assert resume(run, *data, *longer, f"--{key}", value) == 2
        error = capsys.readouterr().err
        assert f"resuming would change the training result: {key} = {value}" in error
        assert "--accept-changes" in error
    assert resume(run, "--data", work / "fitting", *longer) == 2
    assert f"would change the training result: the contents of {work / 'fitting'}" in capsys.readouterr().err
    assert (run / "config.toml").read_text() == before
    assert not list(run.glob("config.step-*"))


def test_an_accepted_change_is_printed_and_the_earlier_config_is_kept(
    work: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "config.toml").read_text()
    more = ["--train.max-steps", 4, "--train.lr", 0.5, "--accept-changes"]
    assert resume(run, "--data", work / "data", *more) == 0
    assert "resuming with a changed config: train.max_steps = 4 (was 3), train.lr = 0.5 (was 0.001)" in (
        capsys.readouterr().err
    )
    assert load(run / "config.toml").train.lr == 0.5
    (kept,) = run.glob("config.step-*.toml")
    assert (kept.name, kept.read_text()) == ("config.step-00000003.toml", before)


def test_resuming_a_finished_run_is_logged(work: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resume(run, "--data", work / "data") == 0
    assert "the run is finished at step 3, and nothing is left to train" in capsys.readouterr().err


def test_resuming_from_an_older_checkpoint_is_logged(work: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older, newest = complete_checkpoints(run / "checkpoints")
    (newest / "rank-00000.bytes").unlink()
    assert resume(run, "--data", work / "data") == 0
    error = capsys.readouterr().err
    assert f"{newest} is damaged and set aside; trying the one before it" in error
    assert "warning: the checkpoint is damaged: " in error
    assert f"resumed from {older}" in error


def test_a_run_prints_what_ends_it(work: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resume(run, "--data", work / "data") == 0
    assert "3 steps, 1 per epoch: train.max_steps = 3 ends the run before train.epochs = 4" in capsys.readouterr().err
    assert resume(run, "--data", work / "data", "--train.max-steps", "9", "--accept-changes") == 0
    assert "4 steps, 1 per epoch: train.epochs = 4 ends the run before train.max_steps = 9" in capsys.readouterr().err


def test_training_without_loss_terms_is_an_error_with_the_cause(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        freescale([*TRAIN, "--data", str(work / "data"), "--out", str(tmp_path / "a"), "--data.max-history", "1"]) == 2
    )
    assert "data.max_history must be at least 2" in capsys.readouterr().err
    (tmp_path / "one.csv").write_text("user,item,time\nann,film,1\n")
    assert freescale(["data", "import", "events", str(tmp_path / "one.csv"), str(tmp_path / "one"), *COLUMNS]) == 0
    assert freescale([*TRAIN, "--data", str(tmp_path / "one"), "--out", str(tmp_path / "b")]) == 3
    assert "no history has two events after the held-out ones" in capsys.readouterr().err
    assert not (tmp_path / "b" / "checkpoints" / "step-00000001").exists()


def test_an_evaluation_without_a_target_is_an_error_before_training(
    work: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, late = tmp_path / "late", ["--data.split", "time", "--data.split-time", "999999"]
    assert freescale([*TRAIN, "--data", str(work / "data"), "--out", str(out), *late]) == 3
    assert "nothing to evaluate on: no user has events both before and from data.split_time" in capsys.readouterr().err
    assert not (out / "metrics.jsonl").exists()
    (tmp_path / "one.csv").write_text("user,item,time\nann,film-1,1\n")
    more = ["--vocabulary", str(work / "data")]
    assert (
        freescale(["data", "import", "events", str(tmp_path / "one.csv"), str(tmp_path / "one"), *COLUMNS, *more]) == 0
    )
    assert freescale(["evaluate", str(run), "--data", str(tmp_path / "one")]) == 3
    assert "nothing to evaluate on: every history has fewer than 2 events" in capsys.readouterr().err


@pytest.fixture(scope="module")
def example() -> Any:
    """The example as a module: it is a script, not part of a package."""
    path = Path(__file__).parents[2] / "examples" / "score_from_export.py"
    spec = importlib.util.spec_from_file_location("score_from_export", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
@pytest.mark.parametrize("seen", ["exclude", "allow"])
def test_the_example_scores_an_export_as_predict_does(
    work: Path, tmp_path: Path, example: Any, kind: str, seen: str
) -> None:
    model = ["--model.kind", kind, "--model.heads", "2", "--task.seen", seen, "--data.max-history", "9"]
    run, new = str(tmp_path / "run"), tmp_path / "new.csv"
    assert freescale([*TRAIN, "--data", str(work / "data"), "--out", run, *model]) == 0
    new.write_text((work / "data.csv").read_text() + "user-1,unheard-of,900\nuser-2,never-seen,901\n")
    more = [*COLUMNS, "--vocabulary", str(work / "data")]
    assert freescale(["data", "import", "events", str(new), str(tmp_path / "new"), *more]) == 0
    assert freescale(["export", run, str(tmp_path / "model")]) == 0
    assert freescale(["predict", run, str(tmp_path / "top"), "--k", "6", "--data", str(tmp_path / "new")]) == 0
    histories: dict[str, list[tuple[int, str]]] = {}
    for line in new.read_text().splitlines()[1:]:
        user, item, time = line.split(",")
        histories.setdefault(user, []).append((int(time), item))
    scorer = example.Scorer(tmp_path / "model")
    rows = predictions(tmp_path / "top")
    assert len(rows) == len(histories)
    for row in rows:
        times, items = zip(*sorted(histories[row["user"]]), strict=True)
        best = scorer.recommend(items, times, 6)
        assert [item for item, _ in best] == row["item"]
        assert [score for _, score in best] == pytest.approx(row["score"], abs=1e-5)
