"""The whole corpus ranked for users, piece by piece: no rank ever holds more than a piece of it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from freescale.data.batch import Batch, Events
from freescale.embedding.sharded import ShardedTables
from freescale.models.retrieval import Retrieval
from freescale.train.network import Network

CUTS = (10, 50, 200)
SAMPLES = 512
"""Samples that a rank should rank at a time: the rows of the corpus travel once for all of them."""


class TargetRanks(NamedTuple):
    """Where the held-out items of some samples rank."""

    before: Tensor
    """Recommendable items that score at least as high as the target; infinite where it cannot be recommended."""
    seen: Tensor
    """Targets that are in the history and are therefore excluded."""
    unknown: Tensor
    """Targets outside the vocabulary, which have no row of their own."""


@dataclass(frozen=True)
class Corpus:
    """Items and the model that ranks them. Every rank must ask the same questions, since rows travel for each.

    `target_ranks` (evaluation) and `top` (prediction) follow one rule for what can be recommended: items of the
    vocabulary, and with `exclude_seen` only those that are not in the history that the model reads.
    """

    network: Network
    tables: ShardedTables | None
    items: int
    """Items that can be recommended; the rows behind them are shared by unknown ones."""
    device: torch.device
    exclude_seen: bool = True
    piece: int = 8_192
    """Items ranked at a time."""

    @torch.no_grad()
    def target_ranks(self, batch: Batch) -> TargetRanks:
        """Rank the held-out item of each sample of this rank that has one, and a history to predict it from.

        Items with the very score of the target rank before it: a model that cannot tell items apart gets no credit.
        """
        batch = batch.to(self.device)
        assert batch.targets is not None
        asked = (batch.targets.lengths > 0) & (batch.history.lengths > 0)
        target = batch.targets["item_id"][batch.targets.offsets[:-1][asked]]
        queries = self._queries(batch)[asked]
        own = (queries @ self._rows(target).T).diagonal()  # a product like those below, so that equal means equal
        sample, item = self._excluded(batch)
        kept = asked[sample]
        sample, item = (asked.cumsum(0) - 1)[sample[kept]], item[kept]
        unknown = target >= self.items
        seen = torch.zeros_like(unknown)
        seen[sample[item == target[sample]]] = True
        seen &= ~unknown  # unknown items share rows, so that one in the history may be another
        itself = torch.arange(len(target), device=self.device)
        who, what = _once(torch.cat([sample, itself]), torch.cat([item, target]))
        before = torch.zeros_like(target)
        for first, rows in self._pieces():
            scores = queries @ rows.T
            before += (scores >= own[:, None]).sum(1)
            at = _inside(who, what, first, len(rows))
            before.index_add_(0, at[0], -(scores[at] >= own[at[0]]).long())
        return TargetRanks(before.double().masked_fill(seen | unknown, float("inf")), seen, unknown)

    @torch.no_grad()
    def top(self, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
        """The best items of each sample and their scores, best first.

        Where fewer than `count` items can be recommended, the scores of the others are -inf: leave them out.
        """
        batch = batch.to(self.device)
        queries = self._queries(batch)
        excluded = self._excluded(batch)
        best, scores = batch.sample_id.new_zeros(len(batch), 0), queries.new_zeros(len(batch), 0)
        for first, rows in self._pieces():
            of_piece = queries @ rows.T
            of_piece[_inside(*excluded, first, len(rows))] = float("-inf")
            leading, at = of_piece.topk(min(count, len(rows)), dim=1)
            scores, order = torch.cat([scores, leading], dim=1).topk(min(count, first + len(rows)), dim=1)
            best = torch.cat([best, at + first], dim=1).gather(1, order)
        return best, scores

    def _excluded(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Pairs of sample and item that cannot be recommended, each once."""
        if not self.exclude_seen:
            return batch.sample_id.new_zeros(0), batch.sample_id.new_zeros(0)
        return _once(_sample_of(batch.history), batch.history["item_id"])

    @property
    def _model(self) -> Retrieval:
        assert isinstance(self.network.model, Retrieval)  # a corpus is only made for retrieval
        return self.network.model

    def _queries(self, batch: Batch) -> Tensor:
        inputs = self._model.prepare_query(batch)
        return self._model.encode_query(inputs, self.network.read(inputs.ids, self.tables))

    def _pieces(self) -> Iterator[tuple[int, Tensor]]:
        for first in range(0, self.items, self.piece):
            yield first, self._rows(torch.arange(first, min(first + self.piece, self.items), device=self.device))

    def _rows(self, ids: Tensor) -> Tensor:
        """Rows of items as queries are compared with them."""
        return self._model.encode_items(self.network.read({"item": ids}, self.tables)["item"].lookup())


def _sample_of(events: Events) -> Tensor:
    """Which sample each event belongs to."""
    return torch.arange(len(events.lengths), device=events.offsets.device).repeat_interleave(events.lengths)


def _once(sample: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
    """Each pair once."""
    span = int(item.max()) + 1 if len(item) else 1
    pairs = torch.unique(sample * span + item)
    return pairs // span, pairs % span


def _inside(sample: Tensor, item: Tensor, first: int, items: int) -> tuple[Tensor, Tensor]:
    """The pairs whose item is in a piece of the corpus, counted from its first."""
    inside = (item >= first) & (item < first + items)
    return sample[inside], item[inside] - first


def retrieval_sums(ranks: TargetRanks) -> Tensor:
    """Sum over queries: count, hits at each cut, NDCG@10, MRR, targets that were seen, targets that are unknown."""
    before = ranks.before
    gain = 1.0 / (before + 2.0).log2()
    hits: Iterable[Tensor] = ((before < cut).double().sum() for cut in CUTS)
    excluded = (ranks.seen.double().sum(), ranks.unknown.double().sum())
    means = ((gain * (before < 10)).sum(), (1 / (before + 1)).sum())
    return torch.stack([before.new_tensor(len(before)), *hits, *means, *excluded])


def retrieval_means(sums: Tensor) -> dict[str, float]:
    """Turn sums over all ranks into metrics by name. Seen and unknown targets count as misses in all of them."""
    count, *rest = sums.tolist()
    names = [*(f"hr@{cut}" for cut in CUTS), "ndcg@10", "mrr", "seen_targets", "unknown_targets"]
    return {name: value / max(count, 1.0) for name, value in zip(names, rest, strict=True)} | {"users": int(count)}


def retrieval_sums_of(corpus: Corpus, batches: Iterator[Batch]) -> Tensor:
    """Sums of the retrieval metrics over this rank's samples."""
    empty = torch.zeros(0, dtype=torch.float64)
    start = retrieval_sums(TargetRanks(empty, empty, empty))
    return sum((retrieval_sums(corpus.target_ranks(batch)).cpu() for batch in batches), start=start)
