"""Metrics over data that was not trained on, the same on every rank whatever it held."""

from collections.abc import Callable
from dataclasses import replace

from freescale.config import RunConfig
from freescale.data.batch import Batch
from freescale.data.dataset import Dataset
from freescale.data.loader import Loader
from freescale.data.vocabulary import DataIdentity
from freescale.embedding.sharded import ShardedTables
from freescale.errors import ConfigError, DataError, suggest
from freescale.log import warning_once
from freescale.progress import track
from freescale.train.network import Network
from freescale.train.retrieve import SAMPLES, Corpus, retrieval_means, retrieval_sums_of
from freescale.transport.world import World

Evaluation = Callable[[], dict[str, float]]


def evaluation_of(config: RunConfig, world: World, network: Network, tables: ShardedTables | None) -> Evaluation | None:
    """How a run of this config is evaluated; None where there is nothing to evaluate on."""
    if not config.data.test_path and (config.data.split == "none" or config.task.kind == "ranking"):
        return None
    if config.data.test_path:
        _require_fitting(config, world)
    if config.data.test_path or config.data.split == "time":
        _require_targets(config, world)

    def evaluate() -> dict[str, float]:
        loader = _loader(config, world)
        if config.task.kind == "retrieval":
            seen = config.task.seen == "exclude"
            corpus = Corpus(network, tables, loader.vocabulary.items, world.device, exclude_seen=seen)
            metrics = _retrieval(loader, corpus, config, world)
        else:
            metrics = _ranking(loader, world, network, tables)
        if config.data.test_path:  # of events held out of the training data, training tells
            for line in loader.report():
                warning_once(f"in {config.data.test_path}: {line}")
        return metrics

    return evaluate


def _retrieval(loader: Loader, corpus: Corpus, config: RunConfig, world: World) -> dict[str, float]:
    sums = retrieval_sums_of(corpus, track(loader, "evaluating", unit="batches"))
    metrics = retrieval_means(world.transport.all_reduce(sums, name="metrics").wait())
    if not metrics["users"]:
        raise _no_targets(config)
    if world.is_rank_zero and metrics["seen_targets"]:
        share = f"{metrics['seen_targets']:.1%} of the held-out items are already in the user's history"
        warning_once(f'{share} and count as misses; task.seen = "allow" makes such items recommendable')
    return metrics


def _ranking(loader: Loader, world: World, network: Network, tables: ShardedTables | None) -> dict[str, float]:
    from freescale.train.rank import Ranker, ranking_metrics  # torchrec takes seconds to import

    batches = track(loader, "evaluating", unit="batches")
    return ranking_metrics(Ranker(network, tables, world.device), batches, world)


def _loader(config: RunConfig, world: World) -> Loader:
    """What is evaluated on, from its beginning."""
    data = replace(config.data, global_batch=max(config.data.global_batch, SAMPLES * world.world_size))
    if data.test_path:
        # Where training cuts nothing off, retrieval still has to ask for something: the last event.
        asks_last = data.split == "none" and config.task.kind == "retrieval"
        data = replace(data, path=data.test_path, split="last" if asks_last else data.split)
    return Loader(data, seed=config.seed, rank=world.rank, world_size=world.world_size, part="test")


def _require_fitting(config: RunConfig, world: World) -> None:
    """Refuse test data that the model cannot be asked about, before anything is trained."""
    loader = _loader(config, world)
    trained = Dataset(config.data.path, features=config.data.features)
    loader.identity.require_same(DataIdentity.from_dataset(trained), where=f"data.test_path = {config.data.test_path}")
    require_labels(config, loader, "data.test_path")


def _require_targets(config: RunConfig, world: World) -> None:
    """Refuse to train for an evaluation that would have nothing to ask. Reads until the first target is found."""
    ranking = config.task.kind == "ranking"
    has_target = any(_has_candidate(batch) if ranking else _has_target(batch) for batch in _loader(config, world))
    if not world.transport.sum(int(has_target), name="targets"):
        raise _no_targets(config)


def _has_target(batch: Batch) -> bool:
    return batch.targets is not None and bool(((batch.targets.lengths > 0) & (batch.history.lengths > 0)).any())


def _has_candidate(batch: Batch) -> bool:
    return batch.candidates is not None and bool((batch.candidates.lengths > 0).any())


def _no_targets(config: RunConfig) -> DataError:
    """Why there is nothing to evaluate on."""
    data = config.data
    if config.task.kind == "ranking":
        why, remedy = "no history has a candidate", "give data.test_path a data set with candidates and labels"
    elif data.split == "time":
        why = f"no user has events both before and from data.split_time = {data.split_time} on"
        remedy = "choose a data.split_time (seconds since the epoch) inside the time span of the log"
    else:
        why, remedy = "every history has fewer than 2 events", "give a log with longer histories, or data.split = none"
    return DataError(f"nothing to evaluate on: {why}", where=data.test_path or data.path, remedy=remedy)


def require_labels(config: RunConfig, loader: Loader, where: str) -> None:
    """Refuse data without a column of labels that the task is about."""
    columns = loader.dataset.columns
    for label in config.task.labels:
        if label not in columns:
            what = f"task.labels names '{label}', which {where} does not have"
            raise ConfigError(what, key="task.labels", where=loader.dataset.address, remedy=suggest(label, columns))
