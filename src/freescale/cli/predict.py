"""`freescale predict`: the best items for every user."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from freescale.cli.options import parse, say
from freescale.cli.saved import RunOptions, on_ranks
from freescale.errors import UsageError

if TYPE_CHECKING:
    from freescale.train.saved import Saved


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """Rank the whole corpus after the last `data.max_history` events of every user, without these, and write the best.

    freescale predict runs/latest top/ --k 10
    """

    out: tyro.conf.Positional[Path]
    """Folder to write, one file per rank: user_id, item_id, score, and item as the log called it."""
    k: int = 10
    """Items per user."""


def run(argv: Sequence[str], prog: str) -> int:
    """Write the predictions and say how many users they are for."""
    options = parse(Options, argv, prog)
    if options.k < 1:
        raise UsageError("--k must be at least 1", remedy=f"see {prog} --help")

    def work(saved: "Saved") -> None:
        from freescale.train.predict import predict

        users = predict(saved, options.out, count=options.k)
        total = saved.world.transport.total(users, name="users")
        if saved.world.leads:
            say(f"{options.out}: {options.k} items for each of {total:,} users")

    return on_ranks(options, ["predict", *argv], work, out=options.out)
