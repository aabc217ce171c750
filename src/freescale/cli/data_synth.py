"""`freescale data synth`: generate a log, of any size or with a known best score."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from freescale.cli.options import Flag, parse, require_at_least, say
from freescale.data import synthetic, synthetic_drift, synthetic_features, synthetic_signal
from freescale.data.manifest import Manifest
from freescale.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SynthOptions:
    """Generate a synthetic log with the lengths and popularity of a real one, or a log with features and labels.

    freescale data synth --preset kuairand --users 2000 data/kr

    freescale data synth --preset yambda --users 2000 --shorter 64 data/yambda
    """

    target: tyro.conf.Positional[Path]
    """The folder to create."""
    preset: synthetic.Preset | Literal["planted", "drift"] | synthetic_signal.FeaturePreset = "ml1m"
    """Lengths: kuairand (median 7,600 events), ml1m (92) or heavy (Zipf 1.2 up to 4,096). With labels that follow a
    hidden rule: planted, short histories with candidates; yambda (median 2,700), with features and labels of events;
    kuairand-ranking, with features and candidates. Another seed gives other users of the same items. drift: sessions of
    40 days, on each of which 5% of the items are replaced; raw ids, for a dynamic table."""
    users: int = 10_000
    """Histories to generate."""
    items: int | None = None
    """Distinct items to draw from: 100,000, of logs with labels 256, of drift 1,000 at a time, unless given."""
    popularity: synthetic.Popularity | None = None
    """public (default): Zipf 0.7 as in public data. production: Zipf 1.05. planted, drift: all are equally popular."""
    seed: int = 0
    """The same seed gives the same log."""
    shorter: int = 1
    """Divide the lengths of the preset by this, for machines that cannot train on full ones."""
    quiet: Flag = False
    """Show no progress, only results, warnings and errors."""


def run_synth(argv: Sequence[str], prog: str) -> int:
    """Write the log and print its size."""
    options = parse(SynthOptions, argv, prog)
    require_at_least(options, users=1, items=1, shorter=1, seed=0)
    if options.preset in ("kuairand", "ml1m", "heavy"):
        made = synthetic.write_log(options.target, options.preset, **_log_options(options, items=100_000))
    elif options.preset == "drift":
        made = _write_drift(options)
    else:
        made = _write_planted(options)
    say(f"{options.target}: {made.rows:,} users, {made.items:,} items, {made.events:,} events")
    return 0


def _log_options(options: SynthOptions, *, items: int) -> dict[str, Any]:
    size = {"users": options.users, "catalogue": options.items or items, "shorter": options.shorter}
    return {**size, "popularity": options.popularity or "public", "seed": options.seed}


def _write_drift(options: SynthOptions) -> Manifest:
    if options.popularity is not None or options.shorter > 1:
        what = "items of a drift log are equally popular, and its sessions are short"
        raise UsageError(what, remedy="leave out --popularity and --shorter")
    size = {"users": options.users, "catalogue": options.items or 1000, "seed": options.seed}
    return synthetic_drift.write_drift_log(options.target, **size)


def _write_planted(options: SynthOptions) -> Manifest:
    """Write a log whose labels follow a hidden rule, and print the best scores that they allow."""
    if options.items is not None and options.items < synthetic.FEWEST_ITEMS:
        what = f"{options.items} items are too few for the hidden groups"
        raise UsageError(what, remedy=f"--items {synthetic.FEWEST_ITEMS}")
    if options.preset in ("yambda", "kuairand-ranking"):
        labels, size = synthetic_signal.SIGNALS[options.preset], _log_options(options, items=256)
        made = synthetic_features.write_feature_log(options.target, options.preset, **size)
    else:
        if options.popularity is not None:
            raise UsageError("items of a planted log are equally popular", remedy="leave out --popularity")
        labels, items = synthetic.CHANCES, options.items or 256
        made = synthetic.write_planted_log(options.target, users=options.users, catalogue=items, seed=options.seed)
    for label in labels:
        entropy, auc = synthetic.planted_optimum(options.target, label), synthetic.planted_auc(options.target, label)
        say(f"{label}: normalised entropy is {entropy:.4f} at best, AUC {auc:.4f}")
    return made
