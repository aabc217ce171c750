"""The loss and dropout take a few launches on a GPU, however many tokens a batch has, and give the CPU's results."""

from collections.abc import Sequence

import torch

from freescale.models.keyed import Keys
from freescale.models.sampled_softmax import sampled_softmax
from tests.models.fused_cases import SALT, TEMPERATURE, LossProblem
from tests.support.ranks import Ranks, World
from tests.support.training import joined


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
