"""Losses of several tasks, and the metrics of ranking against definitions written out."""

import numpy as np
import pytest
import torch

from freescale.config import TaskConfig
from freescale.models.heads import build_heads, multi_task_loss
from freescale.train.ranking_metrics import auc_by_group, compute_metrics

TASK = TaskConfig(kind="ranking", labels=("a", "b"), regression=("b",), weights=(1.0, 0.5))


def test_the_loss_of_several_tasks_weighs_labels_and_leaves_out_missing_ones() -> None:
    outputs = torch.tensor([[0.3, 2.0], [-1.0, 5.0]], dtype=torch.float64)
    labels = torch.tensor([[1.0, 3.5], [float("nan"), 4.0]])
    expected = -np.log(1 / (1 + np.exp(-0.3))) + 0.5 * (0.5 * 1.5**2 + 0.5 * 1.0**2)
    assert float(multi_task_loss(outputs, labels, TASK)) == pytest.approx(expected, rel=1e-12)


def test_an_expert_mixture_gives_one_output_per_task() -> None:
    heads = build_heads(TaskConfig(kind="ranking", labels=("a", "b", "c"), experts=4), 8)
    assert heads(torch.randn(5, 8)).shape == (5, 3)


def by_pairs(predicted: np.ndarray, labels: np.ndarray) -> float:
    up, down = predicted[labels == 1], predicted[labels == 0]
    return float(np.mean([1.0 if p > n else 0.5 if p == n else 0.0 for p in up for n in down]))


def test_auc_counts_pairs_in_the_right_order_and_ties_half_in_each_group() -> None:
    rng = np.random.default_rng(0)
    predicted, labels, users = (
        rng.integers(0, 6, 200) / 6,
        rng.integers(0, 2, 200).astype(float),
        rng.integers(0, 9, 200),
    )
    of_users, weight = auc_by_group(predicted, labels, users)
    for place, user in enumerate(np.unique(users)):
        own = users == user
        assert of_users[place] == pytest.approx(by_pairs(predicted[own], labels[own]), abs=1e-12)
        assert weight[place] == own.sum()
    (alone,), _ = auc_by_group(predicted, labels, np.zeros(200))
    assert alone == pytest.approx(by_pairs(predicted, labels), abs=1e-12)


def test_gauc_leaves_out_users_with_one_class_and_metrics_leave_out_missing_labels() -> None:
    users = np.array([1, 1, 2, 2, 3, 3])
    predicted = np.array([[0.9, 1.0], [0.1, 2.0], [0.2, 3.0], [0.8, 4.0], [0.5, 5.0], [0.6, 6.0]])
    labels = np.array([[1, 1.0], [0, np.nan], [1, 2.0], [0, 4.0], [1, 7.0], [np.nan, 6.0]])
    metrics = compute_metrics(users, predicted, labels, TASK)
    assert metrics["gauc/a"] == pytest.approx(0.5), "user 1 is right, user 2 wrong, user 3 has one class"
    assert metrics["calibration/a"] == pytest.approx((0.9 + 0.1 + 0.2 + 0.8 + 0.5) / 3)
    assert metrics["mse/b"] == pytest.approx((0 + 1 + 0 + 4 + 0) / 5)
    chance = np.array([0.9, 0.9, 0.2, 0.2, 0.5])
    entropy = -np.log(chance).mean() / -(0.6 * np.log(0.6) + 0.4 * np.log(0.4))
    assert metrics["ne/a"] == pytest.approx(entropy, rel=1e-9)
