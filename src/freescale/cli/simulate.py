"""`freescale simulate`: predicts a run, or a model on a data set, on other clusters and world sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from freescale import config as configs
from freescale.balance.cost import memory_costs
from freescale.bubbles import records
from freescale.cli.options import (
    Flag,
    check_all,
    create_folder_of,
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
from freescale.simulate.lookups import sample_data
from freescale.simulate.operations import DeviceModel
from freescale.simulate.report import HEADER, render_report, scaling, table_rows
from freescale.simulate.whatif import ABLATION, Scenario, SimulationResult, Techniques, simulate
from freescale.simulate.workload import ModelCost

_BATCH = 128


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Simulate a run, or a model on a data set, on other machines: throughput and bubbles, with a range.

    freescale simulate runs/latest --gpus 64 256 1024 --cluster h100
    """

    run: tyro.conf.Positional[Path | None] = None
    """Folder of a training, such as runs/latest."""
    from_data: str | None = None
    """Instead: a data set; no run is needed."""
    model: str = "hstu-large"
    """With --from-data: a recipe or a TOML file."""
    gpus: tuple[int, ...] = (8, 64, 256)
    """World sizes."""
    cluster: str = "h100"
    """A cluster of the package (a100, cpu, h100, h100-200g), or a TOML file."""
    without: tuple[Literal["balance", "priority", "sm-free"], ...] = ()
    """Techniques to leave out; by default none, each and all are compared."""
    two_level: Flag = False
    """Hosts request each row once, and each pair of them exchanges one message."""
    max_history: int = 0
    """Longest history, if not the run's."""
    batch: int = 0
    """Samples per rank and step, if not the run's."""
    steps: int = 50
    """Steps to simulate."""
    out: Path = Path("simulate.html")
    """The page."""
    json: Flag = False
    """Print everything as JSON."""
    quiet: Flag = False
    """Show no progress, only results, warnings and errors."""


def run_simulate(argv: Sequence[str], prog: str) -> int:
    """Simulate, print and write the page."""
    options = parse(SimulateOptions, argv, prog)
    if (options.run is None) == (options.from_data is None):
        raise UsageError("name a run, or --from-data and a data set", remedy=f"see {prog} --help")
    check_all(
        lambda: Dataset(_load_config(options)[0].data.path),
        lambda: cluster.load(options.cluster),
        lambda: require_at_least(options, gpus=1, steps=5, batch=1, max_history=1),
        lambda: create_folder_of(options.out),
    )
    scenario, basis = _build_scenario(options)
    used = {name: name.replace("_", "-") not in options.without for name in Techniques._fields}
    techniques = (Techniques(**used),) if options.without else ABLATION
    total = sum(options.gpus) * len(techniques)
    results = (result for size in sorted(options.gpus) for result in simulate(scenario, size, techniques))
    outcomes = list(track(results, "simulating", total=total, size=lambda result: result.world_size))
    name = str(options.run or options.from_data)
    write_page(options.out, render_report(name, scenario.cluster, basis, outcomes))
    if options.json:
        values = [_result_values(result, outcomes) for result in outcomes]
        print_json({"cluster": scenario.cluster.name, "said": basis, "outcomes": values})
    else:
        print_table(f"{name} on {scenario.cluster.name}", HEADER, table_rows(outcomes), words=(1,))
        say(*basis, f"page: {options.out}")
    return 0


def _build_scenario(options: SimulateOptions) -> tuple[Scenario, list[str]]:
    """Return the scenario, and the basis of its prediction as human-readable lines."""
    config, batch = _simulated_config(options)
    dataset, where = Dataset(config.data.path), cluster.load(options.cluster)
    stats, sample = compute_stats(dataset), sample_data(config, dataset)
    model = ModelCost.from_config(config, stats, sample)
    machine, compute = _device_model(options.run, model, where)
    lengths = np.minimum(stats.lengths.values, config.data.max_history)
    basis = [
        compute,
        f"{batch} samples per rank, histories up to {config.data.max_history:,}, "
        f"{config.model.kind} with {config.model.layers} layers of {config.model.dim}.",
        f"Figures of {where.name}: see the page for their sources; assumed figures are ranges.",
    ]
    counts = stats.lengths.counts
    shares = ", ".join(f"{of.memory} {of.work_share:.2f}" for of in memory_costs(config.model, lengths, counts))
    basis.append(
        f"model.memory = {config.model.memory}. Compute of a sample by its values, relative to full: {shares}."
    )
    if model.widths > 1 or len(model.tables) > 1:
        basis.append(f"{len(model.tables)} tables of {model.widths} widths, with the ids of a part of the data.")
    if (rows := config.tables.replicated_rows) == "auto":
        basis.append("tables.replicated_rows = auto depends on the hosts of a run: no rows are replicated here.")
    elif rows:
        model = model.replicate(rows)
        basis.append(f"The {rows:,} most popular rows of every table are on every rank.")
    if options.two_level:
        basis.append("Hosts request each row once, and each pair of them exchanges one message per width of tables.")
    known: dict[str, Any] = {"rules": config.balance, "two_level": options.two_level, "sample": sample}
    return Scenario(model, lengths, counts, batch, where, machine, steps=options.steps, **known), basis


def _load_config(options: SimulateOptions) -> tuple[configs.RunConfig, int]:
    """Return the config of the run or the recipe, and its samples per rank."""
    if options.run is None:
        config = configs.resolve(options.model)
        return replace(config, data=replace(config.data, path=str(options.from_data))), _BATCH
    config = configs.load_run(options.run)
    return config, max(1, config.data.global_batch // records.read_machine(options.run).world_size)


def _simulated_config(options: SimulateOptions) -> tuple[configs.RunConfig, int]:
    """Return the config to simulate, and its samples per rank."""
    config, batch = _load_config(options)
    data = replace(config.data, max_history=options.max_history or config.data.max_history)
    return replace(config, data=data), options.batch or batch


def _device_model(run: Path | None, model: ModelCost, where: Cluster) -> tuple[Callable[[Cluster], DeviceModel], str]:
    """Return the speed of a rank: measured if the run was on such a device, else by the device's figures."""
    device = "" if run is None else records.read_machine(run).device
    if run is None or where.device.lower() not in device.lower():
        why = f"the run was on {device}" if device else "there is no run"
        return lambda c: DeviceModel.from_cluster(c, model), f"Compute by the figures of {where.device}, since {why}."
    compute = operations.fit_compute(records.read_samples(run))
    basis = f"Compute as measured on {device}, {compute.error:.1%} off."
    return lambda c: compute.apply_to(DeviceModel.from_cluster(c, model)), basis


def _result_values(result: SimulationResult, outcomes: Sequence[SimulationResult]) -> dict[str, Any]:
    return {
        "world_size": result.world_size,
        "with": result.techniques.name,
        "step_ms": result.summary.step_ms,
        "step_ms_band": result.step_ms,
        "samples_per_second": result.samples_per_second,
        "scaling": scaling(result, outcomes),
        "bubble_percent": result.summary.bubble_percent,
        "bubble_percent_band": result.bubble_percent,
        "straggler_percent": result.summary.straggler_percent,
        "collisions": result.collisions,
        "moved": result.moved,
        "causes_ms": {line.cause: line.ms for line in result.summary.lines},
    }
