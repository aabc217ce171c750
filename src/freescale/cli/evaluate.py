"""`freescale evaluate`: how good a trained model is on what it has not seen."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freescale.cli.options import parse, print_json
from freescale.cli.saved import RunOptions, on_ranks
from freescale.errors import UsageError

if TYPE_CHECKING:
    from freescale.train.saved import Saved


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """Evaluate a trained model: for retrieval HR, NDCG and MRR over the whole corpus without what a user has seen.

    freescale evaluate runs/latest --nproc 2
    """

    json: bool = False
    """Print for a program to read."""


def run(argv: Sequence[str], prog: str) -> int:
    """Print the metrics of the newest checkpoint."""
    options = parse(Options, argv, prog)

    def work(saved: "Saved") -> None:
        from freescale.train.evaluate import evaluation_of

        evaluation = evaluation_of(saved.config, saved.world, saved.assembly.network, saved.assembly.tables)
        if evaluation is None:
            raise UsageError(
                "nothing is held out in this run",
                remedy='train with data.split = "last" or "time", or give it --data.test-path',
            )
        metrics = evaluation()
        if saved.world.leads and options.json:
            print_json({"step": saved.step, **metrics})
        elif saved.world.leads:
            sys.stdout.write(f"step {saved.step}\n" + "".join(f"{n:>16}  {v:,.4f}\n" for n, v in metrics.items()))

    return on_ranks(options, ["evaluate", *argv], work)
