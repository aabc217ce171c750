"""The whole corpus ranked for users, piece by piece: no rank ever holds more than a piece of it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.data.batch import Batch, Events
from freescale.embedding.sharded import ShardedTables
from freescale.models.retrieval import Retrieval
from freescale.train.network import Network

CUTS = (10, 50, 200)
SAMPLES = 512
"""Samples that a rank should rank at a time: the rows of the corpus travel once for all of them."""


@dataclass(frozen=True)
class Corpus:
    """Items and the model that ranks them. Every rank must ask the same questions, since rows travel for each."""

    network: Network
    tables: ShardedTables | None
    items: int
    """Items that can be recommended; the rows behind them are shared by unknown ones."""
    device: torch.device
    piece: int = 8_192
    """Items ranked at a time."""

    @torch.no_grad()
    def places(self, batch: Batch) -> Tensor:
        """How many unseen items stand before the held-out one, for each sample of this rank that has one.

        Items with the very score of the right one stand before it: a model that cannot tell items apart gets no credit.
        """
        batch = batch.to(self.device)
        assert batch.targets is not None
        asked = (batch.targets.lengths > 0) & (batch.history.lengths > 0)
        right = batch.targets["item_id"][batch.targets.offsets[:-1][asked]]
        queries = self._queries(batch)[asked]
        own = (queries @ self._rows(right).T).diagonal()  # a product like those below, so that equal means equal
        # What does not count: everything that a sample has seen, and the right item itself.
        seen_by = _sample_of(batch.history)
        kept = asked[seen_by]
        number = (asked.cumsum(0) - 1)[seen_by[kept]]
        itself = torch.arange(len(right), device=self.device)
        who, item = _once(torch.cat([number, itself]), torch.cat([batch.history["item_id"][kept], right]))
        before = torch.zeros_like(right)
        for first, rows in self._pieces():
            scores = queries @ rows.T
            before += (scores >= own[:, None]).sum(1)
            sample, at = _inside(who, item, first, len(rows))
            before.index_add_(0, sample, -(scores[sample, at] >= own[sample]).long())
        return before

    @torch.no_grad()
    def top(self, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
        """The best unseen items of each sample and their scores, best first."""
        batch = batch.to(self.device)
        queries = self._queries(batch)
        seen_by, seen = _once(_sample_of(batch.history), batch.history["item_id"])
        best, scores = batch.sample_id.new_zeros(len(batch), 0), queries.new_zeros(len(batch), 0)
        for first, rows in self._pieces():
            of_piece = queries @ rows.T
            of_piece[_inside(seen_by, seen, first, len(rows))] = float("-inf")
            leading, at = of_piece.topk(min(count, len(rows)), dim=1)
            scores, order = torch.cat([scores, leading], dim=1).topk(min(count, first + len(rows)), dim=1)
            best = torch.cat([best, at + first], dim=1).gather(1, order)
        return best, scores

    @property
    def _model(self) -> Retrieval:
        assert isinstance(self.network.model, Retrieval)  # a corpus is only made for retrieval
        return self.network.model

    def _queries(self, batch: Batch) -> Tensor:
        inputs = self._model.prepare_query(batch)
        return self._model.query(inputs, self.network.read(inputs.ids, self.tables))

    def _pieces(self) -> Iterator[tuple[int, Tensor]]:
        for first in range(0, self.items, self.piece):
            yield first, self._rows(torch.arange(first, min(first + self.piece, self.items), device=self.device))

    def _rows(self, ids: Tensor) -> Tensor:
        """Rows of items as queries are compared with them."""
        return self._model.as_items(self.network.read({"item": ids}, self.tables)["item"].each())


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


def retrieval_sums(place: Tensor) -> Tensor:
    """Add up, over queries with `place` items before their right one: count, hits at each cut, NDCG@10, MRR."""
    place = place.double()
    gain = 1.0 / (place + 2.0).log2()
    hits: Iterable[Tensor] = ((place < cut).double().sum() for cut in CUTS)
    return torch.stack([place.new_tensor(len(place)), *hits, (gain * (place < 10)).sum(), (1 / (place + 1)).sum()])


def retrieval_means(sums: Tensor) -> dict[str, float]:
    """Turn sums over all ranks into metrics by name."""
    count, *rest = sums.tolist()
    names = [*(f"hr@{cut}" for cut in CUTS), "ndcg@10", "mrr"]
    return {name: value / max(count, 1.0) for name, value in zip(names, rest, strict=True)} | {"users": int(count)}


def retrieval_sums_of(corpus: Corpus, batches: Iterator[Batch]) -> Tensor:
    """Sums of the retrieval metrics over this rank's samples."""
    return sum((retrieval_sums(corpus.places(batch)).cpu() for batch in batches), start=retrieval_sums(torch.empty(0)))
