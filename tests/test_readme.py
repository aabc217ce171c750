"""The README's snippets run as they are in somebody else's trainer, on two ranks, and stay within their limits."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.support.ranks import Ranks, World

README = (Path(__file__).parents[1] / "README.md").read_text()
SNIPPETS = dict(re.findall(r"^```python (\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE))


class SampleLosses(nn.Module):
    """A loss per sample: how well the mean of a history's items predicts its length."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.head = nn.Embedding(50, 8), nn.Linear(8, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        valid = torch.arange(batch["item"].shape[1]) < batch["length"][:, None]
        mean = (self.items(batch["item"]) * valid[..., None]).sum(1) / batch["length"][:, None]
        return (self.head(mean)[:, 0] - batch["length"].log()).square()


def histories() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randint(1, 50, (1 + index * index % 60,)) for index in range(64)]


def collate(samples: list[Tensor]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(sample) for sample in samples])
    return {"item": nn.utils.rnn.pad_sequence(samples, batch_first=True), "length": lengths}


def trained_with_ddp(world: World) -> tuple[float, float]:
    """The global loss of the first step by the snippet, and by one process that holds all samples."""
    data: Any = histories()
    sampler = DistributedSampler(data, shuffle=False)
    torch.manual_seed(1)
    module = SampleLosses()
    first = [data[i] for i in range(16)]
    expected = float(module(collate(first)).mean())
    scope: dict[str, Any] = {
        "loader": DataLoader(data, batch_size=8, sampler=sampler, collate_fn=collate),
        "model": DistributedDataParallel(module),
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.0),
        "epoch": 0,
    }
    snippet = SNIPPETS["ddp"].replace(
        "    optimizer.step()\n", "    optimizer.step()\n    steps.append(float(loss.detach()))\n"
    )
    scope["steps"] = []
    exec(snippet, scope)
    assert len(scope["steps"]) == 4
    return scope["steps"][0], expected


def test_the_ddp_snippet_trains_on_the_exact_global_mean(groups: dict[int, Ranks]) -> None:
    results = groups[2].run(trained_with_ddp)
    assert abs(sum(loss for loss, _ in results) / 2 - results[0][1]) < 1e-6


def trained_with_torchrec(world: World) -> int:
    from torchrec.distributed.model_parallel import DistributedModelParallel

    from tests.support.torchrec_model import UserModel, batches

    torch.manual_seed(5)
    model = UserModel()
    steps: list[Tensor] = []
    scope: dict[str, Any] = {
        "model": model,
        "device": torch.device("cpu"),
        "loader": list(batches(world, 1, 6, 0.3)),
        "optimizer": torch.optim.SGD(model.over.parameters(), lr=0.1),
        "steps": steps,
    }
    recorded = SNIPPETS["torchrec"].replace(
        "pipeline.progress(batches)\n", "pipeline.progress(batches)\n        steps.append(output)\n"
    )
    exec(recorded, scope)
    assert isinstance(scope["model"], DistributedModelParallel)
    return len(steps)


def test_the_torchrec_snippet_trains_every_batch(groups: dict[int, Ranks]) -> None:
    assert groups[2].run(trained_with_torchrec) == [6, 6]


def profiled(world: World, folder: str) -> None:
    snippet = SNIPPETS["profiler"].replace("runs/mine", folder)
    exec(snippet, {"loader": range(20), "train_step": lambda _: torch.ones(100).sum()})


def test_the_profiler_snippet_attributes_all_step_time(groups: dict[int, Ranks], tmp_path: Path) -> None:
    from freescale.bubbles import records

    groups[2].run(profiled, str(tmp_path / "run"))
    recorded = records.read_machine(tmp_path / "run")
    assert recorded.world_size == 2


def test_the_readme_is_short_and_links_little() -> None:
    assert len(README.splitlines()) <= 130
    assert len(re.findall(r"(?<!!)\[[^\]]*\]\(", README)) <= 8
    for name in (
        "sample balancing",
        "prioritized embedding communication (PEC)",
        "SM-free communication",
        "TrainPipelinePEC",
    ):
        assert name in README
