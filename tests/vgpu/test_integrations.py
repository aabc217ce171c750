"""What other people's trainers import works on virtual GPUs: the pipeline, balanced batches and the profiler."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import freescale as fs
from freescale.bubbles.records import read_intervals
from freescale.bubbles.summary import summarize
from freescale.config import TransportConfig
from freescale.integrations.pipeline import PrioritizedEmbeddingCollection
from tests.support import ddp_training as ddp
from tests.support.ranks import Ranks, World
from tests.support.torchrec_model import Batch, UserModel, batches, outputs, sharded
from tests.support.training import joined
from tests.support.vgpu.checks import reports_of

STEPS = 12
TRANSPORTS = ("c10d", "host_staged", "copy_engine")


class DictModel(UserModel):
    """Takes dicts, as many data loaders yield them."""

    def forward(self, batch: Any) -> Any:
        return super().forward(Batch(batch["ids"], batch["labels"]))


def dicts(world: World) -> Iterator[dict[str, Any]]:
    return ({"ids": batch.ids, "labels": batch.labels} for batch in batches(world, 1, STEPS, 0.3))


def build_model(world: World) -> Any:
    """A TorchRec model of this rank's device. FBGEMM's rows are on the CPU: see the table of stand-ins."""
    device, group = joined(world).device, dist.group.WORLD
    sharder = fs.PrioritizedEmbeddingSharder(fused_params={"learning_rate": 0.1})
    gloo: Any = dist.new_group(backend="gloo")
    model: Any = sharded(world, sharder, DictModel, gloo, data_parallel=False)
    for module in model.modules():
        if isinstance(module, PrioritizedEmbeddingCollection):
            module._env = ShardingEnv.from_process_group(group)  # type: ignore[arg-type]
    inner = model.module
    inner.over = DistributedDataParallel(inner.over.to(device))
    model.device = device
    return model


def piped(world: World, transport: str) -> tuple[list[float], list[str]]:
    """Train with the pipeline, which gets no device; return losses and reports."""
    model: Any = build_model(world)
    dense = {name: p for name, p in model.named_parameters() if "embeddings" not in name}
    adam = KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adam(p, lr=0.01))
    lanes = TransportConfig(urgent=transport, deferred=transport)  # type: ignore[arg-type]
    with reports_of(world) as found:
        pipeline = fs.PrioritizedPipeline(model, CombinedOptimizer([model.fused_optimizer, adam]), transport=lanes)
        losses = [float(loss) for loss, _ in outputs(pipeline, dicts(world))]
        pipeline.close()
    return losses, found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_pipeline_infers_the_device_moves_dicts_and_gives_the_losses_of_the_cpu(
    gpus: Ranks, groups: dict[int, Ranks], transport: str
) -> None:
    on_cpu = groups[2].run(piped, "c10d")
    for rank, (losses, found) in enumerate(gpus.run(piped, transport)):
        assert found == []
        assert len(losses) == STEPS
        assert losses == pytest.approx(on_cpu[rank][0], rel=1e-5)


def balanced(world: World) -> tuple[dict[str, Any], list[str]]:
    """Train a DDP model with balanced batches, which the trainer moves to its device."""
    device = joined(world).device
    loader, sampler = ddp.loader_of(world, "padded", pin_memory=device.type != "cpu")
    model = DistributedDataParallel(_OnDevice(per_event=False).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    sampler.set_epoch(0)
    with reports_of(world) as found:
        for batch in ddp.balanced(loader, "padded", per_event=False):
            moved = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
            (model(moved) * moved["loss_weight"]).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = {name: value.detach().cpu().numpy() for name, value in model.module.named_parameters()}
    return weights, found


class _OnDevice(ddp.Model):
    """Gathers rows by products: the backward pass of an embedding adds floats in any order on a GPU."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        item, lengths, target = batch["item"], batch["length"], batch["target"]
        held = torch.arange(item.shape[1], device=item.device) < lengths[:, None]
        is_item = item[..., None] == torch.arange(ddp.ITEMS, device=item.device)
        rows = (is_item & held[..., None]).double() @ self.items.weight
        seen = rows + torch.tanh(self.look(rows.sum(1) / lengths.clamp(min=1)[:, None]))[:, None]
        off = (self.say(seen)[..., 0] - target[:, None] / ddp.ITEMS).square() * held
        return (off.sum(1) / lengths.clamp(min=1)).sum()


def test_balanced_batches_train_as_on_the_cpu(gpus: Ranks, groups: dict[int, Ranks]) -> None:
    on_cpu = groups[2].run(balanced)
    for rank, (weights, found) in enumerate(gpus.run(balanced)):
        assert found == []
        for name, values in weights.items():
            np.testing.assert_allclose(values, on_cpu[rank][0][name], rtol=1e-9, atol=1e-12, err_msg=name)


def profiled(world: World, folder: str) -> list[str]:
    """Profile a DDP loop."""
    device = joined(world).device
    model = DistributedDataParallel(torch.nn.Linear(16, 16).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with reports_of(world) as found, fs.StepProfiler(folder, device=device) as profiler:
        for _ in profiler.iterate("data", range(8)):
            with profiler.record("forward"):
                loss = model(torch.ones(4, 16, device=device)).square().mean()
            with profiler.record("backward"):
                loss.backward()
            with profiler.record("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            profiler.end_step()
    return found


def test_the_profiler_attributes_all_step_time_of_a_device(gpus: Ranks, tmp_path: Path) -> None:
    assert gpus.run(profiled, str(tmp_path)) == [[], []]
    summary = summarize(read_intervals(tmp_path))
    assert {"forward", "backward", "optimizer"} <= {line.cause for line in summary.lines}
    assert sum(line.ms for line in summary.lines) == pytest.approx(summary.step_ms)
