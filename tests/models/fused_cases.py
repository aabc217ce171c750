"""Problems for the fused kernels, and their errors against torch operators in fp64. Run in Triton's interpreter."""

from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from freescale.models import keyed, sampled_softmax
from freescale.models.keyed import Keys

TEMPERATURE = 0.05
SALT = 77


class LossProblem(NamedTuple):
    """A batch of the sampled softmax."""

    output: Tensor
    rows: Tensor
    positive: Tensor
    negatives: Tensor

    @staticmethod
    def random(tokens: int, rows: int, dim: int, negatives: int, dtype: torch.dtype = torch.float32) -> "LossProblem":
        """Draw a batch with negatives that equal the positive, repeated rows and an unused last row."""
        generator = torch.Generator().manual_seed(tokens + rows + dim)
        output, table = (
            torch.randn(n, dim, generator=generator, dtype=torch.float64).to(dtype) for n in (tokens, rows)
        )
        positive, wrong = (torch.randint(rows - 1, n, generator=generator) for n in ((tokens,), (tokens, negatives)))
        wrong[::3, negatives // 2] = positive[::3]
        return LossProblem(output, table, positive, wrong)

    def run(self, dtype: torch.dtype, gradient: float = 0.37) -> list[Tensor]:
        """Return the loss and the gradients of output and rows."""
        output, rows = (x.to(dtype).requires_grad_() for x in (self.output, self.rows))
        positive, negatives = self.positive, self.negatives
        loss = sampled_softmax.sampled_softmax(
            output, rows, positive=positive, negatives=negatives, temperature=TEMPERATURE
        )
        return [loss.detach(), *torch.autograd.grad(gradient * loss, [output, rows])]


def loss_by_kernels(problem: LossProblem) -> list[tuple[Tensor, Tensor]]:
    """Return loss, gradient of the output and gradient of the rows: each by the kernels, and exact."""
    torch.set_num_threads(1)
    exact = problem.run(torch.float64)
    with patch.object(sampled_softmax, "uses_kernels", lambda *_: True):
        return list(zip(problem.run(problem.rows.dtype), exact, strict=True))


def relative_error(pair: tuple[Tensor, Tensor]) -> float:
    """Return the relative error of a result."""
    result, exact = pair
    return float((result.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def hashes_by_kernel(values: Tensor) -> Tensor:
    """Return hashes by the kernel."""
    with patch.object(keyed, "uses_kernels", lambda *_: True):
        return keyed.hash_keys(values)


def dropout_by_kernel(x: Tensor, p: float) -> list[tuple[Tensor, Tensor]]:
    """Return output and gradient of dropout, each by the kernel and by torch operators."""
    torch.set_num_threads(1)
    keys = Keys(torch.arange(len(x)) * 0x5DEECE66D0B - (1 << 62))
    results = []
    for by_kernel in (True, False):
        leaf = x.clone().requires_grad_()
        with patch.object(keyed, "uses_kernels", lambda *_, chosen=by_kernel: chosen):
            out = keys.dropout(leaf, p, salt=SALT)
        results.append([out.detach(), *torch.autograd.grad(out, leaf, x.roll(1, 0))])
    return list(zip(*results, strict=True))


class RowUpdate(NamedTuple):
    """Gradients of some rows of a table, several of them for some rows, with the state of the optimizer."""

    weights: Tensor
    sums: Tensor | None
    rows: Tensor
    gradients: Tensor
    optimizer: str

    @staticmethod
    def random(dim: int, dtype: torch.dtype, optimizer: str) -> "RowUpdate":
        generator = torch.Generator().manual_seed(dim)
        weights, gradients = (torch.randn(n, dim, generator=generator, dtype=torch.float64).to(dtype) for n in (9, 12))
        width = {"sgd": None, "rowwise_adagrad": 1, "adagrad": dim}[optimizer]
        sums = None if width is None else torch.rand(9, width, generator=generator, dtype=torch.float64).to(dtype)
        return RowUpdate(weights, sums, torch.tensor([5, 0, 3, 5, 7, 5, 0, 8, 1, 8, 5, 2]), gradients, optimizer)

    def run(self, *, by_kernel: bool) -> tuple[Tensor, Tensor]:
        """Return the updated weights and sums."""
        from freescale.embedding import row_update
        from tests.support.vgpu import fused_on_cpu

        weights, sums = self.weights.clone(), None if self.sums is None else self.sums.clone()
        options = {"lr": 0.3, "eps": 1e-8, "optimizer": self.optimizer}
        if by_kernel:
            row_update.update_rows(weights, sums, self.rows, self.gradients, **options)  # type: ignore[arg-type]
        else:
            ordered = row_update.SortedRows(*self.rows.sort(stable=True))
            fused_on_cpu.update_sorted_rows(weights, sums, ordered, self.gradients, **options)  # type: ignore[arg-type]
        return weights, torch.zeros(0) if sums is None else sums


def rows_by_kernel(update: RowUpdate) -> list[tuple[Tensor, Tensor]]:
    """Return weights and sums after an update, each by the kernel and by torch operators."""
    torch.set_num_threads(1)
    return list(zip(update.run(by_kernel=True), update.run(by_kernel=False), strict=True))


class CountingKernel:
    """A kernel that counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.launches = kernel, 0

    def __getitem__(self, grid: Any) -> Any:
        self.launches += 1
        return self._kernel[grid]


def differences_from_stand_ins(problem: LossProblem) -> tuple[dict[str, float], dict[str, int]]:
    """Return the relative differences between kernels and stand-ins on virtual GPUs, and the launches of kernels."""
    from freescale.models import fused_kernels, fused_launch
    from tests.support.vgpu import fused_on_cpu

    torch.set_num_threads(1)
    keys, gradient = torch.arange(len(problem.output)) * 0x5DEECE66D0B, torch.tensor(0.37)
    losses = fused_on_cpu.compute_token_losses(*problem, TEMPERATURE)
    sampled = fused_launch.SampledRows.from_index(losses.sampled, len(problem.rows))
    calls = {
        "splitmix64": ((keys[:, None] - 2**62,), {}),
        "dropout": ((problem.output, keys), {"salt": SALT, "threshold": 1 << 14}),
        "compute_token_losses": ((*problem, TEMPERATURE), {}),
        "compute_row_gradients": ((problem.output, problem.rows, losses, sampled, gradient), {}),
    }
    names, differences, launches = ("splitmix64", "dropout", "token_losses", "row_gradients"), {}, {}
    for name, (args, options) in calls.items():
        counting: dict[str, Any] = {kernel: CountingKernel(getattr(fused_kernels, kernel)) for kernel in names}
        with patch.multiple(fused_kernels, **counting):
            result = getattr(fused_launch, name)(*args, **options)
        expected = getattr(fused_on_cpu, name)(*args, **options)
        pairs = [(result, expected)] if isinstance(result, Tensor) else zip(result, expected, strict=True)
        differences[name] = max(
            0.0 if torch.equal(a, b) else relative_error((a.exp(), b.exp().double())) for a, b in pairs
        )
        launches[name] = sum(kernel.launches for kernel in counting.values())
    return differences, launches
