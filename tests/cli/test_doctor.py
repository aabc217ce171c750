"""Doctor finds every install fault before TorchRec is imported, with what, why and the command that fixes it.

Each fault is made for real in a throw-away environment: another version really installed, files really overwritten, a
small file system really mounted, a limit really set. Only packages that need a GPU machine are planted as metadata.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from freescale.cli import doctor

HERE = Path(sysconfig.get_path("purelib"))


class Environment:
    """A virtual environment that borrows this one's packages, but for those left out."""

    def __init__(self, folder: Path, without: Sequence[str] = ()) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        self.packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        for entry in HERE.iterdir():
            if entry.name != "__pycache__" and not any(entry.name.startswith(name) for name in without):
                (self.packages / entry.name).symlink_to(entry)

    def install(self, requirement: str) -> None:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            self.packages,
            requirement,
        ]
        subprocess.run(command, check=True, capture_output=True)

    def plant(self, name: str, version: str) -> None:
        """Leave the traces of an installed distribution."""
        folder = self.packages / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "RECORD").touch()

    def doctor(self, *options: str, wrap: Sequence[str] = (), **env: str) -> dict[str, Any]:
        command = [*wrap, str(self.python), "-m", "freescale", "doctor", "--json", *options]
        ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=300)
        report = json.loads(ended.stdout)
        assert (ended.returncode == 0) == report["ready"]
        assert ended.returncode in (0, 4)
        return report


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Environment]:
    return lambda *without: Environment(tmp_path / "venv", without)


def faults(report: dict[str, Any]) -> dict[str, str]:
    """What was found at fault, by check; each must carry its reason and its remedy."""
    found = [finding for finding in report["findings"] if finding["status"] == "fault"]
    assert all(finding["what"] and finding["why"] and finding["remedy"] for finding in found)
    told: dict[str, str] = {}
    for finding in found:
        told[finding["check"]] = told.get(finding["check"], "") + f"{finding['what']} | {finding['remedy']}\n"
    return told


def torchrec_was_imported(report: dict[str, Any]) -> bool:
    return any("torchrec imports" in finding["what"] for finding in report["findings"])


def test_a_correct_install_is_ready(make: Callable[..., Environment]) -> None:
    report = make().doctor("--device", "cpu")
    assert report["ready"]
    assert torchrec_was_imported(report)


@pytest.mark.whole
def test_an_fbgemm_of_another_minor_is_found(make: Callable[..., Environment]) -> None:
    environment = make("fbgemm_gpu")
    environment.install("fbgemm-gpu-cpu==1.7.0")
    report = environment.doctor()
    found = faults(report)["fbgemm"]
    assert "fbgemm-gpu-cpu 1.7.0 does not load with torch 2.13.0" in found
    assert "fbgemm-gpu-cpu==1.8.0" in found
    assert not torchrec_was_imported(report)


def test_both_builds_of_fbgemm_at_once_are_found(make: Callable[..., Environment]) -> None:
    environment = make()
    environment.plant("fbgemm-gpu", "1.8.0")
    found = faults(environment.doctor())["fbgemm"]
    assert "both installed" in found
    assert "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && pip install --no-deps fbgemm-gpu-cpu==1.8.0" in found


@pytest.mark.whole
def test_fbgemm_files_overwritten_by_another_package_are_found(make: Callable[..., Environment]) -> None:
    environment = make("fbgemm_gpu")
    shutil.copytree(HERE / "fbgemm_gpu", environment.packages / "fbgemm_gpu")
    record = next(HERE.glob("fbgemm_gpu*.dist-info"))
    shutil.copytree(record, environment.packages / record.name)
    (environment.packages / "fbgemm_gpu" / "__init__.py").write_text("# the other build's file\n")
    assert "not its own: fbgemm_gpu/__init__.py" in faults(environment.doctor())["fbgemm"]


@pytest.mark.whole
def test_a_torchmetrics_that_imports_and_then_fails_is_found(make: Callable[..., Environment]) -> None:
    environment = make("torchmetrics")
    environment.install("torchmetrics==1.4.0")
    found = faults(environment.doctor())["torchmetrics"]
    assert "TorchRec's metrics fail with torchmetrics 1.4.0 | pip install torchmetrics==1.0.3" in found


