"""Compares a training step of TorchRec's two loops with FreeScale's, with techniques on and off.

All variants train the same model on the same samples, in turns, so that a machine that slows down slows all of them.
The bubble of a step is its time beyond compute alone. TorchRec's plain loop runs twice in a turn; its difference from
itself is the noise floor of every comparison.
"""

import gc
import itertools
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from freescale import page
from freescale.bench import torchrec_loops
from freescale.bench.emulated import EmulatedCompute, calibrate_compute, compute_only_ms
from freescale.bubbles.records import read_intervals
from freescale.bubbles.report import COLOURS
from freescale.bubbles.summary import Summary, summarize
from freescale.config import RunConfig
from freescale.data.loader import Loader
from freescale.models.protocol import Model
from freescale.simulate.whatif import Techniques
from freescale.train.build import build
from freescale.train.metrics_logger import read_entries
from freescale.train.sharded_model import build_model_for
from freescale.transport.world import World

PLAIN, SPARSE_DIST, PLAIN_AGAIN = "TorchRec", "TorchRec SparseDist", "TorchRec again"
FREESCALE = {
    "nothing": Techniques(balance=False, priority=False, sm_free=False),
    "balance": Techniques(priority=False, sm_free=False),
    "priority": Techniques(balance=False, sm_free=False),
    "SM-free": Techniques(balance=False, priority=False),
    "everything": Techniques(),
}
VARIANTS = (PLAIN, SPARSE_DIST, *FREESCALE, PLAIN_AGAIN)
LOSS_VARIANTS: dict[Literal["fp64", "fp32"], tuple[str, ...]] = {
    "fp64": tuple(FREESCALE),
    "fp32": (PLAIN, SPARSE_DIST, "nothing"),
}
"""The variants whose losses are compared, by precision."""
_NEVER = 10**9
_MIN_SHOWN_MS = 0.01

HEADER = [
    "variant", "ms per step", "steps/s", "samples/s", "of compute", "bubble ms", "fewer than TorchRec", "SparseDist",
]  # fmt: skip
LOSS_HEADER = ["variant", "precision", "losses against nothing"]


class VariantRun(NamedTuple):
    """One run of one variant."""

    variant: str
    summary: Summary
    compute_ms: float
    """Compute alone, in the same turn."""

    @property
    def bubble_ms(self) -> float:
        """The time of a step beyond compute alone."""
        return self.summary.step_ms - self.compute_ms


class StepComparison(NamedTuple):
    """The runs of all variants; filled on rank 0."""

    world_size: int
    samples: int
    """Global batch size."""
    emulated: bool
    compute: EmulatedCompute
    runs: list[VariantRun]

    def values(self, variant: str, figure: Callable[[VariantRun], float]) -> list[float]:
        """Return a figure of every turn of a variant."""
        return [figure(run) for run in self.runs if run.variant == variant]

    def median(self, variant: str, figure: Callable[[VariantRun], float]) -> float:
        """Return the median of a figure over the turns of a variant."""
        return statistics.median(self.values(variant, figure))

    def bubble_reduction(self, variant: str, baseline: str) -> float | None:
        """Return the share of the baseline's bubble that a variant saves: the median over turns.

        None if the baseline of a turn has no bubble, which noise can cause: there is nothing to compare with.
        """
        pairs = list(zip(self.values(variant, _bubble_ms), self.values(baseline, _bubble_ms), strict=True))
        if any(baseline_ms <= 0 for _, baseline_ms in pairs):
            return None
        return statistics.median(1 - ms / baseline_ms for ms, baseline_ms in pairs)

    def noise_floor(self) -> tuple[float, float]:
        """Return the smallest and largest ratio of the plain loop's step to itself within a turn."""
        pairs = zip(self.values(PLAIN_AGAIN, _step_ms), self.values(PLAIN, _step_ms), strict=True)
        ratios = [again / first for again, first in pairs]
        return min(ratios), max(ratios)

    def figures(self) -> list[dict[str, Any]]:
        """Return the figures of every variant, ready for JSON."""
        compute_ms = self.median(PLAIN, lambda run: run.compute_ms)
        return [{"variant": "compute alone", "step_ms": compute_ms, **self._throughput(compute_ms)}] + [
            {
                "variant": variant,
                "step_ms": self.median(variant, _step_ms),
                **self._throughput(self.median(variant, _step_ms)),
                "step_over_compute": self.median(variant, lambda run: run.summary.step_ms / run.compute_ms),
                "bubble_ms": self.median(variant, _bubble_ms),
                "fewer_bubbles_than_torchrec": self.bubble_reduction(variant, PLAIN),
                "fewer_bubbles_than_sparse_dist": self.bubble_reduction(variant, SPARSE_DIST),
                "causes_ms": self.causes(variant),
            }
            for variant in VARIANTS
        ]

    def causes(self, variant: str) -> dict[str, float]:
        """Return the milliseconds of a step by cause: means over turns, so that they add up to the step."""
        lines = [line for run in self.runs if run.variant == variant for line in run.summary.lines]
        by_cause = {line.cause: [other.ms for other in lines if other.cause == line.cause] for line in lines}
        return {cause: statistics.mean(ms) for cause, ms in by_cause.items()}

    def _throughput(self, step_ms: float) -> dict[str, float]:
        return {"iterations_per_second": 1e3 / step_ms, "samples_per_second": 1e3 * self.samples / step_ms}


