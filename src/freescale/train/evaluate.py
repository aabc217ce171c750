"""Metrics over held-out data, the same on every rank whatever it held."""

from collections.abc import Callable

from freescale.config import RunConfig
from freescale.data.loader import Loader
from freescale.embedding.sharded import ShardedTables
from freescale.train.metrics import retrieval_means
from freescale.train.network import Network
from freescale.train.retrieve import Corpus, retrieval_sums_of
from freescale.transport.world import World

Evaluation = Callable[[], dict[str, float]]


def evaluation_of(config: RunConfig, world: World, network: Network, tables: ShardedTables | None) -> Evaluation | None:
    """How a run of this config is evaluated; None where nothing is held out."""
    if config.task.kind == "retrieval" and config.data.split != "none":
        return lambda: _retrieval(config, world, network, tables)
    return None


def _retrieval(config: RunConfig, world: World, network: Network, tables: ShardedTables | None) -> dict[str, float]:
    loader = Loader(config.data, seed=config.seed, rank=world.rank, ranks=world.ranks, part="test")
    corpus = Corpus(network, tables, loader.known.items)
    sums = retrieval_sums_of(corpus, iter(loader))
    return retrieval_means(world.transport.all_reduce(sums, name="metrics").wait())
