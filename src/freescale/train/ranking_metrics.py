"""Metrics of ranking, exact over all ranks: predictions are gathered, then every rank computes the same figures.

Per binary label: normalized entropy (NE), AUC, GAUC (AUC of each user, weighted by its candidates) and calibration (sum
of predictions over sum of labels). Per number: mean squared error, and the same over the variance. Equal predictions
count as half a correct order. NaN is no label.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.config import TaskConfig
from freescale.data.batch import Batch
from freescale.models.ranking import Ranking
from freescale.train.sharded_model import SequenceModule
from freescale.transport.world import World

Floats = NDArray[np.float64]
_LEAST = 1e-12  # of a probability: a certain but wrong prediction must not make the mean infinite


@dataclass(frozen=True)
class Ranker:
    """A model that scores candidates. Every rank must call it equally often: fetching rows is collective."""

    module: SequenceModule
    device: torch.device

    @torch.no_grad()
    def predict(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the prediction of each label of each candidate, and the label: [candidates, tasks] both.

        A probability for a binary label, else the number itself.
        """
        inputs = self.model.prepare(batch.to(self.device))
        outputs = self.model.outputs(inputs, self.module.read_rows(inputs.ids)).double()
        task = self.model.task
        predicted = [
            column if label in task.regression else column.sigmoid()
            for label, column in zip(task.labels, outputs.unbind(1), strict=True)
        ]
        return torch.stack(predicted, dim=1), inputs.labels.double()

    @property
    def model(self) -> Ranking:
        """The model itself."""
        assert isinstance(self.module.model, Ranking)  # other tasks have no candidates
        return self.module.model


def ranking_metrics(
    ranker: Ranker,
    batches: Iterator[Batch],
    world: World,
    groups: Callable[[Batch], dict[str, Tensor]] | None = None,
) -> dict[str, float]:
    """Return the metrics of every task over the batches of all ranks. A rank may have no candidate.

    `groups`: which candidates of a batch belong to a group; its metrics are METRIC/LABEL/GROUP. Called by all ranks.
    """
    tasks = len(ranker.model.task.labels)
    users, predictions, labels, members = [], [], [], []
    for batch in batches:
        assert batch.candidates is not None
        outputs, known = ranker.predict(batch)
        users.append(batch.scalars["user_id"].repeat_interleave(batch.candidates.lengths).cpu())
        predictions.append(outputs.cpu())
        labels.append(known.cpu())
        members.append(groups(batch) if groups else {})
    empty = torch.empty(0, tasks, dtype=torch.float64)
    user = _gather(torch.cat([torch.empty(0, dtype=torch.int64), *users]), world)
    predicted = _gather(torch.cat([empty, *predictions]), world)
    label = _gather(torch.cat([empty, *labels]), world)
    metrics = compute_metrics(user, predicted, label, ranker.model.task)
    for name in members[0] if members else ():
        inside = _gather(torch.cat([of_batch[name].cpu() for of_batch in members]).long(), world).astype(bool)
        if inside.any():
            of_group = compute_metrics(user[inside], predicted[inside], label[inside], ranker.model.task)
            metrics |= {f"{metric}/{name}": value for metric, value in of_group.items()}
    return metrics


def _gather(values: Tensor, world: World) -> NDArray[np.generic]:
    """Return the rows of all ranks, in the order of the ranks."""
    count = torch.tensor([len(values)], device=world.device)  # NCCL takes no host memory
    counts = world.transport.all_gather(count, name="metrics").wait().flatten().tolist()
    padded = values.new_zeros(max(counts), *values.shape[1:])
    padded[: len(values)] = values
    every = world.transport.all_gather(padded.to(world.device), name="metrics").wait().cpu()
    return torch.cat([rows[:count] for rows, count in zip(every, counts, strict=True)]).numpy()


def compute_metrics(
    users: NDArray[np.generic], predictions: NDArray[np.generic], labels: NDArray[np.generic], task: TaskConfig
) -> dict[str, float]:
    """Return the metrics of every task from all candidates: users [candidates], the others [candidates, tasks]."""
    metrics = {}
    for column, label in enumerate(task.labels):
        known = np.isfinite(labels[:, column])
        predicted, truth, user = predictions[known, column], labels[known, column], users[known]
        of_label = _number_metrics(predicted, truth) if label in task.regression else _binary(predicted, truth, user)
        metrics |= {f"{name}/{label}": value for name, value in of_label.items()}
    return metrics


def _binary(predicted: Floats, labels: Floats, users: NDArray[np.generic]) -> dict[str, float]:
    if not len(labels):
        return dict.fromkeys(("ne", "auc", "gauc", "calibration"), float("nan"))
    chance, mean = np.clip(predicted, _LEAST, 1 - _LEAST), np.clip(labels.mean(), _LEAST, 1 - _LEAST)
    entropy = -(labels * np.log(chance) + (1 - labels) * np.log(1 - chance)).mean()
    best_constant = -(labels.mean() * np.log(mean) + (1 - labels.mean()) * np.log(1 - mean))
    by_user, weight = auc_by_group(predicted, labels, users)
    usable = ~np.isnan(by_user)
    gauc = float(np.average(by_user[usable], weights=weight[usable])) if usable.any() else float("nan")
    return {
        "ne": float(entropy / best_constant),
        "auc": float(auc_by_group(predicted, labels, np.zeros_like(users))[0][0]),
        "gauc": gauc,
        "calibration": float(predicted.sum() / labels.sum()) if labels.sum() else float("nan"),
    }


def _number_metrics(predicted: Floats, labels: Floats) -> dict[str, float]:
    if not len(labels):
        return dict.fromkeys(("mse", "relative_mse"), float("nan"))
    error = float(np.square(predicted - labels).mean())
    return {"mse": error, "relative_mse": error / float(labels.var()) if labels.var() else float("nan")}


def auc_by_group(predicted: Floats, labels: Floats, groups: NDArray[np.generic]) -> tuple[Floats, Floats]:
    """Return the AUC of each group, NaN where it has one class only, and its number of candidates.

    Labels may be shares of both classes: a candidate then counts to both.
    """
    order = np.lexsort((predicted, groups))
    group, value, positive = groups[order], predicted[order], labels[order]
    starts = np.flatnonzero(np.append(True, group[1:] != group[:-1])) if len(group) else np.zeros(0, np.int64)
    tied = np.append(True, (value[1:] != value[:-1]) | (group[1:] != group[:-1])) if len(group) else np.zeros(0, bool)
    ties = np.flatnonzero(tied)
    ups, downs = np.add.reduceat(positive, ties), np.add.reduceat(1 - positive, ties)
    of_group = np.searchsorted(starts, ties, side="right") - 1
    first = np.searchsorted(ties, starts)
    below = np.cumsum(downs) - downs
    below -= below[first][of_group]
    correct = np.bincount(of_group, ups * (below + downs / 2), minlength=len(starts))
    total_up, total_down = (np.bincount(of_group, x, minlength=len(starts)) for x in (ups, downs))
    pairs = total_up * total_down
    auc = np.full(len(starts), np.nan)
    np.divide(correct, pairs, out=auc, where=pairs > 0)
    return auc, (total_up + total_down).astype(np.float64)
