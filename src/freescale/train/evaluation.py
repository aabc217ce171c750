"""Evaluation on held-out data, the same on every rank: retrieval over the whole corpus, or `ranking_metrics`.

Retrieval scores the corpus in chunks, so that no rank holds more than one chunk of its rows.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from freescale.config import RunConfig
from freescale.data.batch import Batch, Events
from freescale.data.dataset import Dataset
from freescale.data.feature_schema import FeatureSchema
from freescale.data.loader import Loader
from freescale.data.partitions import IS_TARGET
from freescale.data.vocabulary import FIRST_SLOT, DataIdentity
from freescale.embedding.zero_collision_layout import EMPTY
from freescale.errors import DataError
from freescale.log import warning_once
from freescale.models.retrieval import Retrieval
from freescale.progress import track
from freescale.train.ranking_metrics import Ranker, ranking_metrics
from freescale.train.sharded_model import SequenceModule
from freescale.transport.world import World

CUTOFFS = (10, 50, 200)
SAMPLES_PER_RANK = 512
"""Samples that a rank scores at a time: the rows of the corpus are fetched once for all of them."""
Evaluation = Callable[[], dict[str, float]]


def build_evaluation(config: RunConfig, world: World, module: SequenceModule) -> Evaluation | None:
    """Return the function that evaluates a run of this config; None where there is nothing to evaluate on."""
    anchored = config.task.anchors != "none"
    if not config.data.test_path and (config.data.split == "none" or (config.task.kind == "ranking" and not anchored)):
        return None
    if config.data.test_path:
        _require_matching_data(config, world)
    if config.data.test_path or config.data.split == "time":
        _require_targets(config, world)

    def evaluate() -> dict[str, float]:
        loader = _test_loader(config, world)
        metrics = _compute_metrics(loader, config, world, module)
        if "users" in metrics and not metrics["users"]:
            raise _no_targets_error(config)
        if config.data.test_path:  # training reports on events held out of its own data
            for line in loader.report():
                warning_once(f"in {config.data.test_path}: {line}")
        return metrics

    return evaluate


def build_validation(config: RunConfig, world: World, module: SequenceModule) -> Callable[[str], dict[str, float]]:
    """Return the function that evaluates the events of a partition; a user's first one of them is the target.

    NAME/new_users and NAME/new_items are a metric over users without an event before the partition and over items
    without a row of their own. In retrieval such items cannot be recommended: NAME/known_items leaves them out.
    """

    def validate(partition: str) -> dict[str, float]:
        data = replace(config.data, path=f"{config.data.path}/{partition}", until="", split="targets", test_path="")
        loader = _test_loader(replace(config, data=data), world)
        metrics = _compute_metrics(loader, config, world, module, by_novelty=True)
        return {("samples" if name == "users" else name): value for name, value in metrics.items()}

    return validate


def _compute_metrics(
    loader: Loader, config: RunConfig, world: World, module: SequenceModule, *, by_novelty: bool = False
) -> dict[str, float]:
    batches = track(loader, "evaluating", unit="batches")
    if config.task.kind != "retrieval":

        def novelty(batch: Batch) -> dict[str, Tensor]:
            assert batch.candidates is not None
            _, unknown = number_items(module, batch.candidates["candidate_id"], loader.vocabulary.items)
            new_user = _is_new_user(batch).repeat_interleave(batch.candidates.lengths)
            return {"new_users": new_user, "new_items": unknown}

        return ranking_metrics(Ranker(module, world.device), batches, world, novelty if by_novelty else None)
    exclude_seen = config.task.seen == "exclude"
    corpus = Corpus(module, loader.vocabulary.items, world.device, exclude_seen=exclude_seen)
    return _retrieval_metrics(batches, corpus, world, by_novelty=by_novelty)


def _retrieval_metrics(
    batches: Iterator[Batch], corpus: "Corpus", world: World, *, by_novelty: bool
) -> dict[str, float]:
    sums = world.transport.reduce_values(sum_retrieval_metrics(corpus, batches), name="metrics")
    of_all, of_new_users = sums.unbind()
    metrics, new_users = retrieval_means(of_all), retrieval_means(of_new_users)
    known = 1.0 - metrics["unknown_targets"]
    for name in ("hr@10", "ndcg@10") if by_novelty else ():
        metrics |= {f"{name}/known_items": metrics[name] / known} if known else {}
        metrics |= {f"{name}/new_users": new_users[name]} if new_users["users"] else {}
    if world.is_rank_zero and metrics["seen_targets"]:
        share = f"{metrics['seen_targets']:.1%} of the held-out items are already in the user's history"
        warning_once(f'{share} and count as misses; task.seen = "allow" makes such items recommendable')
    return metrics


def _test_loader(config: RunConfig, world: World) -> Loader:
    """Return a loader of the data to evaluate on, from its beginning."""
    data = replace(config.data, global_batch=max(config.data.global_batch, SAMPLES_PER_RANK * world.world_size))
    if data.test_path:
        # Where training holds out nothing, retrieval still needs a target: the last event.
        last = data.split == "none" and config.task.kind == "retrieval"
        data = replace(data, path=data.test_path, split="last" if last else data.split)
    return Loader.from_run(config, rank=world.rank, world_size=world.world_size, data=data, part="test")


def _require_matching_data(config: RunConfig, world: World) -> None:
    """Refuse test data that does not fit the model, before training starts."""
    loader = _test_loader(config, world)
    columns = [*config.data.columns, *FeatureSchema.from_config(config).columns()]
    trained = Dataset(config.data.path, features=columns)
    loader.identity.require_same(DataIdentity.from_dataset(trained), where=f"data.test_path = {config.data.test_path}")


def _require_targets(config: RunConfig, world: World) -> None:
    """Refuse to train if the evaluation would have no target. Reads until the first target."""
    has_target = _has_candidate if config.task.kind == "ranking" else _has_target
    found = any(has_target(batch) for batch in _test_loader(config, world))
    if not world.transport.sum(int(found), name="targets"):
        raise _no_targets_error(config)


def _has_target(batch: Batch) -> bool:
    return batch.targets is not None and bool(((batch.targets.lengths > 0) & (batch.history.lengths > 0)).any())


def _is_new_user(batch: Batch) -> Tensor:
    """Return which samples begin with an event that their partition adds; none outside partitions."""
    events, new = batch.history, torch.zeros_like(batch.sample_id, dtype=torch.bool)
    if IS_TARGET in events.features:
        has_event = events.lengths > 0
        new[has_event] = events[IS_TARGET][events.offsets[:-1][has_event]] == 1
    return new


def _has_candidate(batch: Batch) -> bool:
    return batch.candidates is not None and bool((batch.candidates.lengths > 0).any())


def _no_targets_error(config: RunConfig) -> DataError:
    data = config.data
    if config.task.kind == "ranking":
        why, remedy = "no history has a candidate", "give data.test_path a data set with candidates and labels"
    elif data.split == "time":
        why = f"no user has events both before and from data.split_time = {data.split_time} on"
        remedy = "choose a data.split_time (seconds since the epoch) inside the time span of the log"
    else:
        why, remedy = "every history has fewer than 2 events", "give a log with longer histories, or data.split = none"
    return DataError(f"nothing to evaluate on: {why}", where=data.test_path or data.path, remedy=remedy)


class TargetRanks(NamedTuple):
    """Ranks of the held-out items of some samples."""

    before: Tensor
    """Recommendable items that score at least as high as the target; infinite where it cannot be recommended."""
    seen: Tensor
    """Targets that are in the history and are therefore excluded."""
    unknown: Tensor
    """Targets outside the vocabulary, which share rows."""
    new_user: Tensor
    """Targets of users without an event before the partition that is evaluated."""


class _CorpusPart(NamedTuple):
    """Consecutive items of the corpus."""

    first: int
    """Number of the first one."""
    ids: Tensor
    """EMPTY where a slot of dynamic items is free."""
    rows: Tensor

    def scores(self, queries: Tensor) -> Tensor:
        """Return the score of each item for each query; -inf where there is no item."""
        return (queries @ self.rows.T).masked_fill_(self.ids == EMPTY, float("-inf"))


@dataclass(frozen=True)
class Corpus:
    """All items and the model that scores them. Every rank must call it equally often: fetching rows is collective.

    `target_ranks` (evaluation) and `top` (prediction) follow one rule for what can be recommended: items of the
    vocabulary, and with `exclude_seen` only those that are not in the history that the model reads.
    """

    module: SequenceModule
    items: int
    """Items that can be recommended; rows beyond them are shared by unknown items. With dynamic ids: those in slots."""
    device: torch.device
    exclude_seen: bool = True
    chunk: int = 8_192
    """Items scored at a time."""

    @torch.no_grad()
    def target_ranks(self, batch: Batch) -> TargetRanks:
        """Rank the held-out item of each sample of this rank that has one, and a history to predict it from.

        Items with the same score as the target rank before it: a model that cannot tell items apart gets no credit.
        """
        batch = batch.to(self.device)
        assert batch.targets is not None
        has_target = (batch.targets.lengths > 0) & (batch.history.lengths > 0)
        target_id = batch.targets["item_id"][batch.targets.offsets[:-1][has_target]]
        queries = self._queries(batch)[has_target]
        # A matrix product like those below, so that equal scores compare equal.
        target_score = (queries @ self._rows(target_id).T).diagonal()
        target, unknown = self._numbers(target_id)
        sample, item = self._excluded_pairs(batch)
        kept = has_target[sample]
        sample, item = (has_target.cumsum(0) - 1)[sample[kept]], item[kept]
        seen = torch.zeros_like(unknown)
        seen[sample[item == target[sample]]] = True
        seen &= ~unknown  # unknown items share rows: the same row in the history may be another item
        known = (~unknown).nonzero()[:, 0]
        sample, item = _unique_pairs(torch.cat([sample, known]), torch.cat([item, target[known]]))
        before = torch.zeros_like(target)
        for chunk in self._chunks():
            scores = chunk.scores(queries)
            before += (scores >= target_score[:, None]).sum(1)
            at = _pairs_in_chunk(sample, item, chunk.first, len(chunk.rows))
            before.index_add_(0, at[0], -(scores[at] >= target_score[at[0]]).long())
        before = before.double().masked_fill(seen | unknown, float("inf"))
        return TargetRanks(before, seen, unknown, _is_new_user(batch)[has_target])

    @torch.no_grad()
    def top(self, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
        """Return the best items of each sample and their scores, best first.

        Where fewer than `count` items can be recommended, the scores of the others are -inf.
        """
        batch = batch.to(self.device)
        queries = self._queries(batch)
        excluded = self._excluded_pairs(batch)
        best, scores = batch.sample_id.new_zeros(len(batch), 0), queries.new_zeros(len(batch), 0)
        for chunk in self._chunks():
            chunk_scores, size = chunk.scores(queries), len(chunk.rows)
            chunk_scores[_pairs_in_chunk(*excluded, chunk.first, size)] = float("-inf")
            highest, at = chunk_scores.topk(min(count, size), dim=1)
            scores, order = torch.cat([scores, highest], dim=1).topk(min(count, chunk.first + size), dim=1)
            best = torch.cat([best, chunk.ids[at]], dim=1).gather(1, order)
        return best, scores

    def _excluded_pairs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each pair of sample and item that cannot be recommended once."""
        if not self.exclude_seen:
            return batch.sample_id.new_zeros(0), batch.sample_id.new_zeros(0)
        number, unknown = self._numbers(batch.history["item_id"])
        return _unique_pairs(_sample_of_events(batch.history)[~unknown], number[~unknown])

    @property
    def _model(self) -> Retrieval:
        assert isinstance(self.module.model, Retrieval)  # other tasks have no corpus
        return self.module.model

    def _queries(self, batch: Batch) -> Tensor:
        inputs = self._model.prepare_query(batch)
        return self._model.encode_query(inputs, self.module.read_rows(inputs.ids))

    def _numbers(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return number_items(self.module, ids, self.items)

    def _chunks(self) -> Iterator["_CorpusPart"]:
        """Yield all items that can be recommended."""
        slots = self.module.item_slots
        count = self.items if slots is None else slots
        for first in range(0, count, self.chunk):
            ids = torch.arange(first, min(first + self.chunk, count), device=self.device)
            if slots is None:
                yield _CorpusPart(first, ids, self._rows(ids))
            else:
                yield _CorpusPart(first, self.module.identify_items(FIRST_SLOT - ids), self._rows(FIRST_SLOT - ids))

    def _rows(self, ids: Tensor) -> Tensor:
        """Return the item vectors that queries are compared with."""
        return self._model.encode_items(self.module.read_rows({"item": ids})["item"].lookup())


def number_items(module: SequenceModule, ids: Tensor, items: int) -> tuple[Tensor, Tensor]:
    """Return the number of each item in the corpus, and which have none. The number of a dynamic id is its slot."""
    if module.item_slots is None:
        return ids, ids >= items
    number = module.identify_items(ids)
    return number, number == EMPTY


def _sample_of_events(events: Events) -> Tensor:
    return torch.arange(len(events.lengths), device=events.offsets.device).repeat_interleave(events.lengths)


def _unique_pairs(sample: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
    span = int(item.max()) + 1 if len(item) else 1
    pairs = torch.unique(sample * span + item)
    return pairs // span, pairs % span


def _pairs_in_chunk(sample: Tensor, item: Tensor, first: int, items: int) -> tuple[Tensor, Tensor]:
    """Return the pairs whose item is in a chunk of the corpus, with items counted from the chunk's first."""
    inside = (item >= first) & (item < first + items)
    return sample[inside], item[inside] - first


def retrieval_sums(ranks: TargetRanks) -> Tensor:
    """Sum over queries: count, hits at each cutoff, NDCG@10, MRR, seen targets, unknown targets."""
    before = ranks.before
    gain = 1.0 / (before + 2.0).log2()
    hits: Iterable[Tensor] = ((before < cutoff).double().sum() for cutoff in CUTOFFS)
    excluded = (ranks.seen.double().sum(), ranks.unknown.double().sum())
    means = ((gain * (before < 10)).sum(), (1 / (before + 1)).sum())
    return torch.stack([before.new_tensor(len(before)), *hits, *means, *excluded])


def retrieval_means(sums: Tensor) -> dict[str, float]:
    """Return metrics by name from sums over all ranks. Seen and unknown targets count as misses."""
    count, *rest = sums.tolist()
    names = [*(f"hr@{cutoff}" for cutoff in CUTOFFS), "ndcg@10", "mrr", "seen_targets", "unknown_targets"]
    return {name: value / max(count, 1.0) for name, value in zip(names, rest, strict=True)} | {"users": int(count)}


def sum_retrieval_metrics(corpus: Corpus, batches: Iterator[Batch]) -> Tensor:
    """Sum the retrieval metrics over this rank's samples: of all users, and of new ones."""
    empty, none = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.bool)
    sums = torch.stack([retrieval_sums(TargetRanks(empty, none, none, none))] * 2)
    for batch in batches:
        ranks = corpus.target_ranks(batch)
        of_new_users = TargetRanks(*(values[ranks.new_user] for values in ranks))
        sums += torch.stack([retrieval_sums(ranks), retrieval_sums(of_new_users)]).cpu()
    return sums
