"""`freescale data import` and `freescale data stats`: import a log, and describe a data set."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from freescale import page
from freescale.balance.assign import Tradeoff, tolerance_curve
from freescale.balance.cost import Cost, Imbalance, random_batches
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
from freescale.data import histories, importers
from freescale.data.dataset import QUANTILES, Dataset, DatasetStats, compute_stats
from freescale.data.event_log import LogColumns, TimeUnit
from freescale.data.text_log import CsvStyle
from freescale.data.validation import Quarantine
from freescale.errors import DataError, UsageError, storage_errors
from freescale.log import warning_once
from freescale.progress import track


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Turn a log into histories in Parquet, sorted by time, with a saved vocabulary.

    freescale data import ml-1m ml-1m.zip data/ml1m

    freescale data import events clicks.csv data/clicks --user uid --item sku --time ts

    freescale data import events clicks.csv data/rank --impressions shown.csv --labels clicked
    """

    format: tyro.conf.Positional[Literal["ml-1m", "ml-20m", "ml-latest", "amazon", "kuairand", "events", "histories"]]
    """Format of the log. amazon: lines of "user item item ..."; events: CSV, JSON Lines or Parquet with the columns
    below; histories: Parquet with a history per row, whose items are already numbered."""
    paths: tyro.conf.Positional[tuple[Path, ...]]
    """The files of the log, folders of them or quoted globs, then the folder to create."""
    user: str = "user_id"
    """Column of the user (events)."""
    item: str = "item_id"
    """Column of the item (events)."""
    time: str = "timestamp"
    """Column of the time (events); "none" uses the order of the lines."""
    time_unit: TimeUnit = "auto"
    """Unit of numeric times (events). auto: by their size. Dates need none."""
    features: tuple[str, ...] = ()
    """Numeric columns to keep (events)."""
    impressions: tuple[Path, ...] = ()
    """For ranking: logs of impressions, in the same format and with the same columns as the events. The impressions of
    a user at one time are the candidates of one sample, and the events before that time are its history."""
    labels: tuple[str, ...] = ()
    """Columns of the impressions with values from 0 to 1, which become label_NAME."""
    max_history: int = 1000
    """Most events to keep before impressions."""
    separator: str = "auto"
    r"""Field separator (events); \t is a tab. auto: detected from the header among , ; tab and |."""
    quote: str = '"'
    """Quote character, or "none" (events)."""
    encoding: str = "utf-8"
    """Text encoding (events)."""
    vocabulary: Path | None = None
    """A data set whose item numbers are kept; items it lacks share a few rows."""
    on_bad: Literal["stop", "skip"] = "stop"
    """stop at the first unusable line, or skip: count them and write them to a quarantine file next to the data."""
    memory_mb: int = 1024
    """Memory for sorting; larger logs are sorted on disk."""
    json: Flag = False
    """Print the counts as JSON."""
    quiet: Flag = False
    """Show no progress, only results, warnings and errors."""


def run_import(argv: Sequence[str], prog: str) -> int:
    """Import a log and print the counts."""
    options = parse(ImportOptions, argv, prog)
    _check_import(options, prog)
    *sources, target = options.paths
    absolute = target.absolute()  # `.` has no name
    quarantine = Quarantine(options.on_bad, absolute.with_name(f"{absolute.name}.quarantine.jsonl"))
    if options.format == "histories":
        imported = importers.copy_histories(sources[0], target, features=options.features, quarantine=quarantine)
    else:
        imported = _import_log(options, sources, target, quarantine)
    if quarantine.rows:
        warning_once(quarantine.summary())
    if imported.unknown_events:
        warning_once(
            f"{imported.unknown_events:,} events have items outside the vocabulary; they share a few table rows"
        )
    if options.json:
        print_json({**asdict(imported), "set_aside": dict(quarantine.counts)})
    else:
        samples = f"{imported.samples:,} samples of " if options.impressions else ""
        say(f"{target}: {samples}{imported.users:,} users, {imported.items:,} items, {imported.events:,} events")
    return 0


