"""Moves samples to the ranks that compute them, ahead of time, in a thread beside the training step.

All ranks gather the lengths, compute the same placement, and then exchange only the samples that change ranks, with all
features in one all-to-all.
"""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from freescale.balance.placement import Floats, Ints, Placement
from freescale.data.batch import Batch, Events
from freescale.data.loader import prefetch
from freescale.errors import TransportError
from freescale.transport.base import TracerFactory, Transport
from freescale.transport.chunked import as_bytes

_PREFETCH_BATCHES = 2
Groups = Mapping[str, Events]
"""A batch as groups of features with common lengths: one value per sample, per event, or per candidate."""


class StepPlanner(Protocol):
    """Places the samples of a step, identically on all ranks."""

    def __call__(self, lengths: Mapping[str, Ints], source_rank: Ints) -> Placement:
        """Return the placement for the lengths of all samples, by group, and their source ranks."""

    def local_stats(self) -> Sequence[int]:
        """Return what this rank shares before the next plan; of one length on every rank."""

    def receive_stats(self, stats: Ints) -> None:
        """Receive what all ranks shared."""

    def report(self) -> list[str]:
        """Return how samples were placed, as human-readable lines."""


class SampleExchange:
    """Balances batch after batch. All ranks take part, each with any number of samples."""

    def __init__(self, transport: Transport, plan: StepPlanner) -> None:
        self._transport, self.plan = transport, plan
        self._rank, self._world_size = transport.peers.rank, transport.peers.world_size
        self._digest = 0
        """Checksum of the last placement, compared over the ranks with the next lengths."""

    def add_tracer(self, tracer: TracerFactory) -> None:
        """Trace every transfer of samples."""
        self._transport.add_tracer(tracer)

    def exchange(self, groups: Groups) -> tuple[dict[str, Events], Placement]:
        """Return the samples that this rank computes: first its own that stay, then those that arrive."""
        lengths, source_rank = self._gather_lengths(groups)
        placement = self.plan({name: lengths[:, i] for i, name in enumerate(groups)}, source_rank)
        self._digest = zlib.crc32(placement.rank.tobytes())
        mine = source_rank == self._rank
        outgoing = np.flatnonzero(mine & (placement.rank != self._rank))
        outgoing = outgoing[np.argsort(placement.rank[outgoing], kind="stable")]
        incoming = np.flatnonzero(~mine & (placement.rank == self._rank))
        staying = np.flatnonzero(mine & (placement.rank == self._rank))
        first = int(np.searchsorted(source_rank, self._rank))
        packed = SamplePacking(groups)
        sizes = lengths @ packed.bytes_per_row
        to, origin = placement.rank[outgoing], source_rank[incoming]
        counts = (
            sum_by_rank(sizes[outgoing], to, self._world_size),
            sum_by_rank(sizes[incoming], origin, self._world_size),
        )
        got = self._transport.all_to_all(packed.pack(outgoing - first, to), *counts, name="samples").wait()
        return packed.join(staying - first, got, lengths[incoming], origin), placement

    def _gather_lengths(self, groups: Groups) -> tuple[Ints, Ints]:
        """Return the lengths of all ranks' samples, [samples, groups], and the source rank of each sample."""
        own = torch.stack([events.lengths for events in groups.values()], dim=1)
        stats = torch.tensor([len(own), self._digest, *self.plan.local_stats()])
        table = self._transport.all_gather(stats, name="sample counts").wait().numpy()
        counts, digests = table[:, :2].T.tolist()
        if len(set(digests)) > 1:
            remedy = "make sure that all hosts run the same versions of Python, numpy and freescale"
            raise TransportError(f"ranks planned a step differently: {digests}", remedy=remedy)
        self.plan.receive_stats(table[:, 2:])
        padded = own.new_zeros(max(counts), own.shape[1])
        padded[: len(own)] = own
        every = self._transport.all_gather(padded, name="sample lengths").wait()
        lengths = torch.cat([rows[:count] for rows, count in zip(every, counts, strict=True)]).numpy()
        return lengths, np.repeat(np.arange(self._world_size), counts)


