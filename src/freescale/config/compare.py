"""What differs between two configs of one run, and whether it changes the training result. Pure."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from freescale.config.schema import RunConfig

# A field that is not listed changes the result, so that a new one is never changed without a word.
_NEUTRAL = {
    "data.path",  # whether it is the same data is compared by its contents
    "data.test_path",
    "data.on_bad",
    "data.workers",
    "data.prefetch",
    "task.seen",
    "tables.overlap",
    "train.on_fault",
    "train.micro_batches",
    "train.log_every",
    "train.evaluate_every",
    "train.save_every",
    "train.hours_between_failures",
    "train.keep",
    "train.timeout",
}
_NEUTRAL_SECTIONS = ("balance.", "transport.")
_LENGTH = ("train.epochs", "train.max_steps")
"""These change the learning rates of a run whose decay follows its length, and else only where it ends."""


class Difference(NamedTuple):
    """A field that has another value."""

    key: str
    before: Any
    after: Any
    changes_result: bool

    def __str__(self) -> str:
        return f"{self.key} = {self.after!r} (was {self.before!r})"


def differences(before: RunConfig, after: RunConfig) -> list[Difference]:
    """The fields that differ, in the order of the schema."""
    old = dict(_fields(before, ""))
    decays = before.train.decay != "none" or after.train.decay != "none"
    return [
        Difference(key, old[key], value, changes_result=_changes_result(key, decays=decays))
        for key, value in _fields(after, "")
        if value != old[key]
    ]


def _changes_result(key: str, *, decays: bool) -> bool:
    if key in _LENGTH:
        return decays
    return key not in _NEUTRAL and not key.startswith(_NEUTRAL_SECTIONS)


def _fields(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value
