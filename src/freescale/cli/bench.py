"""`freescale bench`: transports, training steps and attention, measured on these machines."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from freescale import page
from freescale.checkpoint.run_folder import RunLock
from freescale.cli import preflight
from freescale.cli.options import (
    Flag,
    parse,
    parse_run,
    print_json,
    print_table,
    require_at_least,
    require_gpu,
    run_parser,
    say,
    write_page,
)
from freescale.config import RunConfig
from freescale.errors import UsageError, reason
from freescale.launch.launcher import launch_ranks
from freescale.progress import progress

if TYPE_CHECKING:
    from freescale.bench.attention import AttentionTiming
    from freescale.models.attention.reference import AttentionProblem
    from freescale.transport.selection import TransportTiming

_TIMEOUT = 120.0
_TRANSPORT_HEADER = ["transport", "KiB sent by a rank", "ms", "ms taken from compute"]


@dataclass(frozen=True, kw_only=True)
class TransportBenchOptions:
    """Measure every available transport between these ranks, alone and overlapped with compute; write a page of curves.

    freescale bench transport --nproc 2
    """

    nproc: int = 2
    """Ranks to start on this machine; under torchrun or SLURM, those that were started."""
    kib: tuple[int, ...] = (16, 64, 256, 1024, 4096, 16384)
    """Sizes of a transfer: KiB that a rank sends."""
    out: Path = Path("transport.html")
    """The page."""
    json: Flag = False
    """Print the table as JSON."""
    quiet: Flag = False
    """Show no progress, only results, warnings and errors."""


def run_transport(argv: Sequence[str], prog: str) -> int:
    """Measure, print and write the page."""
    options = parse(TransportBenchOptions, argv, prog)
    if min(options.kib, default=0) < 1:
        raise UsageError("--kib takes sizes of at least 1", remedy=f"see {prog} --help")
    if (code := launch_ranks(["bench", "transport", *argv], nproc=options.nproc)) is not None:
        return code
    with progress("starting"):
        from freescale.transport.selection import TransportFactory, best_transport, explain, probe
        from freescale.transport.world import destroy_world, init_world

        world = init_world(timeout=_TIMEOUT)
    factory = TransportFactory(world)
    transports = {name: factory.create(name) for name in factory.available}
    timings = probe(transports, world.transport, world.device, sizes=[kib << 10 for kib in options.kib], rounds=5)
    by_size = [[timing for timing in timings if timing.sent_bytes == kib << 10] for kib in options.kib]
    lanes = ("urgent", "deferred")
    choices = [explain(lane, best_transport(same_size, lane), same_size) for same_size in by_size for lane in lanes]
    if world.is_rank_zero:
        write_page(options.out, _transport_page(timings, choices, factory.unavailable))
        if options.json:
            measured = [asdict(timing) for timing in timings]
            print_json({"measured": measured, "unavailable": factory.unavailable, "choices": choices})
        else:
            print_table(f"{world.world_size} ranks", _TRANSPORT_HEADER, _transport_rows(timings))
            unavailable = [f"unavailable: {name}, {why}" for name, why in factory.unavailable.items()]
            say(*choices, *unavailable, f"page: {options.out}")
    destroy_world()
    return 0


def _transport_rows(timings: Sequence["TransportTiming"]) -> list[list[str]]:
    return [
        [m.transport, f"{m.sent_bytes >> 10:,}", f"{m.seconds * 1e3:.2f}", f"{m.lost_compute_seconds * 1e3:.2f}"]
        for m in timings
    ]


def _transport_page(timings: Sequence["TransportTiming"], choices: Sequence[str], unavailable: dict[str, str]) -> str:
    missing = [f"Unavailable: {name}, since {why}." for name, why in unavailable.items()]
    return page.document(
        "Transports between ranks",
        "Every transport moves the same bytes; they differ in time, and in what they take from concurrent compute.",
        page.section(
            "A transfer that ranks wait for",
            "Time of the slowest rank. Urgent traffic uses the fastest transport.",
            _transport_curves(timings, lambda timing: timing.seconds, "ms"),
        ),
        page.section(
            "A transfer overlapped with compute",
            "Compute time lost during the transfer. Deferred traffic uses the transport that costs the least.",
            _transport_curves(timings, lambda timing: timing.lost_compute_seconds, "ms of compute"),
        ),
        page.section("All figures", " ".join(missing), page.table(_TRANSPORT_HEADER, _transport_rows(timings))),
        page.section("Choice", "By size and lane.", page.table(["choice"], [[line] for line in choices])),
    )


def _transport_curves(
    timings: Sequence["TransportTiming"], value: Callable[["TransportTiming"], float], unit: str
) -> str:
    lines = []
    for name in dict.fromkeys(timing.transport for timing in timings):
        own = [timing for timing in timings if timing.transport == name]
        sizes = [timing.sent_bytes / 1024 for timing in own]
        lines.append(page.Series(name, sizes, [max(1e-3, 1e3 * value(timing)) for timing in own]))
    return page.line_chart(lines, page.Axis("KiB sent by a rank", log=True), page.Axis(unit, log=True))


_STEP_HELP = """Train a recipe or a TOML file in turns: TorchRec's plain loop, its SparseDist pipeline, and FreeScale
with each technique alone and with all. Prints steps/s and bubbles of each next to compute alone, and writes a page; the
runs are kept next to it, each for `freescale report`.

  freescale bench step tiny --data data/demo --nproc 2
  torchrun --nproc-per-node 8 -m freescale bench step hstu-large --data data/log
