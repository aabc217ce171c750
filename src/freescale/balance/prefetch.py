"""Balances batches ahead of time, in a thread beside the training step."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from freescale.balance.sample_exchange import SampleExchange
from freescale.data.batch import Batch
from freescale.data.loader import prefetch

_PREFETCH_BATCHES = 2


class Batches(Protocol):
    """A source of batches: a loader or a wrapper of one."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...
    def state_dict(self) -> dict[str, int | str]:
        """Return the position."""

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continue from a position."""

    def report(self) -> list[str]:
        """Return what was skipped, as human-readable lines."""


class BalancedBatches:
    """The batches of a loader, with the samples of each step balanced over the ranks."""

    def __init__(self, loader: Batches, exchange: SampleExchange) -> None:
        self._loader, self._exchange = loader, exchange
        self._state: dict[str, int | str] | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def report(self) -> list[str]:
        """Return what was skipped and how samples were placed, as human-readable lines."""
        return [*self._loader.report(), *self._exchange.plan.report()]

    def state_dict(self) -> dict[str, int | str]:
        """Return the position after the last batch that was yielded, not after the last that was balanced."""
        return self._loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continue from a position."""
        self._state = None
        self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[Batch]:
        if self._state is not None:  # iteration stopped early: batches were balanced and not used
            self.load_state_dict(self._state)
        # All ranks balance the same number of batches before they stop, so none waits for a peer that has stopped.
        for batch, state in prefetch(self._exchange_batches(), _PREFETCH_BATCHES, drain=True):
            self._state = state
            yield batch
        self._state = None

    def _exchange_batches(self) -> Iterator[tuple[Batch, dict[str, int | str]]]:
        """Yield each balanced batch and the position of the loader after it."""
        for batch in self._loader:
            groups, _ = self._exchange.exchange(batch.groups())
            yield batch.with_groups(groups), self._loader.state_dict()
