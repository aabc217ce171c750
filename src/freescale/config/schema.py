"""Config schema: frozen dataclasses whose field docstrings are the reference documentation."""

from dataclasses import dataclass, field
from typing import Literal

from freescale.config.features import FeatureConfig, require


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Input data, sample order and batching."""

    path: str = ""
    """Folder with Parquet histories: a local path or any fsspec address."""
    test_path: str = ""
    """Folder that evaluation reads instead of the held-out events. Required to evaluate ranking."""
    order: Literal["shuffle", "log"] = "shuffle"
    """shuffle: a new order every epoch, derived from the seed. log: the order of the files."""
    global_batch: int = 256
    """Samples per step over all ranks. The batch per rank is derived, so results do not depend on the world size."""
    shards: int = 64
    """Virtual shards, each read by one rank. At least the world size. Changing it changes the sample order."""
    max_history: int = 200
    """Events per history that the model reads: the most recent ones."""
    longest: int = 1_000_000
    """A stored history with more events is treated as a fault in the log."""
    columns: tuple[str, ...] = ()
    """Further columns for a custom model, beyond those of [features]: lists per event or candidate, or scalars."""
    until: str = ""
    """The last partition to read, or a part of its name such as a date. Empty: all that are there."""
    split: Literal["none", "last", "time", "targets"] = "last"
    """none: hold out nothing. last: hold out the last event of each user. time: hold out events from split_time on.
    targets: of one partition, hold out the events that it adds."""
    split_time: int = 0
    """First held-out timestamp; used only with split = "time"."""
    oov_rows: int = 16
    """Table rows for out-of-vocabulary items, which share them by hash."""
    on_bad: Literal["stop", "skip"] = "stop"
    """stop: the first unusable row is an error. skip: unusable rows are counted and written to a quarantine file."""
    workers: int = 2
    """Threads that read and decode in the background; 0 reads synchronously."""
    prefetch: int = 1
    """Windows (one row group of every shard) to prefetch; used only with workers."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "shards", "max_history", "longest", "oov_rows", "prefetch"):
            require(getattr(self, name) >= 1, f"data.{name}", getattr(self, name), "at least 1")
        require(self.workers >= 0, "data.workers", self.workers, "0 or more")
        valid = self.split != "time" or self.split_time > 0
        require(valid, "data.split_time", self.split_time, 'above 0 when data.split = "time"')


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The sequence model."""

    kind: Literal["hstu", "sasrec"] = "hstu"
    """Architecture."""
    dim: int = 64
    """Embedding dimension and width of the residual stream."""
    layers: int = 2
    """Number of blocks."""
    heads: int = 1
    """Attention heads, which split dim."""
    dropout: float = 0.2
    """Dropout probability. Masks are keyed by sample, so they do not depend on the world size."""
    memory: Literal["full", "segments", "local"] = "full"
    """What an event attends to. full: all earlier events. segments: the events of its segment, and of earlier segments
    only `summaries` learned tokens, which follow each segment. local: the last `window` events and the `first` ones."""
    segment: int = 512
    """Events of a segment; used only with memory = "segments"."""
    summaries: int = 16
    """Summary tokens of a segment; used only with memory = "segments"."""
    window: int = 512
    """Latest events that an event attends to, besides itself; used only with memory = "local"."""
    first: int = 64
    """First events of a history, which all later ones attend to; used only with memory = "local"."""

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "segment", "summaries", "window"):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
        require(self.dim % self.heads == 0, "model.heads", self.heads, f"a divisor of model.dim = {self.dim}")
        require(self.first >= 0, "model.first", self.first, "0 or more")
        require(0.0 <= self.dropout < 1.0, "model.dropout", self.dropout, "at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What the model predicts."""

    kind: Literal["retrieval", "ranking"] = "retrieval"
    """retrieval: the next item. ranking: the labels of candidates that follow the history."""
    negatives: int = 128
    """Retrieval: negatives sampled per event."""
    temperature: float = 0.05
    """Retrieval: divisor of the cosine similarities."""
    seen: Literal["exclude", "allow"] = "exclude"
    """Retrieval: whether evaluation and prediction may recommend items of the history. exclude: they may not, and
    held-out items among them count as misses. allow: for logs in which users return to items."""
    interleave: bool = False
    """Retrieval: every event becomes two tokens, its item and its actions (the features of scope "event"), so that the
    next item is predicted from both. Doubles the tokens."""
    labels: tuple[str, ...] = ()
    """Ranking: label columns, one task each. Values are 0 or 1, or numbers for the labels of `regression`; null or NaN:
    no label."""
    regression: tuple[str, ...] = ()
    """Ranking: labels that are numbers; their loss is the squared error instead of the binary cross entropy."""
    weights: tuple[float, ...] = ()
    """Ranking: weight of the loss of each label. Empty: all are 1."""
    anchors: Literal["none", "every", "labeled", "after"] = "none"
    """Ranking: where targets come from. none: from the candidate columns of the data. Else events of the history
    themselves are targets ("anchors"), all in one pass, each seeing only earlier events. every: each `anchor_step`-th
    event. labeled: events with a label. after: events from `anchor_time` on."""
    anchor_step: int = 1
    """Ranking: distance of anchors in events; used only with anchors = "every"."""
    anchor_time: int = 0
    """Ranking: first timestamp of anchors; used only with anchors = "after"."""
    experts: int = 0
    """Ranking: experts of a multi-gate mixture of experts (MMoE) before the heads; 0: heads on the encoder's output."""

    def __post_init__(self) -> None:
        require(self.negatives >= 1, "task.negatives", self.negatives, "at least 1")
        require(self.temperature > 0, "task.temperature", self.temperature, "above 0")
        require(self.anchor_step >= 1, "task.anchor_step", self.anchor_step, "at least 1")
        require(self.experts >= 0, "task.experts", self.experts, "0 or more")
        ranking = self.kind == "ranking"
        valid = not ranking or len(self.labels) > 0
        require(valid, "task.labels", self.labels, 'the names of label columns when task.kind = "ranking"')
        require(len(set(self.labels)) == len(self.labels), "task.labels", self.labels, "different names")
        valid = set(self.regression) <= set(self.labels)
        require(valid, "task.regression", self.regression, f"names among task.labels = {list(self.labels)}")
        valid = not self.weights or (len(self.weights) == len(self.labels) and min(self.weights) > 0)
        require(valid, "task.weights", self.weights, f"{len(self.labels)} numbers above 0, one per label, or empty")
        valid = self.anchors == "none" or ranking
        require(valid, "task.anchors", self.anchors, '"none" when task.kind = "retrieval"')
        require(
            not (self.interleave and ranking), "task.interleave", self.interleave, 'false when task.kind = "ranking"'
        )
        valid = self.anchors != "after" or self.anchor_time > 0
        require(valid, "task.anchor_time", self.anchor_time, 'above 0 when task.anchors = "after"')


