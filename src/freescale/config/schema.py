"""The fields of a run, each with its meaning. Frozen: a run never changes its own config.

Only fields that something reads live here; a technique adds its own section when it arrives.
"""

from dataclasses import dataclass, field
from typing import Literal

from freescale.errors import ConfigError


def _require(ok: bool, key: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{key} = {value!r} cannot be used", key=key, remedy=f"{key} must be {rule}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which histories are read, in which order, and into which batches."""

    path: str = ""
    """Folder of Parquet histories: a local path or any fsspec address."""
    order: Literal["shuffle", "log"] = "shuffle"
    """shuffle: a new order every epoch, from the seed. log: the order of the files, kept."""
    global_batch: int = 256
    """Samples per step over all ranks. What one rank holds is derived, so results do not depend on it."""
    shards: int = 64
    """Virtual shards, each read by one rank. At least the number of ranks; part of the order, so keep it."""
    max_history: int = 200
    """Longest history given to the model; of a longer one the most recent events are kept."""
    longest: int = 1_000_000
    """A stored history above this is taken for a fault in the log, not for a user."""
    features: tuple[str, ...] = ()
    """Columns read beside user_id, item_id, timestamp and the candidates: lists per event or scalars per row."""
    split: Literal["none", "last", "time"] = "last"
    """none: train on everything. last: the last event of each user is held out. time: events from split_time on."""
    split_time: int = 0
    """First timestamp that belongs to evaluation; read only with split = "time"."""
    oov_rows: int = 16
    """Table rows that share, by hash, all item ids outside the vocabulary."""
    on_bad: Literal["stop", "skip"] = "stop"
    """stop: the first unusable row is an error. skip: it is counted and written to the quarantine file."""
    workers: int = 2
    """Threads that read and decode ahead; 0 reads when asked."""
    prefetch: int = 1
    """Windows (one row group of every shard) made ready ahead; used only when there are workers."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "shards", "max_history", "longest", "oov_rows", "prefetch"):
            _require(getattr(self, name) >= 1, f"data.{name}", getattr(self, name), "at least 1")
        _require(self.workers >= 0, "data.workers", self.workers, "0 or more")
        _require(
            self.split != "time" or self.split_time > 0,
            "data.split_time",
            self.split_time,
            'above 0 when data.split = "time"',
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the sequence model, as far as its cost depends on it."""

    kind: Literal["hstu", "sasrec"] = "hstu"
    """Which architecture."""
    dim: int = 64
    """Width of an embedding and of the residual stream."""
    layers: int = 2
    """Blocks stacked."""
    heads: int = 1
    """Attention heads; they share dim."""

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads"):
            _require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
        _require(self.dim % self.heads == 0, "model.heads", self.heads, f"a divisor of model.dim = {self.dim}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, whole: the same file gives the same result on any number of ranks."""

    seed: int = 0
    """The only source of randomness."""
    data: DataConfig = field(default_factory=DataConfig)
    """Which histories, in which order."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """What is trained."""

    def __post_init__(self) -> None:
        _require(0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2^63 - 1")
