"""`freescale data synth`: a made-up log."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from freescale.cli.options import parse
from freescale.data.sources import synthetic
from freescale.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Make up a log whose lengths and popularity are those of a real one.

    freescale data synth --preset kuairand --users 2000 data/kr
    """

    target: tyro.conf.Positional[Path]
    """The folder to make."""
    preset: synthetic.Preset = "ml1m"
    """Lengths: kuairand (median 7,600 events), ml1m (92) or heavy (Zipf 1.2 up to 4,096)."""
    users: int = 10_000
    """Histories to make."""
    items: int = 100_000
    """Distinct items to draw from."""
    popularity: synthetic.Popularity = "public"
    """public: Zipf 0.7 as in public data. production: Zipf 1.05."""
    seed: int = 0
    """One seed, one log."""


def run(argv: Sequence[str], prog: str) -> int:
    """Write the log and say how large it became."""
    options = parse(Options, argv, prog)
    if options.users < 1 or options.items < 1 or options.seed < 0:
        raise UsageError("--users and --items must be at least 1 and --seed 0 or more", remedy=f"see {prog} --help")
    made = synthetic.write(
        options.target,
        options.preset,
        users=options.users,
        catalogue=options.items,
        popularity=options.popularity,
        seed=options.seed,
    )
    sys.stdout.write(f"{options.target}: {made.rows:,} users, {made.items:,} items, {made.events:,} events\n")
    return 0
