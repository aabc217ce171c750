"""`freescale data synth`: a made-up log."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from freescale.cli.options import Flag, parse, require_at_least, say
from freescale.data import synthetic
from freescale.data.dataset import Manifest
from freescale.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Make up a log whose lengths and popularity are those of a real one, or one to learn ranking from.

    freescale data synth --preset kuairand --users 2000 data/kr
    """

    target: tyro.conf.Positional[Path]
    """The folder to make."""
    preset: synthetic.Preset | Literal["planted"] = "ml1m"
    """Lengths: kuairand (median 7,600 events), ml1m (92) or heavy (Zipf 1.2 up to 4,096). planted: short histories with
    candidates, whose labels follow a hidden rule; another seed gives other users over the same items."""
    users: int = 10_000
    """Histories to make."""
    items: int | None = None
    """Distinct items to draw from: 100,000, of planted 256, unless given."""
    popularity: synthetic.Popularity | None = None
    """public (unless given): Zipf 0.7 as in public data. production: Zipf 1.05. Items of planted are all as popular."""
    seed: int = 0
    """One seed, one log."""
    shorter: int = 1
    """How many times shorter histories are than the preset's, for machines that cannot train on whole ones."""
    quiet: Flag = False
    """Show no progress, only results, notes and errors."""


def run(argv: Sequence[str], prog: str) -> int:
    """Write the log and say how large it became."""
    options = parse(Options, argv, prog)
    require_at_least(options, users=1, items=1, shorter=1, seed=0)
    if options.preset == "planted":
        made = _plant(options)
    else:
        size = {"users": options.users, "catalogue": options.items or 100_000, "shorter": options.shorter}
        popularity = options.popularity or "public"
        made = synthetic.write_log(options.target, options.preset, popularity=popularity, seed=options.seed, **size)
    say(f"{options.target}: {made.rows:,} users, {made.items:,} items, {made.events:,} events")
    return 0


def _plant(options: Options) -> Manifest:
    items = options.items or 256
    if options.popularity is not None:
        raise UsageError("items of a planted log are all as popular", remedy="leave out --popularity")
    if items < synthetic.FEWEST_ITEMS:
        raise UsageError(f"{items} items are too few for the hidden groups", remedy=f"--items {synthetic.FEWEST_ITEMS}")
    made = synthetic.write_planted_log(options.target, users=options.users, catalogue=items, seed=options.seed)
    best = {label: synthetic.planted_optimum(options.target, label) for label in synthetic.CHANCES}
    say(*(f"{label}: normalised entropy is {value:.4f} at best" for label, value in best.items()))
    return made
