"""`freescale bench attention`: is attention right on this device, and how quick is it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from freescale.cli.options import Flag, parse, print_json, print_table, require_at_least, require_gpu, say
from freescale.errors import reason
from freescale.progress import progress

if TYPE_CHECKING:
    from freescale.bench.attention import AttentionTiming
    from freescale.models.attention.reference import AttentionProblem

_LIMITS = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Hold attention against its reference, then time it: alone, padded, and against torch's flex attention.

    freescale bench attention --device cpu --longest 512 --batch 32
    """

    device: Literal["cpu", "cuda"] = "cpu"
    """Where."""
    preset: Literal["kuairand", "ml1m", "heavy"] = "heavy"
    """How lengths are spread."""
    batch: int = 64
    """Samples."""
    longest: int = 1024
    """Lengths are cut to this."""
    heads: int = 1
    """Attention heads."""
    width: int = 128
    """Of a head."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Numbers of q, k and v."""
    rounds: int = 5
    """All take turns so many times."""
    json: Flag = False
    """Print the figures as JSON."""
    quiet: Flag = False
    """Show no progress, only results, notes and errors."""


def run(argv: Sequence[str], prog: str) -> int:
    """Check first; what is wrong is not timed."""
    options = parse(Options, argv, prog)
    require_at_least(options, batch=1, longest=1, heads=1, width=1, rounds=1)
    with progress("loading torch"):
        import numpy as np
        import torch

        from freescale.bench import attention
        from freescale.data import synthetic
        from freescale.models.attention.operators import hstu_attention
        from freescale.models.attention.reference import AttentionProblem, relative_errors

    require_gpu(options.device)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[options.precision]
    place, size = torch.device(options.device), {"heads": options.heads, "width": options.width}
    with progress("checking attention"):
        errors = relative_errors(AttentionProblem.edge_cases(**size, dtype=kind, device=place), hstu_attention)
    right = all(error <= _LIMITS[options.precision] for error in errors.values())
    timed: list[AttentionTiming] = []
    left_out: dict[str, str] = {}
    if right:
        drawn = synthetic.draw_lengths(options.preset, options.batch, np.random.default_rng(0))
        lengths = np.minimum(drawn, options.longest).tolist()
        problem = AttentionProblem.random(lengths, **size, dtype=kind, device=place)
        competitors, left_out = _competitors(problem)
        timed = attention.compare(problem, competitors, rounds=options.rounds)
    if options.json:
        print_json({"errors": errors, "right": right, "timed": [asdict(one) for one in timed], "left_out": left_out})
    else:
        _print(options, errors, timed, left_out)
    return 0 if right else 1


def _competitors(problem: "AttentionProblem") -> "tuple[dict[str, Callable[[AttentionProblem], None]], dict[str, str]]":
    """Who can run here, and why the others cannot."""
    from freescale.bench import attention

    competitors: dict[str, Callable[[AttentionProblem], None]] = {
        "ours": attention.run_operator,
        "padded to the longest": attention.run_padded,
    }
    try:
        with progress("compiling flex attention"):
            flex = attention.compile_flex(problem)
            flex(problem)
    except Exception as error:  # whatever the compiler says: it is a guest here
        return competitors, {"flex attention": reason(error)}
    return competitors | {"flex attention (softmax, no biases)": flex}, {}


def _print(
    options: Options, errors: dict[str, float], timed: "Sequence[AttentionTiming]", left_out: dict[str, str]
) -> None:
    title = f"{options.precision} on {options.device}, {options.heads} x {options.width}"
    rows = [[name, f"{error:.1e}"] for name, error in errors.items()]
    print_table(f"Against the reference in fp64, {title}", ["what", "relative error"], rows)
    if not timed:
        say(f"above {_LIMITS[options.precision]:.0e}: nothing was timed")
        return
    rows = [[t.name, f"{t.seconds * 1e3:.1f}", f"{t.flops_per_second / 1e9:.1f}", f"{t.of_dense:.0%}"] for t in timed]
    header = ["forward and backward", "ms", "GFLOP/s", "of dense products"]
    print_table(f"{options.preset}, {options.batch} samples up to {options.longest}", header, rows)
    say(*(f"not timed: {name}, {why}" for name, why in left_out.items()))
