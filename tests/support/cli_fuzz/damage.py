"""Files that are not what they were: cut short, with flipped bits, exchanged, unreadable, or no files at all."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Damage:
    """A file that is not what it was."""

    path: str
    kind: str
    at: float
    """Where, as a share of its length."""


def inflict(damage: Damage, folder: Path) -> None:
    """Damage a file of a case."""
    path = folder / damage.path
    if path.is_file() or path.is_symlink():
        _INFLICT[damage.kind](path, damage.at)


def _rewritten(change: Callable[[bytearray, int], None]) -> Callable[[Path, float], None]:
    def inflict(path: Path, at: float) -> None:
        data = bytearray(path.read_bytes())
        change(data, int(at * max(0, len(data) - 1)))
        path.write_bytes(bytes(data))

    return inflict


def _flip(data: bytearray, at: int) -> None:
    if data:
        data[at] ^= 1 << (at % 8)


def _cut(data: bytearray, at: int) -> None:
    del data[at:]


def _zero(data: bytearray, at: int) -> None:
    data[at : at + 16] = bytes(len(data[at : at + 16]))


def _insert(data: bytearray, at: int) -> None:
    data[at:at] = b"\xff\x00,\n"


def _remove(data: bytearray, at: int) -> None:
    del data[at : at + 1 + at % 40]


def _append(data: bytearray, at: int) -> None:
    data += data[at:] or b"x"


def _other_columns(data: bytearray, _: int) -> None:
    """Other names for what the file calls its columns and keys, of the same length."""
    for name in (b"item", b"time", b"rows", b"step"):
        data[:] = data.replace(name, name[::-1])


def _to_folder(path: Path, _: float) -> None:
    path.unlink()
    path.mkdir()


def _swap(path: Path, _: float) -> None:
    """Another file of the same folder in its place."""
    others = sorted(one for one in path.parent.iterdir() if one.is_file() and one != path)
    if others:
        path.write_bytes(others[0].read_bytes())


_INFLICT: dict[str, Callable[[Path, float], None]] = {
    "cut": _rewritten(_cut),
    "empty": _rewritten(lambda data, _: data.clear()),
    "flip": _rewritten(_flip),
    "zero": _rewritten(_zero),
    "insert": _rewritten(_insert),
    "remove": _rewritten(_remove),
    "append": _rewritten(_append),
    "other columns": _rewritten(_other_columns),
    "folder": _to_folder,
    "unreadable": lambda path, _: path.chmod(0),
    "swap": _swap,
}
KINDS = tuple(_INFLICT)
