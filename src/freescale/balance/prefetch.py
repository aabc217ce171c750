"""Batches balanced ahead of time, in a thread behind the step that is being computed."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from freescale.balance.sample_exchange import Exchange
from freescale.data.batch import Batch
from freescale.data.loader import prefetch

_AHEAD = 2


class Batches(Protocol):
    """What gives batches: a loader, or something around one."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...
    def state_dict(self) -> dict[str, int | str]:
        """Where to continue."""

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continue from there."""

    def report(self) -> list[str]:
        """What was set aside, for people."""


class BalancedBatches:
    """The batches of a loader, with the same samples in every step, dealt so that all ranks compute equally long."""

    def __init__(self, loader: Batches, exchange: Exchange) -> None:
        self._loader, self._exchange = loader, exchange
        self._state: dict[str, int | str] | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def report(self) -> list[str]:
        """What was set aside, and how samples were dealt."""
        return [*self._loader.report(), *self._exchange.plan.report()]

    def state_dict(self) -> dict[str, int | str]:
        """The position behind the last batch that was given out, not behind the last that was balanced."""
        return self._loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continue from there."""
        self._state = None
        self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[Batch]:
        if self._state is not None:  # who ended early left batches that were balanced and not used
            self.load_state_dict(self._state)
        # All ranks have balanced the same number of batches when they end, so none waits for another in vain.
        for batch, state in prefetch(self._balanced(), _AHEAD, drain=True):
            self._state = state
            yield batch
        self._state = None

    def _balanced(self) -> Iterator[tuple[Batch, dict[str, int | str]]]:
        """Each batch, and where the loader stands behind it."""
        for batch in self._loader:
            groups, _ = self._exchange.balanced(batch.groups())
            yield batch.with_groups(groups), self._loader.state_dict()
