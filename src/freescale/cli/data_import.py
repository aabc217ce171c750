"""`freescale data import`: a log on disk becomes a data set."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro

from freescale.cli.options import Flag, parse, print_json, say
from freescale.data.sources import histories, importers
from freescale.data.store.quarantine import Quarantine
from freescale.errors import UsageError
from freescale.log import notice


@dataclass(frozen=True, kw_only=True)
class Options:
    """Turn a log into histories in Parquet, sorted by time, with a saved vocabulary.

    freescale data import ml-1m ml-1m.zip data/ml1m

    freescale data import events clicks.csv data/clicks --user uid --item sku --time ts
    """

    format: tyro.conf.Positional[Literal["ml-1m", "ml-20m", "ml-latest", "amazon", "kuairand", "events"]]
    """What the log is. amazon: lines of "user item item ..."; events: CSV or Parquet with the columns named below."""
    paths: tyro.conf.Positional[tuple[Path, ...]]
    """The files of the log, then the folder to make."""
    user: str = "user_id"
    """Column of the user (events)."""
    item: str = "item_id"
    """Column of the item (events)."""
    time: str = "timestamp"
    """Column of the time (events); "none" takes the order of the lines."""
    features: tuple[str, ...] = ()
    """Numeric columns to keep (events)."""
    separator: str = ","
    """Field separator (events)."""
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
    if len(options.paths) < 2:
        raise UsageError("the log or the target folder is missing", remedy=f"{prog} {options.format} LOG FOLDER")
    *sources, target = options.paths
    quarantine = Quarantine(options.on_bad, target.with_name(f"{target.name}.quarantine.jsonl"))
    disk = next(parent for parent in target.absolute().parents if parent.exists())  # which must hold the result anyway
    with tempfile.TemporaryDirectory(dir=disk) as scratch:
        time, quote = (None if given == "none" else given for given in (options.time, options.quote))
        columns = importers.Columns(options.user, options.item, time, options.features)
        style = importers.CsvStyle(options.separator, quote or "", options.encoding)
        job = importers.Job(sources, Path(scratch), quarantine, columns, style)
        events, names = importers.open_log(options.format, job), ", ".join(source.name for source in sources)
        log = histories.Log(events, names, Path(scratch), quarantine, memory=options.memory_mb << 20)
        done = histories.write(log, target, vocabulary=options.vocabulary)
    if quarantine.rows:
        notice(quarantine.summary())
    if done.unknown_events:
        notice(f"{done.unknown_events:,} events have items that the vocabulary lacks; they will share a few table rows")
    if options.json:
        print_json({**asdict(done), "set_aside": dict(quarantine.counts)})
    else:
        say(f"{target}: {done.users:,} users, {done.items:,} items, {done.events:,} events")
    return 0