@pytest.mark.whole
def test_an_untested_version_that_works_is_a_warning(make: Callable[..., Environment]) -> None:
    environment = make("torchrec-")
    environment.plant("torchrec", "1.7.9")
    report = environment.doctor("--device", "cpu")
    assert report["ready"]
    (warning,) = [finding for finding in report["findings"] if finding["check"] == "torchrec" and finding["why"]]
    assert (warning["status"], warning["what"]) == ("warning", "torchrec 1.7.9 instead of 1.8.0")
    assert warning["remedy"] == "pip install --no-deps torchrec==1.8.0"


@pytest.mark.parametrize(("torch", "torchrec"), [("2.13.1", "1.8.0"), ("2.14.1+cu130", "1.9.2"), ("2.99.0", "1.8.0")])
def test_remedies_come_from_the_tested_set_of_the_installed_torch(
    monkeypatch: pytest.MonkeyPatch, torch: str, torchrec: str
) -> None:
    monkeypatch.setattr(doctor, "installed", {"torch": torch}.get)
    assert doctor.tested_set().torchrec == torchrec


@pytest.mark.parametrize(
    ("without", "check", "mend"),
    [
        (("torch-", "torch", "functorch"), "torch", "pip install torch==2.13.0"),
        (("fbgemm_gpu",), "fbgemm", "fbgemm-gpu-cpu==1.8.0"),
        (("torchrec",), "torchrec", "pip install --no-deps torchrec==1.8.0"),
        (("tensordict",), "torchrec", "pip install tensordict"),
    ],
)
def test_a_missing_package_is_found(
    make: Callable[..., Environment], without: Sequence[str], check: str, mend: str
) -> None:
    assert mend in faults(make(*without).doctor())[check]


@pytest.mark.whole
def test_a_package_broken_inside_is_found_by_loading_it(make: Callable[..., Environment]) -> None:
    environment = make("torchrec")
    (environment.packages / "torchrec").mkdir()
    (environment.packages / "torchrec" / "__init__.py").write_text("raise ImportError('half an install')\n")
    environment.plant("torchrec", "1.8.0")
    assert "torchrec does not import" in faults(environment.doctor())["torchrec"]


def test_a_cpu_torch_on_a_gpu_job_lacks_nccl_and_gpus(make: Callable[..., Environment]) -> None:
    found = faults(make().doctor("--device", "cuda"))
    assert "has no NCCL" in found["nccl"]
    assert "no GPU is visible" in found["gpu"]
    assert "cuda needs fbgemm-gpu" in found["fbgemm"]


@pytest.mark.whole
def test_another_nccl_than_torch_was_built_with_is_found(make: Callable[..., Environment]) -> None:
    environment = make()
    environment.plant("nvidia-nccl-cu13", "2.27.3")
    report = environment.doctor("--device", "cuda")
    assert any("nvidia-nccl-cu13 2.27.3 instead of 2.29.7" in finding["what"] for finding in report["findings"])


def test_a_gloo_interface_that_does_not_exist_is_found(make: Callable[..., Environment]) -> None:
    found = faults(make().doctor(GLOO_SOCKET_IFNAME="nope0"))
    assert "gloo" in found


def test_little_shared_memory_is_found(make: Callable[..., Environment]) -> None:
    small = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"', "--"]
    assert "8 MiB free in /dev/shm" in faults(make().doctor(wrap=small))["shared memory"]


def test_a_low_limit_of_open_files_is_found(make: Callable[..., Environment]) -> None:
    found = faults(make().doctor(wrap=["sh", "-c", 'ulimit -n 128 && exec "$@"', "--"]))
    assert found["file descriptors"] == "limit of 128 | ulimit -n 65536\n"


def test_the_printed_report_says_what_why_and_remedy(make: Callable[..., Environment]) -> None:
    command = [str(make("torchrec").python), "-m", "freescale", "doctor"]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 4
    assert "fault    torchrec: torchrec is not installed\n         why:    it shards the tables" in shown.stdout
    assert shown.stdout.endswith("training on cpu cannot start here\n")
