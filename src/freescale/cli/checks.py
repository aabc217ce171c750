"""The checks behind `freescale doctor`. Each looks at one thing and gives findings; none imports torch here.

First what package metadata says, because a wrong set often cannot even be imported; then what a child process meets
when it really loads torch, FBGEMM and gloo; TorchRec comes last, and only when nothing before it was at fault.
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
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

TORCH, FBGEMM, TORCHREC, TORCHMETRICS, NCCL = "2.13.0", "1.8.0", "1.8.0", "1.0.3", "2.29.7"
_SMALL_DEPENDENCIES = ("tensordict", "pyre-extensions", "tqdm")
_SHM, _SHM_LOW, _SHM_LEAST = Path("/dev/shm"), 1 << 30, 64 << 20
_FILES_LOW, _FILES_LEAST = 4096, 256

Status = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `remedy` is a command wherever a command can mend it."""

    check: str
    status: Status
    what: str
    why: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Target:
    """What training is to run on."""

    device: Literal["cpu", "cuda"]

    @property
    def fbgemm(self) -> str:
        """The FBGEMM distribution that belongs to the device."""
        return "fbgemm-gpu" if self.device == "cuda" else "fbgemm-gpu-cpu"


def installed(name: str) -> str | None:
    """Version of a distribution, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_torch(_target: Target) -> Iterator[Finding]:
    """Torch is there, in the minor that everything else is built for."""
    version = installed("torch")
    mend = f"pip install torch=={TORCH}"
    if version is None:
        yield Finding("torch", "fault", "torch is not installed", "training needs it", mend)
    elif _minor(version) != _minor(TORCH):
        yield Finding(
            "torch",
            "fault",
            f"torch {version} instead of {TORCH}",
            "FBGEMM's and TorchRec's binaries load with one minor of torch only",
            mend,
        )
    else:
        yield Finding("torch", "ok", f"torch {version}")


def check_fbgemm(target: Target) -> Iterator[Finding]:
    """One FBGEMM, the right one, of the right minor, with its own files."""
    clean = f"pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && pip install --no-deps {target.fbgemm}=={FBGEMM}"
    found = [name for name in ("fbgemm-gpu", "fbgemm-gpu-cpu") if installed(name)]
    if len(found) > 1:
        yield Finding(
            "fbgemm",
            "fault",
            "the CUDA and the CPU build of FBGEMM are both installed",
            "they share their file names, so each has overwritten parts of the other",
            clean,
        )
        return
    if not found:
        yield Finding("fbgemm", "fault", f"{target.fbgemm} is not installed", "it holds the embedding tables", clean)
        return
    name, version = found[0], installed(found[0])
    if target.device == "cuda" and name != target.fbgemm:
        yield Finding(
            "fbgemm",
            "fault",
            f"{name} is installed, but cuda needs {target.fbgemm}",
            "it has no GPU kernels",
            clean,
        )
    elif _minor(str(version)) != _minor(FBGEMM):
        yield Finding(
            "fbgemm",
            "fault",
            f"{name} {version} does not load with torch {installed('torch')}",
            f"FBGEMM is built for one minor of torch; this one needs {FBGEMM}",
            clean,
        )
    elif changed := _changed_files(name):
        yield Finding(
            "fbgemm",
            "fault",
            f"files of {name} are not its own: {changed[0]}" + _and_more(changed),
            "another package, usually the other FBGEMM build, was installed over them",
            clean,
        )
    else:
        yield Finding("fbgemm", "ok", f"{name} {version}")


def check_torchrec(_target: Target) -> Iterator[Finding]:
    """TorchRec and what it needs, without what its metadata asks for too much."""
    version = installed("torchrec")
    if version is None or _minor(version) != _minor(TORCHREC):
        what = "torchrec is not installed" if version is None else f"torchrec {version} instead of {TORCHREC}"
        yield Finding(
            "torchrec",
            "fault",
            what,
            "it shards the tables; --no-deps keeps it from replacing FBGEMM",
            f"pip install --no-deps torchrec=={TORCHREC}",
        )
    else:
        yield Finding("torchrec", "ok", f"torchrec {version}")
    missing = [name for name in _SMALL_DEPENDENCIES if installed(name) is None]
    if missing:
        yield Finding(
            "torchrec",
            "fault",
            f"{', '.join(missing)} not installed",
            "torchrec imports them",
            f"pip install {' '.join(missing)}",
        )
    metrics = installed("torchmetrics")
    if metrics != TORCHMETRICS:
        what = (
            "torchmetrics is not installed" if metrics is None else f"torchmetrics {metrics} instead of {TORCHMETRICS}"
        )
        yield Finding(
            "torchmetrics",
            "fault",
            what,
            "TorchRec's metrics import with other versions and then fail in mid-run",
            f"pip install torchmetrics=={TORCHMETRICS}",
        )
    else:
        yield Finding("torchmetrics", "ok", f"torchmetrics {metrics}")


def check_nccl_package(target: Target) -> Iterator[Finding]:
    """The NCCL beside a CUDA torch is the one it was built with."""
    if target.device != "cuda":
        return
    packages = [
        dist.metadata["Name"] for dist in metadata.distributions() if dist.metadata["Name"].startswith("nvidia-nccl")
    ]
    for name in sorted(set(packages)):
        if (version := installed(name)) != NCCL:
            yield Finding(
                "nccl",
                "fault",
                f"{name} {version} instead of {NCCL}",
                f"torch {TORCH} was built with NCCL {NCCL}; another one fails or hangs in collectives",
                f"pip install {name}=={NCCL}",
            )


def check_shared_memory(_target: Target) -> Iterator[Finding]:
    """Room for buffers that ranks of one host share."""
    if not _SHM.is_dir():
        yield Finding(
            "shared memory",
            "fault",
            f"{_SHM} is missing",
            "ranks of one host exchange data through it",
            f"mount -t tmpfs -o size=8g tmpfs {_SHM}",
        )
        return
    free = shutil.disk_usage(_SHM).free
    status: Status = "ok" if free >= _SHM_LOW else "warning" if free >= _SHM_LEAST else "fault"
    why = "" if status == "ok" else "ranks of one host exchange data through it; containers often get 64 MB"
    remedy = "" if status == "ok" else f"mount -o remount,size=8g {_SHM}   (in a container: docker run --shm-size=8g)"
    yield Finding("shared memory", status, f"{free / 2**20:,.0f} MiB free in {_SHM}", why, remedy)


def check_file_limit(_target: Target) -> Iterator[Finding]:
    """Enough file descriptors for part files and one socket per peer."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    status: Status = "ok" if soft >= _FILES_LOW else "warning" if soft >= _FILES_LEAST else "fault"
    why = "" if status == "ok" else "every rank keeps a socket to every other and tens of data files open"
    yield Finding("file descriptors", status, f"limit of {soft:,}", why, "" if status == "ok" else "ulimit -n 65536")


