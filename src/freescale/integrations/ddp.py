"""What DDP trainers import: a loader whose batches are balanced over the ranks. Needs torch and no TorchRec.

    loader = fs.BalancedLoader(loader, lengths=lambda batch: batch["length"], cost=fs.Cost.hstu(dim=256))
    for batch in loader:
        loss = (losses * batch["loss_weight"]).sum()

A step keeps the samples that it would hold anyway, placed so that all ranks compute equally long.
"""

import contextlib
import copy
import itertools
import os
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import length_hint
from typing import Any, Protocol, get_args

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.data as torch_data
from torch import Tensor

from freescale.balance.assign import Compute
from freescale.balance.cost import Cost
from freescale.balance.placement import Ints, Placement
from freescale.balance.planner import Planner
from freescale.balance.sample_exchange import SampleExchange
from freescale.config import BalanceConfig
from freescale.data.batch import Events
from freescale.data.loader import prefetch
from freescale.errors import DataError, UsageError
from freescale.integrations.batches import (
    LENGTHS,
    BatchFormat,
    describe_format,
    empty_like,
    events_from_nested,
    nested_from_events,
    require_place_for_loss_weight,
    with_loss_weight,
)
from freescale.log import info_once, warning_once
from freescale.transport.world import host_of_each_rank, new_group

__all__ = ["BalancedLoader", "BalancedSampler", "events_from_nested", "nested_from_events"]

LengthsOf = Callable[[Any], Tensor | Ints | Sequence[int]]
"""Returns the length of each sample of a batch."""
_PREFETCH_BATCHES = 2
_NO_SAMPLES = {LENGTHS: Events(torch.zeros(1, dtype=torch.int64), {})}
_WORKER_SETTINGS = ("num_workers", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "persistent_workers")
_KEPT_SETTINGS = (*_WORKER_SETTINGS, "pin_memory", "timeout", "generator")
"""Settings of a DataLoader that do not affect which samples it reads."""


