"""A trained model, read back from its run: for evaluation, prediction and export."""

from dataclasses import dataclass, replace
from pathlib import Path

from freescale import config as configs
from freescale.checkpoint import state, store
from freescale.checkpoint.listing import require_complete
from freescale.data.loader import Loader
from freescale.data.vocabulary import check_recorded_identity
from freescale.errors import UsageError
from freescale.train.build import Assembly, assemble, model_of
from freescale.train.retrieve import Corpus
from freescale.transport.world import World


@dataclass(frozen=True)
class Saved:
    """The model of a run's newest checkpoint, over the ranks that are here now."""

    config: configs.RunConfig
    world: World
    assembly: Assembly
    items: int
    """Items that the model knows, without the rows that unknown ones share."""
    step: int

    def corpus(self) -> Corpus:
        """The items, ready to be ranked."""
        if self.config.task.kind != "retrieval":
            what = f"this run was trained for {self.config.task.kind}, which does not rank the corpus"
            raise UsageError(what, remedy='use a run with task.kind = "retrieval"')
        seen = self.config.task.seen == "exclude"
        return Corpus(self.assembly.network, self.assembly.tables, self.items, self.world.device, exclude_seen=seen)


def config_of(run: Path, data: str | None = None) -> configs.RunConfig:
    """The config of a run, with another data set if one is given."""
    config = configs.load_run(run)
    if data is None:
        return config
    return replace(config, data=replace(config.data, path=data, test_path=data if config.data.test_path else ""))


def open_run(run: Path, config: configs.RunConfig, world: World) -> Saved:
    """Read the newest complete checkpoint of a run, whatever number of ranks wrote it."""
    newest = require_complete(run)
    loader = Loader(config.data, seed=config.seed, rank=world.rank, world_size=world.world_size)
    check_recorded_identity(store.read_facts(newest).get("data"), loader.identity, where=config.data.path)
    assembly = assemble(config, world, model_of(config, items=loader.vocabulary.rows))
    parts = state.of_model(assembly.network, assembly.tables, rank=world.rank, world_size=world.world_size)
    return Saved(config, world, assembly, loader.vocabulary.items, store.load(newest, parts)["step"])