def check_gloo_interface(_target: Target) -> Iterator[Finding]:
    """The interface that gloo was told to use exists."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    present = [name for _, name in socket.if_nameindex()]
    for name in names:
        if name not in present:
            yield Finding(
                "gloo",
                "fault",
                f"GLOO_SOCKET_IFNAME names '{name}', which does not exist",
                f"interfaces here: {', '.join(present)}",
                "unset GLOO_SOCKET_IFNAME, or name one of them",
            )


STATIC = (
    check_torch,
    check_fbgemm,
    check_torchrec,
    check_nccl_package,
    check_gloo_interface,
    check_shared_memory,
    check_file_limit,
)


def check_by_loading(target: Target) -> Iterator[Finding]:
    """Load torch, FBGEMM and gloo for real, in a child process that may die of it."""
    seen = _run_child(_LOAD)
    torch = seen.get("torch")
    if torch is None:
        yield Finding(
            "torch",
            "fault",
            "torch does not import",
            seen["died"],
            f"pip install --force-reinstall torch=={TORCH}",
        )
        return
    if target.device == "cuda":
        yield from _gpu(torch)
    if (fbgemm := seen.get("fbgemm")) != "ok":
        yield Finding(
            "fbgemm",
            "fault",
            "FBGEMM does not load",
            fbgemm or seen["died"],
            f"pip install --force-reinstall --no-deps {target.fbgemm}=={FBGEMM}",
        )
    if (gloo := seen.get("gloo", "not reached")) == "ok":
        yield Finding("gloo", "ok", "a gloo group can be made")
    elif gloo != "not reached":
        yield Finding(
            "gloo",
            "fault",
            "a gloo group cannot be made",
            gloo,
            "export GLOO_SOCKET_IFNAME=lo   (or the interface that the hosts share)",
        )


def check_torchrec_imports(_target: Target) -> Iterator[Finding]:
    """The last check: TorchRec itself."""
    seen = _run_child(_TORCHREC)
    if seen.get("torchrec") == "ok":
        yield Finding("torchrec", "ok", "torchrec imports, with its metrics")
    else:
        yield Finding(
            "torchrec",
            "fault",
            "torchrec does not import",
            seen.get("torchrec") or seen["died"],
            f"pip install --force-reinstall --no-deps torchrec=={TORCHREC}",
        )


def has_gpu_driver() -> bool:
    """Whether this machine seems to have an NVIDIA GPU."""
    return Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists()


def _gpu(torch: dict[str, Any]) -> Iterator[Finding]:
    build = f"pip install --force-reinstall torch=={TORCH}   (the CUDA build)"
    if torch["nccl"] is None:
        yield Finding("nccl", "fault", f"torch {torch['version']} has no NCCL", "it is a CPU build", build)
    elif torch["nccl"] != NCCL:
        yield Finding("nccl", "fault", f"NCCL {torch['nccl']} instead of {NCCL}", f"torch {TORCH} ships {NCCL}", build)
    else:
        yield Finding("nccl", "ok", f"NCCL {torch['nccl']}")
    if not torch["gpus"]:
        yield Finding(
            "gpu",
            "fault",
            "no GPU is visible",
            "no driver, no device, or CUDA_VISIBLE_DEVICES hides them",
            "nvidia-smi   (must list the GPUs; else train with --device cpu)",
        )
    else:
        yield Finding("gpu", "ok", f"{torch['gpus']} GPUs")


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
import json
try:
    import torchrec, torchrec.metrics.ne, torchrec.distributed.model_parallel
    what = "ok"
except Exception as error: what = (str(error) or type(error).__name__).splitlines()[0]
print("CHECK " + json.dumps({"torchrec": what}), flush=True)
"""


def _run_child(code: str) -> dict[str, Any]:
    """Run code that reports what it met; `died` says how it ended when something is missing from that."""
    try:
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        return {"died": "no answer within 180 s"}
    seen: dict[str, Any] = {}
    for line in ended.stdout.splitlines():
        if line.startswith("CHECK "):
            seen |= json.loads(line.removeprefix("CHECK "))
    last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    return {**seen, "died": last}


def _changed_files(name: str) -> list[str]:
    """Files of a distribution that no longer are what its own record says."""
    changed = []
    for file in metadata.distribution(name).files or []:
        if file.hash is None or not file.parts[0].startswith("fbgemm_gpu") or file.suffix not in (".so", ".py"):
            continue
        path = Path(str(file.locate()))
        if (
            not path.is_file()
            or (file.size is not None and path.stat().st_size != file.size)
            or _digest(path) != file.hash.value
        ):
            changed.append(str(file))
    return changed


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return base64.urlsafe_b64encode(hashlib.file_digest(file, "sha256").digest()).rstrip(b"=").decode()


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
