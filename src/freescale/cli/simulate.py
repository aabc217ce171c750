"""`freescale simulate`: what other clusters and other sizes would do with a run, or with a data set."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from freescale import config as configs
from freescale.bubbles import records
from freescale.cli.options import (
    Flag,
    check_all,
    parse,
    print_json,
    print_table,
    require_at_least,
    say,
    write_page,
)
from freescale.data.dataset import Dataset, compute_stats
from freescale.errors import UsageError
from freescale.progress import track
from freescale.simulate import cluster, operations
from freescale.simulate.cluster import Cluster
from freescale.simulate.operations import DeviceModel
from freescale.simulate.report import HEADER, render_report, scaling, table_rows
from freescale.simulate.whatif import ABLATION, Scenario, SimulationResult, Techniques, simulate
from freescale.simulate.workload import ModelCost

_BATCH = 128


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Simulate a run, or a model on a data set, on other machines: throughput, bubbles by cause, and how sure that is.

    freescale simulate runs/latest --gpus 64 256 1024 --cluster h100
    """

    run: tyro.conf.Positional[Path | None] = None
    """Folder of a training, such as runs/latest."""
    from_data: str | None = None
    """Instead: a data set; no run is needed."""
    model: str = "hstu-large"
    """With --from-data: a recipe or a TOML file."""
    gpus: tuple[int, ...] = (8, 64, 256)
    """Numbers of ranks."""
    cluster: str = "h100"
    """One that comes with the package (a100, cpu, h100, h100-200g), or a TOML file of your own."""
    without: tuple[Literal["balance", "priority", "sm-free"], ...] = ()
    """Techniques to leave out; without this, nothing, each and everything are compared."""
    max_history: int = 0
    """Another longest history than the run's."""
    batch: int = 0
    """Other samples per rank and step than the run's."""
    steps: int = 50
    """Steps to simulate."""
    out: Path = Path("simulate.html")
    """The page."""
    json: Flag = False
    """Print everything as JSON."""
    quiet: Flag = False
    """Show no progress, only results, notes and errors."""


def run_simulate(argv: Sequence[str], prog: str) -> int:
    """Simulate, print and draw."""
    options = parse(SimulateOptions, argv, prog)
    if (options.run is None) == (options.from_data is None):
        raise UsageError("name a run, or --from-data and a data set", remedy=f"see {prog} --help")
    check_all(
        lambda: Dataset(_asked(options)[0].data.path),
        lambda: cluster.load(options.cluster),
        lambda: require_at_least(options, gpus=1, steps=5, batch=1, max_history=1),
    )
    question, said = _question(options)
    used = {name: name.replace("_", "-") not in options.without for name in Techniques._fields}
    techniques = (Techniques(**used),) if options.without else ABLATION
    asked, ranks_in_all = sorted(options.gpus), sum(options.gpus) * len(techniques)
    found = (one for world_size in asked for one in simulate(question, world_size, techniques))
    outcomes = list(track(found, "simulating", total=ranks_in_all, size=lambda one: one.world_size))
    name = str(options.run or options.from_data)
    write_page(options.out, render_report(name, question.cluster, said, outcomes))
    if options.json:
        figures = [_figures(one, outcomes) for one in outcomes]
        print_json({"cluster": question.cluster.name, "said": said, "outcomes": figures})
    else:
        print_table(f"{name} on {question.cluster.name}", HEADER, table_rows(outcomes), words=(1,))
        say(*said, f"page: {options.out}")
    return 0


def _question(options: SimulateOptions) -> tuple[Scenario, list[str]]:
    """What is asked, and what the answer rests on."""
    config, batch = _config(options)
    found = compute_stats(Dataset(config.data.path))
    model, where = ModelCost.from_config(config, found), cluster.load(options.cluster)
    machine, compute = _machine(options.run, model, where)
    lengths = np.minimum(found.lengths.values, config.data.max_history)
    said = [
        compute,
        f"{batch} samples per rank, histories up to {config.data.max_history:,}, "
        f"{config.model.kind} with {config.model.layers} layers of {config.model.dim}.",
        f"Figures of {where.name}: see the page for their sources; what is assumed there is a range.",
    ]
    if config.task.kind == "ranking":
        said.append("The candidates of this task are left out: its steps are longer than these.")
    counts = found.lengths.counts
    return Scenario(model, lengths, counts, batch, where, machine, rules=config.balance, steps=options.steps), said


def _asked(options: SimulateOptions) -> tuple[configs.RunConfig, int]:
    """The config of the run or the recipe, and its samples per rank."""
    if options.run is None:
        config = configs.resolve(options.model)
        return replace(config, data=replace(config.data, path=str(options.from_data))), _BATCH
    config = configs.load_run(options.run)
    return config, max(1, config.data.global_batch // records.read_machine(options.run).world_size)


def _config(options: SimulateOptions) -> tuple[configs.RunConfig, int]:
    """The config that is simulated, and its samples per rank."""
    config, batch = _asked(options)
    data = replace(config.data, max_history=options.max_history or config.data.max_history)
    return replace(config, data=data), options.batch or batch


def _machine(run: Path | None, model: ModelCost, where: Cluster) -> tuple[Callable[[Cluster], DeviceModel], str]:
    """How quick a rank is: as the run was, if it ran on such a device; else by the device's figures."""
    device = "" if run is None else records.read_machine(run).device
    if run is None or where.device.lower() not in device.lower():
        why = f"the run was on {device}" if device else "there is no run"
        return lambda c: DeviceModel.from_cluster(c, model), f"Compute by the figures of {where.device}, since {why}."
    compute = operations.fit_compute(records.read_samples(run))
    return lambda c: compute.apply_to(
        DeviceModel.from_cluster(c, model)
    ), f"Compute as measured on {device}, {compute.error:.1%} off."


def _figures(one: SimulationResult, outcomes: Sequence[SimulationResult]) -> dict[str, Any]:
    return {
        "world_size": one.world_size,
        "with": one.techniques.name,
        "step_ms": one.summary.step_ms,
        "step_ms_band": one.step_ms,
        "samples_per_second": one.samples_per_second,
        "scaling": scaling(one, outcomes),
        "bubble_percent": one.summary.bubble_percent,
        "bubble_percent_band": one.bubble_percent,
        "straggler_percent": one.summary.straggler_percent,
        "collisions": one.collisions,
        "moved": one.moved,
        "causes_ms": {line.cause: line.ms for line in one.summary.lines},
    }