def _bubble_ms(run: VariantRun) -> float:
    return run.bubble_ms


def _step_ms(run: VariantRun) -> float:
    return run.summary.step_ms


def measure_steps(
    config: RunConfig,
    world: World,
    folder: Path,
    *,
    turns: int,
    emulated: bool,
    on_progress: Callable[[str], None] = lambda _: None,
) -> StepComparison:
    """Train every variant for `train.max_steps`, turn after turn; each turn has its own samples.

    `emulated`: each rank sleeps for the time the model was measured to take, which leaves the CPU free as a GPU would.
    """
    compute = calibrate_compute(config, world)
    calibrated = replace(config, balance=replace(config.balance, cost=compute.cost.constants))
    data, runs = Loader.from_run(config), []
    for turn in range(turns):
        seeded = replace(calibrated, seed=config.seed + turn)

        def model(seeded: RunConfig = seeded) -> Model:
            real = build_model_for(seeded, data)
            return compute.emulate(real) if emulated else real

        loader = Loader.from_run(seeded, rank=world.rank, world_size=world.world_size)
        compute_ms = compute_only_ms(seeded, world, model(), itertools.islice(loader, config.train.max_steps))
        for variant in VARIANTS:
            run_folder = folder / f"{turn}-{variant.replace(' ', '-')}"
            train_variant(variant, seeded, world, run_folder, model())
            if world.is_rank_zero:
                runs.append(VariantRun(variant, summarize(read_intervals(run_folder)), compute_ms))
                times = f"{_step_ms(runs[-1]):.1f} ms, compute alone {compute_ms:.1f} ms"
                on_progress(f"turn {turn + 1} of {turns}, {variant}: {times}")
    return StepComparison(world.world_size, config.data.global_batch, emulated, compute, runs)


def train_variant(variant: str, config: RunConfig, world: World, folder: Path, model: Model) -> list[float]:
    """Train one variant and return the losses of its steps; those of FreeScale's variants on rank 0 only."""
    gc.collect()  # frees the tables of the previous variant, which reference cycles keep alive
    if variant not in FREESCALE:
        return torchrec_loops.train(config, world, folder, model, pipelined=variant == SPARSE_DIST)
    trainer = build(with_techniques(config, FREESCALE[variant]), world, folder, model=model, quiet=True)
    trainer.fit()
    trainer.close()
    if world.is_rank_zero:
        shutil.rmtree(folder / "checkpoints")
    return [entry["loss"] for entry in read_entries(folder) if entry["kind"] == "train"] if world.is_rank_zero else []


def with_techniques(config: RunConfig, techniques: Techniques) -> RunConfig:
    """Return the config with these techniques, and without saving or evaluation during the measurement."""
    transport = config.transport if techniques.sm_free else replace(config.transport, urgent="c10d", deferred="c10d")
    return replace(
        config,
        balance=replace(config.balance, mode="on" if techniques.balance else "off"),
        tables=replace(config.tables, placement="sharded", overlap="on" if techniques.priority else "off"),
        transport=transport,
        train=replace(config.train, epochs=_NEVER, save_every=_NEVER),
    )


class LossDifference(NamedTuple):
    """The difference of a variant's losses from those of FreeScale with no technique."""

    variant: str
    precision: str
    bitwise: bool
    largest_relative: float
    """The largest relative difference of the losses of a step."""


