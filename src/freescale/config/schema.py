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
    test_path: str = ""
    """Folder that evaluation reads instead of the held-out events; ranking is only evaluated with one."""
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
        fits = self.split != "time" or self.split_time > 0
        _require(fits, "data.split_time", self.split_time, 'above 0 when data.split = "time"')


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The sequence model."""

    kind: Literal["hstu", "sasrec"] = "hstu"
    """Which architecture."""
    dim: int = 64
    """Width of an embedding and of the residual stream."""
    layers: int = 2
    """Blocks stacked."""
    heads: int = 1
    """Attention heads; they share dim."""
    dropout: float = 0.2
    """Share of activations dropped in training. Masks are keyed by sample, so they do not depend on the ranks."""

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads"):
            _require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
        _require(self.dim % self.heads == 0, "model.heads", self.heads, f"a divisor of model.dim = {self.dim}")
        _require(0.0 <= self.dropout < 1.0, "model.dropout", self.dropout, "at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What the model learns to say."""

    kind: Literal["retrieval", "ranking"] = "retrieval"
    """retrieval: which item comes next. ranking: the labels of candidates that follow the history."""
    negatives: int = 128
    """Retrieval: wrong items drawn for every event."""
    temperature: float = 0.05
    """Retrieval: cosines are divided by it."""
    seen: Literal["exclude", "allow"] = "exclude"
    """Retrieval: whether items of the history can be recommended, in evaluation and prediction alike. exclude: they
    cannot, and held-out items among them count as misses. allow: for logs in which users return to items."""
    labels: tuple[str, ...] = ()
    """Ranking: columns of candidate labels (0 or 1), one binary task each."""

    def __post_init__(self) -> None:
        _require(self.negatives >= 1, "task.negatives", self.negatives, "at least 1")
        _require(self.temperature > 0, "task.temperature", self.temperature, "above 0")
        fits = self.kind != "ranking" or len(self.labels) > 0
        _require(fits, "task.labels", self.labels, 'the names of label columns when task.kind = "ranking"')


