"""Prioritized training of a TorchRec model is bitwise the serial one, and agrees with TorchRec's own."""

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import freescale as fs
from freescale import log
from freescale.config import TransportConfig
from freescale.config.schema import TransportName
from freescale.embedding.prioritized import RowOperations
from freescale.transport.base import PendingWork
from freescale.transport.c10d import C10d
from tests.support.in_process import ListHandler
from tests.support.ranks import Ranks, World
from tests.support.torchrec_model import batches, outputs, sharded
from tests.support.training import Arrays, same

STEPS, RUNS = 30, 6
WHOLE_STEPS, WHOLE_RUNS = 200, 50
FUSED = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}


def optimizer_of(model: DistributedModelParallel) -> CombinedOptimizer:
    """Of the dense part and, for its learning rate, of the tables."""
    dense = {name: p for name, p in model.named_parameters() if "embeddings" not in name}
    return CombinedOptimizer(
        [model.fused_optimizer, KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adam(p, lr=0.01))]
    )


def slow_down(optimizer: CombinedOptimizer) -> None:
    groups: list[Any] = list(optimizer.param_groups)
    for group in groups:
        group["lr"] *= 0.99


def held(model: DistributedModelParallel) -> Arrays:
    """Own rows, their optimizer and the dense part."""
    found = {}
    for name, value in model.state_dict().items():
        found[name] = value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
    for name, state in model.fused_optimizer.state_dict()["state"].items():
        for key, value in state.items():
            found[f"{name}.{key}"] = value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
    return {name: value.clone().numpy() for name, value in found.items()}


def prioritized(
    world: World,
    optimizer: str,
    shared: float,
    steps: int,
    overlap: bool,
    way: TransportName = "c10d",
) -> tuple[list[float], Arrays]:
    fused = {"optimizer": FUSED[optimizer], "learning_rate": 0.1}
    model = sharded(world, fs.PrioritizedEmbeddingSharder(fused_params=fused))
    rates = optimizer_of(model)
    ways = TransportConfig(urgent=way, deferred=way)
    pipeline = fs.PrioritizedPipeline(model, rates, overlap=overlap, transport=ways)
    losses = []
    for step, (loss, _) in enumerate(outputs(pipeline, batches(world, 1, steps, shared))):
        losses.append(float(loss))
        slow_down(rates)
        if step % 50 == 7:
            model.state_dict()
    pipeline.close()
    return losses, held(model)


def until_a_loader_ends(world: World, counts: list[int], overlap: bool) -> tuple[list[float], Arrays, list[str]]:
    """Losses, the model and what was logged, where every rank has another number of batches."""
    model = sharded(world, fs.PrioritizedEmbeddingSharder(fused_params={"learning_rate": 0.1}))
    loader = list(batches(world, 1, counts[world.rank], 0.3))
    log._logged.clear()  # a rank logs the same text once
    handler = ListHandler()
    with log.handled_by(handler):
        pipeline = fs.PrioritizedPipeline(model, optimizer_of(model), overlap=overlap, timeout=60.0)
        losses = [float(loss) for loss, _ in outputs(pipeline, loader)]
        pipeline.close()
    return losses, held(model), [text for text in handler.messages if "not trained on" in text]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("counts", [[9, 6], [0, 3], [1, 2], [4, 4], [7, 9, 5, 6], [2, 2, 2, 0]])
def test_all_ranks_stop_after_the_last_step_for_which_each_has_a_batch(
    groups: dict[int, Ranks], counts: list[int], overlap: bool
) -> None:
    ranks, common = groups[len(counts)], min(counts)
    expected = ranks.run(until_a_loader_ends, [common] * len(counts), False)
    for rank, (losses, arrays, logged) in enumerate(ranks.run(until_a_loader_ends, counts, overlap)):
        assert len(losses) == common
        assert losses == expected[rank][0]
        assert same(arrays, expected[rank][1])
        left = counts[rank] - common
        assert len(logged) == (left > 0)
        assert all(f"at least {left} batches" in text for text in logged)


def plainly(
    world: World, optimizer: str, shared: float, steps: int, way: TransportName | None = None
) -> tuple[list[float], Arrays]:
    """TorchRec's own loop; its rows take TorchRec's way, or one of ours."""
    fused = {"optimizer": FUSED[optimizer], "learning_rate": 0.1}
    plain = EmbeddingCollectionSharder(fused_params=fused)
    model = sharded(world, plain if way is None else fs.TransportEmbeddingSharder(transport=way, fused_params=fused))
    rates, losses = optimizer_of(model), []
    for batch in batches(world, 1, steps, shared):
        rates.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        rates.step()
        losses.append(float(loss))
        slow_down(rates)
    return losses, held(model)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("optimizer", FUSED)
