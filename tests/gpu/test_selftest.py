"""On GPUs every transport and every technique is correct. Never run so far: no GPU was available."""

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_selftest_fails_nowhere_on_two_gpus() -> None:
    command = [sys.executable, "-m", "freescale", "selftest", "--device", "cuda", "--nproc", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
