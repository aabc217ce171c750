"""The whole corpus ranked for users, piece by piece: no rank ever holds more than a piece of it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.data.batch import Batch, Events
from freescale.embedding.sharded import ShardedTables
from freescale.embedding.unique import Wanted
from freescale.models.retrieval import Retrieval
from freescale.train.metrics import places, retrieval_sums
from freescale.train.network import Network

_PIECE = 65_536


@dataclass(frozen=True)
class Corpus:
    """Items and the model that ranks them. Every rank must ask the same questions, since rows travel for each."""

    network: Network
    tables: ShardedTables | None
    items: int
    """Items that can be recommended; the rows behind them are shared by unknown ones."""

    @torch.no_grad()
    def places(self, batch: Batch) -> Tensor:
        """How many unseen items stand before the held-out one, for each sample of this rank that has one."""
        assert batch.targets is not None
        model = self._model
        asked = (batch.targets.lengths > 0) & (batch.history.lengths > 0)
        right = batch.targets["item_id"][batch.targets.offsets[:-1][asked]]
        queries = self._queries(batch)[asked]
        own = (queries * model.as_items(self._rows({"item": right})["item"])).sum(1)
        before = torch.zeros_like(right)
        rows_of_batch = torch.arange(len(batch))[asked]
        for first, items in self._pieces():
            scores = queries @ items.T
            hidden = seen(batch.history, first, len(items))[rows_of_batch]
            at = right - first
            inside = (at >= 0) & (at < len(items))
            hidden[inside.nonzero()[:, 0], at[inside]] = True  # the right item is not before itself
            before += places(scores, right, first, own, hidden)
        return before

    @torch.no_grad()
    def top(self, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
        """The best unseen items of each sample and their scores, best first."""
        queries = self._queries(batch)
        scores = queries.new_full((len(batch), 0), 0.0)
        best = torch.zeros(len(batch), 0, dtype=torch.int64)
        for first, items in self._pieces():
            piece = (queries @ items.T).masked_fill(seen(batch.history, first, len(items)), float("-inf"))
            scores = torch.cat([scores, piece], dim=1)
            best = torch.cat([best, torch.arange(first, first + len(items)).expand(len(batch), -1)], dim=1)
            order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
            scores, best = scores.gather(1, order), best.gather(1, order)
        return best, scores

    @property
    def _model(self) -> Retrieval:
        assert isinstance(self.network.model, Retrieval)  # a corpus is only made for retrieval
        return self.network.model

    def _queries(self, batch: Batch) -> Tensor:
        model = self._model
        inputs = model.prepare_query(batch)
        (wanted,) = self.network.wanted([inputs.ids])
        return model.query(inputs, self.network.rows(wanted, self._moved(wanted)))

    def _pieces(self) -> Iterator[tuple[int, Tensor]]:
        model = self._model
        for first in range(0, self.items, _PIECE):
            ids = torch.arange(first, min(first + _PIECE, self.items))
            yield first, model.as_items(self._rows({"item": ids})["item"])

    def _rows(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        (wanted,) = self.network.wanted([ids])
        return {name: rows.each() for name, rows in self.network.rows(wanted, self._moved(wanted)).items()}

    def _moved(self, wanted: dict[str, Wanted]) -> dict[str, Tensor] | None:
        return None if self.tables is None else self.tables.read(wanted)


def seen(history: Events, first: int, items: int) -> Tensor:
    """Mark, in a piece of the corpus, the items that each sample's history holds."""
    at = history["item_id"] - first
    inside = (at >= 0) & (at < items)
    sample = torch.arange(len(history.lengths)).repeat_interleave(history.lengths)
    marks = torch.zeros(len(history.lengths), items, dtype=torch.bool)
    marks[sample[inside], at[inside]] = True
    return marks


def retrieval_sums_of(corpus: Corpus, batches: Iterator[Batch]) -> Tensor:
    """Sums of the retrieval metrics over this rank's samples."""
    return sum((retrieval_sums(corpus.places(batch)) for batch in batches), start=torch.zeros(6, dtype=torch.float64))
