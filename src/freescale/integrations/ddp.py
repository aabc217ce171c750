"""Balanced batches for any trainer with torch's DistributedDataParallel; nothing else of FreeScale is needed.

    loader = fs.BalancedLoader(loader, length=lambda batch: batch["length"], cost=fs.Cost.hstu(dim=256))
    for batch in loader:
        loss = model(batch).sum() * batch["loss_scale"]

A step holds the samples that it would hold anyway, dealt so that all ranks compute equally long.
"""

import copy
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.data as torch_data
from torch import Tensor

from freescale.balance.cost import Cost
from freescale.balance.placement import Ints, Placement
from freescale.balance.planner import Planner
from freescale.balance.sample_exchange import SampleExchange
from freescale.config import BalanceConfig
from freescale.data.batch import Events
from freescale.data.loader import prefetch
from freescale.errors import DataError, UsageError
from freescale.integrations.batches import LENGTH, Form, described, scaled, without_samples
from freescale.log import info_once
from freescale.transport.world import host_of_each_rank, new_group

_Length = Callable[[Any], Tensor]
_AHEAD = 2
_NO_GROUPS = {LENGTH: Events(torch.zeros(1, dtype=torch.int64), {})}
"""What a rank has to exchange before its loader has given any batch."""


class BalancedLoader:
    """The batches of a loader, balanced over the ranks of the default process group.

    length: of each sample of a batch; then samples are exchanged between ranks, one or two steps ahead. Or of every
    sample of a map-style data set, read by a DataLoader with a DistributedSampler; then each rank reads what it is to
    compute, and nothing moves.

    Batches are dicts or dataclasses of tensors with a row per sample, and of `Events`. `padded`: tensors that are
    padded to the longest sample of a batch, and with what. What comes out has one thing more: `loss_scale`. The sum of
    the losses times it, averaged over the ranks as DDP averages gradients, is the mean over all terms of all ranks'
    losses. `terms`: how many a sample of some length has; one, if not given. A rank may be given nothing in a step.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        length: _Length | Sequence[int] | Ints | Tensor,
        cost: Cost,
        terms: Callable[[Ints], Ints] = np.ones_like,
        padded: Mapping[str, float] | None = None,
        equal_counts: bool = False,
        max_tokens: int = 0,
        timeout: float = 600.0,
    ) -> None:
        rules = BalanceConfig(counts="equal" if equal_counts else "free", max_tokens=max_tokens)
        rank, world_size = _place()
        transport = new_group(timeout=timeout) if callable(length) and world_size > 1 else None  # else nothing moves
        hosts = None if transport is None else host_of_each_rank(transport)
        plan = _Plan(Planner(cost, rules, world_size=world_size, hosts=hosts), terms, world_size)
        self._batches: _Exchanged | _Placed
        if callable(length):
            path = "samples are exchanged between ranks, behind compute"
            exchange = None if transport is None else SampleExchange(transport, plan)
            self._batches = _Exchanged(loader, length, plan, Form(padded or {}), exchange)
        else:
            path = "every rank reads the samples that it is to compute, and nothing moves"
            lengths = np.asarray(length, dtype=np.int64)
            self._batches = _Placed(loader, PlacedSamples(loader, lengths, plan, rank=rank, world_size=world_size))
        self.report = plan.report
        if rank == 0:
            info_once(f"balance: {path}" if world_size > 1 else "balance: there is one rank, and nothing to balance")

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def _place() -> tuple[int, int]:
    """This rank, and how many there are."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        what = "several ranks were started, but there is no process group yet that says so"
        raise UsageError(what, remedy="call torch.distributed.init_process_group before BalancedLoader")
    return 0, 1


class _Exchanged:
    """Batches whose samples move between ranks."""

    def __init__(
        self, loader: Iterable[Any], length: _Length, plan: "_Plan", form: Form, exchange: SampleExchange | None
    ) -> None:
        self._loader, self._length, self._plan, self._form, self._exchange = loader, length, plan, form, exchange
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if self._exchange is None:
            return (scaled(batch, self._plan.scale_of(self._length(batch).numpy())) for batch in self._loader)
        # All ranks have balanced the same number of batches when they end, so none waits for another in vain.
        return prefetch(self._balanced(self._exchange), _AHEAD, drain=True)

    def _balanced(self, exchange: SampleExchange) -> Iterator[Any]:
        """Until no rank has anything left: who ends earlier goes on with what others give."""
        if self._device is not None:  # each thread has its own, and a DataLoader pins memory for it
            torch.cuda.set_device(self._device)
        batches, batch = iter(self._loader), None
        while True:
            batch = next(batches, None if batch is None else without_samples(batch))
            groups = _NO_GROUPS if batch is None else self._form.apart(batch, self._length(batch).long())
            self._plan.form = "" if batch is None else described(groups)
            moved, placement = exchange.exchange(groups)
            if not len(placement.rank):
                return
            yield scaled(self._form.joined(batch, moved), self._plan.scale)


class _Plan:
    """Plans for the exchange, and sees to it that the batches of all ranks have one form."""

    def __init__(self, planner: Planner, terms: Callable[[Ints], Ints], world_size: int) -> None:
        self._planner, self._terms, self.world_size = planner, terms, world_size
        self.scale, self.form = 1.0, ""
        self.report = planner.report

    def scale_of(self, lengths: Ints) -> float:
        """The loss scale of a step with samples of these lengths."""
        return self.world_size / max(1, int(self._terms(lengths).sum()))

    def __call__(self, lengths: Mapping[str, Ints], source_rank: Ints) -> Placement:
        """As every rank plans."""
        self.scale = self.scale_of(lengths[LENGTH])
        return self._planner({"history": lengths[LENGTH]}, source_rank)

    def local_stats(self) -> Sequence[int]:
        """What this rank's batch looks like; 0 before its loader has given any."""
        return (zlib.crc32(self.form.encode()),)

    def receive_stats(self, stats: Ints) -> None:
        """What the batches of all ranks look like. Every rank raises the same error, so none waits for another."""
        if without := np.flatnonzero(stats == zlib.crc32(b"")).tolist():
            what = f"the loaders of these ranks give no batch at all: {', '.join(map(str, without))}"
            remedy = "give every rank some samples; an iterator that was used up gives none a second time"
            raise DataError(what, remedy=remedy)
        if len(np.unique(stats)) > 1:
            what = "the batches of the ranks differ in their tensors, so samples cannot move between them"
            remedy = "pad to one width everywhere, or name what is padded: padded={'item': 0}"
            raise DataError(what, where=f"this rank's have {self.form}", remedy=remedy)


_WORKERS = ("num_workers", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "persistent_workers")
_KEPT = (*_WORKERS, "pin_memory", "timeout", "generator")
"""Settings of a loader that have nothing to do with which samples it reads."""


class Plan(Protocol):
    """Says where samples go, and then what their loss scale is."""

    scale: float

    def __call__(self, lengths: Mapping[str, Ints], source_rank: Ints) -> Placement:
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


class _Placed:
    """Batches whose samples were placed before they were read."""

    def __init__(self, loader: Iterable[Any], sampler: PlacedSamples) -> None:
        self._sampler = sampler
        self._loader = placed_loader(loader, sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self._sampler.scales.clear()
        for batch in self._loader:
            yield scaled(batch, self._sampler.scales.popleft())
