"""Promise: retrieval metrics are those of the whole corpus sorted by hand, however it is cut and spread."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freescale.config import RunConfig
from freescale.data.loader import Loader
from freescale.train.build import build
from freescale.train.retrieve import Corpus, retrieval_means, retrieval_sums
from tests.ranks import Ranks, World
from tests.training import joined, small


def test_metrics_are_their_definitions() -> None:
    means = retrieval_means(retrieval_sums(torch.tensor([0, 9, 10, 49, 50, 199, 200])))
    assert means["hr@10"] == pytest.approx(2 / 7)
    assert means["hr@50"] == pytest.approx(4 / 7)
    assert means["hr@200"] == pytest.approx(6 / 7)
    assert means["ndcg@10"] == pytest.approx((1 + 1 / math.log2(11)) / 7)
    assert means["mrr"] == pytest.approx(sum(1 / (p + 1) for p in (0, 9, 10, 49, 50, 199, 200)) / 7)


def ranked(world: World, config: RunConfig, folder: str, piece: int) -> tuple[dict[str, float], list[Any]]:
    """The trainer's own evaluation, and per sample: history, target, the scores of all items, place and best items."""
    trainer = build(config, joined(world), Path(folder))
    parts = trainer.parts
    assert parts.evaluate is not None
    metrics = parts.evaluate()
    corpus = Corpus(parts.network, parts.tables, 40, torch.device("cpu"), piece)
    found = []
    for batch in Loader(config.data, seed=1, rank=world.rank, ranks=world.ranks, part="test"):
        before, (best, _) = corpus.places(batch), corpus.top(batch, 7)
        items = next(rows for _, rows in corpus._pieces()) if piece >= 40 else None
        scores = corpus._queries(batch).detach() @ items.T if items is not None else None
        assert batch.targets is not None
        asked = 0
        for i in range(len(batch)):
            seen = set(batch.history.between(i, i + 1)["item_id"].tolist())
            target = batch.targets.between(i, i + 1)["item_id"].tolist()
            place = None
            if target and seen:
                place, asked = int(before[asked]), asked + 1
            row = scores[i].tolist() if scores is not None else None
            found.append((int(batch.sample_id[i]), seen, target, row, place, best[i].tolist()))
    return metrics, sorted(found)


def flat(world: World, config: RunConfig, folder: str) -> dict[str, float]:
    """Metrics of a model that knows nothing: every item has the same row."""
    trainer = build(config, joined(world), Path(folder))
    assert trainer.parts.network.replicated is not None
    assert trainer.parts.evaluate is not None
    with torch.no_grad():
        trainer.parts.network.replicated.weights["item"].fill_(0.5)
    return trainer.parts.evaluate()


def test_a_model_that_cannot_tell_items_apart_gets_no_credit(
    groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    (metrics,) = groups[1].run(flat, small(log, tables={"placement": "replicated"}), str(tmp_path))
    assert metrics["hr@10"] < 0.1  # only who has seen all but a few of the 40 items


@pytest.mark.parametrize("placement", ["sharded", "replicated"])
def test_places_and_best_items_are_those_of_a_sort_by_hand_on_any_ranks_and_pieces(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, placement: str
) -> None:
    config = small(log, tables={"placement": placement})
    ((metrics, alone),) = groups[1].run(ranked, config, str(tmp_path), 64)
    by_hand = []
    for _, seen, target, scores, place, best in alone:
        order = sorted((i for i in range(40) if i not in seen), key=lambda i: (-scores[i], i))
        assert [scores[i] for i in best] == [scores[i] for i in order[:7]]
        assert best == order[:7] or not seen  # without a history all items score the same
        if place is not None:
            before = [i for i in order if scores[i] >= scores[target[0]] and i != target[0]]
            assert place == len(before)
            by_hand.append(place)
    assert metrics["users"] == len(by_hand)
    assert metrics["hr@10"] == pytest.approx(np.mean([p < 10 for p in by_hand]))
    for count in (2, 4):
        results = groups[count].run(ranked, config, str(tmp_path), 7)
        together = sorted(sum((found for _, found in results), []))
        assert [(s, p) for s, _, _, _, p, _ in together] == [(s, p) for s, _, _, _, p, _ in alone]
        assert [b for _, seen, _, _, _, b in together if seen] == [b for _, seen, _, _, _, b in alone if seen]
        assert all(found == pytest.approx(metrics) for found, _ in results)
