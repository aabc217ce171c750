"""`freescale bench step`: what the techniques win here, against TorchRec's loops and against compute alone."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from freescale.checkpoint.run_folder import RunLock
from freescale.cli import preflight
from freescale.cli.options import parse_run, print_json, print_table, require_at_least, run_parser, say, write_page
from freescale.config import RunConfig
from freescale.errors import UsageError
from freescale.launch.launcher import launch_ranks
from freescale.progress import progress

_HELP = """Train a recipe or a TOML file in turns: TorchRec's plain loop, its SparseDist pipeline, and FreeScale with
each technique alone and with all. Prints steps/s and bubbles of each beside compute alone, and writes a page; the runs
lie beside it, each for `freescale report`.

  freescale bench step tiny --data data/demo --nproc 2
  torchrun --nproc-per-node 8 -m freescale bench step hstu-large --data data/log
"""


def run(argv: Sequence[str], prog: str) -> int:
    """Measure, print and draw."""
    options, config = parse_run(_parser(prog), argv)
    require_at_least(options, steps=2, turns=1, exact_steps=1)
    if config.model.dim % 4:
        what = f"model.dim = {config.model.dim} cannot be compared: TorchRec's tables have a multiple of 4"
        raise UsageError(what, remedy=f"--model.dim {-(-config.model.dim // 4) * 4}")
    config = replace(config, train=replace(config.train, max_steps=options.steps))
    preflight.data(config)
    with RunLock(options.out.with_suffix("")) as lock:
        code = launch_ranks(["bench", "step", *argv], nproc=options.nproc, lock=lock)
        return code if code is not None else _measure(options, config)


def _measure(options: argparse.Namespace, config: RunConfig) -> int:
    """What every rank does."""
    with progress("starting"):
        from freescale.bench import step
        from freescale.transport.world import destroy_world, init_world

        world = init_world(timeout=config.train.timeout)
    folder = options.out.with_suffix("")
    trainings = options.turns * len(step.VARIANTS) + sum(map(len, step.LOSS_VARIANTS.values()))
    with progress("training", total=trainings, unit="trainings", at_once=True, in_background=False) as bar:

        def tell(text: str) -> None:
            bar.advance()
            if not options.json and not options.quiet:
                say(text)

        found = step.measure_steps(config, world, folder, turns=options.turns, emulated=options.timed, on_progress=tell)
        exact = step.compare_losses(
            config, world, folder, steps=options.exact_steps, on_progress=lambda _: bar.advance()
        )
    if world.is_rank_zero:
        write_page(options.out, step.render_page(found, exact))
        if options.json:
            print_json(
                {"variants": found.figures(), "floor": found.noise_floor(), "exact": [one._asdict() for one in exact]}
            )
        else:
            print_table(f"{world.world_size} ranks", step.HEADER, step.table_rows(found.figures()))
            print_table("what is learnt", step.LOSS_HEADER, step.loss_rows(exact), words=(0, 1, 2))
            say(step.headline(found), f"page: {options.out}")
    destroy_world()
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = run_parser(prog, _HELP)
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start on this machine (default: 2)")
    parser.add_argument("--steps", type=int, default=32, help="of every way in a turn (default: 32)")
    parser.add_argument("--turns", type=int, default=3, help="each with samples of its own (default: 3)")
    parser.add_argument("--exact-steps", type=int, default=8, help="whose losses are compared (default: 8)")
    parser.add_argument(
        "--timed", action="store_true", help="compute is a wait of its measured length: for machines of few cores"
    )
    parser.add_argument("--out", type=Path, default=Path("step.html"), help="the page (default: step.html)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser
