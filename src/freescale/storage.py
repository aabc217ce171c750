"""Files of a folder at any fsspec address: read, upload, and replace atomically."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import fsspec

from freescale.errors import StorageError, reason

_REMEDY = "check the address, its permissions and its free space"


class StorageFolder:
    """A folder on a local disk or in an object store. Every failure is a StorageError, except for missing files."""

    def __init__(self, address: str) -> None:
        self.address = address
        try:
            self._fs, root = fsspec.core.url_to_fs(address)
        except (ValueError, ImportError, OSError) as error:
            remedy = "give a local folder or an fsspec address such as s3://bucket/folder, with its package installed"
            what = f"the address cannot be opened: {reason(error)}"
            raise StorageError(what, where=address, remedy=remedy) from error
        self._root = str(root).rstrip("/")
        self._is_local = "file" in ((self._fs.protocol,) if isinstance(self._fs.protocol, str) else self._fs.protocol)

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a file; None if there is none."""
        with self._errors(name):
            try:
                return bytes(self._fs.cat_file(self._path(name)))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def upload(self, local: Path, name: str) -> None:
        """Copy a local file, or all files of a local folder, to a name. Not atomic."""
        files = [path for path in sorted(local.rglob("*")) if path.is_file()] if local.is_dir() else [local]
        for path in files:
            target = name if path == local else f"{name}/{path.relative_to(local).as_posix()}"
            with self._errors(target):
                self._make_parent(target)
                self._fs.put_file(str(path), self._path(target))
                if self._is_local:
                    sync_to_disk(Path(self._path(target)))

    def replace(self, name: str, content: bytes) -> None:
        """Write a file so that readers find the old or the new content, and nothing between."""
        with self._errors(name):
            self._make_parent(name)
            if not self._is_local:  # an object appears when its upload is complete
                self._fs.pipe_file(self._path(name), content)
                return
            target = Path(self._path(name))
            partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
            try:
                partial.write_bytes(content)
                sync_to_disk(partial)
                partial.replace(target)
                sync_to_disk(target.parent)
            finally:
                partial.unlink(missing_ok=True)

    def delete(self, name: str) -> None:
        """Remove a file that nothing refers to. A failure is ignored: the file takes space and does no harm."""
        with contextlib.suppress(Exception):
            self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_parent(self, name: str) -> None:
        if self._is_local:
            Path(self._path(name)).parent.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except Exception as error:  # every object store has its own
            where = f"{self.address.rstrip('/')}/{name}"
            raise StorageError(f"the file cannot be used: {reason(error)}", where=where, remedy=_REMEDY) from error


def sync_to_disk(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
