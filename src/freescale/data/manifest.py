"""The description of a data set: its files, their checksums, and the sizes of its row groups. Pure.

`manifest.json` spares every rank the footers of files that other ranks read. It holds the checksums of all that is read
before any row: footers, checksum files and the manifest itself. A data set is a list of *stripes*. A stripe is up to 64
files; its row groups are assigned to them round-robin, so the file of a row group follows from its virtual shard.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from freescale.data.order import MAX_GROUP_ROWS, RowGroupLayout
from freescale.data.parquet import FileEntry
from freescale.errors import DataError

MANIFEST_FILE = "manifest.json"
MANIFEST_VERSION = 3
GROUPS_PER_FILE = 4096
T = TypeVar("T")
_REWRITE = "write the data set again with `freescale data import` or `freescale data synth`"


class Stripe(NamedTuple):
    """Files that share row groups: group k of the stripe is group k // len(files) of file k % len(files)."""

    files: tuple[FileEntry, ...]
    rows: int
    rows_per_group: int

    @property
    def groups(self) -> int:
        """Number of row groups over all files; only the last may be short."""
        return -(-self.rows // self.rows_per_group)


class Manifest(NamedTuple):
    """Description of a data set."""

    stripes: tuple[Stripe, ...]
    events: int
    items: int
    """Size of the item vocabulary: item ids below this are known."""
    vocabulary: str
    """Fingerprint of the vocabulary."""
    note: str = ""
    """One line on the origin of the data, and on what is synthetic."""
    features: Mapping[str, int] = {}
    """Size of the vocabulary of every categorical column, including sets of ids. Other columns hold plain numbers."""

    @property
    def rows(self) -> int:
        """Number of histories."""
        return sum(stripe.rows for stripe in self.stripes)

    def layout(self) -> RowGroupLayout:
        """Sizes of all row groups, in log order."""
        stripe_rows = [(s.rows_per_group, s.rows - s.rows_per_group * np.arange(s.groups)) for s in self.stripes]
        counts = [np.minimum(most, remaining) for most, remaining in stripe_rows]
        return RowGroupLayout.from_counts(np.concatenate([np.empty(0, dtype=np.int64), *counts]))


def data_file_name(stripe: int, file: int) -> str:
    """File name whose alphabetical order is the order of the stripes."""
    return f"part-{stripe:05d}-{file:02d}.parquet"


def dump_manifest(manifest: Manifest) -> bytes:
    """Serialize a manifest with its own checksum."""
    return seal(manifest_body(manifest))


def seal(body: object) -> bytes:
    """Serialize the description of a data set with its checksum."""
    return json.dumps({"freescale": MANIFEST_VERSION, "crc": _crc(body), "data": body}, separators=(",", ":")).encode()


def manifest_checksum(manifest: Manifest) -> str:
    """Checksum of the contents of a data set, from the sizes and checksums of its files."""
    return f"{_crc(manifest_body(manifest)):08x}"


def manifest_body(manifest: Manifest) -> dict[str, object]:
    """Return a manifest as plain values."""
    # Every rank reads this, so it takes about 25 bytes per file. File names follow from the indices.
    stripes = [
        [stripe.rows, stripe.rows_per_group, [[f.size, f.footer_size, f.footer_crc, f.sums_crc] for f in stripe.files]]
        for stripe in manifest.stripes
    ]
    others = {name: getattr(manifest, name) for name in ("events", "items", "vocabulary", "note")}
    return {"stripes": stripes, **others, "features": dict(manifest.features)}


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Parse a manifest; anything that `dump_manifest` did not write is an error."""
    return unseal(raw, manifest_of, where=where)


def unseal(raw: bytes, parse: Callable[[Any], T], *, where: str) -> T:
    """Verify the checksum of a description and parse it. `parse` raises on any value that it does not expect."""
    try:
        tree = json.loads(raw)
        version, body = tree["freescale"], tree["data"]
        if version == MANIFEST_VERSION and tree["crc"] == _crc(body):
            return parse(body)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"the manifest is damaged: {error}", where=where, remedy=_REWRITE) from error
    if version != MANIFEST_VERSION:
        what = f"the manifest has version {version!r}, this package reads {MANIFEST_VERSION}"
        raise DataError(what, where=where, remedy=_REWRITE)
    raise DataError("the manifest is damaged: its checksum does not match", where=where, remedy=_REWRITE)


def manifest_of(body: Any, folder: str = "") -> Manifest:
    """Return the manifest of plain values. `folder`: what the names of its files begin with."""
    stripes = tuple(
        Stripe(
            tuple(FileEntry(folder + data_file_name(s, f), *file) for f, file in enumerate(files)), rows, rows_per_group
        )
        for s, (rows, rows_per_group, files) in enumerate(body["stripes"])
    )
    texts = str(body["vocabulary"]), str(body["note"])
    manifest = Manifest(stripes, body["events"], body["items"], *texts, dict(body["features"]))
    if not _is_plausible(manifest):
        raise ValueError("a count is out of range")
    return manifest


def _is_plausible(manifest: Manifest) -> bool:
    """Whether all counts are in range. Memory is allocated by them, so a damaged count must not pass."""
    files = [file for stripe in manifest.stripes for file in stripe.files]
    counts = [n for file in files for n in (file.size, file.footer_size, file.footer_crc, file.sums_crc)]
    counts += [manifest.events, manifest.items, *(n for s in manifest.stripes for n in (s.rows, s.rows_per_group))]
    counts += manifest.features.values()
    if not all(type(name) is str for name in manifest.features):
        return False
    return all(type(n) is int and 0 <= n < 2**63 for n in counts) and all(
        1 <= s.rows_per_group <= MAX_GROUP_ROWS and s.groups <= len(s.files) * GROUPS_PER_FILE for s in manifest.stripes
    )


def _crc(body: object) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