@dataclass(frozen=True, kw_only=True)
class TablesConfig:
    """Placement and optimizer of embedding tables."""

    placement: Literal["sharded", "replicated"] = "sharded"
    """sharded: rows are sharded over all ranks, with a fused optimizer. replicated: part of the dense model."""
    optimizer: Literal["rowwise_adagrad", "adagrad", "sgd"] = "rowwise_adagrad"
    """Optimizer of sharded tables; replicated tables use the dense optimizer."""
    lr: float = 0.05
    """Learning rate of sharded tables; warm-up and decay apply."""
    eps: float = 1e-8
    """Epsilon of Adagrad."""
    owners: Literal["zigzag", "block"] = "zigzag"
    """Which rank owns a row of a sharded table. zigzag: rows are dealt to the ranks in zig-zag, in the order of
    popularity in which `freescale data import` numbers items, so that all owners are about equally busy. block: every
    rank owns a contiguous block of rows. The result is the same."""
    init: float = 0.02
    """Standard deviation of initial rows, which are uniform in [-init, init] times the square root of 3."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """on: prioritized embedding communication (PEC). Rows that two consecutive batches do not share are exchanged
    while compute runs. auto: the first steps are run with and without it, and the faster setting is selected; measured
    again every 2,000 steps. The result is the same."""
    exchange: Literal["flat", "two_level", "auto"] = "flat"
    """flat: ranks exchange rows with all other ranks. two_level: each row is requested once per host and its gradients
    are added there, and each pair of hosts exchanges one message. auto: where several ranks share a host, the first
    steps are run both ways, and the faster one is selected. The result is the same."""
    replicated_rows: int | Literal["auto"] = 0
    """How many of the first rows of each sharded table every rank has a copy of: the most popular ones, if ids are
    numbered by popularity. They are not exchanged; their gradients are all-reduced. auto: as many as send fewer bytes
    between hosts so, by the counts of the vocabulary. The result is the same up to rounding."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "init"):
            require(getattr(self, name) > 0, f"tables.{name}", getattr(self, name), "above 0")
        rows = self.replicated_rows
        require(rows == "auto" or rows >= 0, "tables.replicated_rows", rows, '0 or more, or "auto"')
        fits = rows == 0 or self.placement == "sharded"
        require(fits, "tables.replicated_rows", rows, '0 with tables.placement = "replicated", which has all rows so')


