"""What a data set written by us says of itself: `manifest.json`, beside the Parquet files.

It spares every rank the footers of files that others read, and it carries the checksums of what is read before any
row: the footers, the files with the checksums of the columns, and the manifest itself.

A data set is a list of *stripes*. A stripe is up to 64 files over which row groups are dealt in turn, so that the file
of a row group, and with it the rank that reads its footer, follows from the number of its virtual shard.
"""

import json
import zlib
from typing import NamedTuple

import numpy as np

from freescale.data.order.layout import MOST_ROWS, Layout
from freescale.data.store.files import File
from freescale.errors import DataError

NAME = "manifest.json"
VERSION = 2
GROUPS_PER_FILE = 4096


class Stripe(NamedTuple):
    """Row group k of a stripe is group k // len(files) of file k % len(files)."""

    files: tuple[File, ...]
    rows: int
    rows_per_group: int

    @property
    def groups(self) -> int:
        """Row groups over all files; only the last may be short."""
        return -(-self.rows // self.rows_per_group)


class Manifest(NamedTuple):
    """A whole data set."""

    stripes: tuple[Stripe, ...]
    events: int
    items: int
    """Rows of the item vocabulary: stored item ids below this are known items."""
    vocabulary: str
    """Fingerprint of the vocabulary: which item each of these ids is."""
    note: str = ""
    """Where the data came from and what was made up, in one line."""

    @property
    def rows(self) -> int:
        """Histories in the data set."""
        return sum(stripe.rows for stripe in self.stripes)

    def layout(self) -> Layout:
        """Sizes of all row groups, in log order."""
        of_stripes = [(s.rows_per_group, s.rows - s.rows_per_group * np.arange(s.groups)) for s in self.stripes]
        counts = [np.minimum(most, left) for most, left in of_stripes]
        return Layout.of(np.concatenate([np.empty(0, dtype=np.int64), *counts]))


def file_name(stripe: int, file: int) -> str:
    """Name the files so that their alphabetical order is the order of the stripes."""
    return f"part-{stripe:05d}-{file:02d}.parquet"


def dump(manifest: Manifest) -> bytes:
    """Write the manifest with its own checksum."""
    body = _body(manifest)
    return json.dumps({"freescale": VERSION, "crc": _crc(body), "data": body}, separators=(",", ":")).encode()


def checksum(manifest: Manifest) -> str:
    """Checksum of a data set's contents: of the sizes and checksums of all its files."""
    return f"{_crc(_body(manifest)):08x}"


def _body(manifest: Manifest) -> dict[str, object]:
    # Every rank reads this, so it is kept to some 25 bytes a file: names follow from the numbers.
    stripes = [
        [stripe.rows, stripe.rows_per_group, [[f.size, f.footer_size, f.footer_crc, f.sums_crc] for f in stripe.files]]
        for stripe in manifest.stripes
    ]
    others = {name: getattr(manifest, name) for name in ("events", "items", "vocabulary", "note")}
    return {"stripes": stripes, **others}


def parse(raw: bytes, where: str) -> Manifest:
    """Read a manifest back; anything but what `dump` wrote is an error."""
    try:
        tree = json.loads(raw)
        version, body = tree["freescale"], tree["data"]
        if version == VERSION and tree["crc"] == _crc(body):
            stripes = tuple(
                Stripe(tuple(File(file_name(s, f), *file) for f, file in enumerate(files)), rows, rows_per_group)
                for s, (rows, rows_per_group, files) in enumerate(body["stripes"])
            )
            found = Manifest(stripes, body["events"], body["items"], str(body["vocabulary"]), str(body["note"]))
            if not _possible(found):
                raise ValueError("no data set has such numbers")
            return found
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"the manifest is damaged: {error}", where=where, remedy=_REWRITE) from error
    if version != VERSION:
        what = f"the manifest has version {version!r}, this package reads {VERSION}"
        raise DataError(what, where=where, remedy=_REWRITE)
    raise DataError("the manifest is damaged: its checksum does not match", where=where, remedy=_REWRITE)


_REWRITE = "write the data set again with `freescale data import` or `freescale data synth`"


def _possible(found: Manifest) -> bool:
    """Whether all counts are counts, and the rows no more than such files hold: memory is set aside by them."""
    files = [file for stripe in found.stripes for file in stripe.files]
    counts = [n for file in files for n in (file.size, file.footer_size, file.footer_crc, file.sums_crc)]
    counts += [found.events, found.items, *(n for s in found.stripes for n in (s.rows, s.rows_per_group))]
    return all(type(n) is int and 0 <= n < 2**63 for n in counts) and all(
        1 <= s.rows_per_group <= MOST_ROWS and s.groups <= len(s.files) * GROUPS_PER_FILE for s in found.stripes
    )


def _crc(body: object) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