"""


def run_step(argv: Sequence[str], prog: str) -> int:
    """Measure, print and write the page."""
    options, config = parse_run(_step_parser(prog), argv)
    require_at_least(options, steps=2, turns=1, exact_steps=1)
    if config.model.dim % 4:
        what = f"model.dim = {config.model.dim} cannot be compared: TorchRec's tables have a multiple of 4"
        raise UsageError(what, remedy=f"--model.dim {-(-config.model.dim // 4) * 4}")
    config = replace(config, train=replace(config.train, max_steps=options.steps))
    preflight.check_data(config)
    with RunLock(options.out.with_suffix("")) as lock:
        code = launch_ranks(["bench", "step", *argv], nproc=options.nproc, lock=lock)
        return code if code is not None else _measure_step(options, config)


def _measure_step(options: argparse.Namespace, config: RunConfig) -> int:
    with progress("starting"):
        from freescale.bench import step_comparison
        from freescale.transport.world import destroy_world, init_world

        world = init_world(timeout=config.train.timeout)
    folder = options.out.with_suffix("")
    trainings = options.turns * len(step_comparison.VARIANTS) + sum(map(len, step_comparison.LOSS_VARIANTS.values()))
    with progress("training", total=trainings, unit="trainings", at_once=True, in_background=False) as bar:

        def tell(text: str) -> None:
            bar.advance()
            if not options.json and not options.quiet:
                say(text)

        result = step_comparison.measure_steps(
            config, world, folder, turns=options.turns, emulated=options.emulated, on_progress=tell
        )
        exact = step_comparison.compare_losses(
            config, world, folder, steps=options.exact_steps, on_progress=lambda _: bar.advance()
        )
    if world.is_rank_zero:
        write_page(options.out, step_comparison.render_page(result, exact))
        if options.json:
            losses = [row._asdict() for row in exact]
            print_json({"variants": result.figures(), "floor": result.noise_floor(), "exact": losses})
        else:
            print_table(
                f"{world.world_size} ranks", step_comparison.HEADER, step_comparison.table_rows(result.figures())
            )
            print_table(
                "training result", step_comparison.LOSS_HEADER, step_comparison.loss_rows(exact), words=(0, 1, 2)
            )
            say(step_comparison.headline(result), f"page: {options.out}")
    destroy_world()
    return 0


def _step_parser(prog: str) -> argparse.ArgumentParser:
    parser = run_parser(prog, _STEP_HELP)
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start on this machine (default: 2)")
    parser.add_argument("--steps", type=int, default=32, help="steps of every loop in a turn (default: 32)")
    parser.add_argument("--turns", type=int, default=3, help="turns, each with its own samples (default: 3)")
    parser.add_argument("--exact-steps", type=int, default=8, help="steps whose losses are compared (default: 8)")
    parser.add_argument(
        "--emulated", action="store_true", help="emulate compute by a wait of its measured length, on few cores"
    )
    parser.add_argument("--out", type=Path, default=Path("step.html"), help="the page (default: step.html)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


_ERROR_LIMITS = {"fp32": 1e-5, "tf32": 1e-2, "bf16": 2e-2, "fp16": 2e-2}


@dataclass(frozen=True, kw_only=True)
class AttentionBenchOptions:
    """Compare attention with its reference, then time it: ours, padded, and torch's flex attention.

    freescale bench attention --device cpu --longest 512 --batch 32
    """

    device: Literal["cpu", "cuda"] = "cpu"
    """Device to measure."""
    preset: Literal["kuairand", "ml1m", "heavy"] = "heavy"
    """Distribution of the lengths."""
    batch: int = 64
    """Samples."""
    longest: int = 1024
    """Longest sequence; longer ones are truncated."""
    heads: int = 1
    """Attention heads."""
    width: int = 128
    """Width of a head."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Precision of q, k and v. tf32: products of fp32 on tensor cores."""
    tune: Flag = False
    """First measure tile sizes for this precision and width, and store the fastest for later runs."""
    rounds: int = 5
    """Repetitions, in turns."""
    json: Flag = False
    """Print the figures as JSON."""
    quiet: Flag = False
    """Show no progress, only results, warnings and errors."""


