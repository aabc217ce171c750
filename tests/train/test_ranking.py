"""Ranking metrics equal a direct count for any placement of samples, and training lowers NE."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray

from freescale.cli.main import main
from freescale.config import RECIPES, RunConfig
from freescale.data import synthetic
from freescale.data.batch import Batch
from freescale.data.loader import Loader
from freescale.train.build import build
from freescale.train.ranking_metrics import Ranker, ranking_metrics
from tests.support.datasets import histories, lists, write_dataset
from tests.support.ranks import RankError, Ranks, World
from tests.support.training import PLACES, chosen, joined, small

LABELS = ("label_click", "label_like")
CANDIDATES = 180
Found = tuple[dict[str, float], NDArray[Any], NDArray[Any], NDArray[Any]]


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 other users over the 40 items of `log`, with two labels."""
    table = histories([1 + i % 9 for i in range(90)], items=40, seed=1, candidates=True)
    liked = np.random.default_rng(2).random(CANDIDATES) < 0.2
    table = table.append_column("label_like", lists([i % 3 + 1 for i in range(90)], liked.astype(np.int8)))
    path = tmp_path_factory.mktemp("unseen") / "data"
    write_dataset(path, table, rows_per_group=4, items=40)
    return path


def ranking(unseen: Path, **changes: Any) -> RunConfig:
    data = {"split": "none", "test_path": str(unseen)}
    return small(unseen, data=data, task={"kind": "ranking", "labels": LABELS}, **changes)


def measured(world: World, config: RunConfig, folder: str, place: str, constant: bool = False) -> Found:
    """Metrics of an untrained model over samples placed by a rule; its outputs, labels and `by_parity` of this rank."""
    parts = build(config, joined(world), Path(folder)).components
    ranker = Ranker(parts.module, torch.device("cpu"))
    if constant:
        ranker.model.head.get_parameter("weight").data.zero_()
    found = [ranker.predict(batch) for batch in placed(world, config, place)]
    metrics = ranking_metrics(ranker, placed(world, config, place), parts.world, by_parity)
    said, was = (torch.cat(values).numpy() for values in zip(*found, strict=True))
    odd = torch.cat([by_parity(batch)["odd"] for batch in placed(world, config, place)]).numpy()
    return metrics, said, was, odd


def by_parity(batch: Batch) -> dict[str, torch.Tensor]:
    """Groups of candidates: those of users with an odd number, and one without members."""
    assert batch.candidates is not None
    odd = (batch.scalars["user_id"] % 2 == 1).repeat_interleave(batch.candidates.lengths)
    return {"odd": odd, "none": torch.zeros_like(odd)}


def placed(world: World, config: RunConfig, place: str) -> Iterator[Batch]:
    for batch in Loader(replace(config.data, path=config.data.test_path), seed=1):
        rank_of = PLACES[place]
        yield chosen(batch, [i for i in range(len(batch)) if rank_of(i, len(batch), world.ranks) == world.rank])


