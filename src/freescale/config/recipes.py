"""Named recipes. Each is a complete config that can be printed, saved and run."""

from freescale.config.features import FeatureConfig
from freescale.config.schema import (
    DataConfig,
    ModelConfig,
    RunConfig,
    TablesConfig,
    TaskConfig,
    TrainConfig,
)


def _ml1m(model: ModelConfig) -> RunConfig:
    """The published protocol: 200 events, the last one held out and ranked against all items."""
    return RunConfig(
        data=DataConfig(global_batch=128, max_history=200),
        model=model,
        tables=TablesConfig(placement="replicated"),
        train=TrainConfig(epochs=101, evaluate_every=10, log_every=48),
    )


def _cross(rows: int, *names: str) -> FeatureConfig:
    return FeatureConfig(scope="context", kind="cross", cross=names, rows=rows)


_DLRM_V4_FEATURES = {
    "user": FeatureConfig(column="user_id", scope="user", rows=1_000_001),
    "artist": FeatureConfig(column="artist_id", missing="default"),
    "album": FeatureConfig(column="album_id", missing="default"),
    "action": FeatureConfig(scope="event", kind="bits", bits=5),
    "hour": FeatureConfig(column="timestamp", scope="context", kind="timestamp"),
    "organic": FeatureConfig(column="is_organic", scope="context", rows=2),
    "user_x_artist": _cross(100_000_000, "user", "artist"),
    "user_x_album": _cross(40_000_000, "user", "album"),
    "user_x_hour": _cross(24_000_000, "user", "hour"),
    "item_x_hour": _cross(40_000_000, "item", "hour"),
    "artist_x_hour": _cross(32_000_000, "artist", "hour"),
    "user_x_organic": _cross(2_000_000, "user", "organic"),
    "user_x_artist_x_hour": _cross(40_000_000, "user", "artist", "hour"),
}
"""The tables of MLPerf's dlrm_v4. docs/dlrm-v4.md compares both line by line."""

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
        train=TrainConfig(precision="bf16", tf32=True),
    ),
    "hstu-large": RunConfig(
        data=DataConfig(global_batch=8192, max_history=8192, shards=256),
        model=ModelConfig(kind="hstu", dim=512, layers=8, heads=8),
        task=TaskConfig(negatives=4),
        train=TrainConfig(precision="bf16", tf32=True),
    ),
    "hstu-ranking-synth": RunConfig(
        data=DataConfig(global_batch=128, max_history=24, split="none"),
        model=ModelConfig(kind="hstu", dim=32, layers=2, heads=1, dropout=0.0),
        task=TaskConfig(kind="ranking", labels=("label_click", "label_like")),
        tables=TablesConfig(placement="sharded", optimizer="rowwise_adagrad", lr=0.1),
        train=TrainConfig(epochs=4, lr=1e-2, decay="cosine", evaluate_every=1, log_every=25),
    ),
    "dlrm-v4": RunConfig(
        data=DataConfig(global_batch=8192, max_history=4086, shards=256, split="time", split_time=25_833_600),
        model=ModelConfig(kind="hstu", dim=512, layers=3, heads=4, dropout=0.2),
        task=TaskConfig(kind="ranking", labels=("label_full_listen",), anchors="labeled"),
        features=_DLRM_V4_FEATURES,
        tables=TablesConfig(optimizer="rowwise_adagrad", lr=1e-6, eps=1e-8),
        train=TrainConfig(lr=1e-6, beta1=0.95, beta2=0.999, warmup_steps=24_000, clip=1.0, precision="bf16", tf32=True),
    ),
}