def run_attention(argv: Sequence[str], prog: str) -> int:
    """Check the result, and time it only if it is correct."""
    options = parse(AttentionBenchOptions, argv, prog)
    require_at_least(options, batch=1, longest=1, heads=1, width=1, rounds=1)
    with progress("loading torch"):
        import numpy as np
        import torch

        from freescale.bench import attention
        from freescale.data import synthetic
        from freescale.models.attention.operators import hstu_attention
        from freescale.models.attention.reference import AttentionProblem, relative_errors

    require_gpu(options.device)
    if options.device == "cpu" and (options.tune or options.precision == "tf32"):
        asked = "--tune" if options.tune else "--precision tf32"
        raise UsageError(f"{asked} needs a GPU", remedy="add --device cuda")
    torch.backends.cuda.matmul.allow_tf32 = options.precision == "tf32"
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision, torch.float32)
    place, size = torch.device(options.device), {"heads": options.heads, "width": options.width}
    with progress("checking attention"):
        errors = relative_errors(AttentionProblem.edge_cases(**size, dtype=kind, device=place), hstu_attention)
    correct = all(error <= _ERROR_LIMITS[options.precision] for error in errors.values())
    timed: list[AttentionTiming] = []
    left_out: dict[str, str] = {}
    tuned: list[str] = []
    if correct:
        drawn = synthetic.draw_lengths(options.preset, options.batch, np.random.default_rng(0))
        lengths = np.minimum(drawn, options.longest).tolist()
        problem = AttentionProblem.random(lengths, **size, dtype=kind, device=place)
        tuned = _tune(problem, options.rounds) if options.tune else []
        competitors, left_out = _competitors(problem)
        timed = attention.compare(problem, competitors, rounds=options.rounds)
    if options.json:
        timings = [asdict(timing) for timing in timed]
        print_json({"errors": errors, "right": correct, "timed": timings, "left_out": left_out, "tuned": tuned})
    else:
        say(*tuned)
        _print_attention(options, errors, timed, left_out)
    return 0 if correct else 1


def _tune(problem: "AttentionProblem", rounds: int) -> list[str]:
    """Measure and store tiles, and return what was found."""
    from freescale.bench.attention_tuning import fastest_tiles, tune
    from freescale.models.attention.tiles import device_profile, tiles_path, write_tiles

    profile, timings = device_profile(problem.q.device), tune(problem, rounds=rounds)
    found, path = fastest_tiles(timings), tiles_path(profile)
    write_tiles(path, profile, found)
    seconds = {(timing.key, timing.tile): timing.seconds for timing in timings}
    lines = [
        f"{key.kernel}: {tile.block} x {tile.tile}, {tile.warps} warps, {tile.stages} stages, "
        f"{1e3 * seconds[key, tile]:.2f} ms"
        for key, tile in found.items()
    ]
    failed = sum(bool(timing.failure) for timing in timings)
    return [*lines, f"{failed} of {len(timings)} tiles cannot be used here", f"stored in {path}"]


def _competitors(problem: "AttentionProblem") -> "tuple[dict[str, Callable[[AttentionProblem], None]], dict[str, str]]":
    """Return the implementations that run here, and why the others cannot."""
    from freescale.bench import attention

    competitors: dict[str, Callable[[AttentionProblem], None]] = {
        "ours": attention.run_operator,
        "padded to the longest": attention.run_padded,
    }
    try:
        with progress("compiling flex attention"):
            flex = attention.compile_flex(problem)
            flex(problem)
    except Exception as error:  # any compiler error: flex attention is optional
        return competitors, {"flex attention": reason(error)}
    return competitors | {"flex attention (softmax, no biases)": flex}, {}


def _print_attention(
    options: AttentionBenchOptions,
    errors: dict[str, float],
    timed: "Sequence[AttentionTiming]",
    left_out: dict[str, str],
) -> None:
    title = f"{options.precision} on {options.device}, {options.heads} x {options.width}"
    rows = [[name, f"{error:.1e}"] for name, error in errors.items()]
    print_table(f"Against the reference in fp64, {title}", ["what", "relative error"], rows)
    if not timed:
        say(f"above {_ERROR_LIMITS[options.precision]:.0e}: nothing was timed")
        return
    rows = [[t.name, f"{t.seconds * 1e3:.1f}", f"{t.flops_per_second / 1e9:.1f}", f"{t.of_dense:.0%}"] for t in timed]
    header = ["forward and backward", "ms", "GFLOP/s", "of dense products"]
    print_table(f"{options.preset}, {options.batch} samples up to {options.longest}", header, rows)
    say(*(f"not timed: {name}, {why}" for name, why in left_out.items()))
