"""The files of a selftest, ready to attach to an issue: outcomes, timings, traces, versions and topology."""

import json
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from freescale.page import markup
from freescale.train.selftest import CheckOutcome
from freescale.transport.world import World, host_of_each_rank

JSON, PAGE = "selftest.json", "selftest.html"
_PACKAGES = ("freescale", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "triton", "numpy", "nvidia-nccl-cu12")


def facts(world: World) -> dict[str, Any]:
    """Return versions, devices and topology. Collective."""
    found: dict[str, Any] = {"ranks": world.world_size, "hosts": list(host_of_each_rank(world.transport).host_of)}
    found |= {"host": socket.gethostname(), "system": platform.platform(), "python": platform.python_version()}
    found["packages"] = {name: version for name in _PACKAGES if (version := _version(name))}
    found["device"] = str(world.device)
    if world.device.type == "cuda":
        index, count = world.device.index, torch.cuda.device_count()
        found["gpu"] = torch.cuda.get_device_name(index)
        found["gpu_memory_bytes"] = torch.cuda.get_device_properties(index).total_memory
        found["cuda"], found["nccl"] = torch.version.cuda, list(torch.cuda.nccl.version())
        peers = [d for d in range(count) if d != index and torch.cuda.can_device_access_peer(index, d)]
        found["writes_to_gpus"] = peers
    found["backend"] = dist.get_backend(world.group)
    return found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def write(folder: Path, found: Mapping[str, Any], outcomes: Sequence[CheckOutcome]) -> Path:
    """Write both files; returns the JSON one."""
    folder.mkdir(parents=True, exist_ok=True)
    report = {"facts": dict(found), "checks": [asdict(outcome) for outcome in outcomes]}
    (folder / JSON).write_text(json.dumps(report, indent=1), encoding="utf-8")
    (folder / PAGE).write_text(_page(found, outcomes), encoding="utf-8")
    return folder / JSON


def _page(found: Mapping[str, Any], outcomes: Sequence[CheckOutcome]) -> str:
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    lead = f"{len(failed)} of {len(outcomes)} checks failed" if failed else f"none of {len(outcomes)} checks failed"
    rows = [[o.check, o.status, f"{o.seconds:.2f}", o.why] for o in outcomes]
    checks = markup.table(["check", "outcome", "seconds", "why"], rows, words=(0, 1, 3))
    listed = [[name, value if isinstance(value, str) else json.dumps(value)] for name, value in found.items()]
    parts = [
        markup.section("Checks", "All ranks run all checks together.", checks),
        markup.section(
            "Versions and topology", "As rank 0 sees them.", markup.table(["fact", "value"], listed, words=(0, 1))
        ),
    ]
    parts += [markup.section(f"Trace of {o.check}", o.why, f"<pre>{markup.escape(o.trace)}</pre>") for o in failed]
    return markup.document("FreeScale selftest", lead, *parts)
