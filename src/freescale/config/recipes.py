"""Named recipes. Each is a complete config that can be printed, saved and run."""

from freescale.config.schema import DataConfig, ModelConfig, RunConfig, TablesConfig, TaskConfig, TrainConfig


def _ml1m(model: ModelConfig) -> RunConfig:
    """The published protocol: 200 events, the last one held out and ranked against all items."""
    return RunConfig(
        data=DataConfig(global_batch=128, max_history=200),
        model=model,
        tables=TablesConfig(placement="replicated"),
        train=TrainConfig(epochs=101, evaluate_every=10, log_every=48),
    )


RECIPES: dict[str, RunConfig] = {
    "tiny": RunConfig(
        data=DataConfig(global_batch=64, max_history=64),
        model=ModelConfig(kind="hstu", dim=32, layers=2, heads=1),
        task=TaskConfig(negatives=32),
        train=TrainConfig(max_steps=60),
    ),
    "sasrec-ml1m": _ml1m(ModelConfig(kind="sasrec", dim=50, layers=2, heads=1)),
    "hstu-ml1m": _ml1m(ModelConfig(kind="hstu", dim=50, layers=2, heads=1)),
    "hstu-large-ml1m": _ml1m(ModelConfig(kind="hstu", dim=50, layers=8, heads=2)),
    "hstu-kuairand": RunConfig(
        data=DataConfig(global_batch=8192, max_history=21_000, shards=256),
        model=ModelConfig(kind="hstu", dim=256, layers=8, heads=4),
    ),
    "hstu-large": RunConfig(
        data=DataConfig(global_batch=8192, max_history=8192, shards=256),
        model=ModelConfig(kind="hstu", dim=512, layers=8, heads=8),
        task=TaskConfig(negatives=4),
    ),
    "hstu-ranking-synth": RunConfig(
        data=DataConfig(global_batch=128, max_history=24, split="none"),
        model=ModelConfig(kind="hstu", dim=32, layers=2, heads=1, dropout=0.0),
        task=TaskConfig(kind="ranking", labels=("label_click", "label_like")),
        tables=TablesConfig(placement="sharded", optimizer="rowwise_adagrad", lr=0.1),
        train=TrainConfig(epochs=4, lr=1e-2, decay="cosine", evaluate_every=1, log_every=25),
    ),
}
