"""`freescale predict`: the best items for every user."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from freescale import config as configs
from freescale.cli.options import check_all, parse, require_at_least, say
from freescale.cli.saved import RunOptions, on_ranks

if TYPE_CHECKING:
    from freescale.train.trained_model import TrainedModel


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """Rank the whole corpus after the last `data.max_history` events of every user, and write the best items.

    With task.seen = "exclude", as it is trained and evaluated by default, items among these events are left out.

    freescale predict runs/latest top/ --k 10
    """

    out: tyro.conf.Positional[Path]
    """Folder to write, one file per rank. Columns: user and item (keys of the log), user_id and item_id (row numbers in
    the data set), score. item, item_id and score are lists, best first."""
    k: int = 10
    """Items per user, or as many as can be recommended."""


def run(argv: Sequence[str], prog: str) -> int:
    """Write the predictions and say how many users they are for."""
    options = parse(Options, argv, prog)
    check_all(lambda: configs.load_run(options.run), lambda: require_at_least(options, k=1))

    def work(saved: "TrainedModel") -> None:
        from freescale.train.trained_model import write_predictions

        predicted = write_predictions(saved, options.out, count=options.k)
        users, short = (saved.world.transport.sum(count, name="users") for count in predicted)
        if saved.world.is_rank_zero:
            fewer = f"; for {short:,} of them fewer can be recommended" if short else ""
            say(f"{options.out}: {'up to ' if short else ''}{options.k} items for each of {users:,} users{fewer}")

    return on_ranks(options, ["predict", *argv], work, out=options.out)
