"""Dynamic ids for any PyTorch or TorchRec model: raw ids in, rows of an embedding table out."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from freescale.embedding.zero_collision_ids import DynamicIds, RowMoves, empty_state, initial_rows
from freescale.embedding.zero_collision_layout import EMPTY, BucketLayout, EvictionPolicy
from freescale.errors import UsageError

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class ZeroCollisionTable(nn.Module):
    """Maps raw 64-bit ids to rows of an embedding table. No two ids share a slot.

    In training mode every call is a step: new ids get slots, and old ids lose theirs by the eviction policy. In
    evaluation mode a call changes nothing. Ids without a slot have one of the shared rows. `initialize_` gives new
    ids their initial row:

        table = fs.ZeroCollisionTable(slots=1 << 20, eviction="lru")
        embedding = nn.Embedding(table.rows, 64)
        rows = table(ids)
        table.initialize_(embedding.weight, optimizer)
        vectors = embedding(rows)

    Slots depend on the ids of each step only: the same events give the same slots in every run. With
    torch.distributed, each rank holds the whole table, and a step takes the ids of all ranks of `process_group` (by
    default all ranks), so that the tables stay equal. Every rank has to make the same number of calls.

    `eviction`: "none"; "ttl", the oldest id after `ttl` seconds of event time; "lru", the least recently used; "lfu",
    the least frequently used. Slots that one of the last three steps used are never evicted. `admit_after`: an id
    gets a slot in the n-th step that uses it. `features`: which keys of a KeyedJaggedTensor to map, by default all.
    `name` and `seed` determine initial rows. A table needs up to 24 bytes per slot.
    """

    def __init__(
        self,
        slots: int,
        *,
        eviction: Literal["none", "ttl", "lru", "lfu"] = "none",
        ttl: int = 0,
        admit_after: int = 1,
        features: Collection[str] | None = None,
        process_group: dist.ProcessGroup | None = None,
        name: str = "ids",
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.layout = BucketLayout.of(slots)
        self.policy, self.admit_after = EvictionPolicy(eviction, ttl), admit_after
        self.features, self.name, self.seed = features, name, seed
        self.new_ids = self.new_rows = torch.empty(0, dtype=torch.int64, device=device)
        """The ids that got a slot in the last step, and their rows."""
        self.evicted = 0
        """Number of ids that lost their slot in the last step."""
        self.waiting = 0
        """Number of ids with a shared row because they are not admitted yet."""
        self.without_slot = 0
        """Number of ids with a shared row because there is no slot for them."""
        self._process_group, self._step = process_group, 0
        self._table: DynamicIds | None = None
        state = empty_state(self.layout, self.layout.buckets, admit_after=admit_after, device=device)
        self._hold(self._open(state))

    @property
    def rows(self) -> int:
        """Rows of the embedding table: all slots, and a shared row per bucket."""
        return self.layout.rows

    @property
    def table(self) -> DynamicIds:
        """The table, for lookups without a module and for export."""
        if self._table is None:
            self._table = self._open(dict(self.named_buffers()))
        return self._table

    def forward(self, ids: "Tensor | KeyedJaggedTensor", *, time: int | None = None) -> "Tensor | KeyedJaggedTensor":
        """Return the rows of ids, in the shape of the ids. `time`: the latest event time of the step, in seconds."""
        if time is None and self.training and self.policy.kind == "ttl":
            what = "a table with eviction 'ttl' needs the event time of every step"
            raise UsageError(what, remedy="call it with time=..., the latest event time of the batch in seconds")
        if isinstance(ids, Tensor):
            return self._rows(ids, time or 0)
        return _with_values(ids, self.features, lambda values: self._rows(values, time or 0))

    def initialize_(
        self, weight: Tensor, optimizer: Optimizer | None = None, *, deviation: float = 0.01, first_row: int = 0
    ) -> None:
        """Initialize the rows of the ids that the last step gave a slot, and reset their optimizer state to zero.

        `weight`: all rows, or those from `first_row` on.
        """
        mine = (self.new_rows >= first_row) & (self.new_rows < first_row + len(weight))
        ids, rows = self.new_ids[mine], self.new_rows[mine] - first_row
        values = initial_rows(ids, weight.shape[1], table=self.name, seed=self.seed, deviation=deviation)
        with torch.no_grad():
            weight[rows] = values.to(weight)
        states = optimizer.state.get(weight, {}) if optimizer is not None else {}
        for state in states.values():
            if isinstance(state, Tensor) and state.shape[:1] == weight.shape[:1]:
                state[rows] = 0

    def grow(self, slots: int) -> RowMoves:
        """Grow to at least so many slots; return where rows go: `new_weight[moves.after] = weight[moves.before]`."""
        grown, moves = self.table.grow(-(-slots // self.layout.buckets))
        self.layout = grown.layout
        self._hold(grown)
        return moves

    def get_extra_state(self) -> Tensor:
        """Return the number of steps."""
        return torch.tensor(self._step)

    def set_extra_state(self, state: Tensor) -> None:
        """Continue after so many steps, with the slots that were loaded."""
        self._step, self._table = int(state), None

    def _rows(self, ids: Tensor, time: int) -> Tensor:
        unique, inverse = torch.unique(ids.to(torch.int64), return_inverse=True)
        if not self.training:
            return self.table.lookup(unique)[inverse]
        group = self._process_group or (dist.group.WORLD if dist.is_initialized() else None)
        everywhere, time = (unique, time) if group is None else _of_all_ranks(unique, time, group)
        assigned = self.table.assign(everywhere, step=self._step, time=time)
        self._step += 1
        self.new_ids, self.new_rows = everywhere[assigned.new], assigned.rows[assigned.new]
        self.evicted = int((assigned.evicted != EMPTY).sum())
        self.waiting, self.without_slot = assigned.waiting, assigned.without_slot
        return assigned.rows[torch.searchsorted(everywhere, unique)][inverse]

    def _open(self, state: dict[str, Tensor]) -> DynamicIds:
        return DynamicIds(self.layout, policy=self.policy, admit_after=self.admit_after, state=state)

    def _hold(self, table: DynamicIds) -> None:
        for name, array in table.state_dict().items():
            self.register_buffer(name, array)
        self._table = table

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ZeroCollisionTable":
        self._table = None  # buffers may move to another device
        self.new_ids, self.new_rows = fn(self.new_ids), fn(self.new_rows)
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}  # it holds addresses


def _of_all_ranks(unique: Tensor, time: int, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Return the distinct ids of all ranks, ascending, and the latest time."""
    world_size = dist.get_world_size(group)
    mine = torch.tensor([len(unique), time], device=unique.device)
    sizes = mine.new_empty(world_size, 2)
    dist.all_gather(list(sizes), mine, group=group)
    counts, times = zip(*sizes.tolist(), strict=True)
    padded = nn.functional.pad(unique, (0, max(counts) - len(unique)))
    gathered = padded.new_empty(world_size, max(counts))
    dist.all_gather(list(gathered), padded, group=group)
    parts = [part[:count] for part, count in zip(gathered, counts, strict=True)]
    return torch.cat(parts).unique(), max(times)


def _with_values(
    features: "KeyedJaggedTensor", keys: Collection[str] | None, mapped: Callable[[Tensor], Tensor]
) -> "KeyedJaggedTensor":
    """Return features whose values are mapped, those of some keys or of all."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    values = features.values()
    if keys is None:
        values = mapped(values)
    else:
        if unknown := sorted(set(keys) - set(features.keys())):
            what = f"the batch has no feature {', '.join(unknown)}"
            raise UsageError(what, remedy=f"it has {', '.join(features.keys())}: name those in `features`")
        parts = list(values.split(features.length_per_key()))
        chosen = [place for place, key in enumerate(features.keys()) if key in keys]
        rows = mapped(torch.cat([parts[place] for place in chosen]))
        for place, part in zip(chosen, rows.split([len(parts[place]) for place in chosen]), strict=True):
            parts[place] = part
        values = torch.cat(parts)
    strides = features.stride_per_key_per_rank() if features.variable_stride_per_key() else None
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=values,
        weights=features.weights_or_none(),
        lengths=features.lengths(),
        stride_per_key_per_rank=strides,
        inverse_indices=features.inverse_indices_or_none(),
    )
