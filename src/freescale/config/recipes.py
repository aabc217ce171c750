"""Complete named runs. A recipe is a whole config, so it can be printed, saved and run again as a file."""

from freescale.config.schema import DataConfig, ModelConfig, RunConfig

_ML1M = DataConfig(global_batch=128, max_history=200)

RECIPES: dict[str, RunConfig] = {
    "tiny": RunConfig(
        data=DataConfig(global_batch=64, max_history=64),
        model=ModelConfig(kind="hstu", dim=32, layers=2, heads=1),
    ),
    "sasrec-ml1m": RunConfig(data=_ML1M, model=ModelConfig(kind="sasrec", dim=50, layers=2, heads=1)),
    "hstu-ml1m": RunConfig(data=_ML1M, model=ModelConfig(kind="hstu", dim=50, layers=2, heads=1)),
    "hstu-large-ml1m": RunConfig(data=_ML1M, model=ModelConfig(kind="hstu", dim=50, layers=8, heads=2)),
    "hstu-kuairand": RunConfig(
        data=DataConfig(global_batch=8192, max_history=21_000, shards=256),
        model=ModelConfig(kind="hstu", dim=256, layers=8, heads=4),
    ),
}
