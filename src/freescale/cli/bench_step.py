"""`freescale bench step`: what the techniques win here, against TorchRec's loops and against compute alone."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from freescale import config
from freescale.cli.options import print_json, print_table, say, write_page
from freescale.errors import UsageError
from freescale.launch import launched_instead

_HELP = """Train a recipe or a TOML file in turns: TorchRec's plain loop, its SparseDist pipeline, and FreeScale with
each technique alone and with all. Prints steps/s and bubbles of each beside compute alone, and writes a page; the runs
lie beside it, each for `freescale report`.

  freescale bench step tiny --data data/demo --nproc 2
  torchrun --nproc-per-node 8 -m freescale bench step hstu-large --data data/log
"""


def run(argv: Sequence[str], prog: str) -> int:
    """Measure, print and draw."""
    options, overrides = _parse(argv, prog)
    run_config = config.resolve(options.source, overrides, prog=f"{prog} {options.source}")
    if not run_config.data.path:
        raise UsageError("no data is given", remedy=f"{prog} {options.source} --data FOLDER")
    folder = options.out.with_suffix("")
    if (code := launched_instead(["bench", "step", *argv], ranks=options.nproc)) is not None:
        return code
    from freescale.bench import page, step
    from freescale.transport.world import join, leave

    world = join(deadline=run_config.train.deadline)
    run_config = replace(run_config, train=replace(run_config.train, max_steps=options.steps))
    tell = (lambda _: None) if options.json else say
    found = step.measure(run_config, world, folder, turns=options.turns, timed=options.timed, say=tell)
    exact = step.compared(run_config, world, folder, steps=options.exact_steps)
    if world.leads:
        write_page(options.out, page.document(found, exact))
        if options.json:
            print_json({"ways": found.figures(), "floor": found.floor(), "exact": [one._asdict() for one in exact]})
        else:
            print_table(f"{world.ranks} ranks", page.HEADER, page.rows(found.figures()))
            print_table("what is learnt", page.EXACT_HEADER, page.exact_rows(exact), words=(0, 1, 2))
            say(page.headline(found), f"page: {options.out}")
    leave()
    return 0


def _parse(argv: Sequence[str], prog: str) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog=prog, description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("source", help=f"a .toml file or a recipe: {', '.join(config.RECIPES)}")
    parser.add_argument("--data", help="folder of the data set (data.path)")
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start on this machine (default: 2)")
    parser.add_argument("--steps", type=int, default=32, help="of every way in a turn (default: 32)")
    parser.add_argument("--turns", type=int, default=3, help="each with samples of its own (default: 3)")
    parser.add_argument("--exact-steps", type=int, default=8, help="whose losses are compared (default: 8)")
    parser.add_argument(
        "--timed", action="store_true", help="compute is a wait of its measured length: for machines of few cores"
    )
    parser.add_argument("--out", type=Path, default=Path("step.html"), help="the page (default: step.html)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options, overrides = parser.parse_known_args(list(argv))
    if options.data is not None:
        overrides = ["--data.path", options.data, *overrides]
    return options, overrides
