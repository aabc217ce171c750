"""`freescale train` and `freescale config`: train a recipe or a config file, or print it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from freescale.checkpoint.run_folder import RunLock
from freescale.cli import preflight
from freescale.cli.options import parse_run, run_parser
from freescale.config import RECIPES, RunConfig, override, resolve, to_toml
from freescale.errors import UsageError
from freescale.launch import Hosts, is_rank
from freescale.launch.launcher import launch_ranks
from freescale.log import info_once
from freescale.progress import progress

_TRAIN_HELP = """Train a recipe or a TOML file; any field of the config is a flag (--train.epochs 3).

  freescale train tiny --nproc 2                                          (generates demo data)
  freescale train hstu-ml1m --data data/ml1m --nproc 2
  freescale train run.toml --nproc 8 --hosts 2:4 --rdzv-endpoint 10.0.0.1:29400    (on every host)
  torchrun --nproc-per-node 2 -m freescale train run.toml
  srun freescale train run.toml --autoresume                                       (see docs/how-to/slurm.md)
  freescale train run.toml --until now             (new partitions of a data set that grows; repeat it by cron)
"""

_CONFIG_HELP = f"""usage: freescale config RECIPE|FILE.toml [--from-data FOLDER] [--FIELD VALUE ...]

Print the resolved config as TOML, with the meaning of each field above it. Every field can be given as a flag,
such as --data.global-batch 64. --from-data proposes features, labels and their tables from the columns of a data set:
read the proposal before you train.

  freescale config tiny --data.path data/kr > run.toml
  freescale config tiny --from-data data/kr > run.toml

recipes: {", ".join(RECIPES)}
"""


def run_config(argv: Sequence[str], prog: str) -> int:
    """Print the config that a run would have."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_CONFIG_HELP)
        return 0
    source, *overrides = argv
    if "--from-data" in overrides:
        place = overrides.index("--from-data")
        if place + 1 == len(overrides):
            raise UsageError("--from-data needs the folder of a data set", remedy=f"see {prog} --help")
        from freescale.data.feature_stats import propose_config

        proposed = propose_config(resolve(source), overrides[place + 1])
        config = override(proposed, overrides[:place] + overrides[place + 2 :], prog=f"{prog} {source}")
    else:
        config = resolve(source, overrides, prog=f"{prog} {source}")
    sys.stdout.write(to_toml(config, explain=True))
    return 0


def run_train(argv: Sequence[str], prog: str) -> int:
    """Train in this process, or start the ranks."""
    options, config = parse_run(_train_parser(prog), argv, demo_data=None if is_rank() else _demo_data)
    hosts = Hosts.parse(options.hosts, options.rdzv_endpoint)
    out = options.out or Path("runs") / Path(options.source).stem
    preflight.check_train(config, out, options, joins=hosts is not None)
    with RunLock(out, waits=options.autoresume) as lock:
        words = ["train", *argv, "--data", config.data.path]
        code = launch_ranks(words, nproc=options.nproc, hosts=hosts, restarts=options.restarts, lock=lock)
        return code if code is not None else _train_on_rank(options, config, out)


def _demo_data() -> Path:
    """Return the folder of a small synthetic data set; generate it if it does not exist."""
    folder = Path("data/demo")
    lengths = "a synthetic log with MovieLens-like lengths"
    if folder.exists():
        info_once(f"no --data is given: training on {folder}, {lengths}")
    else:
        from freescale.data.synthetic import write_log

        write_log(folder, "ml1m", users=2000, catalogue=10_000)
        info_once(f"no --data is given: generated {lengths} in {folder}")
    return folder


def _train_on_rank(options: argparse.Namespace, config: RunConfig, out: Path) -> int:
    with progress("starting"):
        from freescale.train.build import train
        from freescale.transport.world import init_world

        world = init_world(timeout=config.train.timeout)
    names = ("resume", "autoresume", "accept_changes", "quiet", "until")
    flags = {name: getattr(options, name) for name in names}
    return train(config, world, out, monitoring=preflight.monitoring(options), **flags)


def _train_parser(prog: str) -> argparse.ArgumentParser:
    parser = run_parser(prog, _TRAIN_HELP)
    parser.add_argument("--nproc", type=int, default=1, help="ranks to start on this machine")
    parser.add_argument("--restarts", type=int, default=3, help="how often lost ranks are restarted (default: 3)")
    parser.add_argument("--hosts", default="", metavar="LEAST:MOST", help="how many hosts take part, each with --nproc")
    parser.add_argument(
        "--rdzv-endpoint", default="", metavar="HOST:PORT", help="address of the rendezvous; on every host the same"
    )
    parser.add_argument("--out", type=Path, help="folder of the run (default: runs/NAME)")
    until = "train partitions not yet trained, up to this one, a date, or `now`; exit code 8: there is none"
    parser.add_argument("--until", default="", metavar="PARTITION", help=until)
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint in --out")
    autoresume = "as --resume if there is a checkpoint, else start anew: for jobs that a cluster starts again"
    parser.add_argument("--autoresume", action="store_true", help=autoresume)
    changes = "resume with values that change the training result; without this flag they are refused"
    parser.add_argument("--accept-changes", action="store_true", help=changes)
    parser.add_argument("--tensorboard", action="store_true", help="also write TensorBoard files into the run's folder")
    parser.add_argument("--wandb", action="store_true", help="also log to Weights & Biases (see WANDB_MODE)")
    parser.add_argument("--mlflow", action="store_true", help="also log to MLflow (see MLFLOW_TRACKING_URI)")
    address = "serve metrics to Prometheus; without HOST on the loopback address, with 0.0.0.0 on all interfaces"
    parser.add_argument("--metrics-address", default="", metavar="[HOST:]PORT", help=address)
    textfile = "also write metrics to a file for the textfile collector of Prometheus' node exporter"
    parser.add_argument("--metrics-file", type=Path, metavar="FILE.prom", help=textfile)
    return parser
