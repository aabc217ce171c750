"""`freescale data stats`: describe a data set."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from freescale import page
from freescale.balance.assign import Tradeoff, tolerance_curve
from freescale.balance.cost import Cost, Imbalance, MemoryCost, memory_costs, random_batches
from freescale.cli.options import (
    Flag,
    check_all,
    create_folder_of,
    parse,
    print_json,
    print_table,
    require_at_least,
    say,
    write_page,
)
from freescale.config import ModelConfig
from freescale.data.dataset import QUANTILES, Dataset, DatasetStats, compute_stats
from freescale.data.feature_stats import ColumnStats, describe_columns
from freescale.data.validation import Quarantine
from freescale.errors import DataError
from freescale.log import warning_once
from freescale.progress import track

_TOP = (0.001, 0.01, 0.1)
_COST_MODEL = ModelConfig(kind="hstu", dim=256, layers=8, heads=4)


@dataclass(frozen=True, kw_only=True)
class StatsOptions:
    """Print lengths, popularity, the bubble of random batches on this data, and what balancing them moves.

    freescale data stats data/kr --ranks 8 64 256
    """

    path: tyro.conf.Positional[str]
    """Folder of Parquet histories: a local path or any fsspec address."""
    ranks: tuple[int, ...] = (8, 64, 256)
    """World sizes to estimate."""
    batch: int = 128
    """Samples per rank and step."""
    max_history: int = 1_000_000
    """Longest history; longer ones count as truncated."""
    model: ModelConfig = _COST_MODEL
    """Model for the cost of a sample."""
    on_bad: Literal["stop", "skip"] = "stop"
    """stop at the first unusable row, or skip: count them and write them to quarantine.jsonl."""
    page: Path | None = None
    """Write a self-contained page with plots to this file."""
    json: Flag = False
    """Print everything as JSON."""
    quiet: Flag = False
    """Show no progress, only results, warnings and errors."""


def run_stats(argv: Sequence[str], prog: str) -> int:
    """Describe the data set on the terminal, as JSON, or as a page."""
    options = parse(StatsOptions, argv, prog)
    check_all(
        lambda: Dataset(options.path),
        lambda: require_at_least(options, ranks=1, batch=1, max_history=1),
        lambda: options.page and create_folder_of(options.page),
    )
    dataset = Dataset(options.path, quarantine=Quarantine(options.on_bad, "quarantine.jsonl"))
    stats = compute_stats(dataset)
    if not stats.rows:
        raise DataError(
            "the data set holds no usable history", where=options.path, remedy="import or generate it again"
        )
    lengths, counts = np.minimum(stats.lengths.values, options.max_history), stats.lengths.counts
    costs = Cost.of_model(options.model).of(lengths)
    bubbles, curves = [], {}
    for n in track(options.ranks, "estimating bubbles", total=sum(options.ranks), size=float):
        bubbles.append(random_batches(costs, counts, world_size=n, batch=options.batch))
        curves[n] = tolerance_curve(lengths, costs, counts, world_size=n, batch=options.batch)
    columns, unchecked = describe_columns(options.path, options.on_bad), dataset.unchecked_files()
    _warn_about_data(dataset, unchecked)
    if options.page:
        write_page(options.page, _stats_page(options, stats, bubbles, curves, columns))
    if options.json:
        seen = {"set_aside": dict(dataset.quarantine.counts), "files_without_checksums": len(unchecked)}
        described = {"columns": [column._asdict() for column in columns]}
        print_json(_stats_values(options, stats, bubbles, curves) | described | seen)
    else:
        _print_stats(options, stats, bubbles, curves)
        if columns:
            print_table("columns", _COLUMN_HEADER, _column_rows(columns), words=(0, 1, 2, 5, 6))
    return 0


def _warn_about_data(dataset: Dataset, unchecked: list[str]) -> None:
    if dataset.quarantine.rows:
        warning_once(dataset.quarantine.summary())
    if unchecked:
        which = f"{len(unchecked)} files without page checksums ({unchecked[0]} first)"
        warning_once(f"{which}: flipped bits cannot be detected there")


Curves = dict[int, list[Tradeoff]]
"""What balancing moves and reaches with several tolerances, by world size."""


def _stats_values(
    options: StatsOptions, stats: DatasetStats, bubbles: list[Imbalance], curves: Curves
) -> dict[str, Any]:
    quantiles = {f"{q:g}": stats.quantile(q) for q in QUANTILES}
    return {
        "path": options.path,
        "histories": stats.rows,
        "events": stats.events,
        "items": len(stats.items.values),
        "memory": [cost._asdict() for cost in _memory_costs(options, stats)],
        "length": {"mean": stats.mean_length, "variation": stats.variation, "quantiles": quantiles},
        "popularity": {f"{share:g}": stats.top_share(share) for share in _TOP},
        "model": asdict(options.model),
        "random_batches": [{**asdict(b), "recoverable_share": b.recoverable_share} for b in bubbles],
        "balanced_batches": [{"world_size": n} | point._asdict() for n, curve in curves.items() for point in curve],
    }


def _length_rows(stats: DatasetStats) -> list[list[str]]:
    names = {0.0: "shortest", 0.5: "median", 1.0: "longest"}
    rows = [[names.get(q, f"{100 * q:g}%"), f"{stats.quantile(q):,}"] for q in QUANTILES]
    return [*rows, ["mean", f"{stats.mean_length:,.1f}"], ["deviation / mean", f"{stats.variation:.2f}"]]


def _popularity_rows(stats: DatasetStats) -> list[list[str]]:
    return [[f"top {100 * top:g}% of the items", f"{stats.top_share(top):.1%} of the events"] for top in _TOP]


def _bubble_rows(bubbles: list[Imbalance]) -> list[list[str]]:
    shares = [[f"{b.straggler_share:.1%}", f"{b.best_share:.1%}", f"{b.recoverable_share:.1%}"] for b in bubbles]
    return [[f"{b.world_size:,}", f"{b.max_over_mean:.3f}", *of] for b, of in zip(bubbles, shares, strict=True)]


def _curve_rows(curves: Curves) -> list[list[str]]:
    return [
        [f"{n:,}", f"{point.tolerance:.1%}", f"{point.moved_tokens:.1%}", f"{point.max_over_mean:.3f}"]
        for n, curve in curves.items()
        for point in curve
    ]


_MEMORY_HEADER = ["memory", "pairs per history", "of full", "tokens", "compute"]
_CURVE_HEADER = ["ranks", "balance.tolerance", "tokens moved", "slowest / mean"]
_BUBBLE_HEADER = ["ranks", "slowest / mean", "ranks wait", "at best", "recoverable"]


_COLUMN_HEADER = ["column", "one per", "holds", "distinct", "missing", "most frequent", "quantiles 0, 25, 50, 75, 100%"]


def _column_rows(columns: list[ColumnStats]) -> list[list[str]]:
    """Describe the columns that a feature or a label can read."""
    entries = {"sample": "row", "history": "event", "candidates": "candidate"}
    rows = []
    for c in columns:
        top = ", ".join(f"{value} ({count / max(1, c.values):.1%})" for value, count in c.top)
        quantiles = ", ".join(f"{value:.4g}" for value in c.quantiles)
        distinct = f"{c.distinct:,}" if c.distinct else ""
        rows.append([c.name, entries[c.group], c.kind, distinct, f"{c.missing_share:.1%}", top, quantiles])
    return rows


def _print_stats(options: StatsOptions, stats: DatasetStats, bubbles: list[Imbalance], curves: Curves) -> None:
    say(f"{options.path}: {_describe_counts(stats)}")
    print_table("events per history", ["quantile", "events"], _length_rows(stats))
    print_table("popularity", ["items", "share"], _popularity_rows(stats))
    print_table("attention by model.memory", _MEMORY_HEADER, _memory_rows(options, stats))
    print_table(_bubble_title(options), _BUBBLE_HEADER, _bubble_rows(bubbles))
    print_table("the same batches, balanced", _CURVE_HEADER, _curve_rows(curves))


def _memory_costs(options: StatsOptions, stats: DatasetStats) -> list[MemoryCost]:
    lengths = np.minimum(stats.lengths.values, options.max_history)
    return memory_costs(options.model, lengths, stats.lengths.counts)


def _memory_rows(options: StatsOptions, stats: DatasetStats) -> list[list[str]]:
    shares = "pair_share", "token_share", "work_share"
    return [
        [of.memory, f"{of.pairs:,.0f}", *(f"{getattr(of, share):.1%}" for share in shares)]
        for of in _memory_costs(options, stats)
    ]


def _rules_of(options: StatsOptions) -> str:
    model = options.model
    segments = f"segments of {model.segment} events with {model.summaries} summary tokens"
    return f"{segments}, or the last {model.window} and the first {model.first} events"


def _describe_counts(stats: DatasetStats) -> str:
    return f"{stats.rows:,} histories, {stats.events:,} events, {len(stats.items.values):,} items"


def _bubble_title(options: StatsOptions) -> str:
    model = options.model
    return f"random batches of {options.batch} per rank, {model.kind} with {model.layers} layers of {model.dim}"


def _stats_page(
    options: StatsOptions, stats: DatasetStats, bubbles: list[Imbalance], curves: Curves, columns: list[ColumnStats]
) -> str:
    longest = stats.quantile(1.0)
    edges = np.unique(np.geomspace(max(1, stats.quantile(0.0)), longest + 1, 41).round())
    counts, _ = np.histogram(stats.lengths.values, bins=edges, weights=stats.lengths.counts)
    popularity = stats.popularity()
    places = np.unique(np.geomspace(1, len(popularity), 200).round().astype(int))
    events, histories = page.Axis("events in a history", log=True), page.Axis("histories")
    items = page.Series("items", places.tolist(), popularity[places - 1].tolist())
    by_popularity = page.Axis("item, by popularity", log=True), page.Axis("events", log=True)
    return page.document(
        f"Data set {options.path}",
        _describe_counts(stats),
        page.section(
            "Bubbles of random batches",
            f"{_bubble_title(options)}: the share of its time that a rank waits for the slowest one, and what "
            "remains with the best placement of samples.",
            page.table(_BUBBLE_HEADER, _bubble_rows(bubbles)),
            _bubble_chart(bubbles),
        ),
        page.section(
            "Balanced batches",
            "What balancing such batches moves, and how long the slowest rank then takes: a higher balance.tolerance "
            "moves less.",
            page.table(_CURVE_HEADER, _curve_rows(curves)),
        ),
        page.section(
            "Attention by model.memory",
            f"What each rule costs with {_rules_of(options)}, relative to attention to all earlier events.",
            page.table(_MEMORY_HEADER, _memory_rows(options, stats)),
        ),
        page.section(
            "Lengths",
            "How many histories have how many events.",
            page.table(["quantile", "events"], _length_rows(stats)),
            page.histogram(edges.tolist(), counts.tolist(), events, histories),
        ),
        page.section(
            "Popularity",
            "Events per item, most popular first.",
            page.table(["items", "share"], _popularity_rows(stats)),
            page.line_chart([items], *by_popularity),
        ),
        page.section(
            "Columns",
            "What features and labels can read, besides items and times.",
            page.table(_COLUMN_HEADER, _column_rows(columns), words=(0, 1, 2, 5, 6)),
        ),
    )


def _bubble_chart(bubbles: list[Imbalance]) -> str:
    ranks = [float(b.world_size) for b in bubbles]
    drawn = page.Series("random batches", ranks, [b.straggler_share for b in bubbles])
    best = page.Series("placed at best", ranks, [b.best_share for b in bubbles])
    axes = page.Axis("ranks", log=len(ranks) > 1), page.Axis("time spent waiting", percent=True)
    return page.line_chart([drawn, best], *axes)
