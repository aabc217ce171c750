"""`freescale doctor`: checks whether training can start here, and names the remedy for each fault. Imports no torch.

Package metadata is checked first, because a wrong set of packages often cannot be imported. A child process then loads
torch, FBGEMM and gloo. TorchRec comes last, and only if no earlier check found a fault.
"""

import base64
import hashlib
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from freescale.cli.options import Flag, parse, print_json, say
from freescale.errors import InstallError
from freescale.progress import progress


class PackageSet(NamedTuple):
    """Versions that are tested together."""

    torch: str
    fbgemm: str
    torchrec: str
    torchmetrics: str
    nccl: str
    """The version that this torch ships."""


TESTED_SETS = (
    PackageSet("2.13.0", "1.8.0", "1.8.0", "1.0.3", "2.29.7"),
    PackageSet("2.14.1", "1.9.0", "1.9.2", "1.0.3", "2.30.7"),
)
_UNTESTED = "this set is not tested; training may work"
_SMALL_DEPENDENCIES = ("tensordict", "pyre-extensions", "tqdm")
_SHM, _SHM_LOW, _SHM_LEAST = Path("/dev/shm"), 1 << 30, 64 << 20
_FILES_LOW, _FILES_LEAST = 4096, 256

Status = Literal["ok", "warning", "fault"]
Device = Literal["cpu", "cuda"]
"""Device to train on."""


@dataclass(frozen=True)
class Finding:
    """Result of a check. `remedy` is a command where a command can fix it."""

    check: str
    status: Status
    what: str
    why: str = ""
    remedy: str = ""


def fault(check: str, what: str, why: str, remedy: str) -> Finding:
    """Return a finding that prevents training."""
    return Finding(check, "fault", what, why, remedy)


def ok(check: str, what: str) -> Finding:
    """Return a finding without a fault."""
    return Finding(check, "ok", what)


def _fbgemm_of(device: Device) -> str:
    """Return the FBGEMM distribution for a device."""
    return "fbgemm-gpu" if device == "cuda" else "fbgemm-gpu-cpu"