def by_hand(said: NDArray[Any], was: NDArray[Any]) -> dict[str, float]:
    found = {}
    for i, label in enumerate(LABELS):
        chance, drawn = said[:, i], was[:, i]
        loss, rate = -np.where(drawn == 1, np.log(chance), np.log(1 - chance)).mean(), drawn.mean()
        found[f"ne/{label}"] = loss / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
        right, wrong = chance[drawn == 1, None], chance[None, drawn == 0]
        found[f"auc/{label}"] = ((right > wrong) + 0.5 * (right == wrong)).mean()
        found[f"calibration/{label}"] = chance.sum() / drawn.sum()
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"train": {"precision": "fp32"}}, marks=pytest.mark.whole),
        pytest.param({"tables": {"placement": "replicated"}}, marks=pytest.mark.whole),
    ],
)
def test_metrics_equal_a_direct_count_on_any_world_size_with_empty_ranks(
    groups: dict[int, Ranks], unseen: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = ranking(unseen, **changes)
    ((alone, said, was, odd),) = groups[1].run(measured, config, str(tmp_path), "equal")
    assert len(said) == CANDIDATES
    expected = by_hand(said, was) | {f"{name}/odd": value for name, value in by_hand(said[odd], was[odd]).items()}
    assert {name: value for name, value in alone.items() if "gauc" not in name} == pytest.approx(expected)
    for count in (2, 4):
        for place in ("equal", "unequal", "last rank empty", "all on rank 1"):
            results = groups[count].run(measured, config, str(tmp_path), place)
            held = [len(said) for _, said, _, _ in results]
            assert sum(held) == CANDIDATES
            assert (0 in held) == (place in ("last rank empty", "all on rank 1"))
            for metrics, _, _, _ in results:
                assert metrics == results[0][0], "the same on all ranks"
                assert metrics == pytest.approx(alone, abs=1e-6), (count, place)


def test_a_constant_prediction_has_an_auc_of_one_half(groups: dict[int, Ranks], unseen: Path, tmp_path: Path) -> None:
    for count in (1, 2, 4):
        for metrics, said, _, _ in groups[count].run(measured, ranking(unseen), str(tmp_path), "unequal", True):
            assert not len(said) or np.ptp(said, axis=0).max() == 0
            assert [metrics[f"auc/{label}"] for label in LABELS] == pytest.approx([0.5, 0.5], abs=1e-4)


def evaluated(world: World, config: RunConfig, folder: str) -> dict[str, float]:
    """The trainer's own evaluation before the first step."""
    evaluate = build(config, joined(world), Path(folder)).components.evaluate
    assert evaluate is not None
    return evaluate()


def test_a_run_is_evaluated_on_its_test_path(groups: dict[int, Ranks], log: Path, unseen: Path, tmp_path: Path) -> None:
    config = ranking(unseen)
    ((expected, _, _, _),) = groups[1].run(measured, config, str(tmp_path), "equal")
    retrieval = small(log, data={"split": "none", "test_path": str(unseen)})
    (last_of_unseen,) = groups[1].run(evaluated, small(unseen), str(tmp_path))
    assert last_of_unseen["users"] > 0
    for count in (1, 2, 4):
        for found in groups[count].run(evaluated, config, str(tmp_path)):
            assert found == pytest.approx({n: v for n, v in expected.items() if "/odd" not in n}, abs=1e-6)
        for found in groups[count].run(evaluated, retrieval, str(tmp_path)):
            assert found == pytest.approx(last_of_unseen)


def test_test_data_that_does_not_fit_is_refused_before_training(
    groups: dict[int, Ranks], log: Path, unseen: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    write_dataset(other, histories([3] * 9, items=30, candidates=True), rows_per_group=4, items=30)
    data = {"split": "none", "test_path": str(other)}
    with pytest.raises(RankError, match="has 30 items, but the model was trained on a vocabulary of 40"):
        groups[1].run(evaluated, small(unseen, data=data), str(tmp_path))
    data = {"split": "none", "test_path": str(log)}
    with pytest.raises(RankError, match=r"task\.labels reads column 'label_like', which the data does not have"):
        groups[1].run(evaluated, small(unseen, data=data, task={"kind": "ranking", "labels": LABELS}), str(tmp_path))


def test_plain_parquet_is_refused_with_a_remedy_that_works(groups: dict[int, Ranks], tmp_path: Path) -> None:
    plain, made = tmp_path / "plain", tmp_path / "made"
    plain.mkdir()
    pq.write_table(histories([3, 5, 2] * 9, items=30, candidates=True), plain / "part.parquet")
    with pytest.raises(RankError, match=f"freescale data import histories {plain} NEW_FOLDER"):
        groups[1].run(evaluated, small(plain), str(tmp_path))
    assert main(["data", "import", "histories", str(plain), str(made)]) == 0
    groups[1].run(evaluated, small(made, data={"split": "last"}), str(tmp_path))


def trained(world: World, config: RunConfig, folder: str) -> None:
    trainer = build(config, joined(world), Path(folder))
    assert trainer.fit()
    trainer.close()


@pytest.mark.whole
def test_training_on_a_planted_log_brings_normalised_entropy_near_the_optimum(
    groups: dict[int, Ranks], tmp_path: Path
) -> None:
    for name, users, seed in (("log", 2000, 0), ("unseen", 1000, 1)):
        synthetic.write_planted_log(tmp_path / name, users=users, catalogue=32, seed=seed)
    recipe = RECIPES["hstu-ranking-synth"]
    data = replace(recipe.data, path=str(tmp_path / "log"), test_path=str(tmp_path / "unseen"), global_batch=64)
    groups[2].run(trained, replace(recipe, data=data), str(tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (last,) = [line for line in lines if line["kind"] == "evaluate"][-1:]
    for label in LABELS:
        best = synthetic.planted_optimum(tmp_path / "unseen", label)
        assert best < last[f"ne/{label}"] < 1.04 * best < 0.8
