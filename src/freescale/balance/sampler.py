"""Places samples before they are read, where their order and lengths are known beforehand: nothing has to move."""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch.utils.data as torch_data

from freescale.balance.form import LENGTH, without_samples
from freescale.balance.place.placement import Ints, Placement
from freescale.errors import UsageError


class Plan(Protocol):
    """Says where samples go, and then what their loss scale is."""

    scale: float

    def __call__(self, lengths: Mapping[str, Ints], homes: Ints) -> Placement:
        """From the lengths of a step."""
        ...


class PlacedSamples(torch_data.Sampler[list[int]]):
    """The samples of each step on one rank. All ranks' together are those that a DistributedSampler would give them."""

    def __init__(self, loader: Any, lengths: Ints, plan: Plan, *, rank: int, ranks: int) -> None:
        self._sampler = _distributed(loader)
        if (self._sampler.rank, self._sampler.num_replicas) != (rank, ranks):
            raise UsageError(
                f"the sampler is that of rank {self._sampler.rank} of {self._sampler.num_replicas}, but this is rank "
                f"{rank} of {ranks}",
                remedy="balance over all ranks of the default process group, or exchange: let length be a function",
            )
        if len(lengths) != len(loader.dataset):
            raise UsageError(
                f"there are {len(lengths)} lengths, but {len(loader.dataset)} samples",
                remedy="give the length of every sample of the data set, in its order",
            )
        self._batch, self._drop_last = loader.batch_size, loader.drop_last
        self._lengths, self._plan = lengths, plan
        self.scales: deque[float] = deque()
        """Of the steps that were given out: the loss scale."""

    def __len__(self) -> int:
        samples = self._sampler.num_samples
        return samples // self._batch if self._drop_last else -(-samples // self._batch)

    def __iter__(self) -> Iterator[list[int]]:
        ranks, rank = self._sampler.num_replicas, self._sampler.rank
        order, each = self._order(), ranks * self._batch
        for step in range(len(self)):
            samples = order[step * each : (step + 1) * each]
            placement = self._plan({LENGTH: self._lengths[samples]}, np.arange(len(samples)) % ranks)
            self.scales.append(self._plan.scale)
            yield samples[placement.rank == rank].tolist()

    def _order(self) -> Ints:
        """Of all ranks: sample i is on rank i % ranks."""
        whole = copy.copy(self._sampler)
        whole.num_replicas, whole.rank, whole.num_samples = 1, 0, whole.total_size
        return np.array(list(whole), dtype=np.int64)


class Collate:
    """Joins samples to a batch as somebody else's function does, and none to an empty one."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any) -> None:
        self._collate, self._dataset = collate, dataset

    def __call__(self, samples: list[Any]) -> Any:
        """A batch."""
        return self._collate(samples) if samples else without_samples(self._collate([self._dataset[0]]))


def placed_loader(loader: torch_data.DataLoader[Any], sampler: PlacedSamples) -> torch_data.DataLoader[Any]:
    """A loader that reads other samples in the same way."""
    return torch_data.DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=Collate(loader.collate_fn, loader.dataset),
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _distributed(loader: object) -> torch_data.DistributedSampler[Any]:
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, torch_data.DistributedSampler) or getattr(loader, "batch_size", None) is None:
        raise UsageError(
            "lengths by sample are of use only where the order of samples is known beforehand",
            where=f"a loader of type {type(loader).__name__} with a sampler of type {type(sampler).__name__}",
            remedy="take a DataLoader with batch_size and a DistributedSampler, or let length be a function of a batch",
        )
    return sampler