TransportName = Literal["auto", "c10d", "host_staged", "shared_memory", "copy_engine"]


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """Transports for embedding rows. All give the same result. auto probes at startup and logs its selection."""

    urgent: TransportName = "auto"
    """Transport of transfers that block the step; auto selects the fastest."""
    deferred: TransportName = "auto"
    """Transport of transfers that overlap with compute; auto selects the one that slows compute least."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Training length, optimizer, fault handling and checkpoints."""

    epochs: int = 1
    """Passes over the data."""
    max_steps: int = 0
    """Maximum number of steps; 0 sets no limit."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimizer of the dense model."""
    lr: float = 1e-3
    """Learning rate of the dense model."""
    beta1: float = 0.9
    """AdamW: decay rate of the first moment."""
    beta2: float = 0.98
    """AdamW: decay rate of the second moment."""
    weight_decay: float = 0.0
    """AdamW: weight decay."""
    warmup_steps: int = 0
    """Steps of linear warm-up of the learning rates."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """Learning rate decay after warm-up, over the rest of the run."""
    final_lr: float = 0.0
    """Final learning rate, as a fraction of the full rate."""
    clip: float = 0.0
    """Maximum norm of the dense gradient; 0 disables clipping."""
    on_fault: Literal["stop", "skip", "rollback"] = "stop"
    """On a NaN or Inf loss or gradient. stop: raise. skip: skip the update. rollback: repeat without the samples."""
    spike: float = 0.0
    """A dense gradient norm above this multiple of the median of the last 64 is such a fault; 0 disables this."""
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """bf16: autocast forward. fp64: for exactness tests; sharded tables then use plain torch instead of FBGEMM."""
    tf32: bool = False
    """Tensor cores of GPUs compute fp32 matrix products, with operands cut to TF32. Does not affect bf16."""
    micro_batches: int = 1
    """Micro-batches per step and rank, of about equal cost. More use less memory; the result is the same."""
    log_every: int = 10
    """Steps between two log lines."""
    evaluate_every: int = 0
    """Epochs between two evaluations; 0 evaluates only at the end."""
    guard_metric: str = ""
    """Metric, such as hr@10, of the events of a partition before they are trained. If it falls by more than
    `guard_drop` below its mean over the last 8 partitions, `train --until` ends with exit code 9. Empty: no guard."""
    guard_drop: float = 0.3
    """Share of that mean by which the metric may fall."""
    save_every: int = 0
    """Steps between two checkpoints; 0 saves at the end of every epoch and at an interval derived from failures."""
    hours_between_failures: float = 24.0
    """Expected mean time between failures before the first one; used with save_every = 0."""
    keep: int = 2
    """Number of checkpoints to keep."""
    timeout: float = 600.0
    """Seconds before a wait for another rank fails."""

    def __post_init__(self) -> None:
        for name in ("epochs", "micro_batches", "log_every", "keep"):
            require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        counts = ("max_steps", "warmup_steps", "evaluate_every", "save_every")
        for name in (*counts, "clip", "spike", "final_lr", "weight_decay", "guard_drop"):
            require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "0 or more")
        for name in ("lr", "timeout", "hours_between_failures"):
            require(getattr(self, name) > 0, f"train.{name}", getattr(self, name), "above 0")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"train.{name}", getattr(self, name), "at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """Load balancing: how the samples of a step are distributed over the ranks. The samples stay the same."""

    mode: Literal["auto", "on", "off"] = "on"
    """on: samples move to less loaded ranks while compute runs. No effect with one rank. auto: on if the lengths of the
    data and the cost model predict that ranks otherwise wait for more than 1% of the time."""
    counts: Literal["free", "equal"] = "free"
    """free: any number of samples per rank. equal: the same number on all ranks, plus or minus one."""
    max_tokens: int = 0
    """Maximum number of events and candidates per rank and step, to bound memory; 0 sets no limit."""
    tolerance: float = 0.005
    """How far above the best possible time the slowest rank may end. Higher values move fewer samples."""
    cost: tuple[float, ...] = ()
    """Cost per sample, per token, and per attended pair of tokens. Empty: derived from the model."""
    group_ranks: int = 256
    """With more ranks than this, samples are placed inside groups of about as many, of whole hosts, and move between
    groups only as far as these differ by more than the tolerance allows. 0, or with `adapt`: one group."""
    adapt: bool = False
    """Fit the costs and the speed of each rank during training. Runs are then not bitwise reproducible."""

    def __post_init__(self) -> None:
        valid = not self.cost or (len(self.cost) == 3 and min(self.cost) >= 0 < max(self.cost))
        require(valid, "balance.cost", self.cost, "three numbers, none below 0 and not all 0")
        require(self.max_tokens >= 0, "balance.max_tokens", self.max_tokens, "0 or more")
        require(0 <= self.tolerance <= 1, "balance.tolerance", self.tolerance, "between 0 and 1")
        require(self.group_ranks >= 0, "balance.group_ranks", self.group_ranks, "0 or more")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The complete config of a run. The same file gives the same result on any world size."""

    seed: int = 0
    """Seed of all randomness."""
    data: DataConfig = field(default_factory=DataConfig)
    """Input data, sample order and batching."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The sequence model."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """What the model predicts."""
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    """Load balancing."""
    features: dict[str, FeatureConfig] = field(default_factory=dict)
    """Features by name."""
    tables: TablesConfig = field(default_factory=TablesConfig)
    """Embedding tables."""
    transport: TransportConfig = field(default_factory=TransportConfig)
    """Transports for embedding rows."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Training length, optimizer, fault handling and checkpoints."""

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2^63 - 1")
        valid = self.tables.placement == "replicated" or self.model.dim % 4 == 0
        rule = 'a multiple of 4 when tables.placement = "sharded" (required by FBGEMM), or use "replicated"'
        require(valid, "model.dim", self.model.dim, rule)
        predicts = self.task.kind != "retrieval" or self.data.max_history >= 2
        rule = 'at least 2 when task.kind = "retrieval": the loss is that of the next event'
        require(predicts, "data.max_history", self.data.max_history, rule)
        for name, feature in self.features.items():
            feature.check(name, self)
        self._check_shared_tables()
        rule = f"0 with the dynamic ids of {', '.join(self.dynamic_tables)}: their rows are not in order of popularity"
        valid = self.tables.replicated_rows == 0 or not self.dynamic_tables
        require(valid, "tables.replicated_rows", self.tables.replicated_rows, rule)

    @property
    def dynamic_tables(self) -> dict[str, FeatureConfig]:
        """The tables with dynamic ids, each with the config of a feature that uses it."""
        return {f.table or name: f for name, f in self.features.items() if f.ids == "dynamic"}

    @property
    def samples_slots(self) -> bool:
        """Whether the negatives of retrieval are slots of dynamic items."""
        return self.task.kind == "retrieval" and "item" in self.features

    def require_continuous(self) -> None:
        """Refuse what cannot train one partition after the other, each of them once."""
        needed = {"data.order": "log", "data.split": "none"}
        needed |= {"train.decay": "none", "train.epochs": 1, "train.max_steps": 0}
        for key, value in needed.items():
            section, _, name = key.partition(".")
            given = getattr(getattr(self, section), name)
            require(given == value, key, given, f"{value!r} with --until, which trains each partition once, in order")

    def _check_shared_tables(self) -> None:
        """Refuse features that share a table but disagree on its size."""
        first: dict[str, tuple[str, FeatureConfig]] = {}
        for name, feature in self.features.items():
            if not feature.has_table:
                continue
            other, earlier = first.setdefault(feature.table or name, (name, feature))
            for size in ("rows", "dim", "ids", "admit_after", "eviction", "ttl"):
                value, expected = getattr(feature, size), getattr(earlier, size)
                rule = f"{expected} as in [features.{other}], which shares the table {feature.table or name!r}"
                require(value == expected, f"features.{name}.{size}", value, rule)
            alike = (feature.kind in ("id", "set")) == (earlier.kind in ("id", "set"))
            rule = f"of a kind that can share the table of [features.{other}], which is {earlier.kind!r}"
            require(alike, f"features.{name}.kind", feature.kind, rule)