def installed(name: str) -> str | None:
    """Return the version of a distribution without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def tested_set() -> PackageSet:
    """Return the tested set with the installed minor version of torch; the first set if there is none."""
    torch = installed("torch")
    return next((known for known in TESTED_SETS if torch and _minor(known.torch) == _minor(torch)), TESTED_SETS[0])


def check_torch(_device: Device) -> Iterator[Finding]:
    """Check that torch is installed, in a tested version."""
    required = tested_set().torch
    yield _check_version("torch", required, "training needs it", f"pip install torch=={required}")


def check_fbgemm(device: Device) -> Iterator[Finding]:
    """Check that exactly one FBGEMM is installed, of the right build, with intact files."""
    required, name = tested_set().fbgemm, _fbgemm_of(device)
    clean = f"pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && pip install --no-deps {name}=={required}"
    what, wrong = _fbgemm(device)
    if wrong:
        yield fault("fbgemm", what, wrong, clean)
    elif _minor(str(installed(_fbgemm_builds()[0]))) != _minor(required):
        yield Finding("fbgemm", "warning", f"{what} is not tested with torch {installed('torch')}", _UNTESTED, clean)
    else:
        yield ok("fbgemm", what)


def _fbgemm_builds() -> list[str]:
    """Return the installed distributions of FBGEMM."""
    return [name for name in ("fbgemm-gpu", "fbgemm-gpu-cpu") if installed(name)]


def _fbgemm(device: Device) -> tuple[str, str]:
    """Return which FBGEMM is installed, and what is wrong with it."""
    builds = _fbgemm_builds()
    if len(builds) > 1:
        what = "the CUDA and the CPU build of FBGEMM are both installed"
        return what, "they share their file names, so each has overwritten parts of the other"
    if not builds:
        return f"{_fbgemm_of(device)} is not installed", "it holds the embedding tables"
    name, version = builds[0], installed(builds[0])
    if device == "cuda" and name != _fbgemm_of(device):
        return f"{name} is installed, but cuda needs {_fbgemm_of(device)}", "it has no GPU kernels"
    if changed := _changed_files(name):
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        what = f"files of {name} are not its own: {changed[0]}{more}"
        return what, "another package, usually the other FBGEMM build, was installed over them"
    return f"{name} {version}", ""


def check_torchrec(_device: Device) -> Iterator[Finding]:
    """Check TorchRec and the dependencies that it really needs."""
    required = tested_set()
    why = "it shards the tables; --no-deps keeps it from replacing FBGEMM"
    yield _check_version("torchrec", required.torchrec, why, f"pip install --no-deps torchrec=={required.torchrec}")
    if missing := [name for name in _SMALL_DEPENDENCIES if installed(name) is None]:
        what, remedy = f"{', '.join(missing)} not installed", f"pip install {' '.join(missing)}"
        yield fault("torchrec", what, "torchrec imports them", remedy)
    metrics = required.torchmetrics
    yield _check_version("torchmetrics", metrics, "torchrec imports it", f"pip install torchmetrics=={metrics}")


def check_nccl_package(device: Device) -> Iterator[Finding]:
    """Check that NCCL is the version that a CUDA torch was built with."""
    names = {dist.metadata["Name"] for dist in metadata.distributions()} if device == "cuda" else set()
    for name in sorted(name for name in names if name.startswith("nvidia-nccl")):
        required = tested_set()
        if (version := installed(name)) != required.nccl:
            why = (
                f"torch {required.torch} was built with NCCL {required.nccl}; another one fails or hangs in collectives"
            )
            what, remedy = f"{name} {version} instead of {required.nccl}", f"pip install {name}=={required.nccl}"
            yield fault("nccl", what, why, remedy)


def check_shared_memory(_device: Device) -> Iterator[Finding]:
    """Check the space for buffers that ranks of one host share."""
    why = "ranks of one host exchange data through it"
    if not _SHM.is_dir():
        yield fault("shared memory", f"{_SHM} is missing", why, f"mount -t tmpfs -o size=8g tmpfs {_SHM}")
        return
    free = shutil.disk_usage(_SHM).free
    why, remedy = f"{why}; containers often get 64 MB", f"mount -o remount,size=8g {_SHM}"
    remedy += "   (in a container: docker run --shm-size=8g)"
    what = f"{free / 2**20:,.0f} MiB free in {_SHM}"
    yield _limited(Finding("shared memory", "warning", what, why, remedy), free, _SHM_LOW, _SHM_LEAST)


def check_file_limit(_device: Device) -> Iterator[Finding]:
    """Check the limit of file descriptors: part files and sockets to other ranks."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    why = "every rank keeps sockets to other ranks, up to all of them, and tens of data files open"
    low = Finding("file descriptors", "warning", f"limit of {soft:,}", why, "ulimit -n 65536")
    yield _limited(low, soft, _FILES_LOW, _FILES_LEAST)


