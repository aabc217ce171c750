"""`freescale bench transport`: how quick each way between ranks is here, and what it takes from compute."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from freescale import page
from freescale.cli.options import Flag, parse, print_json, print_table, say, write_page
from freescale.errors import UsageError
from freescale.launch.launcher import launch_ranks
from freescale.progress import progress

if TYPE_CHECKING:
    from freescale.transport.selection import TransportTiming

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
    if (code := launch_ranks(["bench", "transport", *argv], nproc=options.nproc)) is not None:
        return code
    with progress("starting"):
        from freescale.transport.selection import TransportFactory, best_transport, explain, probe
        from freescale.transport.world import destroy_world, init_world

        world = init_world(timeout=_DEADLINE)
    ways = TransportFactory(world)
    opened = {name: ways.create(name) for name in ways.available}
    found = probe(opened, world.transport, world.device, sizes=[kib << 10 for kib in options.kib], rounds=5)
    by_size = [[one for one in found if one.sent_bytes == kib << 10] for kib in options.kib]
    picks = [explain(lane, best_transport(of, lane), of) for of in by_size for lane in ("urgent", "deferred")]
    if world.is_rank_zero:
        write_page(options.out, _page(found, picks, ways.unavailable))
        if options.json:
            print_json({"measured": [asdict(one) for one in found], "impossible": ways.unavailable, "picks": picks})
        else:
            print_table(f"{world.world_size} ranks", _HEADER, _rows(found))
            impossible = [f"not possible: {way}, {why}" for way, why in ways.unavailable.items()]
            say(*picks, *impossible, f"page: {options.out}")
    destroy_world()
    return 0


def _rows(found: Sequence["TransportTiming"]) -> list[list[str]]:
    return [
        [m.transport, f"{m.sent_bytes >> 10:,}", f"{m.seconds * 1e3:.2f}", f"{m.lost_compute_seconds * 1e3:.2f}"]
        for m in found
    ]


def _page(found: Sequence["TransportTiming"], picks: Sequence[str], impossible: dict[str, str]) -> str:
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
            _curves(found, lambda one: one.lost_compute_seconds, "ms of compute"),
        ),
        page.section("All figures", " ".join(left_out), page.table(_HEADER, _rows(found))),
        page.section("What would be chosen", "By size and lane.", page.table(["choice"], [[line] for line in picks])),
    )


def _curves(found: Sequence["TransportTiming"], figure: Callable[["TransportTiming"], float], unit: str) -> str:
    by_way = {one.transport: [other for other in found if other.transport == one.transport] for one in found}
    sizes = {way: [one.sent_bytes / 1024 for one in some] for way, some in by_way.items()}
    lines = [page.Series(way, sizes[way], [max(1e-3, 1e3 * figure(one)) for one in by_way[way]]) for way in by_way]
    return page.line_chart(lines, page.Axis("KiB sent by a rank", log=True), page.Axis(unit, log=True))
