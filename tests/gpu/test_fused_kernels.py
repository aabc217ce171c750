"""On a GPU the fused kernels compute what torch operators do. Never run so far: no GPU was available."""

import pytest
import torch

from freescale.train.kernel_checks import kernel_errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("width", [4, 25, 50, 64, 128, 256])
def test_hashes_dropout_loss_and_row_updates_are_those_of_the_cpu(width: int) -> None:
    errors = kernel_errors(torch.device("cuda"), width)
    assert max(errors.values()) <= 1e-5, errors
