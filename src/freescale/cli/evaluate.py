"""`freescale evaluate`: how good a trained model is on what it has not seen."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freescale.cli.options import parse, print_json, say
from freescale.cli.saved import RunOptions, on_ranks
from freescale.errors import UsageError

if TYPE_CHECKING:
    from freescale.train.trained_model import TrainedModel


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

    def work(saved: "TrainedModel") -> None:
        from freescale.train.evaluation import build_evaluation

        evaluation = build_evaluation(saved.config, saved.world, saved.sharded.module, saved.sharded.tables)
        if evaluation is None:
            remedy = "train with --data.split last or time, or with --data.test-path"
            raise UsageError("nothing is held out in this run", remedy=remedy)
        metrics = evaluation()
        if saved.world.is_rank_zero and options.json:
            print_json({"step": saved.step, **metrics})
        elif saved.world.is_rank_zero:
            told = {name: f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for name, value in metrics.items()}
            say(f"step {saved.step}", *(f"{name:>16}  {text}" for name, text in told.items()))

    return on_ranks(options, ["evaluate", *argv], work)
