"""Compare two configs of one run, and tell which differences change the training result. Pure."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from freescale.config.schema import RunConfig

# Unlisted fields change the result, so that a new field is safe by default.
_NEUTRAL = {
    "data.path",  # the contents of the data are compared instead
    "data.test_path",
    "data.until",
    "data.on_bad",
    "data.workers",
    "data.prefetch",
    "task.seen",
    "tables.overlap",
    "tables.exchange",
    "tables.owners",
    "tables.replicated_rows",
    "train.on_fault",
    "train.micro_batches",
    "train.log_every",
    "train.evaluate_every",
    "train.guard_metric",
    "train.guard_drop",
    "train.save_every",
    "train.hours_between_failures",
    "train.keep",
    "train.timeout",
}
_NEUTRAL_SECTIONS = ("balance.", "transport.")
_LENGTH = ("train.epochs", "train.max_steps")
"""With learning rate decay these change the result; without, only the end of the run."""


class ConfigDifference(NamedTuple):
    """A field with different values."""

    key: str
    before: Any
    after: Any
    changes_result: bool

    def __str__(self) -> str:
        return f"{self.key} = {self.after!r} (was {self.before!r})"


def differences(before: RunConfig, after: RunConfig) -> list[ConfigDifference]:
    """Fields that differ, in schema order."""
    old = dict(_fields(before, ""))
    decays = before.train.decay != "none" or after.train.decay != "none"
    return [
        ConfigDifference(key, old.get(key), value, changes_result=_changes_result(key, decays=decays))
        for key, value in _fields(after, "")
        if value != old.get(key)
    ]


def _changes_result(key: str, *, decays: bool) -> bool:
    if key in _LENGTH:
        return decays
    return key not in _NEUTRAL and not key.startswith(_NEUTRAL_SECTIONS)


def _fields(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if isinstance(value, dict):
            yield f"{prefix}{field.name}", tuple(value)
            for name, part in value.items():
                yield from _fields(part, f"{prefix}{field.name}.{name}.")
        elif dataclasses.is_dataclass(value):
            yield from _fields(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value
