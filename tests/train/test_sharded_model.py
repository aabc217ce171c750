"""Dense gradients overlap with the backward pass, and urgent row gradients leave before DDP waits."""

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from freescale import config
from freescale.bench.emulated import EmulatedModel, emulate_passes
from freescale.bubbles.recorder import Recorder
from freescale.bubbles.records import read_samples
from freescale.config.recipes import RECIPES
from freescale.data.loader import Loader
from freescale.train.build import build
from freescale.train.sharded_model import SequenceModule, backward, build_model, data_parallel
from tests.support.ranks import Ranks, World
from tests.support.training import joined, small

LAYERS, BACKWARD, LATE = 20, 0.2, 0.2


class Layers(nn.Module):
    """A model whose gradients come one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, tuple[int, int]] = {}
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(LAYERS))

    def forward(self, inputs: Tensor, _: object) -> Tensor:
        return emulate_passes([inputs], self.parameters(), forward=0.0, backward=BACKWARD)


def sent(world: World) -> list[tuple[int, float]]:
    """Bytes of every bucket, in order, and after which share of the backward pass it left."""
    recorder = Recorder(world.rank)
    parallel = data_parallel(SequenceModule(Layers()), joined(world), recorder)  # type: ignore[arg-type]
    loss = parallel(torch.ones(1, requires_grad=True), {}, {})
    recorder.restart_step()
    with recorder.record("backward"):
        loss.backward()
    step = recorder.read(recorder.end_step(1))
    return [(one.size, (one.arrived - step.begin) / 1e9 / BACKWARD) for one in step.transfers]


def test_buckets_are_sent_as_soon_as_their_gradients_are_computed(groups: dict[int, Ranks]) -> None:
    for buckets in groups[2].run(sent):
        whole = sum(size for size, _ in buckets)
        assert whole == 4 * LAYERS * (256 * 256 + 256)
        assert max(size for size, _ in buckets) < whole / 8
        assert sum(size for size, when in buckets if when < 0.9) > 0.7 * whole


def computed_before_the_end(world: World) -> float:
    """How long before the backward pass ends its gradients are there, if rank 1 is late."""
    parallel = data_parallel(SequenceModule(Layers()), joined(world))  # type: ignore[arg-type]
    loss, when = parallel(torch.ones(1, requires_grad=True), {}, {}), []
    time.sleep(LATE * world.rank)

    def computed() -> AbstractContextManager[None]:
        when.append(time.monotonic())
        return nullcontext()

    backward(loss, computed)
    (one,) = when
    return time.monotonic() - one


def test_the_callback_after_local_gradients_does_not_wait_for_other_ranks(groups: dict[int, Ranks]) -> None:
    early, late = groups[2].run(computed_before_the_end)
    assert early > LATE / 2 > late


def train(world: World, log: Path, folder: Path) -> None:
    """Some steps with emulated compute, in which rank 1 is late."""
    run = small(log, train={"max_steps": 8, "epochs": 10}, tables={"overlap": "on"})
    model = build_model(run, items=Loader(run.data, seed=0).vocabulary.rows)
    lane = EmulatedModel(model, lambda _: (0.0, BACKWARD + LATE * world.rank))
    trainer = build(run, joined(world), folder, model=lane)
    trainer.fit()
    trainer.close()


def test_urgent_row_gradients_are_sent_before_dense_gradients_are_summed(
    groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    groups[2].run(train, log, tmp_path)
    first = [ranks[0].step.transfers for ranks in read_samples(tmp_path).values()]
    ahead = []
    for transfers in first:
        rows = [one.arrived for one in transfers if one.kind == "row gradients" and not one.independent]
        dense = [one.done for one in transfers if one.kind == "dense gradients"]
        ahead += [(max(dense) - begin) / 1e9 for begin in rows]
    assert len(ahead) >= 4
    assert min(ahead) > LATE / 2


def allowed_tf32(world: World, log: Path, folder: Path, recipe: str) -> bool:
    """Build a trainer with the precision that the TOML of a recipe states; return whether torch allows TF32."""
    precision = config.parse(config.to_toml(RECIPES[recipe])).train
    training = {"tf32": precision.tf32, "precision": precision.precision}
    build(small(log, train=training), joined(world), folder / recipe, quiet=True).close()
    return bool(torch.backends.cuda.matmul.allow_tf32)


def test_a_recipe_for_gpus_allows_tf32_as_its_toml_says_and_others_do_not(
    groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    for recipe, expected in {"hstu-large": True, "hstu-ml1m": False, "dlrm-v4": True, "tiny": False}.items():
        assert groups[1].run(allowed_tf32, log, tmp_path, recipe) == [expected]
