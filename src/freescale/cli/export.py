"""`freescale export`: a trained model in files that others read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from freescale.cli.options import parse, say
from freescale.cli.saved import RunOptions, on_ranks
from freescale.progress import progress

if TYPE_CHECKING:
    from freescale.train.trained_model import TrainedModel


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """Write weights as safetensors with the vocabulary and the config, and read everything back.

    freescale export runs/latest model/
    """

    out: tyro.conf.Positional[Path]
    """Folder to write."""


def run(argv: Sequence[str], prog: str) -> int:
    """Write the export and list its files."""
    options = parse(Options, argv, prog)

    def work(saved: "TrainedModel") -> None:
        from freescale.train.trained_model import export_model

        with progress(f"writing {options.out}"):
            files = export_model(saved, options.out)
        if saved.world.is_rank_zero:
            say(*(str(options.out / name) for name in files))

    return on_ranks(options, ["export", *argv], work, out=options.out)
