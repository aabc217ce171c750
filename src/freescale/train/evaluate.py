"""Metrics over data that was not trained on, the same on every rank whatever it held."""

from collections.abc import Callable
from dataclasses import replace

from freescale.config import RunConfig
from freescale.data.loader import Loader
from freescale.embedding.sharded import ShardedTables
from freescale.errors import ConfigError, DataError, nearest
from freescale.log import notice
from freescale.progress import track
from freescale.train.network import Network
from freescale.train.retrieve import SAMPLES, Corpus, retrieval_means, retrieval_sums_of
from freescale.transport.world import World

Evaluation = Callable[[], dict[str, float]]


def evaluation_of(config: RunConfig, world: World, network: Network, tables: ShardedTables | None) -> Evaluation | None:
    """How a run of this config is evaluated; None where there is nothing to evaluate on."""
    if config.data.test_path:
        _require_fitting(config, world, network)
    elif config.data.split == "none" or config.task.kind == "ranking":
        return None
    measure = _retrieval if config.task.kind == "retrieval" else _ranking

    def evaluate() -> dict[str, float]:
        loader = _loader(config, world)
        metrics = measure(loader, world, network, tables)
        if config.data.test_path:  # of events held out of the training data, training tells
            for line in loader.report():
                notice(f"in {config.data.test_path}: {line}")
        return metrics

    return evaluate


def _retrieval(loader: Loader, world: World, network: Network, tables: ShardedTables | None) -> dict[str, float]:
    corpus = Corpus(network, tables, loader.known.items, world.device)
    sums = retrieval_sums_of(corpus, track(loader, "evaluating", unit="batches"))
    return retrieval_means(world.transport.all_reduce(sums, name="metrics").wait())


def _ranking(loader: Loader, world: World, network: Network, tables: ShardedTables | None) -> dict[str, float]:
    from freescale.train.rank import Ranker, ranking_metrics  # torchrec takes seconds to import

    batches = track(loader, "evaluating", unit="batches")
    return ranking_metrics(Ranker(network, tables, world.device), batches, world)


def _loader(config: RunConfig, world: World) -> Loader:
    """What is evaluated on, from its beginning."""
    data = replace(config.data, global_batch=max(config.data.global_batch, SAMPLES * world.ranks))
    if data.test_path:
        # Where training cuts nothing off, retrieval still has to ask for something: the last event.
        asks_last = data.split == "none" and config.task.kind == "retrieval"
        data = replace(data, path=data.test_path, split="last" if asks_last else data.split)
    return Loader(data, seed=config.seed, rank=world.rank, ranks=world.ranks, part="test")


def _require_fitting(config: RunConfig, world: World, network: Network) -> None:
    """Refuse test data that the model cannot be asked about, before anything is trained."""
    loader = _loader(config, world)
    rows, _ = network.model.tables["item"]
    if loader.known.rows != rows:
        what = f"data.test_path has {loader.known.items:,} items and the model {rows - config.data.oov_rows:,}"
        remedy = "import it with `--vocabulary` and the training data's folder, so that items have the same numbers"
        raise DataError(what, where=config.data.test_path, remedy=remedy)
    require_labels(config, loader, "data.test_path")


def require_labels(config: RunConfig, loader: Loader, where: str) -> None:
    """Refuse data without a column of labels that the task is about."""
    columns = loader.dataset.columns
    for label in config.task.labels:
        if label not in columns:
            what = f"task.labels names '{label}', which {where} does not have"
            raise ConfigError(what, key="task.labels", where=loader.dataset.address, remedy=nearest(label, columns))