class BalancedLoader:
    """Yields the batches of a loader, balanced over the ranks of a process group.

    lengths: a function that returns the length of each sample of a batch, as integers in a tensor, an array or a list;
    samples are then exchanged between ranks, one or two steps ahead. Or the length of every sample of a map-style
    dataset, read by a DataLoader with a DistributedSampler; each rank then reads the samples that it computes, and
    nothing moves. cost: of a sample. compute: "jagged" if the model computes each sample at its own length, "padded" if
    at that of the longest one of its batch; with "padded" a rank gets a few long samples or many short ones. tolerance:
    how far above the best possible time the slowest rank may end, for fewer moves.

    Batches are dicts, or dataclasses with a field `loss_weight`, of tensors with a row per sample and of `Events`.
    pad_values: padded tensors by name, with their padding. Every batch gets a `loss_weight`: the sum of all losses
    times it, averaged over the ranks by DDP, is the mean over all ranks' losses. terms: a function that gets lengths as
    a numpy array and returns the number of losses of each sample; by default one per sample. A rank may get an empty
    batch.

    Where ranks have unequal numbers of batches, all stop after the last step for which every rank has a batch, and a
    rank with batches left logs how many.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        lengths: LengthsOf | Sequence[int] | Ints | Tensor,
        cost: Cost,
        pad_values: Mapping[str, float] | None = None,
        process_group: dist.ProcessGroup | None = None,
        terms: Callable[[Ints], Ints] = np.ones_like,
        equal_counts: bool = False,
        max_tokens: int = 0,
        compute: Compute = "jagged",
        tolerance: float = 0.005,
        timeout: float = 600.0,
    ) -> None:
        _require_positive(cost)
        _require_compute(compute, equal_counts=equal_counts)
        counts = "equal" if equal_counts else "free"
        rules = BalanceConfig(counts=counts, max_tokens=max_tokens, tolerance=tolerance)
        rank, world_size = _rank_and_world_size(process_group)
        moves = callable(lengths) and world_size > 1
        transport = new_group(process_group, timeout=timeout) if moves else None
        hosts = None if transport is None else np.array(host_of_each_rank(transport).host_of)
        plan = Planner(cost, rules, world_size=world_size, hosts=hosts, compute=compute)
        planner = _WeightingPlanner(plan, terms, world_size)
        self._loader, self._epoch = loader, 0
        self._start = self._step = 0
        self._batches: _ExchangedBatches | _SampledBatches
        if callable(lengths):
            path = "samples are exchanged between ranks, overlapped with compute"
            exchange = None if transport is None else SampleExchange(transport, planner)
            self._batches = _ExchangedBatches(loader, lengths, planner, BatchFormat(pad_values or {}), exchange, rank)
        else:
            path = "every rank reads the samples that it computes, and nothing moves"
            lengths = np.asarray(lengths, dtype=np.int64)
            sampler = BalancedSampler(loader, lengths, planner, rank=rank, world_size=world_size)
            self._batches = _SampledBatches(loader, sampler)
        self._report = planner.report
        if rank == 0:
            info_once(f"balance: {path}" if world_size > 1 else "balance: there is one rank, and nothing to balance")

    def __len__(self) -> int:
        """Return the number of batches of an epoch, if the loader has a length."""
        return len(self._batches)

    def report(self) -> list[str]:
        """Return lines on what was balanced, the same on every rank; none before the first step."""
        return self._report()

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, 0
        self._step = start
        with contextlib.closing(self._batches.read(start)) as batches:
            for batch in batches:
                self._step += 1
                yield batch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader, its samplers and its dataset, where they have one."""
        if epoch != self._epoch:
            self._epoch, self._start, self._step = epoch, 0, 0
        parts = (getattr(self._loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))
        for part in (self._loader, *parts):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of batches of it that were yielded; the same on all ranks."""
        return {"epoch": self._epoch, "step": self._step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a position: the next iteration skips the batches that were yielded before it."""
        self.set_epoch(state["epoch"])
        self._start = self._step = state["step"]


