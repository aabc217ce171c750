"""What the owner of rows does with them, whatever keeps them: look up, and update from gradients."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class LookedUp:
    """Rows that were read, and all that is needed to update them later."""

    rows: dict[str, Tensor]
    local: dict[str, Tensor]
    lr: float
    """The learning rate of the step that read them; their update uses it."""
    source: list[Tensor]
    """The outputs that the rows are views of, where an update is a backward pass."""


class Shard(Protocol):
    """The rows of all tables that this rank owns."""

    def look_up(self, local: dict[str, Tensor], *, lr: float) -> LookedUp:
        """Read rows, one per local number, for a step with this learning rate."""
        ...

    def update(self, looked_up: LookedUp, gradients: dict[str, Tensor]) -> None:
        """Add up the gradients of each row, then let the optimizer change it once."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Weights (`item`) and optimizer state (`item.sum`), as they live: the own rows of each, first dimension."""
        ...
