"""Places samples before they are read, where their order and lengths are known beforehand: nothing has to move."""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch.utils.data as torch_data

from freescale.balance.form import LENGTH, without_samples
from freescale.balance.place.placement import Ints, Placement
from freescale.errors import UsageError

_WORKERS = ("num_workers", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "persistent_workers")
_KEPT = (*_WORKERS, "pin_memory", "timeout", "generator")
"""Settings of a loader that have nothing to do with which samples it reads."""


class Plan(Protocol):
    """Says where samples go, and then what their loss scale is."""

    scale: float

    def __call__(self, lengths: Mapping[str, Ints], homes: Ints) -> Placement:
        """From the lengths of a step."""


class PlacedSamples(torch_data.Sampler[list[int]]):
    """The samples of each step on one rank. All ranks' together are those that a DistributedSampler would give them."""

    def __init__(self, loader: Any, lengths: Ints, plan: Plan, *, rank: int, world_size: int) -> None:
        self._sampler = _distributed(loader)
        its_rank, its_ranks = self._sampler.rank, self._sampler.num_replicas
        if (its_rank, its_ranks) != (rank, world_size):
            what = f"the sampler is that of rank {its_rank} of {its_ranks}, but this is rank {rank} of {world_size}"
            remedy = "balance over all ranks of the default process group, or exchange: let length be a function"
            raise UsageError(what, remedy=remedy)
        if len(lengths) != len(loader.dataset):
            what = f"there are {len(lengths)} lengths, but {len(loader.dataset)} samples"
            raise UsageError(what, remedy="give the length of every sample of the data set, in its order")
        self._batch, self._drop_last = loader.batch_size, loader.drop_last
        self._lengths, self._plan = lengths, plan
        self.scales: deque[float] = deque()
        """Of the steps that were given out: the loss scale."""

    def __len__(self) -> int:
        samples = self._sampler.num_samples
        return samples // self._batch if self._drop_last else -(-samples // self._batch)

    def __iter__(self) -> Iterator[list[int]]:
        world_size, rank = self._sampler.num_replicas, self._sampler.rank
        order, each = self._order(), world_size * self._batch
        for step in range(len(self)):
            samples = order[step * each : (step + 1) * each]
            placement = self._plan({LENGTH: self._lengths[samples]}, np.arange(len(samples)) % world_size)
            self.scales.append(self._plan.scale)
            yield samples[placement.rank == rank].tolist()

    def _order(self) -> Ints:
        """Of all ranks: sample i is on rank i % ranks."""
        whole = copy.copy(self._sampler)
        whole.num_replicas, whole.rank, whole.num_samples = 1, 0, whole.total_size
        return np.array(list(whole), dtype=np.int64)


def _joined(collate: Callable[[list[Any]], Any], dataset: Any, samples: list[Any]) -> Any:
    """Samples as a batch, as somebody else's function makes one; of none, an empty one."""
    return collate(samples) if samples else without_samples(collate([dataset[0]]))


def placed_loader(loader: torch_data.DataLoader[Any], sampler: PlacedSamples) -> torch_data.DataLoader[Any]:
    """A loader that reads other samples in the same way."""
    collate, same = partial(_joined, loader.collate_fn, loader.dataset), {n: getattr(loader, n) for n in _KEPT}
    return torch_data.DataLoader(loader.dataset, batch_sampler=sampler, collate_fn=collate, **same)


def _distributed(loader: object) -> torch_data.DistributedSampler[Any]:
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, torch_data.DistributedSampler) or getattr(loader, "batch_size", None) is None:
        what = "lengths by sample are of use only where the order of samples is known beforehand"
        where = f"a loader of type {type(loader).__name__} with a sampler of type {type(sampler).__name__}"
        remedy = "take a DataLoader with batch_size and a DistributedSampler, or let length be a function of a batch"
        raise UsageError(what, where=where, remedy=remedy)
    return sampler