class SamplePacking:
    """Packs samples into bytes: by destination rank, feature after feature."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        sizes = [sum(map(_row_bytes, group.features.values())) for group in groups.values()]
        self.bytes_per_row = np.array(sizes, dtype=np.int64)

    def pack(self, samples: Ints, to: Ints) -> Tensor:
        """Pack samples, which are in the order of their destination. Each feature is gathered once for all ranks."""
        ranks, first = np.unique(to, return_index=True)
        by_feature = []
        for events in self._groups.values():
            chosen = torch.from_numpy(samples)
            rows = events.row_indices(chosen)
            before = np.concatenate([[0], events.lengths[chosen].cumsum(0).numpy()])
            counts = np.diff(before[np.append(first, len(samples))]).tolist()
            for values in events.features.values():
                sizes = [count * _row_bytes(values) for count in counts]
                by_feature.append(as_bytes(values[rows]).split(sizes))
        parts = [piece for of_rank in zip(*by_feature, strict=True) for piece in of_rank]
        return torch.cat(parts) if len(ranks) and parts else torch.empty(0, dtype=torch.uint8)

    def join(self, staying: Ints, got: Tensor, lengths: Ints, source_rank: Ints) -> dict[str, Events]:
        """Return the samples that stay, followed by those received from `source_rank`, with their lengths by group."""
        kept = torch.from_numpy(staying)
        arrived = self._unpack(got, lengths, source_rank)
        joined = {}
        for place, (name, events) in enumerate(self._groups.items()):
            counts = torch.cat([events.lengths[kept], torch.from_numpy(lengths[:, place])])
            rows = events.row_indices(kept)
            features = {n: torch.cat([v[rows], *arrived[name][n]]) for n, v in events.features.items()}
            joined[name] = Events(torch.cat([counts.new_zeros(1), counts.cumsum(0)]), features)
        return joined

    def _unpack(self, got: Tensor, lengths: Ints, source_rank: Ints) -> dict[str, dict[str, list[Tensor]]]:
        """Return the received rows of every feature, one tensor per source rank."""
        unpacked: dict[str, dict[str, list[Tensor]]] = {n: {f: [] for f in g.features} for n, g in self._groups.items()}
        begin = 0
        for rank in np.unique(source_rank):
            counts = lengths[source_rank == rank].sum(axis=0).tolist()
            for count, (name, events) in zip(counts, self._groups.items(), strict=True):
                for feature, like in events.features.items():
                    end = begin + count * _row_bytes(like)
                    rows = got[begin:end].clone().view(like.dtype).view(count, *like.shape[1:])
                    unpacked[name][feature].append(rows)
                    begin = end
        return unpacked


class Batches(Protocol):
    """A source of batches: a loader or a wrapper of one."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...
    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position."""

    def report(self) -> list[str]:
        """Return what was skipped, as human-readable lines."""


class BalancedBatches:
    """The batches of a loader, with the samples of each step balanced over the ranks."""

    def __init__(self, loader: Batches, exchange: SampleExchange) -> None:
        self._loader, self._exchange = loader, exchange
        self._state: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def report(self) -> list[str]:
        """Return what was skipped and how samples were placed, as human-readable lines."""
        return [*self._loader.report(), *self._exchange.plan.report()]

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was yielded, not after the last that was balanced."""
        return self._loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position."""
        self._state = None
        self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[Batch]:
        if self._state is not None:  # iteration stopped early: batches were balanced and not used
            self.load_state_dict(self._state)
        # All ranks balance the same number of batches before they stop, so none waits for a peer that has stopped.
        for batch, state in prefetch(self._exchange_batches(), _PREFETCH_BATCHES, drain=True):
            self._state = state
            yield batch
        self._state = None

    def _exchange_batches(self) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Yield each balanced batch and the position of the loader after it."""
        for batch in self._loader:
            groups, _ = self._exchange.exchange(batch.groups())
            yield batch.with_groups(groups), self._loader.state_dict()


def _row_bytes(values: Tensor) -> int:
    return math.prod(values.shape[1:]) * values.element_size()


def sum_by_rank(sizes: Floats | Ints, ranks: Ints, count: int) -> list[int]:
    """Return the sum of sizes for each of so many ranks, as whole numbers."""
    return np.bincount(ranks, weights=sizes, minlength=count).astype(np.int64).tolist()
