"""Draws the pictures of the concepts, one each: `python docs/concepts/pictures.py` writes them beside itself."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

COMPUTE, DARK, WAIT, ROWS, URGENT, IDS, GREY = (
    "#2b7bba", "#123f74", "#d62839", "#3a7d44", "#f57c00", "#6a8d73", "#9aa5b1",
)  # fmt: skip
LEFT, HEIGHT, GAP, WIDTH = 110, 34, 10, 820


class Box(NamedTuple):
    """Something that takes from `begin` to `end`, in hundredths of the picture's width."""

    begin: float
    end: float
    colour: str
    text: str = ""


class Row(NamedTuple):
    """Boxes beside a name."""

    name: str
    boxes: Sequence[Box]


def picture(says: str, rows: Sequence[Row], *, notes: Iterable[tuple[float, str]] = ()) -> str:
    """Rows under each other; `notes` stand below, at hundredths of the width."""
    scale = (WIDTH - LEFT - 20) / 100
    height = 16 + len(rows) * (HEIGHT + GAP) + 26
    shapes = [f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>']
    for place, row in enumerate(rows):
        top = 12 + place * (HEIGHT + GAP)
        shapes.append(_text(LEFT - 10, top + 22, row.name, "#1d2530", "end"))
        for box in row.boxes:
            x, width = LEFT + scale * box.begin, scale * (box.end - box.begin)
            shapes.append(
                f'<rect x="{x:.0f}" y="{top}" width="{width - 2:.0f}" height="{HEIGHT}" rx="3" fill="{box.colour}"/>'
            )
            shapes.append(_text(x + width / 2 - 1, top + 22, box.text, "#fff"))
    shapes += [_text(LEFT + scale * at, height - 12, text, "#4a5563") for at, text in notes]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{says}"'
    return f'{head} font-family="system-ui, sans-serif" font-size="12">\n' + "\n".join(shapes) + "\n</svg>\n"


def _text(x: float, y: float, words: str, colour: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" text-anchor="{anchor}">{words}</text>' if words else ""


def _ranks(lengths: Sequence[float]) -> list[Row]:
    """Ranks that compute so long, and wait for the longest."""
    longest = max(lengths)
    return [
        Row(
            f"rank {rank}",
            [Box(0, length, COMPUTE, "computes"), *([Box(length, longest, WAIT, "waits")] if length < longest else [])],
        )
        for rank, length in enumerate(lengths)
    ]


_TWO_STEPS = [
    Box(0, 18, COMPUTE, "forward i"),
    Box(18, 44, DARK, "backward i"),
    Box(56, 74, COMPUTE, "forward i + 1"),
    Box(74, 100, DARK, "backward i + 1"),
]
_BEHIND = [
    Box(0, 10, IDS, "ids i + 1"),
    Box(10, 40, ROWS, "other rows i + 1"),
    Box(56, 84, GREY, "other gradients i"),
]
_SHARD = [Box(0, 36, GREY, "read"), Box(36, 50, URGENT, "step i"), Box(50, 100, COMPUTE, "to come")]

PICTURES = {
    "stragglers": picture(
        "Three ranks wait for the one with the longest histories.",
        _ranks([42, 95, 58, 35]),
        notes=[(47, "one step: it ends when the slowest rank has computed its batch")],
    ),
    "collisions": picture(
        "Rows that batch i changes and batch i + 1 reads have to be waited for; all others can be fetched early.",
        [
            Row("batch i", [Box(0, 52, COMPUTE, "rows of batch i alone"), Box(52, 64, URGENT, "both")]),
            Row("batch i + 1", [Box(52, 64, URGENT, "both"), Box(64, 100, ROWS, "rows of batch i + 1 alone")]),
        ],
        notes=[(50, "of both: changed, then read; of batch i + 1 alone: fetched while batch i is computed")],
    ),
    "lanes": picture(
        "Compute, urgent and deferred traffic of two steps.",
        [Row("compute", _TWO_STEPS), Row("urgent", [Box(44, 56, URGENT, "shared rows")]), Row("deferred", _BEHIND)],
        notes=[(50, "only this is waited for")],
    ),
    "sm-free": picture(
        "A transfer by the cores of a GPU slows compute beside it; one by copy engines does not.",
        [
            Row("cores", [Box(0, 78, COMPUTE, "compute, slowed"), Box(78, 100, DARK, "compute")]),
            Row("NCCL", [Box(0, 60, URGENT, "transfer, on some of the same cores")]),
            Row("cores", [Box(0, 62, COMPUTE, "compute at full speed"), Box(62, 84, DARK, "compute")]),
            Row("copy engines", [Box(0, 70, ROWS, "the same transfer, on none of them")]),
        ],
    ),
    "placement": picture(
        "The samples of a step are the same on two ranks and on three; so are their sum and what is learnt.",
        [
            Row("2 ranks", [Box(0, 48, COMPUTE, "a  b  c"), Box(52, 100, COMPUTE, "d  e  f")]),
            Row("3 ranks", [Box(0, 31, ROWS, "a  b"), Box(35, 65, ROWS, "c  d"), Box(69, 100, ROWS, "e  f")]),
            Row("balanced", [Box(0, 48, URGENT, "a  f"), Box(52, 100, URGENT, "b  c  d  e")]),
        ],
        notes=[(50, "sum of the losses of a to f, divided by their number")],
    ),
    "cursor": picture(
        "The log is cut into virtual shards; a cursor says how far all of them are read, for any number of ranks.",
        [Row(f"shard {shard}", _SHARD) for shard in range(4)],
        notes=[(36, "cursor: epoch, step"), (76, "4 shards: 1, 2 or 4 ranks read them alike")],
    ),
}


def main() -> None:
    """Write all of them."""
    for name, drawn in PICTURES.items():
        (Path(__file__).parent / f"{name}.svg").write_text(drawn)


if __name__ == "__main__":
    main()
