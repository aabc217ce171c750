"""`freescale bench transport`: how quick each way between ranks is here, and what it takes from compute."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from freescale import page
from freescale.cli.options import Flag, parse, print_json, print_table, say, write_page
from freescale.errors import UsageError
from freescale.launch import launched_instead
from freescale.progress import progress

if TYPE_CHECKING:
    from freescale.transport.probe import Measured

_DEADLINE = 120.0
_HEADER = ["way", "KiB sent by a rank", "ms", "ms taken from compute"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure every way that is possible between these ranks, alone and behind compute; write a page with the curves.

    freescale bench transport --nproc 2
    """

    nproc: int = 2
    """Ranks to start on this machine; under torchrun or SLURM, those that were started."""
    kib: tuple[int, ...] = (16, 64, 256, 1024, 4096, 16384)
    """Sizes: what a rank sends in one transfer."""
    out: Path = Path("transport.html")
    """The page."""
    json: Flag = False
    """Print the table as JSON."""
    quiet: Flag = False
    """Show no progress, only results, notes and errors."""


def run(argv: Sequence[str], prog: str) -> int:
    """Measure, print and draw."""
    options = parse(Options, argv, prog)
    if min(options.kib, default=0) < 1:
        raise UsageError("--kib takes sizes of at least 1", remedy=f"see {prog} --help")
    if (code := launched_instead(["bench", "transport", *argv], ranks=options.nproc)) is not None:
        return code
    with progress("starting"):
        from freescale.transport.choose import Ways, explain, pick
        from freescale.transport.probe import probe
        from freescale.transport.world import join, leave

        world = join(timeout=_DEADLINE)
    ways = Ways(world)
    opened = {name: ways.make(name) for name in ways.possible}
    found = probe(opened, world.transport, world.device, sizes=[kib << 10 for kib in options.kib], rounds=5)
    by_size = [[one for one in found if one.sent_bytes == kib << 10] for kib in options.kib]
    picks = [explain(lane, pick(of, lane), of) for of in by_size for lane in ("urgent", "deferred")]
    if world.is_rank_zero:
        write_page(options.out, _page(found, picks, ways.impossible))
        if options.json:
            print_json({"measured": [asdict(one) for one in found], "impossible": ways.impossible, "picks": picks})
        else:
            print_table(f"{world.world_size} ranks", _HEADER, _rows(found))
            impossible = [f"not possible: {way}, {why}" for way, why in ways.impossible.items()]
            say(*picks, *impossible, f"page: {options.out}")
    leave()
    return 0


def _rows(found: Sequence["Measured"]) -> list[list[str]]:
    return [[m.way, f"{m.sent_bytes >> 10:,}", f"{m.seconds * 1e3:.2f}", f"{m.taken_seconds * 1e3:.2f}"] for m in found]


def _page(found: Sequence["Measured"], picks: Sequence[str], impossible: dict[str, str]) -> str:
    left_out = [f"Not possible here: {way}, since {why}." for way, why in impossible.items()]
    return page.document(
        "Ways between ranks",
        "Every way moves the same bytes; they differ in time, and in what they take from compute beside them.",
        page.section(
            "A transfer that everybody waits for",
            "Time of the slowest rank. Urgent traffic takes the quickest way.",
            _curves(found, lambda one: one.seconds, "ms"),
        ),
        page.section(
            "A transfer behind compute",
            "Compute time that is lost while it goes on. Deferred traffic takes the way that costs the least.",
            _curves(found, lambda one: one.taken_seconds, "ms of compute"),
        ),
        page.section("All figures", " ".join(left_out), page.table(_HEADER, _rows(found))),
        page.section("What would be chosen", "By size and lane.", page.table(["choice"], [[line] for line in picks])),
    )


def _curves(found: Sequence["Measured"], figure: Callable[["Measured"], float], unit: str) -> str:
    by_way = {one.way: [other for other in found if other.way == one.way] for one in found}
    sizes = {way: [one.sent_bytes / 1024 for one in some] for way, some in by_way.items()}
    lines = [page.Series(way, sizes[way], [max(1e-3, 1e3 * figure(one)) for one in by_way[way]]) for way in by_way]
    return page.line_chart(lines, page.Axis("KiB sent by a rank", log=True), page.Axis(unit, log=True))
