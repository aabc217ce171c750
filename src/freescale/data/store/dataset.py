"""A data set as numbered row groups: ours, described by a manifest, or anyone's Parquet files.

Bad input is the quarantine's business; nothing that a library raises gets past this file. Safe to call from several
threads.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from freescale.data.order.layout import MOST_ROWS, Layout
from freescale.data.store import columns, manifest
from freescale.data.store.files import FETCH_AGAIN, File, Files
from freescale.data.store.quarantine import Place, Quarantine
from freescale.errors import DataError, reason

_Stripe = tuple[int, tuple[File, ...]]
"""The number of its first row group, and its files."""
_CHECK_ADDRESS = "check the address and its permissions"


class Dataset:
    """Histories in Parquet files."""

    def __init__(
        self, address: str, *, features: Sequence[str] = (), longest: int = 10**6, quarantine: Quarantine | None = None
    ) -> None:
        self.address = address
        self.quarantine = quarantine or Quarantine()
        self._longest = longest
        self._files = Files(address)
        self.manifest = self._find_manifest()
        self._stripes, self.layout = _described(self.manifest) if self.manifest else self._discovered()
        self._starts = [first for first, _ in self._stripes]
        self.columns = self._choose_columns(features)

    @property
    def rows(self) -> int:
        """Histories in the data set, usable or not."""
        return self.layout.rows

    @property
    def bytes_read(self) -> int:
        """Bytes fetched so far."""
        return self._files.bytes_read

    def read_group(self, group: int) -> columns.Group:
        """Read and check one row group. One that cannot be read is an error, or holds no usable row where allowed."""
        file, index = self._locate(group)
        rows = int(self.layout.rows_of(group))
        try:
            table = self._files.read_group(file, index, self.columns)
            if table.num_rows != rows:
                raise DataError(f"the row group holds {table.num_rows} rows instead of {rows}")
            if not file.noted:  # only the columns of the first file were looked at so far
                columns.choose(table.schema, tuple(self.columns), Place(file.name))
        except Exception as error:  # Arrow raises many kinds on damaged bytes; none may reach the user bare
            what = error.what if isinstance(error, DataError) else reason(error)
            place = Place(file.name, index)
            self.quarantine.bad(place, "unreadable", what, remedy=FETCH_AGAIN, rows=rows, cause=error)
            return columns.Group.unreadable(rows, self.columns)

        def report(row: int, kind: str, what: str) -> None:
            self.quarantine.bad(Place(file.name, index, row), kind, what, remedy="mend or remove that row")

        return columns.decode(table, longest=self._longest, report=report)

    def unchecked_files(self) -> list[str]:
        """Files whose pages carry no checksum, so that a flipped bit in them cannot be seen."""
        files = [file for _, files in self._stripes for file in files if not file.noted]
        return [file.name for file in files if not self._files.has_page_checksums(file)]

    def _find_manifest(self) -> manifest.Manifest | None:
        try:
            raw = self._files.read(manifest.NAME)
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            remedy = "give the folder that holds the Parquet files"
            raise DataError("this is a file, not a data set", where=self.address, remedy=remedy) from error
        except OSError as error:
            raise DataError(reason(error), where=self.address, remedy=_CHECK_ADDRESS) from error
        return manifest.parse(raw, f"{self.address}/{manifest.NAME}")

    def _discovered(self) -> tuple[list[_Stripe], Layout]:
        """Number the row groups of files that nobody described: by file name, one after another."""
        try:
            found = self._files.list("*.parquet")
        except OSError as error:
            raise DataError(reason(error), where=self.address, remedy=_CHECK_ADDRESS) from error
        if not found:
            remedy = "make some with `freescale data import` or `freescale data synth`, or give their folder"
            raise DataError("no Parquet files here", where=self.address, remedy=remedy)
        stripes: list[_Stripe] = []
        counts: list[int] = []
        for file in found:
            try:
                metadata = self._files.footer(file).metadata
                rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
                if not all(0 <= count <= MOST_ROWS for count in rows):
                    raise DataError(f"a row group claims {max(rows, key=abs):,} rows; {MOST_ROWS:,} are the most")
            except DataError as error:
                place = Place(file.name)
                self.quarantine.bad(place, "unreadable file", error.what, remedy=FETCH_AGAIN, cause=error)
                continue
            stripes.append((len(counts), (file,)))
            counts += rows
        return stripes, Layout.of(counts)

    def _choose_columns(self, features: Sequence[str]) -> dict[str, columns.Kind]:
        why = "there is none"
        for file in (file for _, files in self._stripes for file in files):
            try:
                schema = self._files.footer(file).schema
            except DataError as error:  # reported when, and if, a group of that file is read
                why = f"{error.where}: {error.what}"
                continue
            return columns.choose(schema, features, Place(file.name))
        raise DataError(f"no file here can be read ({why})", where=self.address, remedy=FETCH_AGAIN)

    def _locate(self, group: int) -> tuple[File, int]:
        first, files = self._stripes[bisect_right(self._starts, group) - 1]
        index, file = divmod(group - first, len(files))
        return files[file], index


def _described(found: manifest.Manifest) -> tuple[list[_Stripe], Layout]:
    first = accumulate((stripe.groups for stripe in found.stripes), initial=0)
    return [(next(first), stripe.files) for stripe in found.stripes], found.layout()
