"""`freescale data import`: a log on disk becomes a data set."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro

from freescale.cli.options import Flag, parse, print_json, say
from freescale.data import histories, importers
from freescale.data.event_log import LogColumns, TimeUnit
from freescale.data.text_log import CsvStyle
from freescale.data.validation import Quarantine
from freescale.errors import UsageError, storage_errors
from freescale.log import warning_once


@dataclass(frozen=True, kw_only=True)
class Options:
    """Turn a log into histories in Parquet, sorted by time, with a saved vocabulary.

    freescale data import ml-1m ml-1m.zip data/ml1m

    freescale data import events clicks.csv data/clicks --user uid --item sku --time ts

    freescale data import events clicks.csv data/rank --impressions shown.csv --labels clicked
    """

    format: tyro.conf.Positional[Literal["ml-1m", "ml-20m", "ml-latest", "amazon", "kuairand", "events", "histories"]]
    """What the log is. amazon: lines of "user item item ..."; events: CSV, JSON Lines or Parquet with the columns named
    below; histories: Parquet with a history per row, whose items are numbered already."""
    paths: tyro.conf.Positional[tuple[Path, ...]]
    """The files of the log, folders of them or quoted globs, then the folder to make."""
    user: str = "user_id"
    """Column of the user (events)."""
    item: str = "item_id"
    """Column of the item (events)."""
    time: str = "timestamp"
    """Column of the time (events); "none" takes the order of the lines."""
    time_unit: TimeUnit = "auto"
    """Unit of a time in numbers (events). auto: by their size. Dates have their own."""
    features: tuple[str, ...] = ()
    """Numeric columns to keep (events)."""
    impressions: tuple[Path, ...] = ()
    """For ranking: logs of what users were shown, in the same format and with the same columns as the events. What a
    user was shown at one time are the candidates of one sample, and the events before that time are its history."""
    labels: tuple[str, ...] = ()
    """Columns of the impressions, from 0 to 1, which become label_NAME."""
    max_history: int = 1000
    """Most events that are kept before impressions."""
    separator: str = "auto"
    r"""Field separator (events); \t is a tab. auto: what the header suggests among , ; tab and |."""
    quote: str = '"'
    """Quote character, or "none" (events)."""
    encoding: str = "utf-8"
    """Text encoding (events)."""
    vocabulary: Path | None = None
    """A data set whose item numbers are to be kept; items it lacks share a few rows."""
    on_bad: Literal["stop", "skip"] = "stop"
    """stop at the first unusable line, or skip: count them and write them to a quarantine file beside the data."""
    memory_mb: int = 1024
    """What sorting may hold in memory; larger logs go through the disk."""
    json: Flag = False
    """Print the counts as JSON."""
    quiet: Flag = False
    """Show no progress, only results, notes and errors."""


def run(argv: Sequence[str], prog: str) -> int:
    """Import, and say what came out."""
    options = parse(Options, argv, prog)
    _check(options, prog)
    *sources, target = options.paths
    whole = target.absolute()  # so that `.` has a name
    quarantine = Quarantine(options.on_bad, whole.with_name(f"{whole.name}.quarantine.jsonl"))
    if options.format == "histories":
        done = importers.copy_histories(sources[0], target, features=options.features, quarantine=quarantine)
    else:
        done = _import(options, sources, target, quarantine)
    if quarantine.rows:
        warning_once(quarantine.summary())
    if done.unknown_events:
        warning_once(f"{done.unknown_events:,} events have items outside the vocabulary; they share a few table rows")
    if options.json:
        print_json({**asdict(done), "set_aside": dict(quarantine.counts)})
    else:
        samples = f"{done.samples:,} samples of " if options.impressions else ""
        say(f"{target}: {samples}{done.users:,} users, {done.items:,} items, {done.events:,} events")
    return 0


def _check(options: Options, prog: str) -> None:
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


def _import(options: Options, sources: list[Path], target: Path, quarantine: Quarantine) -> histories.ImportSummary:
    """Open the logs, and write what they hold."""
    time = None if options.time == "none" else options.time
    columns = LogColumns(options.user, options.item, time, options.features)
    style = CsvStyle.parse(options.separator, options.quote, options.encoding)
    disk = next(parent for parent in target.absolute().parents if parent.exists())  # which must hold the result anyway
    with storage_errors(target):
        made = tempfile.TemporaryDirectory(dir=disk, prefix=".freescale-import-")
    with made as name:
        scratch = Path(name)
        job = importers.LogSpec(sources, scratch, quarantine, columns, style, options.time_unit)
        events, shown = importers.open_log(options.format, job), None
        if options.impressions:
            (scratch / "impressions").mkdir()
            labelled = columns._replace(features=(), labels=options.labels)
            job = job._replace(sources=options.impressions, scratch=scratch / "impressions", columns=labelled)
            shown = importers.open_log(options.format, job)
        memory = options.memory_mb << 20
        log = histories.ImportJob(events, scratch, quarantine, memory, shown, max_history=options.max_history)
        return histories.write_histories(log, target, vocabulary=options.vocabulary)
