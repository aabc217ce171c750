"""A planted log has exactly the documented signal, and all such logs share their items."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.cli.main import main
from freescale.data import synthetic
from freescale.data.synthetic import CANDIDATES, CHANCES, EVENTS, GROUPS, PlantedItems
from tests.support.datasets import loader

USERS, CATALOGUE = 4000, 64


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    for name, seed in (("log", 0), ("again", 0), ("other", 1)):
        synthetic.write_planted_log(folder / name, users=USERS, catalogue=CATALOGUE, seed=seed)
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return pa.concat_tables([pq.read_table(file) for file in sorted(folder.glob("*.parquet"))]).to_pylist()


def test_every_label_probability_follows_from_candidate_and_history(logs: Path) -> None:
    items = PlantedItems.from_catalogue(CATALOGUE)
    assert Counter(zip(items.group.tolist(), items.good.tolist(), strict=True)) == {
        (group, good): CATALOGUE // GROUPS // 2 for group in range(GROUPS) for good in (False, True)
    }
    for row in rows(logs / "log"):
        counts = Counter(items.group[row["item_id"]].tolist())
        commonest = min(counts, key=lambda group: (-counts[group], group))
        facts = [(int(items.group[c] == commonest), int(items.good[c])) for c in row["candidate_id"]]
        for label, chances in CHANCES.items():
            expected = [chances[match][good] for match, good in facts]
            assert row[label.replace("label_", "true_")] == expected
        assert EVENTS[0] <= len(row["item_id"]) <= EVENTS[1]
        assert CANDIDATES[0] <= len(row["candidate_id"]) <= CANDIDATES[1]
        assert row["timestamp"] == sorted(row["timestamp"])


@pytest.mark.parametrize("label", CHANCES)
def test_the_optimum_is_the_best_score_the_labels_allow(logs: Path, label: str) -> None:
    chance, drawn = synthetic.planted_truth(logs / "log", label)
    optimum = synthetic.planted_optimum(logs / "log", label)
    entropy = -(chance * np.log(chance) + (1 - chance) * np.log(1 - chance))
    mean = chance.mean()
    assert optimum == pytest.approx(entropy.mean() / -(mean * np.log(mean) + (1 - mean) * np.log(1 - mean)))
    loss = -np.where(drawn == 1, np.log(chance), np.log(1 - chance))
    rate = drawn.mean()
    reached = loss.mean() / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert synthetic.normalised_entropy(chance, drawn) == pytest.approx(reached)
    assert reached == pytest.approx(optimum, abs=4 * loss.std() / len(loss) ** 0.5), "labels follow their probabilities"
    for value in np.unique(chance):
        assert drawn[chance == value].mean() == pytest.approx(value, abs=0.02)
    assert optimum < 0.8, "there is something to learn"
    for wrong in (chance * 0.9, 0.9 * chance + 0.1 * mean, np.full_like(chance, mean)):
        assert synthetic.normalised_entropy(wrong, chance) > optimum
        assert synthetic.normalised_entropy(wrong, drawn) > reached


def test_a_seed_reproduces_its_log_and_another_seed_changes_only_users(logs: Path) -> None:
    log, again, other = (rows(logs / name) for name in ("log", "again", "other"))
    assert log == again
    assert not {row["user_id"] for row in log} & {row["user_id"] for row in other}
    assert not {tuple(row["item_id"]) for row in log} & {tuple(row["item_id"]) for row in other}
    best: list[dict[float, float]] = [{}, {}]
    for result, log_rows in zip(best, (log, other), strict=True):
        for row in log_rows:
            for item, chance in zip(row["candidate_id"], row["true_like"], strict=True):
                result[item] = max(chance, result.get(item, 0.0))
    assert best[0] == best[1], "an item that is good in one log is good in the other"
    assert len(best[0]) == CATALOGUE


def test_training_does_not_read_the_label_probabilities(logs: Path) -> None:
    batch = next(iter(loader(logs / "log")))
    assert batch.candidates is not None
    assert set(batch.candidates.features) == {"candidate_id", *CHANCES}
    assert (set(batch.history.features), set(batch.scalars)) == ({"item_id", "timestamp"}, {"user_id"})


def test_the_command_writes_the_log_and_prints_the_optimum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "synth", "--preset", "planted", "--users", "300", "--seed", "5"]
    assert main([*words, str(tmp_path / "log")]) == 0
    output = capsys.readouterr().out
    assert "300 users, 256 items" in output
    for label in CHANCES:
        assert (
            f"{label}: normalised entropy is {synthetic.planted_optimum(tmp_path / 'log', label):.4f} at best" in output
        )
    for wrong, message in ((["--popularity", "public"], "equally popular"), (["--items", "15"], "too few")):
        assert main([*words, *wrong, str(tmp_path / "other")]) == 2
        assert message in capsys.readouterr().err
