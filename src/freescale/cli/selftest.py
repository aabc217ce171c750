"""`freescale selftest`: checks every transport and technique on these machines."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from freescale.cli.options import Flag, parse, print_json, print_table, require_gpu, say
from freescale.launch.launcher import launch_ranks
from freescale.progress import progress

_TIMEOUT = 60.0


@dataclass(frozen=True, kw_only=True)
class SelftestOptions:
    """Run every transport, technique, kernel and recipe for a few steps. Exits with 0 only if none fails.

    freescale selftest --nproc 2
    """

    device: Literal["cpu", "cuda"] = "cpu"
    """Device to test."""
    nproc: int = 2
    """Ranks to start on this machine; under torchrun or SLURM, those that were started."""
    out: Path = Path("selftest")
    """Folder for selftest.json and selftest.html: outcomes, timings, traces, versions and topology.

    On several hosts: one that all of them see, or the check of resuming is left out."""
    only: str = "*"
    """Checks to run: a name, or a pattern such as "transport *"."""
    json: Flag = False
    """Print the outcomes as JSON."""
    quiet: Flag = False
    """Show no progress, only results, warnings and errors."""


def run_selftest(argv: Sequence[str], prog: str) -> int:
    """Run all checks and print their outcomes."""
    options = parse(SelftestOptions, argv, prog)
    if (code := launch_ranks(["selftest", *argv], nproc=options.nproc)) is not None:
        return code
    with progress("starting"):
        from freescale.train import selftest_report
        from freescale.train.selftest import CheckOutcome, Selftest
        from freescale.transport.world import destroy_world, init_world

        require_gpu(options.device)
        world = init_world(timeout=_TIMEOUT, device=options.device)
    facts = selftest_report.facts(world)

    def write(outcomes: list[CheckOutcome]) -> None:
        folder = options.out if world.is_rank_zero else options.out / f"rank-{world.rank}"
        selftest_report.write(folder, facts, outcomes)

    selftest = Selftest(world, options.out, only=options.only, on_failure=write)
    outcomes = selftest.run()
    if world.is_rank_zero or any(outcome.trace for outcome in outcomes):
        write(outcomes)
    failed = sum(outcome.status == "failed" for outcome in outcomes)
    if world.is_rank_zero and options.json:
        print_json([asdict(outcome) for outcome in outcomes])
    elif world.is_rank_zero:
        title = f"selftest, {world.world_size} ranks on {world.device.type}"
        rows = [[outcome.check, outcome.status, outcome.why] for outcome in outcomes]
        print_table(title, ["check", "outcome", "why"], rows, words=(0, 1, 2))
        say(f"{failed} failed" if failed else "nothing failed", f"report: {options.out / selftest_report.PAGE}")
    if not selftest.is_cut_short:  # else a communicator may not end
        destroy_world()
    return 1 if failed else 0
