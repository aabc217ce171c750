"""What is predicted for candidates, and how it is measured over all ranks: by TorchRec's metrics."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.metrics import auc
from torchrec.metrics.metrics_config import RecTaskInfo
from torchrec.metrics.ne import NEMetric
from torchrec.metrics.rec_metric import MetricComputationReport

from freescale.data.batch import Batch
from freescale.embedding.sharded import ShardedTables
from freescale.models.ranking import Ranking
from freescale.train.network import Network
from freescale.transport.world import World

# TorchRec's windows forget; this one, which it deals over the ranks, is larger than any data set. That of NE also
# forgets all but the last thousand batches, so NE is read over the lifetime. AUC has a window only.
_WINDOW = 1 << 62
_READ = {"ne": "lifetime_ne", "auc": "window_auc"}


@dataclass(frozen=True)
class Ranker:
    """A model that ranks candidates. Every rank must ask equally often, since rows travel each time."""

    network: Network
    tables: ShardedTables | None
    device: torch.device

    @torch.no_grad()
    def chances(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """How likely each label of each candidate is, and what it was: [candidates, tasks] both."""
        model = self.model
        inputs = model.prepare(batch.to(self.device))
        logits = model.logits(inputs, self.network.read(inputs.ids, self.tables))
        return logits.double().sigmoid(), inputs.labels.double()

    @property
    def model(self) -> Ranking:
        """The model itself."""
        assert isinstance(self.network.model, Ranking)  # a ranker is only made for ranking
        return self.network.model


def ranking_metrics(ranker: Ranker, batches: Iterator[Batch], world: World) -> dict[str, float]:
    """Normalised entropy and AUC of each task over the batches of all ranks, any of which may hold nothing."""
    labels = ranker.model.labels
    setting: dict[str, Any] = {
        "world_size": world.world_size,
        "my_rank": world.rank,
        "batch_size": 1,  # only compared with the window; batches are as they come
        "window_size": _WINDOW,
        "tasks": [RecTaskInfo(name=label) for label in labels],
        "compute_on_all_ranks": True,
        "process_group": world.group,
    }
    metrics = [kind(**setting).to(world.device) for kind in (NEMetric, _AUC)]
    for batch in batches:
        said, was = (dict(zip(labels, of.unbind(1), strict=True)) for of in ranker.chances(batch))
        for metric in metrics:
            metric.update(predictions=said, labels=was, weights=None)
    with warnings.catch_warnings(), world.transport.guard("metrics"):
        warnings.filterwarnings("ignore", "The ``compute`` method")  # told of a rank that held nothing
        warnings.filterwarnings("ignore", "Using a non-tuple sequence")  # how torchmetrics joins unequal ranks
        found = {name: value for metric in metrics for name, value in metric.compute().items()}
    return {f"{kind}/{label}": float(found[f"{kind}-{label}|{key}"]) for kind, key in _READ.items() for label in labels}


class _EvenAUC(auc.AUCMetricComputation):
    """AUC in which equal predictions share their labels: TorchRec's own depends on the order in which they arrive."""

    def _compute(self) -> list[MetricComputationReport]:
        states = (getattr(self, name) for name in (auc.PREDICTIONS, auc.LABELS, auc.WEIGHTS))
        said, was, weight = (torch.cat(state, dim=-1)[0] for state in states)
        _, place = said.unique(return_inverse=True)
        among = said.new_zeros(len(said)).double()
        share = among.index_add(0, place, (was * weight).double()) / among.index_add(0, place, weight.double())
        setattr(self, auc.LABELS, [share[place].nan_to_num(0.0).float()[None]])
        return super()._compute()


class _AUC(auc.AUCMetric):
    _computation_class = _EvenAUC