@pytest.mark.parametrize(
    "shared", [pytest.param(0.0, marks=pytest.mark.whole), 0.05, pytest.param(0.3, marks=pytest.mark.whole), 1.0]
)
def test_prioritized_is_bitwise_serial(
    groups: dict[int, Ranks], whole_form: bool, ranks: int, optimizer: str, shared: float
) -> None:
    steps = WHOLE_STEPS if whole_form else STEPS
    serial, overlapped = (groups[ranks].run(prioritized, optimizer, shared, steps, on) for on in (False, True))
    for (losses, arrays), (other_losses, other_arrays) in zip(serial, overlapped, strict=True):
        assert len(losses) == steps
        assert losses == other_losses
        assert same(arrays, other_arrays)


def delayed(world: World, runs: int) -> list[tuple[list[float], Arrays]]:
    """Some short runs; whenever anything is sent or waited for, somebody is late."""
    rng, lock = np.random.default_rng([3, world.rank]), threading.Lock()

    def late() -> None:
        with lock:
            seconds = float(rng.exponential(4e-4) * rng.integers(0, 2))
        time.sleep(seconds)

    start, wait, backward = C10d._start, PendingWork.wait, fs.PrioritizedPipeline.backward
    C10d._start = lambda *words: (late(), start(*words))[1]  # type: ignore[method-assign]
    PendingWork.wait = lambda self: (late(), wait(self))[1]  # type: ignore[method-assign]
    # DDP adds gradients up inside of it.
    fs.PrioritizedPipeline.backward = lambda *words: (late(), backward(*words))[1]  # type: ignore[method-assign]
    try:
        ways: list[TransportName] = ["c10d", "shared_memory"]
        return [prioritized(world, "rowwise_adagrad", 0.3, 8, True, ways[run % 2]) for run in range(runs)]
    finally:
        C10d._start, PendingWork.wait, fs.PrioritizedPipeline.backward = start, wait, backward  # type: ignore[method-assign]


@pytest.mark.parametrize("ranks", [2, 4])
def test_whoever_is_late_the_result_is_bitwise_the_same(groups: dict[int, Ranks], whole_form: bool, ranks: int) -> None:
    count = WHOLE_RUNS if whole_form else RUNS
    serial = groups[ranks].run(prioritized, "rowwise_adagrad", 0.3, 8, False)
    for (losses, arrays), runs in zip(serial, groups[ranks].run(delayed, count), strict=True):
        assert len(runs) == count
        for other_losses, other_arrays in runs:
            assert losses == other_losses
            assert same(arrays, other_arrays)


def states_between_steps(world: World, overlap: bool) -> list[Arrays]:
    """The state dicts after each step, where deferred updates are late."""
    update = RowOperations.update_deferred
    RowOperations.update_deferred = lambda *words: (time.sleep(0.1), update(*words))[1]  # type: ignore[method-assign]
    try:
        model = sharded(world, fs.PrioritizedEmbeddingSharder(fused_params={"learning_rate": 0.1}))
        ways = TransportConfig(urgent="c10d", deferred="c10d")
        pipeline = fs.PrioritizedPipeline(model, optimizer_of(model), overlap=overlap, transport=ways)
        states = [held(model) for _ in outputs(pipeline, batches(world, 1, 4, 0.3))]
        pipeline.close()
        return states
    finally:
        RowOperations.update_deferred = update  # type: ignore[method-assign]


def test_a_state_dict_between_steps_has_the_deferred_updates(groups: dict[int, Ranks]) -> None:
    serial, overlapped = (groups[2].run(states_between_steps, overlap) for overlap in (False, True))
    for states, others in zip(serial, overlapped, strict=True):
        assert len(states) == 4
        assert all(same(one, other) for one, other in zip(states, others, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("optimizer", FUSED)
@pytest.mark.parametrize(("steps", "bound"), [(1, 1e-5), (20, 1e-3)])
def test_steps_are_those_of_torchrec(
    groups: dict[int, Ranks], ranks: int, optimizer: str, steps: int, bound: float
) -> None:
    theirs = groups[ranks].run(plainly, optimizer, 0.3, steps)
    ours = groups[ranks].run(prioritized, optimizer, 0.3, steps, True)
    for (losses, arrays), (our_losses, our_arrays) in zip(theirs, ours, strict=True):
        assert our_losses == pytest.approx(losses, rel=bound)
        assert arrays.keys() == our_arrays.keys()
        for name, value in arrays.items():
            assert np.linalg.norm(value - our_arrays[name]) <= bound * np.linalg.norm(value), name


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("way", ["c10d", "host_staged", "shared_memory"])
def test_plain_torchrec_learns_the_same_bits_whichever_way_its_rows_take(
    groups: dict[int, Ranks], ranks: int, way: TransportName
) -> None:
    theirs = groups[ranks].run(plainly, "rowwise_adagrad", 0.3, 12)
    ours = groups[ranks].run(plainly, "rowwise_adagrad", 0.3, 12, way)
    for (losses, arrays), (our_losses, our_arrays) in zip(theirs, ours, strict=True):
        assert our_losses == losses
        assert same(our_arrays, arrays)
