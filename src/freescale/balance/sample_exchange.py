"""Moves samples to the ranks that will compute them: lengths to everyone, a plan that everyone makes alike, and then
only the samples that change ranks, with all their features in one transfer.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from freescale.balance.placement import Floats, Ints, Placement
from freescale.data.batch import Events
from freescale.errors import TransportError
from freescale.transport.base import Transport
from freescale.transport.chunked import as_bytes

Groups = Mapping[str, Events]
"""A batch as groups of features that share their lengths: one value per sample, one per event, one per candidate."""


class Plan(Protocol):
    """Says where samples go, the same on all ranks."""

    def __call__(self, lengths: Mapping[str, Ints], homes: Ints) -> Placement:
        """From the lengths of all samples, by group, and their homes."""

    def tells(self) -> Sequence[int]:
        """What this rank has to say before the next plan; as many numbers on every rank."""

    def hears(self, told: Ints) -> None:
        """What all ranks said."""

    def report(self) -> list[str]:
        """How samples were dealt, for people."""


class Exchange:
    """Balances one batch after another. All ranks take part, with as many samples as each has."""

    def __init__(self, transport: Transport, plan: Plan) -> None:
        self._transport, self.plan = transport, plan
        self._rank, self._world_size = transport.peers.rank, transport.peers.world_size
        self._digest = 0
        """Of the plan before: told to the others with the next lengths."""

    def balanced(self, groups: Groups) -> tuple[dict[str, Events], Placement]:
        """The samples that this rank is to compute: first its own that stay, then those that come."""
        lengths, homes = self._lengths_of_all(groups)
        placement = self.plan({name: lengths[:, i] for i, name in enumerate(groups)}, homes)
        self._digest = zlib.crc32(placement.rank.tobytes())
        mine = homes == self._rank
        going = np.flatnonzero(mine & (placement.rank != self._rank))
        going = going[np.argsort(placement.rank[going], kind="stable")]
        coming = np.flatnonzero(~mine & (placement.rank == self._rank))
        staying = np.flatnonzero(mine & (placement.rank == self._rank))
        first = int(np.searchsorted(homes, self._rank))
        packed = Packing(groups)
        sizes = lengths @ packed.bytes_per_row
        to, origin = placement.rank[going], homes[coming]
        counts = _per_rank(sizes[going], to, self._world_size), _per_rank(sizes[coming], origin, self._world_size)
        got = self._transport.all_to_all(packed.pack(going - first, to), *counts, name="samples").wait()
        return packed.joined(staying - first, got, lengths[coming], origin), placement

    def _lengths_of_all(self, groups: Groups) -> tuple[Ints, Ints]:
        """[samples, groups] of all ranks in order, and the rank that each sample is on."""
        own = torch.stack([events.lengths for events in groups.values()], dim=1)
        said = torch.tensor([len(own), self._digest, *self.plan.tells()])
        table = self._transport.all_gather(said, name="sample counts").wait().numpy()
        counts, digests = table[:, :2].T.tolist()
        if len(set(digests)) > 1:
            remedy = "see that all hosts run the same versions of Python, numpy and freescale"
            raise TransportError(f"ranks planned a step differently: {digests}", remedy=remedy)
        self.plan.hears(table[:, 2:])
        padded = own.new_zeros(max(counts), own.shape[1])
        padded[: len(own)] = own
        every = self._transport.all_gather(padded, name="sample lengths").wait()
        lengths = torch.cat([rows[:count] for rows, count in zip(every, counts, strict=True)]).numpy()
        return lengths, np.repeat(np.arange(self._world_size), counts)


class Packing:
    """Samples as bytes: for each rank that they go to, feature after feature."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        sizes = [sum(map(_row_bytes, group.features.values())) for group in groups.values()]
        self.bytes_per_row = np.array(sizes, dtype=np.int64)

    def pack(self, samples: Ints, to: Ints) -> Tensor:
        """Some samples, in the order of the ranks that they go to. Each feature is gathered once, for all ranks."""
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

    def joined(self, staying: Ints, got: Tensor, lengths: Ints, homes: Ints) -> dict[str, Events]:
        """Samples that stay, and those that came from the ranks `homes`, with these lengths by group."""
        kept = torch.from_numpy(staying)
        arrived = self._unpack(got, lengths, homes)
        found = {}
        for place, (name, events) in enumerate(self._groups.items()):
            counts = torch.cat([events.lengths[kept], torch.from_numpy(lengths[:, place])])
            rows = events.row_indices(kept)
            features = {n: torch.cat([v[rows], *arrived[name][n]]) for n, v in events.features.items()}
            found[name] = Events(torch.cat([counts.new_zeros(1), counts.cumsum(0)]), features)
        return found

    def _unpack(self, got: Tensor, lengths: Ints, homes: Ints) -> dict[str, dict[str, list[Tensor]]]:
        """Every feature, in pieces by the rank that it came from."""
        found: dict[str, dict[str, list[Tensor]]] = {n: {f: [] for f in g.features} for n, g in self._groups.items()}
        begin = 0
        for rank in np.unique(homes):
            counts = lengths[homes == rank].sum(axis=0).tolist()
            for count, (name, events) in zip(counts, self._groups.items(), strict=True):
                for feature, like in events.features.items():
                    end = begin + count * _row_bytes(like)
                    rows = got[begin:end].clone().view(like.dtype).view(count, *like.shape[1:])
                    found[name][feature].append(rows)
                    begin = end
        return found


def _row_bytes(values: Tensor) -> int:
    return math.prod(values.shape[1:]) * values.element_size()


def _per_rank(sizes: Floats | Ints, ranks: Ints, count: int) -> list[int]:
    return np.bincount(ranks, weights=sizes, minlength=count).astype(np.int64).tolist()