def check_gloo_interface(_device: Device) -> Iterator[Finding]:
    """Check that the interface of GLOO_SOCKET_IFNAME exists."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    present = [name for _, name in socket.if_nameindex()]
    for name in names:
        if name not in present:
            what = f"GLOO_SOCKET_IFNAME names '{name}', which does not exist"
            why = f"interfaces here: {', '.join(present)}"
            yield fault("gloo", what, why, "unset GLOO_SOCKET_IFNAME, or name one of them")


_PACKAGES = (check_torch, check_fbgemm, check_torchrec, check_nccl_package)
STATIC = (*_PACKAGES, check_gloo_interface, check_shared_memory, check_file_limit)


def check_by_loading(device: Device) -> Iterator[Finding]:
    """Load torch, FBGEMM and gloo in a child process, which may crash."""
    results, reinstall = _run_child(_LOAD), "pip install --force-reinstall"
    torch = results.get("torch")
    if torch is None:
        yield fault("torch", "torch does not import", results["died"], f"{reinstall} torch=={tested_set().torch}")
        return
    if device == "cuda":
        yield from _gpu(torch)
    if (fbgemm := results.get("fbgemm")) != "ok":
        builds = " and ".join(f"{name} {installed(name)}" for name in _fbgemm_builds()) or "FBGEMM"
        what = f"{builds} does not load with torch {torch['version']}"
        remedy = f"{reinstall} --no-deps {_fbgemm_of(device)}=={tested_set().fbgemm}"
        yield fault("fbgemm", what, fbgemm or results["died"], remedy)
    if (gloo := results.get("gloo", "not reached")) == "ok":
        yield ok("gloo", "a gloo group can be made")
    elif gloo != "not reached":
        remedy = "export GLOO_SOCKET_IFNAME=lo   (or the interface that the hosts share)"
        yield fault("gloo", "a gloo group cannot be made", gloo, remedy)


def check_torchrec_by_use(_device: Device) -> Iterator[Finding]:
    """Import TorchRec and compute one of its metrics, in a child process."""
    results, required = _run_child(_TORCHREC), tested_set()
    if (imported := results.get("torchrec")) != "ok":
        remedy = f"pip install --force-reinstall --no-deps torchrec=={required.torchrec}"
        yield fault("torchrec", "torchrec does not import", imported or results["died"], remedy)
    elif (metrics := results.get("metrics")) != "ok":
        what = f"TorchRec's metrics fail with torchmetrics {installed('torchmetrics')}"
        remedy = f"pip install torchmetrics=={required.torchmetrics}"
        yield fault("torchmetrics", what, metrics or results["died"], remedy)
    else:
        yield ok("torchrec", "torchrec imports, and its metrics work")


def has_gpu_driver() -> bool:
    """Return whether this machine seems to have an NVIDIA GPU."""
    return Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists()


def _check_version(name: str, required: str, why: str, remedy: str) -> Finding:
    """Return a fault if a distribution is missing, and a warning if its version is not the tested one."""
    version = installed(name)
    if version is None:
        return fault(name, f"{name} is not installed", why, remedy)
    if _minor(version) == _minor(required):
        return ok(name, f"{name} {version}")
    return Finding(name, "warning", f"{name} {version} instead of {required}", _UNTESTED, remedy)


def _limited(low: Finding, amount: int, enough: int, least: int) -> Finding:
    """Return the finding for an amount: ok, the warning `low`, or the same as a fault."""
    if amount >= enough:
        return ok(low.check, low.what)
    return low if amount >= least else replace(low, status="fault")


def _gpu(torch: dict[str, Any]) -> Iterator[Finding]:
    required = tested_set()
    build = f"pip install --force-reinstall torch=={required.torch}   (the CUDA build)"
    if torch["nccl"] is None:
        yield fault("nccl", f"torch {torch['version']} has no NCCL", "it is a CPU build", build)
    elif torch["nccl"] != required.nccl:
        why = f"torch {required.torch} ships {required.nccl}"
        yield fault("nccl", f"NCCL {torch['nccl']} instead of {required.nccl}", why, build)
    else:
        yield ok("nccl", f"NCCL {torch['nccl']}")
    if torch["gpus"]:
        yield ok("gpu", f"{torch['gpus']} GPUs")
    else:
        why = "no driver, no device, or CUDA_VISIBLE_DEVICES hides them"
        yield fault(
            "gpu",
            "no GPU is visible",
            why,
            "nvidia-smi   (must list the GPUs; else: CUDA_VISIBLE_DEVICES= freescale train ...)",
        )


_LOAD = """
import datetime, json, torch
def say(**what): print("CHECK " + json.dumps(what), flush=True)
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() or torch.version.cuda else None
say(torch={"version": torch.__version__, "nccl": nccl, "gpus": torch.cuda.device_count()})
try:
    import fbgemm_gpu
    torch.ops.fbgemm.asynchronous_complete_cumsum(torch.ones(2, dtype=torch.int64))
    say(fbgemm="ok")
