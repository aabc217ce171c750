"""The loss and dropout take a few launches on a GPU, however many tokens a batch has, and give the CPU's results."""

from collections.abc import Sequence
from unittest.mock import patch

import torch

from freescale.config import TablesConfig
from freescale.embedding import sharded
from freescale.embedding.sharded import PlainShard
from freescale.models.keyed import Keys
from freescale.models.sampled_softmax import sampled_softmax
from tests.models.fused_cases import SALT, TEMPERATURE, LossProblem
from tests.support.ranks import Ranks, World
from tests.support.training import joined
from tests.support.vgpu.checks import reports_of


def results(problem: LossProblem) -> Sequence[torch.Tensor]:
    """Return the loss of an output after dropout, and its gradients."""
    output, rows = (value.clone().requires_grad_() for value in (problem.output, problem.rows))
    dropped = Keys(problem.positive * 0x5DEECE66D0B).dropout(output, 0.2, salt=SALT)
    positive, negatives = problem.positive, problem.negatives
    loss = sampled_softmax(dropped, rows, positive=positive, negatives=negatives, temperature=TEMPERATURE)
    return loss, *torch.autograd.grad(loss, [output, rows])


def launches(world: World, tokens: int) -> tuple[dict[str, int], float]:
    """Return the launches by kernel, and the largest difference from the CPU."""
    from tests.support.vgpu import device

    on_cpu = LossProblem.random(tokens, 40, 8, 5, torch.float64)
    on_gpu = LossProblem(*(value.to(joined(world).device) for value in on_cpu))
    device.launches.clear()
    found = results(on_gpu)
    counts: dict[str, int] = {}
    for (_, _, name), count in device.launches.items():
        counts[name] = counts.get(name, 0) + count
    pairs = zip(found, results(on_cpu), strict=True)
    return counts, max(float((a.detach().cpu() - b).abs().max()) for a, b in pairs)


def test_launches_of_loss_and_dropout_do_not_depend_on_the_number_of_tokens(gpus: Ranks) -> None:
    (few, error), _ = gpus.run(launches, 50)
    (many, larger_error), _ = gpus.run(launches, 700)
    assert few == many
    assert many["dropout"] == 2
    assert many["compute_token_losses"] == many["compute_row_gradients"] == 1
    assert sum(many.values()) <= 16, many
    assert max(error, larger_error) < 1e-10


def updated_rows(world: World, by: str) -> tuple[list[str], bool]:
    """Update rows on the device; return the reports, and whether the rows have the bits of the CPU."""
    with reports_of(world) as found, patch.object(sharded, "uses_kernels", lambda *_: by == "triton"):
        weights = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
        rows, gradients = torch.tensor([5, 0, 3, 5, 7, 5, 0]), torch.arange(28.0).view(7, 4) / 7
        results = []
        for device in (torch.device("cpu"), joined(world).device):
            state = {"item": weights.to(device, copy=True), "item.sum": torch.zeros(9, 1).to(device)}
            shard = PlainShard(state, TablesConfig(optimizer="rowwise_adagrad"))
            shard.update({"item": rows.to(device)}, {"item": gradients.to(device)}, lr={"item": 0.1})
            results.append([value.cpu() for value in state.values()])
    return found, all(map(torch.equal, *results))


def test_rows_updated_without_triton_are_those_of_the_cpu(gpus: Ranks) -> None:
    assert gpus.run(updated_rows, "torch") == [([], True)] * 2


def test_rows_updated_by_the_kernel_are_those_of_the_cpu(gpus: Ranks) -> None:
    assert gpus.run(updated_rows, "triton") == [([], True)] * 2
