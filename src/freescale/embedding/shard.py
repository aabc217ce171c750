"""What the owner of rows does with them, whatever keeps them: look up, and update from gradients."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class Shard(Protocol):
    """The rows of all tables that this rank owns. Several threads may use it, on different rows."""

    def look_up(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        """Read rows, one per local number."""

    def update(self, local: dict[str, Tensor], gradients: dict[str, Tensor], *, lr: Mapping[str, float]) -> None:
        """Add up the gradients of each row, then let the optimizer change it once. `lr`: by table."""

    def state(self) -> dict[str, Tensor]:
        """Weights (`item`) and optimizer state (`item.sum`), as they live: the own rows of each, first dimension."""