except Exception as error: say(fbgemm=(str(error) or type(error).__name__).splitlines()[0])
try:
    import torch.distributed as dist
    soon = datetime.timedelta(seconds=10)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=soon)
    dist.all_reduce(torch.ones(1))
    say(gloo="ok")
except Exception as error: say(gloo=(str(error) or type(error).__name__).splitlines()[0])
"""

_TORCHREC = """
import json, torch
def say(**what): print("CHECK " + json.dumps(what), flush=True)
def reason(error): return (str(error) or type(error).__name__).splitlines()[0]
try:
    import torchrec, torchrec.distributed.model_parallel
    from torchrec.metrics.metrics_config import DefaultTaskInfo
    from torchrec.metrics.ne import NEMetric
    say(torchrec="ok")
    metric, task = NEMetric(world_size=1, my_rank=0, batch_size=2, tasks=[DefaultTaskInfo]), DefaultTaskInfo.name
    ones = torch.ones(2, dtype=torch.float64)
    metric.update(predictions={task: ones / 2}, labels={task: ones}, weights={task: ones})
    metric.compute()
    say(metrics="ok")
except ImportError as error: say(torchrec=reason(error))
except Exception as error: say(metrics=reason(error))
"""


def _run_child(code: str) -> dict[str, Any]:
    """Run code that reports its results; `died` holds the last line of its output if a result is missing."""
    try:
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        return {"died": "no answer within 180 s"}
    results: dict[str, Any] = {}
    for line in ended.stdout.splitlines():
        if line.startswith("CHECK "):
            results |= json.loads(line.removeprefix("CHECK "))
    last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    return {**results, "died": last}


def _changed_files(name: str) -> list[str]:
    """Return the files of a distribution that differ from its record."""
    changed = []
    for file in metadata.distribution(name).files or []:
        if file.hash is None or not file.parts[0].startswith("fbgemm_gpu") or file.suffix not in (".so", ".py"):
            continue
        path = Path(str(file.locate()))
        if not path.is_file() or file.size not in (None, path.stat().st_size) or _digest(path) != file.hash.value:
            changed.append(str(file))
    return changed


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return base64.urlsafe_b64encode(hashlib.file_digest(file, "sha256").digest()).rstrip(b"=").decode()


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Check versions, devices, transports and limits. Exits with 0 only when training can start.

    freescale doctor --device cpu
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto: the GPU where there is a driver."""
    json: Flag = False
    """Print the findings as JSON."""
    quiet: Flag = False
    """Show no progress, only results, warnings and errors."""


def run_doctor(argv: Sequence[str], prog: str) -> int:
    """Run all checks and print their findings."""
    options = parse(DoctorOptions, argv, prog)
    on_gpu = options.device == "cuda" or (options.device == "auto" and has_gpu_driver())
    device: Device = "cuda" if on_gpu else "cpu"
    with progress("checking packages and devices"):
        findings = list(_examine(device))
    ready = all(finding.status != "fault" for finding in findings)
    if options.json:
        print_json({"ready": ready, "device": device, "findings": [asdict(finding) for finding in findings]})
    else:
        say(*_lines(findings), "", f"training on {device} {'can' if ready else 'cannot'} start here")
    return 0 if ready else InstallError.exit_code


def _examine(device: Device) -> Iterator[Finding]:
    """Run the checks in order; skip TorchRec if an earlier check found a fault."""
    findings = [finding for check in STATIC for finding in check(device)]
    yield from findings
    if installed("torch"):
        findings += (loaded := list(check_by_loading(device)))
        yield from loaded
    if all(finding.status != "fault" for finding in findings):
        yield from check_torchrec_by_use(device)


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"{finding.status:<8} {finding.check}: {finding.what}"
        if finding.status != "ok":
            yield f"         why:    {finding.why}\n         remedy: {finding.remedy}"