def _rank_and_world_size(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(process_group), dist.get_world_size(process_group)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        what = "WORLD_SIZE is above 1, but there is no process group"
        raise UsageError(what, remedy="call torch.distributed.init_process_group before BalancedLoader")
    return 0, 1


def _require_positive(cost: Cost) -> None:
    if cost.power is None and not min(cost.constants) >= 0 < max(cost.constants):
        remedy = "use fs.Cost(token=1.0) for time in proportion to the length, or fs.Cost.hstu(dim=..., layers=...)"
        raise UsageError(
            "a cost has constants of which none is below 0 and not all are 0", where=f"{cost}", remedy=remedy
        )


def _require_compute(compute: Compute, *, equal_counts: bool) -> None:
    if compute not in get_args(Compute):
        remedy = "use 'padded' for a model that pads a batch to its longest sample, else 'jagged'"
        raise UsageError(f"compute is '{compute}', which is not known", remedy=remedy)
    if compute == "padded" and equal_counts:
        what = "with compute='padded' ranks hold few long samples or many short ones, but equal_counts is set"
        remedy = "leave out equal_counts: with as many samples as ranks, every rank has one all the same"
        raise UsageError(what, remedy=remedy)


class _Exhausted(Exception):  # noqa: N818
    """Raised on all ranks at once when the loaders of some have ended."""


class _ExchangedBatches:
    """Batches whose samples move between ranks."""

    def __init__(
        self,
        loader: Iterable[Any],
        lengths_of: LengthsOf,
        planner: "_WeightingPlanner",
        batch_format: BatchFormat,
        exchange: SampleExchange | None,
        rank: int,
    ) -> None:
        self._loader, self._lengths_of, self._planner, self._rank = loader, lengths_of, planner, rank
        self._format, self._exchange = batch_format, exchange
        self._device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def read(self, start: int) -> Generator[Any, None, None]:
        """Yield balanced batches, without the first ones."""
        if self._exchange is None:
            for batch in itertools.islice(self._loader, start, None):
                yield with_loss_weight(batch, self._planner.weight_of(self._read_lengths(batch).numpy()))
            return
        # All ranks balance the same number of batches before they stop, so none waits for a peer that has stopped.
        yield from prefetch(self._balance(self._exchange, start), _PREFETCH_BATCHES, drain=True)

    def _balance(self, exchange: SampleExchange, start: int) -> Iterator[Any]:
        if self._device is not None:  # the current device is per thread, and a DataLoader pins memory for it
            torch.accelerator.set_device_index(self._device)
        batches = itertools.islice(self._loader, start, None)
        for step in itertools.count(start):
            batch = next(batches, None)
            groups = _NO_SAMPLES if batch is None else self._to_jagged(batch)
            self._planner.exhausted, self._planner.format = batch is None, describe_format(groups)
            try:
                moved, _ = exchange.exchange(groups)
            except _Exhausted as exhausted:
                self._log_leftover(batch is not None, step, str(exhausted))
                return
            yield with_loss_weight(self._format.from_jagged(batch, moved), self._planner.loss_weight)

    def _to_jagged(self, batch: Any) -> dict[str, Events]:
        require_place_for_loss_weight(batch)  # before its tensors: their errors do not apply to a tuple
        return self._format.to_jagged(batch, self._read_lengths(batch))

    def _read_lengths(self, batch: Any) -> Tensor:
        lengths = torch.as_tensor(self._lengths_of(batch)).long()
        if lengths.dim() != 1:
            what = f"`lengths` returns the shape {list(lengths.shape)} for a batch"
            raise DataError(what, remedy="let it return one integer per sample")
        return lengths

    def _log_leftover(self, has_batch: bool, step: int, exhausted: str) -> None:
        """Log the batches that this rank does not yield because another rank has no batch for this step."""
        if has_batch:
            count = max(1, length_hint(self._loader) - step)
            warning_once(
                f"balance: rank {self._rank} has at least {count} batches left that are not used, "
                f"since the loaders of these ranks ended after step {step}: {exhausted}"
            )
        elif step == 0:
            warning_once(f"balance: there is no step, since the loaders of these ranks yield no batch: {exhausted}")


class _WeightingPlanner:
    """Plans for the exchange, computes loss weights, and checks that the batches of all ranks have one format."""

    def __init__(self, planner: Planner, terms: Callable[[Ints], Ints], world_size: int) -> None:
        self._planner, self._terms, self._world_size = planner, terms, world_size
        self.loss_weight, self.format, self.exhausted = 1.0, "", False
        self.report = planner.report

    def weight_of(self, lengths: Ints) -> float:
        """Return the loss weight of a step with samples of these lengths: the world size over the number of terms."""
        return self._world_size / max(1, int(self._terms(lengths).sum()))

    def __call__(self, lengths: Mapping[str, Ints], source_rank: Ints) -> Placement:
        """Place the samples of a step, and set its loss weight."""
        self.loss_weight = self.weight_of(lengths[LENGTHS])
        return self._planner({"history": lengths[LENGTHS]}, source_rank)

    def local_stats(self) -> Sequence[int]:
        """Return a checksum of the format of this rank's batch, and whether its loader has ended."""
        return zlib.crc32(self.format.encode()), int(self.exhausted)

    def receive_stats(self, stats: Ints) -> None:
        """Compare the formats of all ranks. Every rank raises the same error, so none waits for another."""
        if exhausted := np.flatnonzero(stats[:, 1]).tolist():
            raise _Exhausted(", ".join(map(str, exhausted)))
        if len(np.unique(stats[:, 0])) > 1:
            what = "the batches of the ranks differ in their tensors, so samples cannot move between them"
            remedy = "pad to one width everywhere, or name the padded tensors: pad_values={'item': 0}"
            raise DataError(what, where=f"this rank's have {self.format}", remedy=remedy)


class WeightedPlan(Protocol):
    """Places the samples of a step, then has its loss weight."""

    loss_weight: float

    def __call__(self, lengths: Mapping[str, Ints], source_rank: Ints) -> Placement:
        """Return the placement for the lengths of a step."""


class BalancedSampler(torch_data.Sampler[list[int]]):
    """Yields this rank's samples of each step. Those of all ranks together are a DistributedSampler's."""

    def __init__(self, loader: Any, lengths: Ints, plan: WeightedPlan, *, rank: int, world_size: int) -> None:
        self._sampler = _distributed_sampler(loader)
        sampler_rank, replicas = self._sampler.rank, self._sampler.num_replicas
        if (sampler_rank, replicas) != (rank, world_size):
            what = f"the sampler is that of rank {sampler_rank} of {replicas}, but this is rank {rank} of {world_size}"
            remedy = "balance over the ranks of the sampler: set process_group, or let lengths be a function of a batch"
            raise UsageError(what, remedy=remedy)
        if len(lengths) != len(loader.dataset):
            what = f"there are {len(lengths)} lengths, but {len(loader.dataset)} samples"
            raise UsageError(what, remedy="give the length of every sample of the dataset, in its order")
        self._batch_size, self._drop_last = loader.batch_size, loader.drop_last
        self._lengths, self._plan = lengths, plan
        self.start = 0
        """Steps that the next iteration skips."""
        self.loss_weights: deque[float] = deque()
        """Of the steps that were yielded."""

    def __len__(self) -> int:
        samples = self._sampler.num_samples
        return samples // self._batch_size if self._drop_last else -(-samples // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        world_size, rank = self._sampler.num_replicas, self._sampler.rank
        order, step_size = self._order(), world_size * self._batch_size
        for step in range(self.start, len(self)):
            samples = order[step * step_size : (step + 1) * step_size]
            placement = self._plan({LENGTHS: self._lengths[samples]}, np.arange(len(samples)) % world_size)
            self.loss_weights.append(self._plan.loss_weight)
            yield samples[placement.rank == rank].tolist()

    def _order(self) -> Ints:
        """Return the samples of all ranks: sample i is on rank i % world_size."""
        whole = copy.copy(self._sampler)
        whole.num_replicas, whole.rank, whole.num_samples = 1, 0, whole.total_size
        return np.array(list(whole), dtype=np.int64)


class _SampledBatches:
    """Batches of samples that were placed before they are read."""

    def __init__(self, loader: Any, sampler: BalancedSampler) -> None:
        self._sampler = sampler
        collate = partial(_collate, loader.collate_fn, loader.dataset)
        settings = {name: getattr(loader, name) for name in _KEPT_SETTINGS}
        self._loader: torch_data.DataLoader[Any]
        self._loader = torch_data.DataLoader(loader.dataset, batch_sampler=sampler, collate_fn=collate, **settings)

    def __len__(self) -> int:
        return len(self._sampler)

    def read(self, start: int) -> Generator[Any, None, None]:
        """Yield batches, without the first ones."""
        self._sampler.start = start
        self._sampler.loss_weights.clear()
        for batch in self._loader:
            yield with_loss_weight(batch, self._sampler.loss_weights.popleft())


def _collate(collate: Callable[[list[Any]], Any], dataset: Any, samples: list[Any]) -> Any:
    """Collate samples with the user's function; without samples, return an empty batch."""
    return collate(samples) if samples else empty_like(collate([dataset[0]]))


def _distributed_sampler(loader: object) -> torch_data.DistributedSampler[Any]:
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, torch_data.DistributedSampler) or getattr(loader, "batch_size", None) is None:
        what = "lengths of a whole dataset need a known order of samples"
        where = f"a loader of type {type(loader).__name__} with a sampler of type {type(sampler).__name__}"
        remedy = "use a DataLoader with batch_size and a DistributedSampler, or let lengths be a function of a batch"
        raise UsageError(what, where=where, remedy=remedy)
    return sampler
