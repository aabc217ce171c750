"""On a GPU attention equals its reference, and its time is reported. Never run so far: no GPU was available."""

import pytest
import torch

from freescale.cli.main import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("width", [25, 50, 64, 128, 256])
def test_bench_attention_ends_well(precision: str, width: int) -> None:
    assert main(["bench", "attention", "--device", "cuda", "--precision", precision, "--width", str(width)]) == 0
