"""`freescale train`: a recipe or a config file, on one rank or many."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from freescale.checkpoint.run_folder import RunLock
from freescale.cli import preflight
from freescale.cli.options import parse_run, run_parser
from freescale.config import RunConfig
from freescale.launch.launcher import Hosts, launch_ranks
from freescale.progress import progress

_HELP = """Train a recipe or a TOML file; any field of the config is a flag (--train.epochs 3).

  freescale train tiny --data data/demo --nproc 2
  freescale train run.toml --nproc 8 --hosts 2:4 --rdzv-endpoint 10.0.0.1:29400    (on every host)
  torchrun --nproc-per-node 2 -m freescale train run.toml
  srun freescale train run.toml
"""


def run(argv: Sequence[str], prog: str) -> int:
    """Train here, or start the ranks that do."""
    options, config = parse_run(_parser(prog), argv)
    hosts = Hosts.parse(options.hosts, options.rdzv_endpoint)
    out = options.out or Path("runs") / Path(options.source).stem
    preflight.train(config, out, options, joins=hosts is not None)
    with RunLock(out) as lock:
        start = {"nproc": options.nproc, "hosts": hosts, "restarts": options.restarts, "lock": lock}
        code = launch_ranks(["train", *argv], **start)
        return code if code is not None else _train(options, config, out)


def _train(options: argparse.Namespace, config: RunConfig, out: Path) -> int:
    """What every rank does."""
    with progress("starting"):
        from freescale.train.build import train
        from freescale.transport.world import init_world

        world = init_world(timeout=config.train.timeout)
    asked = {name: getattr(options, name) for name in ("resume", "accept_changes", "tensorboard", "quiet")}
    return train(config, world, out, **asked)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = run_parser(prog, _HELP)
    parser.add_argument("--nproc", type=int, default=1, help="ranks to start on this machine")
    parser.add_argument("--restarts", type=int, default=3, help="how often lost ranks are restarted (default: 3)")
    parser.add_argument("--hosts", default="", metavar="LEAST:MOST", help="how many hosts take part, each with --nproc")
    parser.add_argument(
        "--rdzv-endpoint", default="", metavar="HOST:PORT", help="address of the rendezvous; on every host the same"
    )
    parser.add_argument("--out", type=Path, help="folder of the run (default: runs/NAME)")
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint in --out")
    changes = "resume with values that change the training result; without this flag they are refused"
    parser.add_argument("--accept-changes", action="store_true", help=changes)
    parser.add_argument("--tensorboard", action="store_true", help="also write TensorBoard files into the run's folder")
    return parser
