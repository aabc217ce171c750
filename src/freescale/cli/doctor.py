"""`freescale doctor`: can training start here, and if not, what mends it."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from freescale.cli import checks
from freescale.cli.options import Flag, parse, print_json, say
from freescale.errors import InstallError
from freescale.progress import progress


@dataclass(frozen=True, kw_only=True)
class Options:
    """Check versions, devices, transports and limits. Exits with 0 only when training can start.

    freescale doctor --device cpu
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What training is to run on; auto takes the GPU where there is a driver."""
    json: Flag = False
    """Print the findings as JSON."""
    quiet: Flag = False
    """Show no progress, only results, notes and errors."""


def run(argv: Sequence[str], prog: str) -> int:
    """Look at everything, print it, and judge."""
    options = parse(Options, argv, prog)
    on_gpu = options.device == "cuda" or (options.device == "auto" and checks.has_gpu_driver())
    device: checks.Device = "cuda" if on_gpu else "cpu"
    with progress("looking at packages and devices"):
        findings = list(_examine(device))
    ready = all(finding.status != "fault" for finding in findings)
    if options.json:
        print_json({"ready": ready, "device": device, "findings": [asdict(finding) for finding in findings]})
    else:
        say(*_lines(findings), "", f"training on {device} {'can' if ready else 'cannot'} start here")
    return 0 if ready else InstallError.exit_code


def _examine(device: checks.Device) -> Iterator[checks.Finding]:
    """Metadata first, then loading; TorchRec last and only when nothing before it was at fault."""
    findings = [finding for check in checks.STATIC for finding in check(device)]
    yield from findings
    if checks.installed("torch"):
        findings += (loaded := list(checks.check_by_loading(device)))
        yield from loaded
    if all(finding.status != "fault" for finding in findings):
        yield from checks.check_torchrec_imports(device)


def _lines(findings: Sequence[checks.Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"{finding.status:<8} {finding.check}: {finding.what}"
        if finding.status != "ok":
            yield f"         why:    {finding.why}\n         remedy: {finding.remedy}"
