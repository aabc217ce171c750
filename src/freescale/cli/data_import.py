"""`freescale data import`: turn a log into a data set."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro

from freescale.cli.options import Flag, parse, print_json, require_at_least, say
from freescale.data import histories, importers
from freescale.data.append import AppendOptions, append_partition
from freescale.data.event_log import LogColumns, TimeUnit
from freescale.data.feature_columns import FeatureColumn
from freescale.data.log_reader import LogSpec, SideTableSpec
from freescale.data.text_log import CsvStyle
from freescale.data.validation import Quarantine
from freescale.errors import UsageError, storage_errors
from freescale.log import warning_once

_FEATURE_OPTIONS = {
    "features": ("events", "histories"),
    "event_labels": ("events",),
    "items": ("events", "kuairand", "yambda"),
    "item_features": ("events",),
    "users": ("events", "kuairand"),
    "user_features": ("events",),
}
"""Formats for which an option on features has a meaning."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Turn a log into histories in Parquet, sorted by time, with a saved vocabulary.

    freescale data import ml-1m ml-1m.zip data/ml1m

    freescale data import events clicks.csv data/clicks --user uid --item sku --time ts

    freescale data import events clicks.csv data/clicks --features price --items items.csv --item-features tags:set

    freescale data import events clicks.csv data/rank --impressions shown.csv --labels clicked
    """

    format: tyro.conf.Positional[
        Literal["ml-1m", "ml-20m", "ml-latest", "amazon", "kuairand", "yambda", "events", "histories"]
    ]
    """Format of the log. Public data sets come with their features and labels. amazon: lines of "user item item ...";
    events: CSV, JSON Lines or Parquet with the columns below; histories: Parquet with a history per row, whose items
    are already numbered."""
    paths: tyro.conf.Positional[tuple[str, ...]]
    """The files of the log, folders of them or quoted globs, then the folder to create; with --append any fsspec
    address."""
    user: str = "user_id"
    """Column of the user (events)."""
    item: str = "item_id"
    """Column of the item (events)."""
    time: str = "timestamp"
    """Column of the time (events); "none" uses the order of the lines."""
    time_unit: TimeUnit = "auto"
    """Unit of numeric times (events). auto: by their size. Dates need none."""
    features: tuple[str, ...] = ()
    """Columns to keep, as NAME or NAME:KIND (events, histories). id: numbered by a vocabulary; set: several ids, from
    a list or from text with separators; number; bits: an integer whose bits are actions. Without a kind, text is an
    id."""
    event_labels: tuple[str, ...] = ()
    """Columns with a number per event, or none, which become label_NAME (events)."""
    items: tuple[Path, ...] = ()
    """Table of the items: a line per item, by a column that is called as in the log (events, kuairand, yambda)."""
    item_features: tuple[str, ...] = ()
    """Columns of that table to join to every event and candidate, like --features (events)."""
    users: tuple[Path, ...] = ()
    """Table of the users, likewise (events, kuairand)."""
    user_features: tuple[str, ...] = ()
    """Columns of that table to join to every history (events)."""
    set_separator: str = "|"
    """Separates the elements of a set in text."""
    impressions: tuple[Path, ...] = ()
    """For ranking: logs of impressions, in the same format and with the same columns as the events. The impressions of
    a user at one time are the candidates of one sample, and the events before that time are its history."""
    labels: tuple[str, ...] = ()
    """Columns of the impressions with values from 0 to 1, which become label_NAME."""
    max_history: int = 0
    """Most events to keep before impressions, or in a sample of a partition; 0: 1,000, or as in the data set."""
    separator: str = "auto"
    r"""Field separator (events); \t is a tab. auto: detected from the header among , ; tab and |."""
    quote: str = '"'
    """Quote character, or "none" (events)."""
    encoding: str = "utf-8"
    """Text encoding (events)."""
    vocabulary: Path | None = None
    """A data set whose ids of items and features are kept; keys it lacks share a few rows."""
    raw_ids: tuple[str, ...] = ()
    """Columns for dynamic ids, which need no vocabulary: item_id, or features that are ids or sets. Whole numbers of
    items stay as they are; text is hashed to 63 bits."""
    append: str = ""
    """Add the log to the data set as a partition of this name, such as date=2026-11-16/hour=03, behind the others; the
    first one creates the data set. Its events become targets, and earlier events of their users their context."""
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
    if options.append:
        return _run_append(options, [Path(source) for source in sources], target)
    absolute = Path(target).absolute()  # `.` has no name
    quarantine = Quarantine(options.on_bad, absolute.with_name(f"{absolute.name}.quarantine.jsonl"))
    if options.format == "histories":
        features = _parse(options.features, options)
        imported = importers.copy_histories(Path(sources[0]), Path(target), features=features, quarantine=quarantine)
    else:
        with _open_log(options, [Path(source) for source in sources], absolute, quarantine) as job:
            imported = histories.write_histories(job, target, vocabulary=options.vocabulary, raw=options.raw_ids)
    _warn(quarantine, imported)
    if options.json:
        print_json({**asdict(imported), "set_aside": dict(quarantine.counts)})
    else:
        samples = f"{imported.samples:,} samples of " if options.impressions else ""
        say(f"{target}: {samples}{imported.users:,} users, {imported.items:,} items, {imported.events:,} events")
    return 0


def _run_append(options: ImportOptions, sources: list[Path], address: str) -> int:
    """Append a partition and print its counts."""
    file = f"{options.append.replace('/', '-')}.quarantine.jsonl"
    quarantine = Quarantine(options.on_bad, file)
    scratch = Path.cwd() / "scratch" if "://" in address else Path(address).absolute()
    with _open_log(options, sources, scratch, quarantine) as job:
        belongs = AppendOptions(options.vocabulary, options.raw_ids, options.max_history)
        appended = append_partition(job, address, options.append, belongs)
    if appended is None:
        say(f"{address} has partition {options.append} already: nothing is appended")
        return 0
    partition, imported = appended
    _warn(quarantine, imported)
    counts = {name: getattr(partition, name) for name in ("targets", "duplicates", "late", "too_late")}
    if options.json:
        print_json({**asdict(imported), **counts, "set_aside": dict(quarantine.counts)})
        return 0
    left_out = f"left out: {partition.duplicates:,} duplicates, {partition.too_late:,} too late"
    events = f"{partition.targets:,} events of {imported.users:,} users ({partition.late:,} late)"
    say(f"{address}/{partition.name}: {imported.samples:,} samples with {events}; {left_out}")
    return 0


def _warn(quarantine: Quarantine, imported: histories.ImportSummary) -> None:
    if quarantine.rows:
        warning_once(quarantine.summary())
    if imported.unknown_events:
        what = f"{imported.unknown_events:,} events have items outside the vocabulary"
        warning_once(f"{what}; they share a few table rows")


def _check_import(options: ImportOptions, prog: str) -> None:
    if len(options.paths) < 2:
        raise UsageError("the log or the target folder is missing", remedy=f"{prog} {options.format} LOG FOLDER")
    require_at_least(options, max_history=1, memory_mb=1)
    if options.append and (options.impressions or options.time == "none" or options.format in ("amazon", "histories")):
        what = "a partition needs events with times, and takes no impressions"
        raise UsageError(what, remedy="import the log as events, with --event-labels for ranking")
    if bool(options.impressions) != bool(options.labels):
        raise UsageError("ranking needs both impressions and labels", remedy="--impressions LOG --labels COLUMN")
    if options.impressions and (options.format in ("amazon", "yambda", "histories") or options.time == "none"):
        what = "impressions need times, which tell the events that came before them"
        raise UsageError(what, remedy="give --time COLUMN, or leave out --impressions")
    if options.format == "histories" and (options.vocabulary or len(options.paths) > 2):
        what = "histories are one folder of Parquet files, whose items are numbered already"
        raise UsageError(what, remedy=f"{prog} histories FOLDER NEW_FOLDER")
    if options.raw_ids and (options.vocabulary or options.format == "histories"):
        what = "raw ids need no vocabulary, and those of histories stay as they are"
        raise UsageError(what, remedy="leave out --vocabulary or --raw-ids")
    _check_features(options)


def _check_features(options: ImportOptions) -> None:
    """Refuse options on features that the format does not have, and side tables without a file or without features."""
    for name, formats in _FEATURE_OPTIONS.items():
        if getattr(options, name) and options.format not in formats:
            option = f"--{name.replace('_', '-')}"
            what = f"the format {options.format} has its own columns: {option} belongs to {', '.join(formats)}"
            raise UsageError(what, remedy=f"leave out {option}, or import the log as events")
    for files, features in (("items", "item_features"), ("users", "user_features")):
        if options.format == "events" and bool(getattr(options, files)) != bool(getattr(options, features)):
            what = f"a table of {files} needs both its files and its features"
            raise UsageError(what, remedy=f"--{files} FILE --{features.replace('_', '-')} COLUMN")
    if options.impressions and options.event_labels:
        what = "with impressions, labels belong to the candidates"
        raise UsageError(what, remedy="leave out --event-labels, or give their columns to --features")
    if not options.set_separator:
        raise UsageError("--set-separator is empty", remedy="give the text between two elements, such as ,")


@contextmanager
def _open_log(
    options: ImportOptions, sources: list[Path], target: Path, quarantine: Quarantine
) -> Iterator[histories.ImportJob]:
    """Open the logs. Temporary files are next to the target, whose disk must hold the result anyway."""
    time = None if options.time == "none" else options.time
    columns = LogColumns(options.user, options.item, time, _parse(options.features, options))
    columns = columns._replace(event_labels=options.event_labels)
    style = CsvStyle.parse(options.separator, options.quote, options.encoding)
    disk = next(parent for parent in target.parents if parent.exists())
    with storage_errors(target):
        scratch_folder = tempfile.TemporaryDirectory(dir=disk, prefix=".freescale-import-")
    with scratch_folder as name:
        scratch = Path(name)
        job = LogSpec(sources, scratch, quarantine, columns, style, options.time_unit)
        items = SideTableSpec(options.items, _parse(options.item_features, options))
        users = SideTableSpec(options.users, _parse(options.user_features, options))
        events, impressions = importers.open_log(options.format, job._replace(items=items, users=users)), None
        if options.impressions:
            (scratch / "impressions").mkdir()
            labelled = columns._replace(features=(), labels=options.labels)
            job = job._replace(sources=options.impressions, scratch=scratch / "impressions", columns=labelled)
            impressions = importers.open_log(options.format, job)
        memory, most = options.memory_mb << 20, options.max_history or histories.MAX_HISTORY
        yield histories.ImportJob(events, scratch, quarantine, memory, impressions, max_history=most)


def _parse(features: Sequence[str], options: ImportOptions) -> tuple[FeatureColumn, ...]:
    return tuple(FeatureColumn.parse(text, options.set_separator) for text in features)
