"""`freescale evaluate`, `predict` and `export`: commands on a trained model, over one rank or many."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from freescale import config as configs
from freescale.checkpoint.run_folder import RunLock
from freescale.cli import preflight
from freescale.cli.options import Flag, check_all, parse, print_json, require_at_least, say
from freescale.errors import UsageError, storage_errors
from freescale.launch.launcher import launch_ranks
from freescale.progress import progress

if TYPE_CHECKING:
    from freescale.train.trained_model import TrainedModel


@dataclass(frozen=True, kw_only=True)
class TrainedModelOptions:
    """Which trained model, and over how many ranks."""

    run: tyro.conf.Positional[Path]
    """Folder of a training, such as runs/latest."""
    data: str | None = None
    """Another data set than the one it was trained on; it must have the same items."""
    nproc: int = 1
    """Ranks to start on this machine. Each holds its share of the tables."""
    quiet: Flag = False
    """Show no progress, only results, warnings and errors."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(TrainedModelOptions):
    """Evaluate a trained model. Retrieval: HR, NDCG and MRR over the whole corpus without what a user has seen.

    freescale evaluate runs/latest --nproc 2
    """

    json: bool = False
    """Print the metrics as JSON."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions(TrainedModelOptions):
    """Rank the whole corpus after the last `data.max_history` events of every user, and write the best items.

    With task.seen = "exclude", as it is trained and evaluated by default, items among these events are left out.

    freescale predict runs/latest top/ --k 10
    """

    out: tyro.conf.Positional[Path]
    """Folder to write, one file per rank. Columns: user and item (keys of the log), user_id and item_id (row numbers in
    the data set), score. item, item_id and score are lists, best first."""
    k: int = 10
    """Items per user, or as many as can be recommended."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(TrainedModelOptions):
    """Write a trained model: as weights, or as programs that answer requests without this package.

    freescale export runs/latest model/

    freescale export runs/latest model/ --format pt2
    """

    out: tyro.conf.Positional[Path]
    """Folder to write."""
    format: Literal["safetensors", "pt2", "aoti"] = "safetensors"
    """safetensors: weights with the vocabulary and the config, read back after writing. pt2: programs for serving by
    torch.export, weights apart, and serve.py. aoti: the same, compiled for this machine; needs a C++ compiler."""


def run_evaluate(argv: Sequence[str], prog: str) -> int:
    """Print the metrics of the newest checkpoint."""
    options = parse(EvaluateOptions, argv, prog)

    def evaluate(trained: "TrainedModel") -> None:
        from freescale.train.evaluation import build_evaluation

        sharded, is_rank_zero = trained.sharded, trained.world.is_rank_zero
        evaluation = build_evaluation(trained.config, trained.world, sharded.module)
        if evaluation is None:
            remedy = "train with --data.split last or time, or with --data.test-path"
            raise UsageError("nothing is held out in this run", remedy=remedy)
        metrics = evaluation()
        if is_rank_zero and options.json:
            print_json({"step": trained.step, **metrics})
        elif is_rank_zero:
            texts = {name: f"{v:,}" if isinstance(v, int) else f"{v:.4f}" for name, v in metrics.items()}
            say(f"step {trained.step}", *(f"{name:>16}  {text}" for name, text in texts.items()))

    return _on_ranks(options, ["evaluate", *argv], evaluate)


def run_predict(argv: Sequence[str], prog: str) -> int:
    """Write the predictions and print for how many users."""
    options = parse(PredictOptions, argv, prog)
    check_all(lambda: configs.load_run(options.run), lambda: require_at_least(options, k=1))

    def predict(trained: "TrainedModel") -> None:
        from freescale.train.trained_model import write_predictions

        counts = write_predictions(trained, options.out, count=options.k)
        users, short = (trained.world.transport.sum(count, name="users") for count in counts)
        if trained.world.is_rank_zero:
            fewer = f"; for {short:,} of them fewer can be recommended" if short else ""
            say(f"{options.out}: {'up to ' if short else ''}{options.k} items for each of {users:,} users{fewer}")

    return _on_ranks(options, ["predict", *argv], predict, out=options.out)


def run_export(argv: Sequence[str], prog: str) -> int:
    """Write the export and list its files."""
    options = parse(ExportOptions, argv, prog)

    def export(trained: "TrainedModel") -> None:
        from freescale.train.trained_model import export_model

        with progress(f"writing {options.out}"):
            if options.format == "safetensors":
                files = export_model(trained, options.out)
            else:
                from freescale.serving.package import write_package

                files = write_package(trained, options.out, options.format)
        if trained.world.is_rank_zero:
            say(*(str(options.out / name) for name in files))

    return _on_ranks(options, ["export", *argv], export, out=options.out)


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Publish a trained model as the next version: a full one, or the rows that have changed since the last one.

    freescale publish runs/latest s3://models/mine
    """

    run: tyro.conf.Positional[Path]
    """Folder of a training, such as runs/latest."""
    address: tyro.conf.Positional[str]
    """Folder of the versions: a local path or any fsspec address."""
    format: Literal["pt2", "aoti"] = "pt2"
    """Format of the programs of full versions, as in `freescale export`."""
    full_every: int = 24
    """Versions from one full version to the next."""
    quiet: Flag = False
    """Show no progress, only results, warnings and errors."""


def run_publish(argv: Sequence[str], prog: str) -> int:
    """Publish a version and print which."""
    options = parse(PublishOptions, argv, prog)
    require_at_least(options, full_every=1)

    def work(trained: "TrainedModel") -> None:
        from freescale.serving.publish import publish

        with progress(f"publishing to {options.address}"):
            done = publish(trained, options.address, options.format, full_every=options.full_every)
        if done is None:
            say(f"{options.address} has step {trained.step} already: nothing is published")
            return
        kind = "full" if done.is_full else f"{done.rows:,} changed rows"
        say(f"{options.address}: version {done.version} of step {trained.step}, {kind}, {done.bytes / 1e6:,.2f} MB")

    return _on_ranks(TrainedModelOptions(run=options.run, quiet=options.quiet), ["publish", *argv], work)


def _on_ranks(
    options: TrainedModelOptions,
    words: Sequence[str],
    work: Callable[["TrainedModel"], None],
    *,
    out: Path | None = None,
) -> int:
    """Load the model on every rank and call `work`. `out`: the folder that it writes."""
    preflight.check_trained_model(options.run, options.data)
    with RunLock(out or options.run) as lock:
        code = launch_ranks(words, nproc=options.nproc, lock=lock if out is not None else None)
        return code if code is not None else _load_and_work(options, work, out)


def _load_and_work(options: TrainedModelOptions, work: Callable[["TrainedModel"], None], out: Path | None) -> int:
    with progress("starting"):
        from freescale.train.trained_model import load_config, load_trained_model
        from freescale.transport.world import destroy_world, init_world

        config = load_config(options.run, options.data)
        world = init_world(timeout=config.train.timeout)
    with progress(f"loading {options.run}"):
        trained = load_trained_model(options.run, config, world)
    with storage_errors(out) if out is not None else nullcontext():
        work(trained)
    destroy_world()
    return 0
