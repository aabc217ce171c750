"""Retrieval metrics equal those of a full sort of the corpus, for any chunk size and world size."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freescale.config import RunConfig
from freescale.data.loader import Loader
from freescale.train.build import build
from freescale.train.evaluation import Corpus, TargetRanks, retrieval_means, retrieval_sums
from tests.support.datasets import histories, write_dataset
from tests.support.ranks import Ranks, World
from tests.support.training import joined, small


def test_metrics_are_their_definitions() -> None:
    before = torch.tensor([0, 9, 10, 49, 50, 199, 200], dtype=torch.float64)
    none = torch.zeros(7, dtype=torch.bool)
    means = retrieval_means(retrieval_sums(TargetRanks(before, none, none, none)))
    assert means["hr@10"] == pytest.approx(2 / 7)
    assert means["hr@50"] == pytest.approx(4 / 7)
    assert means["hr@200"] == pytest.approx(6 / 7)
    assert means["ndcg@10"] == pytest.approx((1 + 1 / math.log2(11)) / 7)
    assert means["mrr"] == pytest.approx(sum(1 / (p + 1) for p in (0, 9, 10, 49, 50, 199, 200)) / 7)


def ranked(world: World, config: RunConfig, folder: str, piece: int) -> tuple[dict[str, float], list[Any]]:
    """The trainer's own evaluation, and per sample: history, target, the scores of all items, place and best items."""
    trainer = build(config, joined(world), Path(folder))
    parts = trainer.components
    assert parts.evaluate is not None
    metrics = parts.evaluate()
    corpus = Corpus(parts.module, 40, torch.device("cpu"), exclude_seen=config.task.seen == "exclude", chunk=piece)
    found = []
    for batch in Loader(config.data, seed=1, rank=world.rank, world_size=world.ranks, part="test"):
        before, (best, _) = corpus.target_ranks(batch).before, corpus.top(batch, 7)
        items = next(corpus._chunks()).rows if piece >= 40 else None
        scores = corpus._queries(batch).detach() @ items.T if items is not None else None
        assert batch.targets is not None
        asked = 0
        for i in range(len(batch)):
            seen = set(batch.history.slice(i, i + 1)["item_id"].tolist())
            target = batch.targets.slice(i, i + 1)["item_id"].tolist()
            place = None
            if target and seen:
                place, asked = float(before[asked]), asked + 1
            row = scores[i].tolist() if scores is not None else None
            found.append((int(batch.sample_id[i]), seen, target, row, place, best[i].tolist()))
    return metrics, sorted(found)


def flat(world: World, config: RunConfig, folder: str) -> dict[str, float]:
    """Metrics of a model that knows nothing: every item has the same row."""
    trainer = build(config, joined(world), Path(folder))
    assert trainer.components.module.replicated is not None
    assert trainer.components.evaluate is not None
    with torch.no_grad():
        trainer.components.module.replicated.weights["item"].fill_(0.5)
    return trainer.components.evaluate()


def test_a_model_that_cannot_tell_items_apart_gets_no_credit(
    groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    (metrics,) = groups[1].run(flat, small(log, tables={"placement": "replicated"}), str(tmp_path))
    assert metrics["hr@10"] < 0.1  # only who has seen all but a few of the 40 items


@pytest.mark.parametrize(
    ("placement", "rule"), [("sharded", "exclude"), ("replicated", "exclude"), ("sharded", "allow")]
)
def test_ranks_and_best_items_equal_a_full_sort_for_any_world_size_and_chunk(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, placement: str, rule: str
) -> None:
    config = small(log, tables={"placement": placement}, task={"seen": rule})
    ((metrics, alone),) = groups[1].run(ranked, config, str(tmp_path), 64)
    by_hand, repeats = [], 0
    for _, seen, target, scores, place, best in alone:
        excluded = seen if rule == "exclude" else set()
        order = sorted((i for i in range(40) if i not in excluded), key=lambda i: (-scores[i], i))
        recommended = [i for i in best if i not in excluded]
        assert [scores[i] for i in recommended] == [scores[i] for i in order[:7]]
        assert recommended == order[:7] or not seen  # without a history all items score the same
        if place is not None:
            before = [i for i in order if scores[i] >= scores[target[0]] and i != target[0]]
            assert place == (len(before) if target[0] in order else math.inf)
            repeats += target[0] not in order
            by_hand.append(place)
    assert metrics["users"] == len(by_hand)
    assert metrics["hr@10"] == pytest.approx(np.mean([p < 10 for p in by_hand]))
    assert metrics["seen_targets"] == pytest.approx(repeats / len(by_hand))
    assert bool(repeats) == (rule == "exclude")
    for count in (2, 4):
        results = groups[count].run(ranked, config, str(tmp_path), 7)
        together = sorted(sum((found for _, found in results), []))
        assert [(s, p) for s, _, _, _, p, _ in together] == [(s, p) for s, _, _, _, p, _ in alone]
        assert [b for _, seen, _, _, _, b in together if seen] == [b for _, seen, _, _, _, b in alone if seen]
        assert all(found == pytest.approx(metrics) for found, _ in results)


def hits_twice(world: World, config: RunConfig, folder: str, items: int) -> tuple[dict[str, float], int]:
    """Metrics of evaluation, and how many held-out items are among the ten that prediction returns."""
    parts = build(config, joined(world), Path(folder)).components
    exclude = config.task.seen == "exclude"
    corpus = Corpus(parts.module, items, torch.device("cpu"), exclude_seen=exclude)
    returned = 0
    for batch in Loader(config.data, seed=1, rank=world.rank, world_size=world.ranks, part="test"):
        assert batch.targets is not None
        best, scores = corpus.top(batch, 10)
        for i in range(len(batch)):
            asked = batch.targets.slice(i, i + 1)["item_id"].tolist() if batch.history.lengths[i] else []
            returned += sum(item in best[i][scores[i] > -math.inf].tolist() for item in asked)
    assert parts.evaluate is not None
    return parts.evaluate(), returned


@pytest.mark.parametrize(("rule", "items"), [("exclude", 40), ("allow", 40), ("exclude", 25)])
def test_evaluation_counts_exactly_the_hits_that_prediction_returns(
    groups: dict[int, Ranks], tmp_path: Path, rule: str, items: int
) -> None:
    lengths = np.random.default_rng(5).integers(2, 20, 150).tolist()
    write_dataset(tmp_path / "data", histories(lengths, items=40), rows_per_group=8, items=items)
    config = small(tmp_path / "data", task={"seen": rule})
    ((metrics, returned),) = groups[1].run(hits_twice, config, str(tmp_path / "run"), items)
    assert metrics["users"] == 150
    assert metrics["hr@10"] == pytest.approx(returned / 150)
    assert returned > 10
    assert (metrics["seen_targets"] > 0.05) == (rule == "exclude")
    assert (metrics["unknown_targets"] > 0.1) == (items < 40)
