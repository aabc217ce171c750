"""Config of a feature. Field docstrings are the reference documentation."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from freescale.errors import ConfigError

if TYPE_CHECKING:
    from freescale.config.schema import RunConfig


def require(ok: bool, key: str, value: object, rule: str) -> None:
    """Refuse a value that breaks a rule."""
    if not ok:
        raise ConfigError(f"{key} = {value!r} is not valid", key=key, remedy=f"{key} must be {rule}")


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """A feature that the built-in models read besides the item: `[features.NAME]`, as many as needed."""

    column: str = ""
    """Column of the data. Empty: the name of the feature."""
    scope: Literal["item", "event", "user", "context", "candidate"] = "item"
    """item: of the item, on events and candidates; candidates have it in candidate_COLUMN. event: known only after the
    event, such as an action or a dwell time; candidates do not have it. user: one value per row; it becomes a prefix
    token. context: of the request, one value per row; it joins at the candidates. candidate: in candidate_COLUMN only.
    With task.anchors, context and candidate features are event columns, read at the anchor."""
    kind: Literal["id", "set", "number", "bits", "timestamp", "cross"] = "id"
    """id: a categorical id. set: ids, whose rows are summed. number: see `scaling`. bits: a bit mask of actions, one
    learned vector per bit. timestamp: seconds since 1970, as the hour of the week in UTC. cross: see `cross`."""
    cross: tuple[str, ...] = ()
    """Ids that are hashed together into `rows`: names of id or timestamp features of candidates or users, `item`, or
    `user`, which is user_id. Only with kind = "cross" and scope = "context" or "candidate"; it reads no column."""
    table: str = ""
    """Embedding table of ids, sets, timestamps and quantiles; features that name the same table share it. Empty: one
    table per feature."""
    rows: int = 0
    """Ids below this have a row of their own, others share data.oov_rows. 0: the size of the column's vocabulary. With
    ids = "dynamic": how many ids have a row of their own at a time."""
    ids: Literal["vocabulary", "dynamic"] = "vocabulary"
    """vocabulary: the column holds numbers of a vocabulary. dynamic: it holds any ids from 0 to 2^63 - 1. An id gets a
    row when it occurs in training, and `eviction` says which id loses its row when there is no free one. Needs `rows`.
    [features.item] with ids = "dynamic" does so for item_id."""
    admit_after: int = 1
    """Dynamic ids: an id gets a row in the n-th step in which it occurs, and shares one until then."""
    eviction: Literal["none", "ttl", "lru", "lfu"] = "none"
    """Dynamic ids: which id loses its row. none: no id; new ones share rows. ttl: the oldest that did not occur for
    `ttl` seconds of event time. lru: the least recently used. lfu: the least frequently used."""
    ttl: int = 0
    """Dynamic ids: seconds; used only with eviction = "ttl"."""
    dim: int = 0
    """Width of the table. 0: model.dim."""
    combine: Literal["sum", "concat"] = "sum"
    """sum: added to the embedding of the event; needs the width of the model. concat: concatenated with all others of
    its scope, and projected to the width of the model."""
    missing: Literal["refuse", "default"] = "refuse"
    """Null values. refuse: the row is a fault of the data. default: ids have a row for it, a set is empty, a number is
    the mean, quantiles have a bucket for it, and no bit is set."""
    scaling: Literal["standardize", "quantiles"] = "standardize"
    """Numbers. standardize: minus the mean, over the standard deviation. quantiles: the bucket among quantiles, an id.
    Both of the training data, stored with the model."""
    buckets: int = 64
    """Buckets of scaling = "quantiles"."""
    bits: int = 8
    """Bits of a bit mask."""

    @property
    def has_table(self) -> bool:
        """Whether the feature is looked up in an embedding table."""
        return self.kind not in ("number", "bits") or (self.kind == "number" and self.scaling == "quantiles")

    def check(self, name: str, run: "RunConfig") -> None:
        """Refuse values that do not fit together. `name`: of the feature."""
        key = f"features.{name}"
        require(name.isidentifier(), key, name, "letters, digits and underscores")
        if name == "item":
            self._check_item(key)
        for field_name, least in (("rows", 0), ("dim", 0), ("buckets", 2), ("bits", 1)):
            value = getattr(self, field_name)
            require(value >= least, f"{key}.{field_name}", value, f"at least {least}")
        require(self.bits <= 63, f"{key}.bits", self.bits, "at most 63: a mask is a 64-bit integer")
        shares = self.kind in ("id", "set") and "item" not in run.features
        require(self.table != "item" or shares, f"{key}.table", self.table, "another table: item ids, not dynamic ones")
        width = self.dim or run.model.dim
        fits = self.combine == "concat" or width == run.model.dim
        rule = f'model.dim = {run.model.dim} with combine = "sum"; other widths need combine = "concat"'
        require(fits, f"{key}.dim", self.dim, rule)
        valid = run.tables.placement == "replicated" or not self.has_table or width % 4 == 0
        require(valid, f"{key}.dim", self.dim, 'a multiple of 4 when tables.placement = "sharded" (required by FBGEMM)')
        for field_name, used in (
            ("table", self.has_table),
            ("rows", self.kind in ("id", "set", "cross")),
            ("cross", self.kind == "cross"),
        ):
            value = getattr(self, field_name)
            require(used or not value, f"{key}.{field_name}", value, f'empty: kind = "{self.kind}" does not use it')
        self._check_dynamic(key, run)
        ranking = run.task.kind == "ranking"
        valid = ranking or self.scope not in ("context", "candidate")
        require(valid, f"{key}.scope", self.scope, '"item", "event" or "user" when task.kind = "retrieval"')
        if self.kind == "cross":
            self._check_cross(key, run)

    def _check_item(self, key: str) -> None:
        """Refuse all but dynamic ids: the item is no feature, and has its table without a config."""
        rule = '"dynamic": [features.item] gives dynamic ids to the items, and cannot be a feature'
        require(self.ids == "dynamic", f"{key}.ids", self.ids, rule)
        settings = ("ids", "rows", "admit_after", "eviction", "ttl")
        for field in fields(self):
            value = getattr(self, field.name)
            unused = field.name in settings or value == field.default
            require(unused, f"{key}.{field.name}", value, f"left out: [features.item] has only {', '.join(settings)}")

    def _check_dynamic(self, key: str, run: "RunConfig") -> None:
        """Refuse what dynamic ids cannot have, and their fields without them."""
        if self.ids == "vocabulary":
            for name, unused in (("admit_after", 1), ("eviction", "none"), ("ttl", 0)):
                value = getattr(self, name)
                require(value == unused, f"{key}.{name}", value, f'{unused!r}: it needs ids = "dynamic"')
            return
        require(self.kind in ("id", "set"), f"{key}.ids", self.ids, '"vocabulary": only ids and sets are dynamic')
        require(self.table != "item", f"{key}.table", self.table, 'another table with ids = "dynamic"')
        require(self.rows > 0, f"{key}.rows", self.rows, 'above 0 with ids = "dynamic"')
        require(self.admit_after >= 1, f"{key}.admit_after", self.admit_after, "at least 1")
        valid = (self.eviction == "ttl") == (self.ttl > 0)
        require(valid, f"{key}.ttl", self.ttl, 'above 0 with eviction = "ttl", else 0')
        sharded = run.tables.placement == "sharded"
        require(sharded, "tables.placement", run.tables.placement, f'"sharded" with {key}.ids = "dynamic"')

    def _check_cross(self, key: str, run: "RunConfig") -> None:
        """Refuse a cross of what a candidate does not have."""
        valid = self.scope in ("context", "candidate")
        require(valid, f"{key}.scope", self.scope, '"context" or "candidate" with kind = "cross"')
        require(self.rows > 0, f"{key}.rows", self.rows, 'above 0 with kind = "cross"')
        require(not self.column, f"{key}.column", self.column, 'empty with kind = "cross"')
        require(len(self.cross) >= 2, f"{key}.cross", self.cross, "two names or more")
        usable = {"item", "user"} | {
            name
            for name, feature in run.features.items()
            if feature.kind in ("id", "timestamp") and feature.scope != "event"
        }
        rule = f"names among {', '.join(sorted(usable))}: ids and timestamps of candidates and users"
        require(usable >= set(self.cross), f"{key}.cross", self.cross, rule)
