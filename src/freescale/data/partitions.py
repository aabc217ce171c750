"""A data set that grows by partitions: `partitions.json` lists them in order, with their manifests. Pure.

A partition is a data set of its own, in a folder such as `date=2026-11-16/hour=03`. It belongs to the whole when the
list names it, and the list is replaced atomically. The list also holds what the next append needs: how much of a user's
history is kept, and the version of the file that holds it, for each bucket of users.
"""

import re
from typing import Any, NamedTuple

from freescale.data.manifest import Manifest, manifest_body, manifest_checksum, manifest_of, seal, unseal
from freescale.errors import DataError, UsageError

PARTITIONS_FILE = "partitions.json"
IS_TARGET = "is_target"
"""Column of a partition: 1 for events that it adds, 0 for earlier events of their users, which are context."""
CONTEXT_BUCKETS = 64
"""Files with the context of users; user_id modulo this selects one."""
_NAME = re.compile(r"[\w.:-]+(=[\w.:-]+)?(/[\w.:-]+(=[\w.:-]+)?)*")


class DataPartition(NamedTuple):
    """One partition, and what its log held."""

    name: str
    manifest: Manifest
    targets: int
    """Events that it adds."""
    duplicates: int
    """Events that the data set already had."""
    late: int
    """Added events that are older than the newest event of earlier partitions."""
    too_late: int
    """Events that are older than all that is kept of their users, and are left out."""
    last_time: int
    """Time of the newest event so far."""

    @property
    def checksum(self) -> str:
        """Checksum of its contents."""
        return manifest_checksum(self.manifest)


class PartitionList(NamedTuple):
    """All partitions, in order."""

    partitions: tuple[DataPartition, ...] = ()
    max_history: int = 0
    """Events of a sample, including its context."""
    raw: tuple[str, ...] = ()
    """Columns with raw ids."""
    context: tuple[int, ...] = (-1,) * CONTEXT_BUCKETS
    """Version of the context of each bucket of users; -1: none."""

    def until(self, last: str) -> "PartitionList":
        """Return the partitions up to a name or a part of it, such as a date."""
        bound = position(last)
        kept = [one for one in self.partitions if position(one.name)[: len(bound)] <= bound]
        return self._replace(partitions=tuple(kept))

    def require_new(self, name: str, *, where: str) -> None:
        """Refuse a name that is not behind all others."""
        if not _NAME.fullmatch(name) or ".." in name:
            remedy = "take a name such as date=2026-11-16 or date=2026-11-16/hour=03"
            raise UsageError(f"'{name}' cannot be the name of a partition", remedy=remedy)
        if self.partitions and position(name) <= position(last := self.partitions[-1].name):
            what = f"partition {name} is not behind {last}, the last one: training reads partitions in order"
            remedy = "append late events under a later name; they are counted as late"
            raise DataError(what, where=where, remedy=remedy)

    def manifest(self) -> Manifest:
        """Return all partitions as one data set."""
        manifests = [one.manifest for one in self.partitions]
        stripes = tuple(stripe for one in manifests for stripe in one.stripes)
        events = sum(one.events for one in manifests)
        return manifests[-1]._replace(stripes=stripes, events=events, note=f"{len(manifests)} partitions")


def position(name: str) -> tuple[str, ...]:
    """Return what partitions are sorted by: the values of a name without their keys."""
    return tuple(part.rpartition("=")[2] for part in name.split("/"))


def dump_partitions(listed: PartitionList) -> bytes:
    """Serialize the list with its checksum."""
    partitions = [[one.name, manifest_body(one.manifest), *one[2:]] for one in listed.partitions]
    return seal({**listed._asdict(), "partitions": partitions})


def parse_partitions(raw: bytes, where: str) -> PartitionList:
    """Parse a list; anything that `dump_partitions` did not write is an error."""
    return unseal(raw, _parse, where=where)


def _parse(body: Any) -> PartitionList:
    partitions = tuple(
        DataPartition(str(name), manifest_of(manifest, f"{name}/"), *counts)
        for name, manifest, *counts in body["partitions"]
    )
    numbers = [n for one in partitions for n in one[2:]] + [body["max_history"], *body["context"]]
    if not all(type(n) is int and n < 2**63 for n in numbers) or not all(_NAME.fullmatch(p.name) for p in partitions):
        raise ValueError("a count or a name is out of range")
    return PartitionList(partitions, body["max_history"], tuple(map(str, body["raw"])), tuple(body["context"]))
