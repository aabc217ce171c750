"""Which checkpoints a folder holds, by their names alone. Imports no torch."""

from pathlib import Path

from freescale.errors import UsageError

FACTS = "facts.json"


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if not path.suffix and (path / FACTS).exists())


def named(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step after which it was saved."""
    return int(checkpoint.name.split("-")[1])


def require_complete(run: Path) -> Path:
    """The newest complete checkpoint of a run that others want to read."""
    if found := complete(run / "checkpoints"):
        return found[-1]
    raise UsageError("the run has no complete checkpoint", where=str(run), remedy="let it train until it saves one")


def require_start(run: Path, newest: Path | None, *, resume: bool) -> None:
    """Refuse to start over an earlier run, and to resume from nothing."""
    if newest is not None and not resume:
        remedy = "add --resume, or choose another --out"
        raise UsageError(f"there is a run in {run} already", where=str(newest), remedy=remedy)
    if newest is None and resume:
        raise UsageError(f"there is no complete checkpoint in {run} to resume", remedy="leave out --resume")
