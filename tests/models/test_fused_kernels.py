"""The fused kernels of the loss, dropout and row updates equal torch operators. Triton's interpreter runs them."""

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from freescale.hashing import splitmix64
from tests.models.fused_cases import (
    LossProblem,
    RowUpdate,
    differences_from_stand_ins,
    dropout_by_kernel,
    hashes_by_kernel,
    loss_by_kernels,
    relative_error,
    rows_by_kernel,
)
from tests.support.vgpu import standins

LIMITS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.float64: 1e-12}


@pytest.mark.parametrize(
    ("tokens", "rows", "dim", "negatives", "dtype"),
    [
        (7, 6, 50, 5, torch.float32),
        (5, 4, 64, 70, torch.float32),  # several blocks of negatives, and of tokens that sampled a row
        (3, 9, 256, 20, torch.float32),
        (1, 3, 8, 1, torch.float32),
        (7, 6, 50, 5, torch.float16),
        (5, 4, 8, 70, torch.float64),
    ],
)
def test_the_loss_and_its_gradients_are_those_of_fp64(
    interpreter: ProcessPoolExecutor, tokens: int, rows: int, dim: int, negatives: int, dtype: torch.dtype
) -> None:
    problem = LossProblem.random(tokens, rows, dim, negatives, dtype)
    loss, d_output, d_rows = interpreter.submit(loss_by_kernels, problem).result()
    assert max(map(relative_error, (loss, d_output, d_rows))) <= LIMITS[dtype]
    assert not d_rows[0][-1].any(), "no token sampled the last row"
    assert d_output[0].dtype == d_rows[0].dtype == dtype


def test_the_gradient_of_a_confident_token_keeps_its_digits(interpreter: ProcessPoolExecutor) -> None:
    """The probability of the positive rounds to 1 in fp32, where 1 - p would be 0."""
    problem = LossProblem.random(1, 5, 8, 4)
    problem.rows[:, 0] = 0.0  # orthogonal to the output
    problem.output[:], problem.output[0, 0], problem.rows[0, 0] = 0.0, 1.0, 30.0
    problem = problem._replace(positive=torch.zeros_like(problem.positive), negatives=torch.tensor([[1, 2, 3, 3]]))
    results = interpreter.submit(loss_by_kernels, problem).result()
    _, d_output = results[1]
    assert 0 < d_output.norm() < 1e-6
    assert max(map(relative_error, results[1:])) <= 1e-5


def test_rows_and_outputs_of_zeros_have_the_gradients_of_torch(interpreter: ProcessPoolExecutor) -> None:
    problem = LossProblem.random(4, 5, 8, 3)
    problem.rows[1], problem.output[2] = 0, 0
    for result, exact in interpreter.submit(loss_by_kernels, problem).result():
        torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-5)


def test_a_batch_without_tokens_has_a_loss_and_gradients_of_zero(interpreter: ProcessPoolExecutor) -> None:
    problem = LossProblem.random(1, 3, 8, 2)
    problem = LossProblem(problem.output[:0], problem.rows, problem.positive[:0], problem.negatives[:0])
    for result, exact in interpreter.submit(loss_by_kernels, problem).result():
        assert result.shape == exact.shape
        assert not result.any()


def test_keys_and_negatives_are_hashed_to_the_bits_of_torch_operators(interpreter: ProcessPoolExecutor) -> None:
    values = torch.tensor([[0, 1, -1, 2**63 - 1, -(2**63)]]) + 977 * torch.arange(300)[:, None]
    assert torch.equal(interpreter.submit(hashes_by_kernel, values).result(), splitmix64(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("width", [1, 6, 50, 64])
@pytest.mark.parametrize("p", [0.2, 0.9])
def test_dropout_and_its_gradient_are_bitwise_those_of_torch_operators(
    interpreter: ProcessPoolExecutor, width: int, dtype: torch.dtype, p: float
) -> None:
    tokens = 1100 // width  # several programs
    x = torch.randn(tokens, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width)).to(dtype)
    for result, expected in interpreter.submit(dropout_by_kernel, x, p).result():
        assert result.dtype == dtype
        assert torch.equal(result, expected)
        assert 0 < result.count_nonzero() < result.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [1, 50, 256])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad"])
def test_a_row_update_is_that_of_torch_operators_and_bitwise_so_without_a_root(
    interpreter: ProcessPoolExecutor, optimizer: str, dim: int, dtype: torch.dtype
) -> None:
    update = RowUpdate.random(dim, dtype, optimizer)
    for result, expected in interpreter.submit(rows_by_kernel, update).result():
        if optimizer == "sgd":
            assert torch.equal(result, expected)
        torch.testing.assert_close(result, expected, rtol=LIMITS[dtype] / 10, atol=LIMITS[dtype] / 10)


def test_the_stand_ins_on_virtual_gpus_compute_what_the_kernels_do_and_count_their_launches(
    interpreter: ProcessPoolExecutor,
) -> None:
    differences, launches = interpreter.submit(differences_from_stand_ins, LossProblem.random(6, 5, 8, 7)).result()
    assert max(differences.values()) < 1e-5, differences
    counted = {
        entry.replaces.rpartition(".")[2]: entry.launches
        for entry in standins.TABLE
        if "fused_launch" in entry.replaces
    }
    assert counted == launches
