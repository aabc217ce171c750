"""Measures the bubbles of a step, against TorchRec's plain loop and its SparseDist pipeline.

    python benchmarks/step.py --out benchmarks/results/step.json

Runs `freescale bench step` on hosts of a lab (network namespaces, one rank each) with shaped links: 2 and 4 ranks with
emulated compute, and 2 ranks with real compute, without a target, on the loopback. Histories like KuaiRand's, 32 times
shorter, and `heavy`. Writes a page of each beside the figures.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.support.lab import lab

from freescale.bench import step_comparison
from freescale.config import RunConfig, resolve
from freescale.data import synthetic
from freescale.transport.world import World
from processes import on_ranks
from record import save

PRESETS: dict[synthetic.Preset, tuple[int, int]] = {"heavy": (4, 256), "kuairand": (32, 64)}
"""How many times shorter histories are made, and samples of a rank."""
EXACT_ITEMS, EXACT_SAMPLES = 20_000, 16
"""Data on which the losses of all variants are compared."""


def settings(options: argparse.Namespace, data: Path, samples: int, ranks: int) -> RunConfig:
    fields = {
        "data.path": data,
        "data.max-history": 1024,
        "data.global-batch": samples * ranks,
        "data.split": "none",
        "model.dim": options.dim,
        "model.layers": options.layers,
        "task.negatives": options.negatives,
        "train.max-steps": options.steps,
        "train.log-every": 10**6,
    }
    return resolve("tiny", [word for name, value in fields.items() for word in (f"--{name}", str(value))])


def compared(world: World, config: RunConfig, folder: Path, steps: int) -> Any:
    return step_comparison.compare_losses(config, world, folder, steps=steps)


def measured(
    world: World,
    config: RunConfig,
    folder: Path,
    exact: list[step_comparison.LossDifference],
    options: argparse.Namespace,
    emulated: bool,
) -> Any:
    found = step_comparison.measure_steps(
        config, world, folder, turns=options.turns, emulated=emulated, on_progress=print
    )
    if not world.is_rank_zero:
        return None
    figures = {"variants": found.figures(), "floor": found.noise_floor(), "exact": [one._asdict() for one in exact]}
    calibration = {"step": found.compute.step, "cost": found.compute.cost.constants, "off": found.compute.error}
    return figures | {"calibration": calibration}, step_comparison.render_page(found, exact)


def of_preset(
    preset: synthetic.Preset, options: argparse.Namespace, folder: Path
) -> Iterator[tuple[dict[str, Any], str]]:
    """Figures of one lane after another, and the page of each."""
    shorter, samples = PRESETS[preset]
    synthetic.write_log(folder / "small", preset, users=500, catalogue=EXACT_ITEMS, shorter=shorter)
    small = settings(options, folder / "small", EXACT_SAMPLES, 2)
    exact = on_ranks(compared, 2, small, folder / "exact", options.exact_steps)
    synthetic.write_log(folder / "data", preset, users=20_000, catalogue=options.items, shorter=shorter)
    lanes = [(ranks, "emulated") for ranks in options.ranks] + ([(2, "real")] if options.real else [])
    for ranks, lane in lanes:
        config = settings(options, folder / "data", options.samples or samples, ranks)
        words = config, folder / f"{ranks}-{lane}", exact, options, lane == "emulated"
        with lab(ranks) if lane == "emulated" else nullcontext() as hosts:
            if hosts is not None:
                hosts.shape(options.mbit)
            figures, drawn = on_ranks(measured, ranks, *words, lab=hosts)
        yield {"preset": preset, "world_size": ranks, "compute": lane} | figures, drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="with emulated compute")
    parser.add_argument("--mbit", type=float, default=400, help="of the links between the hosts")
    parser.add_argument("--items", type=int, default=4_370_000, help="of the catalogue: as many as KuaiRand-1K's")
    parser.add_argument("--samples", type=int, help="of a rank")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--negatives", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--exact-steps", type=int, default=8)
    parser.add_argument("--no-real", dest="real", action="store_false", help="leave real compute out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for preset in options.presets:
        with tempfile.TemporaryDirectory() as folder:
            for result, drawn in of_preset(preset, options, Path(folder)):
                results.append(result)
                print(json.dumps(result), flush=True)
                save(options.out, results)  # as soon as there are some
                if options.out:
                    name = f"step-{preset}-{result['world_size']}-{result['compute']}.html"
                    options.out.with_name(name).write_text(drawn)


if __name__ == "__main__":
    main()