@dataclass(frozen=True, kw_only=True)
class TablesConfig:
    """Where embedding tables live and how they are updated."""

    placement: Literal["sharded", "replicated"] = "sharded"
    """sharded: rows dealt over all ranks, updated in place. replicated: a copy per rank, part of the dense model."""
    optimizer: Literal["rowwise_adagrad", "adagrad", "sgd"] = "rowwise_adagrad"
    """Of sharded tables; replicated ones follow the dense optimizer."""
    lr: float = 0.05
    """Learning rate of sharded tables; warm-up and decay apply to it too."""
    eps: float = 1e-8
    """Keeps Adagrad from dividing by nothing."""
    init: float = 0.02
    """Rows begin uniform in [-init, init] times the square root of 3, so this is their deviation."""
    overlap: Literal["on", "off"] = "on"
    """on: rows of sharded tables that two consecutive batches do not share travel behind compute. Same result."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "init"):
            _require(getattr(self, name) > 0, f"tables.{name}", getattr(self, name), "above 0")


TransportName = Literal["auto", "c10d", "host_staged", "shared_memory", "copy_engine"]


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """Which way rows take between ranks. All give the same result; auto probes at the start and says what it found."""

    urgent: TransportName = "auto"
    """For what a step waits for: the quickest."""
    deferred: TransportName = "auto"
    """For what travels behind compute: the one that takes the least from it."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and how fast."""

    epochs: int = 1
    """Passes over the data."""
    max_steps: int = 0
    """End after so many steps, if above 0."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Of the dense model."""
    lr: float = 1e-3
    """Learning rate of the dense model."""
    beta1: float = 0.9
    """How much AdamW's mean of gradients keeps of the steps before."""
    beta2: float = 0.98
    """The same for its mean of squares."""
    weight_decay: float = 0.0
    """AdamW's decay."""
    warmup_steps: int = 0
    """Steps over which the learning rates rise from 0."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """How the learning rates fall after warm-up, over the rest of the run."""
    final_lr: float = 0.0
    """Where decay ends, as a share of the full rate."""
    clip: float = 0.0
    """Largest norm of the dense gradient; 0 leaves it alone."""
    on_fault: Literal["stop", "skip", "rollback"] = "stop"
    """When a loss or gradient is not a number. skip: the step changes nothing. rollback: again without the samples."""
    spike: float = 0.0
    """A dense gradient so many times the median of the last 64 counts as such a fault; 0: none does."""
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """bf16: the forward pass in autocast. fp64: for proofs; sharded tables are then plain torch (FBGEMM has none)."""
    micro_batches: int = 1
    """Parts in which a rank computes its share of a step. Memory falls, the result stays."""
    log_every: int = 10
    """Steps between two lines of progress and metrics."""
    evaluate_every: int = 0
    """Epochs between two evaluations; 0 evaluates at the end only."""
    save_every: int = 0
    """Steps between two checkpoints; 0 saves at the end of every epoch, and between as often as failures make worth."""
    hours_between_failures: float = 24.0
    """As expected before any was seen; read with save_every = 0."""
    keep: int = 2
    """Checkpoints kept."""
    timeout: float = 600.0
    """Seconds that any wait for another rank may take."""

    def __post_init__(self) -> None:
        for name in ("epochs", "micro_batches", "log_every", "keep"):
            _require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        counts = ("max_steps", "warmup_steps", "evaluate_every", "save_every")
        for name in (*counts, "clip", "spike", "final_lr", "weight_decay"):
            _require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "0 or more")
        for name in ("lr", "timeout", "hours_between_failures"):
            _require(getattr(self, name) > 0, f"train.{name}", getattr(self, name), "above 0")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"train.{name}", getattr(self, name), "at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How samples are dealt over the ranks, so that none waits for another. The samples of a step stay the same."""

    mode: Literal["on", "off"] = "on"
    """on: samples move to where there is room, behind compute. With one rank there is nothing to balance."""
    counts: Literal["free", "equal"] = "free"
    """free: a rank may hold any number of samples. equal: all hold the same number, give or take one."""
    max_tokens: int = 0
    """Most events and candidates that a rank may hold in a step, if above 0: a limit for memory."""
    cost: tuple[float, ...] = ()
    """Of a sample, of a token, and of a pair of tokens of which one sees the other. Empty: counted from the model."""
    adapt: bool = False
    """Learn cost and the speed of each rank while training. Two runs of one seed are then not bitwise the same."""

    def __post_init__(self) -> None:
        fits = not self.cost or (len(self.cost) == 3 and min(self.cost) >= 0 < max(self.cost))
        _require(fits, "balance.cost", self.cost, "three numbers, none below 0 and not all 0")
        _require(self.max_tokens >= 0, "balance.max_tokens", self.max_tokens, "0 or more")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, whole: the same file gives the same result on any number of ranks."""

    seed: int = 0
    """The only source of randomness."""
    data: DataConfig = field(default_factory=DataConfig)
    """Which histories, in which order."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """What is trained."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """What for."""
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    """Where its samples are computed."""
    tables: TablesConfig = field(default_factory=TablesConfig)
    """Where its embeddings live."""
    transport: TransportConfig = field(default_factory=TransportConfig)
    """Which way their rows take."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How long and how fast."""

    def __post_init__(self) -> None:
        _require(0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2^63 - 1")
        fits = self.tables.placement == "replicated" or self.model.dim % 4 == 0
        rule = 'a multiple of 4 when tables.placement = "sharded" (FBGEMM wants it), or use "replicated"'
        _require(fits, "model.dim", self.model.dim, rule)
        predicts = self.task.kind != "retrieval" or self.data.max_history >= 2
        rule = 'at least 2 when task.kind = "retrieval": the loss is that of the next event'
        _require(predicts, "data.max_history", self.data.max_history, rule)
