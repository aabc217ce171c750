"""`freescale data stats`: what a data set is like, and what it would cost ranks that take random batches of it.

Composes two rooms that do not know each other: `data` counts lengths, `balance` says what lengths cost.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from freescale import page
from freescale.balance.cost import Cost
from freescale.balance.estimate import Imbalance, random_batches
from freescale.cli.options import (
    Flag,
    check_all,
    parse,
    print_json,
    print_table,
    require_at_least,
    say,
    write_page,
)
from freescale.config import ModelConfig
from freescale.data.dataset import QUANTILES, Dataset, DatasetStats, compute_stats
from freescale.data.validation import Quarantine
from freescale.errors import DataError
from freescale.log import warning_once
from freescale.progress import track

_TOP = (0.001, 0.01, 0.1)
_MODEL = ModelConfig(kind="hstu", dim=256, layers=8, heads=4)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Lengths, popularity, and the bubble that random batches would cost on this data.

    freescale data stats data/kr --ranks 8 64 256
    """

    path: tyro.conf.Positional[str]
    """Folder of Parquet histories: a local path or any fsspec address."""
    ranks: tuple[int, ...] = (8, 64, 256)
    """Numbers of ranks to estimate for."""
    batch: int = 128
    """Samples per rank and step."""
    max_history: int = 1_000_000
    """Histories are taken as cut to this length."""
    model: ModelConfig = _MODEL
    """Whose cost is taken."""
    on_bad: Literal["stop", "skip"] = "stop"
    """stop at the first unusable row, or skip: count them and write them to quarantine.jsonl."""
    page: Path | None = None
    """Write a page with plots, self-contained, to this file."""
    json: Flag = False
    """Print everything as JSON."""
    quiet: Flag = False
    """Show no progress, only results, notes and errors."""


def run(argv: Sequence[str], prog: str) -> int:
    """Describe the data set on the terminal, as JSON, or as a page."""
    options = parse(Options, argv, prog)
    check_all(
        lambda: Dataset(options.path),
        lambda: require_at_least(options, ranks=1, batch=1, max_history=1),
    )
    dataset = Dataset(options.path, quarantine=Quarantine(options.on_bad, "quarantine.jsonl"))
    found = compute_stats(dataset)
    if not found.rows:
        raise DataError("the data set holds no usable history", where=options.path, remedy="import or make it again")
    costs = Cost.of_model(options.model).of(np.minimum(found.lengths.values, options.max_history))
    sizes = track(options.ranks, "estimating bubbles", total=sum(options.ranks), size=float)
    bubbles = [random_batches(costs, found.lengths.counts, world_size=n, batch=options.batch) for n in sizes]
    unchecked = dataset.unchecked_files()
    _say_what_was_seen(dataset, unchecked)
    if options.page:
        write_page(options.page, _page(options, found, bubbles))
    if options.json:
        seen = {"set_aside": dict(dataset.quarantine.counts), "files_without_checksums": len(unchecked)}
        print_json(_figures(options, found, bubbles) | seen)
    else:
        _print(options, found, bubbles)
    return 0


def _say_what_was_seen(dataset: Dataset, unchecked: list[str]) -> None:
    if dataset.quarantine.rows:
        warning_once(dataset.quarantine.summary())
    if unchecked:
        which = f"{len(unchecked)} files without page checksums ({unchecked[0]} first)"
        warning_once(f"{which}: flipped bits cannot be seen there")


def _figures(options: Options, found: DatasetStats, bubbles: list[Imbalance]) -> dict[str, Any]:
    quantiles = {f"{q:g}": found.quantile(q) for q in QUANTILES}
    return {
        "path": options.path,
        "histories": found.rows,
        "events": found.events,
        "items": len(found.items.values),
        "length": {"mean": found.mean_length, "variation": found.variation, "quantiles": quantiles},
        "popularity": {f"{share:g}": found.top_share(share) for share in _TOP},
        "model": asdict(options.model),
        "random_batches": [{**asdict(b), "recoverable_share": b.recoverable_share} for b in bubbles],
    }