def compare_losses(
    config: RunConfig, world: World, folder: Path, *, steps: int, on_progress: Callable[[str], None] = lambda _: None
) -> list[LossDifference]:
    """Train every variant for a few steps with real compute and compare the losses. Returns them on rank 0.

    FreeScale's variants use fp64, where only the order of additions can differ. TorchRec's tables have no fp64, so its
    loops are compared in fp32.
    """
    losses: dict[tuple[str, str], Sequence[float]] = {}
    loader = Loader.from_run(config)
    for precision, variants in LOSS_VARIANTS.items():
        train = replace(config.train, precision=precision, max_steps=steps, log_every=1)
        precise = replace(config, train=train)
        for variant in variants:
            run_folder = folder / f"{precision}-{variant.replace(' ', '-')}"
            model = build_model_for(config, loader)
            losses[precision, variant] = train_variant(variant, precise, world, run_folder, model)
            on_progress(f"{variant} in {precision}")
    return _differences(losses) if world.is_rank_zero else []


def _differences(losses: Mapping[tuple[str, str], Sequence[float]]) -> list[LossDifference]:
    differences = []
    for (precision, variant), values in losses.items():
        expected = losses[precision, "nothing"]
        if variant != "nothing":
            largest = max(abs(a - b) / max(abs(b), 1e-300) for a, b in zip(values, expected, strict=True))
            differences.append(LossDifference(variant, precision, list(values) == list(expected), largest))
    return differences


def table_rows(figures: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a table row per variant, as `HEADER` names its columns."""
    return [
        [
            figure["variant"],
            f"{figure['step_ms']:.1f}",
            f"{figure['iterations_per_second']:.2f}",
            f"{figure['samples_per_second']:,.0f}",
            *_bubble_columns(figure),
        ]
        for figure in figures
    ]


def _bubble_columns(figure: dict[str, Any]) -> list[str]:
    if "bubble_ms" not in figure:
        return ["1.000", "", "", ""]
    shares = [figure[f"fewer_bubbles_than_{baseline}"] for baseline in ("torchrec", "sparse_dist")]
    reductions = ["-" if share is None else f"{100 * share:+.1f}%" for share in shares]
    return [f"{figure['step_over_compute']:.3f}", f"{figure['bubble_ms']:.1f}", *reductions]


def loss_rows(differences: Sequence[LossDifference]) -> list[list[str]]:
    """Return a table row per loss comparison, as `LOSS_HEADER` names its columns."""
    return [
        [d.variant, d.precision, "the same bits" if d.bitwise else f"off by at most {d.largest_relative:.1e}"]
        for d in differences
    ]


def headline(comparison: StepComparison) -> str:
    """Return a summary in a few sentences."""
    best = next(figure for figure in comparison.figures() if figure["variant"] == "everything")
    low, high = comparison.noise_floor()
    compute = "emulated with its calibrated time" if comparison.emulated else "real"
    return (
        f"{comparison.world_size} ranks, {comparison.samples} samples per step, compute is {compute}. With everything "
        f"a step takes {best['step_over_compute']:.3f} of compute alone, and its bubble is "
        f"{_relative_size(best['fewer_bubbles_than_torchrec'], PLAIN)}, "
        f"{_relative_size(best['fewer_bubbles_than_sparse_dist'], SPARSE_DIST)}. "
        f"The plain loop was {low:.3f} to {high:.3f} of itself."
    )


def _relative_size(reduction: float | None, baseline: str) -> str:
    if reduction is None:
        return f"not comparable with that of {baseline}, which has none"
    return f"{100 * abs(reduction):.1f}% {'smaller' if reduction >= 0 else 'larger'} than that of {baseline}"


def render_page(comparison: StepComparison, differences: Sequence[LossDifference]) -> str:
    """Return the HTML page: bubbles by cause of every variant, beside compute alone."""
    figures = comparison.figures()
    bars = [page.StackedBar(variant, comparison.causes(variant)) for variant in VARIANTS]
    bars.insert(0, page.StackedBar("compute alone", {"forward": figures[0]["step_ms"]}))
    shown = {c: colour for c, colour in COLOURS.items() if any(bar.values.get(c, 0) > _MIN_SHOWN_MS for bar in bars)}
    return page.document(
        "A step of every variant",
        headline(comparison),
        page.section(
            "Where a step goes",
            "Mean of all ranks and turns. Compute alone and SparseDist do not separate forward and backward.",
            page.legend(shown),
            page.stacked_bars(bars, shown, rows="", axis="ms per step"),
        ),
        page.section(
            "All figures",
            "Medians over turns; bubbles are compared within a turn. A bubble is the time of a step beyond compute "
            "alone: forward, backward and update of the same samples with local rows and no communication, mean of all "
            "ranks.",
            page.table(HEADER, table_rows(figures)),
        ),
        page.section(
            "The training result is the same",
            "Losses of a few steps with real compute. Where samples move, sums have another order; TorchRec also adds "
            "the gradients of a row in another order.",
            page.table(LOSS_HEADER, loss_rows(differences), words=(0, 1, 2)),
        ),
    )
