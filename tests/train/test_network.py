"""Promise: gradients of the dense part travel behind the backward pass, all but the last of them."""

import torch
from torch import Tensor, nn

from freescale.bubbles.recorder import Recorder
from freescale.models.timed import waits
from freescale.train.network import Network, data_parallel
from tests.ranks import Ranks, World
from tests.training import joined

LAYERS, BACKWARD = 20, 0.2


class Layers(nn.Module):
    """A model whose gradients come one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, tuple[int, int]] = {}
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(LAYERS))

    def forward(self, inputs: Tensor, _: object) -> Tensor:
        return waits([inputs], self.parameters(), forward=0.0, backward=BACKWARD)


def sent(world: World) -> list[tuple[int, float]]:
    """Bytes of every bucket, in order, and after which share of the backward pass it left."""
    recorder = Recorder(world.rank)
    parallel = data_parallel(Network(Layers(), None), joined(world), recorder)  # type: ignore[arg-type]
    loss = parallel(torch.ones(1, requires_grad=True), {}, {})
    recorder.restart()
    with recorder.during("backward"):
        loss.backward()
    step = recorder.read(recorder.cut(1))
    return [(one.size, (one.arrived - step.begin) / 1e9 / BACKWARD) for one in step.transfers]


def test_gradients_leave_when_they_are_there(groups: dict[int, Ranks]) -> None:
    for buckets in groups[2].run(sent):
        whole = sum(size for size, _ in buckets)
        assert whole == 4 * LAYERS * (256 * 256 + 256)
        assert max(size for size, _ in buckets) < whole / 8
        assert sum(size for size, when in buckets if when < 0.9) > 0.7 * whole