def _length_rows(found: DatasetStats) -> list[list[str]]:
    names = {0.0: "shortest", 0.5: "median", 1.0: "longest"}
    rows = [[names.get(q, f"{100 * q:g}%"), f"{found.quantile(q):,}"] for q in QUANTILES]
    return [*rows, ["mean", f"{found.mean_length:,.1f}"], ["deviation / mean", f"{found.variation:.2f}"]]


def _popularity_rows(found: DatasetStats) -> list[list[str]]:
    return [[f"top {100 * top:g}% of the items", f"{found.top_share(top):.1%} of the events"] for top in _TOP]


def _bubble_rows(bubbles: list[Imbalance]) -> list[list[str]]:
    shares = [[f"{b.straggler_share:.1%}", f"{b.best_share:.1%}", f"{b.recoverable_share:.1%}"] for b in bubbles]
    return [[f"{b.world_size:,}", f"{b.max_over_mean:.3f}", *of] for b, of in zip(bubbles, shares, strict=True)]


_BUBBLE_HEADER = ["ranks", "slowest / mean", "ranks wait", "at best", "recoverable"]


def _print(options: Options, found: DatasetStats, bubbles: list[Imbalance]) -> None:
    say(f"{options.path}: {_counts(found)}")
    print_table("events per history", ["quantile", "events"], _length_rows(found))
    print_table("popularity", ["items", "share"], _popularity_rows(found))
    print_table(_bubble_title(options), _BUBBLE_HEADER, _bubble_rows(bubbles))


def _counts(found: DatasetStats) -> str:
    return f"{found.rows:,} histories, {found.events:,} events, {len(found.items.values):,} items"


def _bubble_title(options: Options) -> str:
    model = options.model
    return f"random batches of {options.batch} per rank, {model.kind} with {model.layers} layers of {model.dim}"


def _page(options: Options, found: DatasetStats, bubbles: list[Imbalance]) -> str:
    longest = found.quantile(1.0)
    edges = np.unique(np.geomspace(max(1, found.quantile(0.0)), longest + 1, 41).round())
    counts, _ = np.histogram(found.lengths.values, bins=edges, weights=found.lengths.counts)
    popularity = found.popularity()
    places = np.unique(np.geomspace(1, len(popularity), 200).round().astype(int))
    events, histories = page.Axis("events in a history", log=True), page.Axis("histories")
    items = page.Series("items", places.tolist(), popularity[places - 1].tolist())
    by_popularity = page.Axis("item, by popularity", log=True), page.Axis("events", log=True)
    return page.document(
        f"Data set {options.path}",
        _counts(found),
        page.section(
            "Bubbles of random batches",
            f"{_bubble_title(options)}: the share of its time that a rank waits for the slowest one, and what is left "
            "when samples are placed as well as can be.",
            page.table(_BUBBLE_HEADER, _bubble_rows(bubbles)),
            _bubble_chart(bubbles),
        ),
        page.section(
            "Lengths",
            "How many histories have how many events.",
            page.table(["quantile", "events"], _length_rows(found)),
            page.histogram(edges.tolist(), counts.tolist(), events, histories),
        ),
        page.section(
            "Popularity",
            "Events per item, most popular first.",
            page.table(["items", "share"], _popularity_rows(found)),
            page.line_chart([items], *by_popularity),
        ),
    )


def _bubble_chart(bubbles: list[Imbalance]) -> str:
    ranks = [float(b.world_size) for b in bubbles]
    drawn = page.Series("random batches", ranks, [b.straggler_share for b in bubbles])
    best = page.Series("placed at best", ranks, [b.best_share for b in bubbles])
    axes = page.Axis("ranks", log=len(ranks) > 1), page.Axis("time spent waiting", percent=True)
    return page.line_chart([drawn, best], *axes)
