"""`freescale checkpoint convert`: checkpoints to and from torch.distributed.checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from freescale.cli.options import Flag, parse, print_json, say
from freescale.progress import progress

_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Convert the newest checkpoint of a run to torch.distributed.checkpoint (DCP), or such a checkpoint to a run.

    freescale checkpoint convert runs/mine dcp/mine
    freescale checkpoint convert dcp/mine runs/back
    freescale checkpoint convert dcp/torchrec runs/theirs --like runs/mine
    """

    source: tyro.conf.Positional[Path]
    """Folder of a run, of one of its checkpoints, or of a DCP checkpoint. The result has the other format."""
    out: tyro.conf.Positional[Path]
    """New folder."""
    like: Path | None = None
    """A checkpoint of the result's format. Its names and sizes are used, and its values where the source has none."""
    rename: tuple[str, ...] = ()
    """OURS=THEIRS: names that begin with OURS in FreeScale begin with THEIRS in DCP. Used with --like."""
    json: Flag = False
    """Print JSON."""
    quiet: Flag = False
    """Show no progress, only results, warnings and errors."""


def run_convert(argv: Sequence[str], prog: str) -> int:
    """Convert a checkpoint and print what was converted."""
    options = parse(ConvertOptions, argv, prog)
    from freescale.checkpoint.conversion import convert

    with progress(f"converting {options.source}"):
        summary = convert(options.source, options.out, like=options.like, renames=options.rename)
    if options.json:
        print_json(summary._asdict())
        return 0
    say(f"{summary.out}: {len(summary.converted):,} tensors of {options.source}")
    if summary.kept:
        say(f"the values of {options.like} are kept for {_names(summary.kept)}")
    if summary.unused:
        say(f"not used: {_names(summary.unused)}")
    return 0


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
