"""PrioritizedPipeline trains any TorchRec model, and refuses with a reason what it cannot do exactly."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.tbe.config.optimizer_config import GlobalWeightDecayDefinition, WeightDecayMode
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import freescale as fs
from freescale.bubbles import records
from freescale.bubbles.summary import summarize
from freescale.embedding.prioritized import EmbeddingMemory
from freescale.errors import ConfigError, FreeScaleError, UsageError
from freescale.integrations.batches import move_to_device
from freescale.integrations.torchrec import events_from_keyed_jagged, keyed_jagged_from_events
from tests.support.ranks import Ranks, World
from tests.support.torchrec_model import Batch, UserModel, batches, outputs, sharded

_DECAY = {
    "weight_decay": 0.1,
    "weight_decay_mode": WeightDecayMode.DECOUPLE_GLOBAL,
    "global_weight_decay": GlobalWeightDecayDefinition(start_iter=0),
}
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}


def model_of(world: World, prioritized: bool, **changes: Any) -> DistributedModelParallel:
    kind = fs.PrioritizedEmbeddingSharder if prioritized else EmbeddingCollectionSharder
    return sharded(world, kind(fused_params=FUSED | changes))


def pipeline_of(model: DistributedModelParallel, **options: Any) -> fs.PrioritizedPipeline[Batch]:
    dense = [p for name, p in model.named_parameters() if "embeddings" not in name]
    return fs.PrioritizedPipeline(model, torch.optim.SGD(dense, lr=0.05), **options)


def load(model: DistributedModelParallel, state: Any) -> None:
    model.load_state_dict(state)


def train(model: DistributedModelParallel, loader: Iterator[Batch], prioritized: bool) -> list[float]:
    if prioritized:
        return [float(loss) for loss, _ in outputs(pipeline_of(model), loader)]
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if "embeddings" not in name], lr=0.05)
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def moved(world: World, folder: str, first: bool) -> tuple[list[float], list[float]]:
    """Losses after a checkpoint: of who wrote it, and of the other kind, which read it."""
    one, other = model_of(world, first), model_of(world, not first)
    train(one, batches(world, 1, 6, 0.3), first)
    train(other, batches(world, 2, 3, 0.3), not first)  # whatever it was before
    saved = {"model": one.state_dict(), "tables": one.fused_optimizer.state_dict()}
    dcp.save(saved, checkpoint_id=folder)
    read = {"model": other.state_dict(), "tables": other.fused_optimizer.state_dict()}
    dcp.load(read, checkpoint_id=folder)
    load(other, read["model"])
    other.fused_optimizer.load_state_dict(read["tables"])
    return tuple(train(model, batches(world, 3, 6, 0.3), kind) for model, kind in ((one, first), (other, not first)))  # type: ignore[return-value]


@pytest.mark.parametrize("first", [True, False], ids=["prioritized to plain", "plain to prioritized"])
def test_a_checkpoint_moves_between_torchrec_and_prioritized(
    groups: dict[int, Ranks], tmp_path: Path, first: bool
) -> None:
    for wrote, read in groups[2].run(moved, str(tmp_path / "saved"), first):
        assert read == pytest.approx(wrote, rel=1e-4)


def interrupted(world: World, evaluate: bool) -> list[float]:
    """Losses of a training, in the middle of which somebody else may use the model."""
    model = model_of(world, True)
    losses, held_out = [], next(batches(world, 9, 1, 0.5))
    for step, (loss, _) in enumerate(outputs(pipeline_of(model), batches(world, 1, 12, 0.5))):
        losses.append(float(loss))
        if evaluate and step % 4 == 1:
            model.eval()
            with torch.no_grad():
                _, (once, _) = model(held_out)
                _, (again, _) = model(held_out)
            model.train()
            assert torch.equal(once, again)
        if evaluate and step % 4 == 2:  # loading what was saved drops the rows that were fetched ahead
            load(model, model.state_dict())
    return losses


def test_evaluation_and_loading_in_between_change_nothing(groups: dict[int, Ranks]) -> None:
    assert groups[2].run(interrupted, True) == groups[2].run(interrupted, False)


def stepped_aside(world: World) -> bool:
    """A step of the plain loop in the middle of a pipeline: rows that were fetched ahead of it are not used."""
    found = []
    for aside in (True, False):
        model = model_of(world, True)
        losses = []
        middle = list(batches(world, 7, 1, 1.0))
        for step, (loss, _) in enumerate(outputs(pipeline_of(model, overlap=aside), batches(world, 1, 8, 1.0))):
            losses.append(float(loss))
            if step == 4:
                train(model, iter(middle), prioritized=False)
        found.append(losses)
    return found[0] == found[1]


def test_somebody_elses_step_in_between_is_seen(groups: dict[int, Ranks]) -> None:
    assert all(groups[2].run(stepped_aside))


def refused(world: World, what: str) -> str:
    """What is said to somebody who does something that cannot be done."""
    try:
        _DO[what](world)
    except FreeScaleError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


class Changing(UserModel):
    """Looks up other ids than the batch holds."""

    def forward(self, batch: Batch) -> Any:
        ids = batch.ids
        other = KeyedJaggedTensor(keys=ids.keys(), values=ids.values() // 2, lengths=ids.lengths())
        return super().forward(Batch(other, batch.labels))


def _other_ids(world: World) -> None:
    model = sharded(world, fs.PrioritizedEmbeddingSharder(fused_params=FUSED), Changing)
    for _ in outputs(pipeline_of(model), batches(world, 1, 3, 0.1)):
        pass


def _hidden_features(world: World) -> None:
    loader = ({"inside": [batch]} for batch in batches(world, 1, 3, 0.1))
    for _ in outputs(pipeline_of(model_of(world, True)), loader):
        pass


_DO = {
    "adam": lambda world: model_of(world, True, optimizer=EmbOptimType.ADAM),
    "decay": lambda world: model_of(world, True, **_DECAY),
    "plain": lambda world: pipeline_of(model_of(world, False)),
    "other ids": _other_ids,
    "hidden": _hidden_features,
}


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("adam", ConfigError, "counts its updates"),
        ("decay", ConfigError, "more than the rows of a batch"),
        ("plain", UsageError, "fs.PrioritizedEmbeddingSharder()"),
        ("other ids", UsageError, "looks up other ids than the batch holds"),
        ("hidden", UsageError, "0 of the 0 KeyedJaggedTensors"),
    ],
)
def test_what_would_not_be_exact_is_refused_with_the_reason(
    groups: dict[int, Ranks], what: str, error: type[Exception], words: str
) -> None:
    for said in groups[1].run(refused, what):
        assert said.startswith(error.__name__), said
        assert words in said
        assert "remedy" in said


def memory(world: World) -> tuple[EmbeddingMemory, EmbeddingMemory]:
    """What was held between steps, and what one batch needs at most: ids, rows, gradients; asked here and there."""
    loader = list(batches(world, 1, 30, 0.3))
    pipeline = pipeline_of(model_of(world, True))
    for _ in outputs(pipeline, loader):
        pass
    ids = max(len(batch.ids.values()) for batch in batches(world, 1, 30, 0.3))
    most = torch.tensor(ids)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    asked = int(most) * world.ranks
    return pipeline.peak_memory, EmbeddingMemory(8 * asked, 64 * asked, 64 * asked)


def test_between_steps_one_batch_of_rows_is_held_one_of_gradients_and_two_of_ids(groups: dict[int, Ranks]) -> None:
    for held, of_batch in groups[2].run(memory):
        assert 0 < held.rows <= of_batch.rows
        assert held.gradients <= of_batch.gradients
        assert 0 < held.ids <= 2 * 2 * of_batch.ids  # of each batch, those wanted and those asked for


def epochs(world: World, read_to_the_end: bool) -> list[float]:
    """Losses of three epochs, each with a new iterator. The end of an epoch is a count or StopIteration."""
    pipeline, losses = pipeline_of(model_of(world, True), timeout=60.0), []
    for epoch in range(3):
        if read_to_the_end:
            losses += [float(loss) for loss, _ in outputs(pipeline, batches(world, epoch, 4, 0.5))]
        else:
            iterator = batches(world, epoch, 4, 0.5)
            losses += [float(pipeline.progress(iterator)[0]) for _ in range(4)]
    pipeline.close()
    return losses


def test_a_new_iterator_continues_training(groups: dict[int, Ranks]) -> None:
    results = groups[2].run(epochs, True)
    assert [len(losses) for losses in results] == [12, 12]
    assert groups[2].run(epochs, False) == results


def stopped(world: World) -> list[bool]:
    """Whether `progress` raises StopIteration at every call after the end, without waiting for other ranks."""
    pipeline, iterator = pipeline_of(model_of(world, True), timeout=60.0), batches(world, 1, 2, 0.5)
    assert len(list(outputs(pipeline, iterator))) == 2
    raised = []
    for _ in range(1 + 2 * world.rank):
        try:
            pipeline.progress(iterator)
        except StopIteration:
            raised.append(True)
    return raised


def test_progress_raises_stop_iteration_again_after_the_end(groups: dict[int, Ranks]) -> None:
    assert groups[2].run(stopped) == [[True], [True] * 3]


def profiled(world: World, folder: str) -> None:
    """Train two epochs with a profiler, and end none of its steps."""
    with fs.StepProfiler(folder, timeout=60.0) as profiler:
        pipeline = pipeline_of(model_of(world, True), profiler=profiler, timeout=60.0)
        for epoch in range(2):
            assert len(list(outputs(pipeline, batches(world, epoch, 6, 0.3)))) == 6
        assert profiler.step == 12
        pipeline.close()


def test_progress_ends_the_steps_of_its_profiler(groups: dict[int, Ranks], tmp_path: Path) -> None:
    groups[2].run(profiled, str(tmp_path))
    intervals = records.read_intervals(tmp_path)
    assert sum(interval.steps for interval in intervals) == 11  # the first is warm-up
    summary = summarize(intervals)
    assert summary.waiting_known
    assert [line.ms > 0 for line in summary.lines if line.cause == "data"] == [True]


class Moving:
    """A batch with a `to` of its own."""

    def __init__(self) -> None:
        self.device: torch.device | None = None

    def to(self, device: torch.device) -> "Moving":
        self.device = device
        return self


def test_batches_of_any_form_are_moved_to_the_device() -> None:
    meta, jagged = torch.device("meta"), KeyedJaggedTensor(["a"], torch.tensor([1, 2]), torch.tensor([1, 1]))
    batch = {"tensor": torch.ones(2), "jagged": jagged, "nested": [(torch.ones(1), 3)], "own": Moving(), "word": "x"}
    moved = move_to_device(batch, meta)
    assert moved["tensor"].device == moved["nested"][0][0].device == moved["jagged"].device() == meta
    assert (moved["own"].device, moved["word"], moved["nested"][0][1]) == (meta, "x", 3)
    assert move_to_device(Batch(jagged, torch.ones(2)), meta).labels.device == meta


def test_keyed_jagged_tensors_convert_to_events_and_back() -> None:
    lengths = torch.tensor([2, 0, 1, 0, 3, 1])
    features = KeyedJaggedTensor(keys=["item", "shop"], values=torch.arange(7), lengths=lengths)
    events = events_from_keyed_jagged(features)
    assert events["shop"].lengths.tolist() == [0, 3, 1]
    assert events["shop"]["shop"].tolist() == [3, 4, 5, 6]
    back = keyed_jagged_from_events(events)
    assert back.keys() == features.keys()
    assert torch.equal(back.values(), features.values())
    assert torch.equal(back.lengths(), features.lengths())