def _check_import(options: ImportOptions, prog: str) -> None:
    if len(options.paths) < 2:
        raise UsageError("the log or the target folder is missing", remedy=f"{prog} {options.format} LOG FOLDER")
    if min(options.max_history, options.memory_mb) < 1:
        raise UsageError("--max-history and --memory-mb must be at least 1", remedy=f"see {prog} --help")
    if bool(options.impressions) != bool(options.labels):
        raise UsageError("ranking needs both impressions and labels", remedy="--impressions LOG --labels COLUMN")
    if options.impressions and (options.format in ("amazon", "histories") or options.time == "none"):
        what = "impressions need times, which tell the events that came before them"
        raise UsageError(what, remedy="give --time COLUMN, or leave out --impressions")
    if options.format == "histories" and (options.vocabulary or len(options.paths) > 2):
        what = "histories are one folder of Parquet files, whose items are numbered already"
        raise UsageError(what, remedy=f"{prog} histories FOLDER NEW_FOLDER")


def _import_log(
    options: ImportOptions, sources: list[Path], target: Path, quarantine: Quarantine
) -> histories.ImportSummary:
    """Open the logs and write their histories."""
    time = None if options.time == "none" else options.time
    columns = LogColumns(options.user, options.item, time, options.features)
    style = CsvStyle.parse(options.separator, options.quote, options.encoding)
    disk = next(parent for parent in target.absolute().parents if parent.exists())  # it must hold the result anyway
    with storage_errors(target):
        scratch_folder = tempfile.TemporaryDirectory(dir=disk, prefix=".freescale-import-")
    with scratch_folder as name:
        scratch = Path(name)
        job = importers.LogSpec(sources, scratch, quarantine, columns, style, options.time_unit)
        events, impressions = importers.open_log(options.format, job), None
        if options.impressions:
            (scratch / "impressions").mkdir()
            labelled = columns._replace(features=(), labels=options.labels)
            job = job._replace(sources=options.impressions, scratch=scratch / "impressions", columns=labelled)
            impressions = importers.open_log(options.format, job)
        memory = options.memory_mb << 20
        log = histories.ImportJob(events, scratch, quarantine, memory, impressions, max_history=options.max_history)
        return histories.write_histories(log, target, vocabulary=options.vocabulary)


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
    unchecked = dataset.unchecked_files()
    _warn_about_data(dataset, unchecked)
    if options.page:
        write_page(options.page, _stats_page(options, stats, bubbles, curves))
    if options.json:
        seen = {"set_aside": dict(dataset.quarantine.counts), "files_without_checksums": len(unchecked)}
        print_json(_stats_values(options, stats, bubbles, curves) | seen)
    else:
        _print_stats(options, stats, bubbles, curves)
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


_CURVE_HEADER = ["ranks", "balance.tolerance", "tokens moved", "slowest / mean"]
_BUBBLE_HEADER = ["ranks", "slowest / mean", "ranks wait", "at best", "recoverable"]


def _print_stats(options: StatsOptions, stats: DatasetStats, bubbles: list[Imbalance], curves: Curves) -> None:
    say(f"{options.path}: {_describe_counts(stats)}")
    print_table("events per history", ["quantile", "events"], _length_rows(stats))
    print_table("popularity", ["items", "share"], _popularity_rows(stats))
    print_table(_bubble_title(options), _BUBBLE_HEADER, _bubble_rows(bubbles))
    print_table("the same batches, balanced", _CURVE_HEADER, _curve_rows(curves))


def _describe_counts(stats: DatasetStats) -> str:
    return f"{stats.rows:,} histories, {stats.events:,} events, {len(stats.items.values):,} items"


def _bubble_title(options: StatsOptions) -> str:
    model = options.model
    return f"random batches of {options.batch} per rank, {model.kind} with {model.layers} layers of {model.dim}"


def _stats_page(options: StatsOptions, stats: DatasetStats, bubbles: list[Imbalance], curves: Curves) -> str:
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
    )


def _bubble_chart(bubbles: list[Imbalance]) -> str:
    ranks = [float(b.world_size) for b in bubbles]
    drawn = page.Series("random batches", ranks, [b.straggler_share for b in bubbles])
    best = page.Series("placed at best", ranks, [b.best_share for b in bubbles])
    axes = page.Axis("ranks", log=len(ranks) > 1), page.Axis("time spent waiting", percent=True)
    return page.line_chart([drawn, best], *axes)
