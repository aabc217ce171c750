"""One case after another."""

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from freescale.cli.main import COMMANDS

from . import cases, worlds
from .cases import Case
from .damage import inflict
from .runner import Reply, Runner
from .verdict import listing, verdicts


@dataclass(frozen=True)
class Outcome:
    """A case, and what became of it."""

    case: Case
    reply: Reply
    faults: list[str]

    @property
    def command(self) -> str:
        """As one would type it."""
        return "freescale " + " ".join(map(shlex.quote, self.case.words)).encode("utf-8", "backslashreplace").decode()

    @property
    def name(self) -> str:
        """Which of the commands it is; of a mistyped one, its first word."""
        two = " ".join(self.case.words[:2])
        return two if two in COMMANDS else self.case.words[0] if self.case.words else ""


def run_case(seed: int, number: int, world: Path, runner: Runner) -> Outcome:
    """Run a case in a copy of the world."""
    place = world.with_name(f"case-{number}")
    case = cases.drawn(seed, number, world)
    worlds.copied(world, place)
    try:
        for damage in case.damages:
            inflict(damage, place)
        before = listing(place)
        reply = runner.run(case.words, place, case.circumstances)
        return Outcome(case, reply, list(verdicts(case, reply, before, place)))
    finally:
        for path in (place, *place.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                os.chmod(path, 0o755)
        shutil.rmtree(place)
