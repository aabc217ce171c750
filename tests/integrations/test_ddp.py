"""Promise: in any DDP trainer, balanced batches teach what the same samples teach on one rank."""

import multiprocessing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import freescale as fs
from freescale.errors import DataError, UsageError
from tests.support.ranks import Ranks, World

SAMPLES, BATCH, EPOCHS, ITEMS = 90, 4, 2, 50
COST = fs.Cost(token=20.0, pair=1.0)
LENGTHS = np.minimum(np.random.default_rng(0).lognormal(2.0, 1.2, SAMPLES).astype(int) + 1, 60)


class Histories(Dataset[dict[str, Tensor]]):
    """What a sample holds follows from its number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        items = (torch.arange(int(LENGTHS[index])) * 7 + index) % (ITEMS - 1) + 1
        return {"number": torch.tensor(index), "item": items, "target": items.double().mean()}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        "number": torch.stack([sample["number"] for sample in samples]),
        "item": nn.utils.rnn.pad_sequence([sample["item"] for sample in samples], batch_first=True),
        "length": torch.tensor([len(sample["item"]) for sample in samples]),
        "target": torch.stack([sample["target"] for sample in samples]),
    }


@dataclass(frozen=True)
class Jagged:
    number: Tensor
    events: fs.Events
    target: Tensor
    epoch: int = 3


def jagged(samples: list[dict[str, Tensor]]) -> Jagged:
    lengths = torch.tensor([0, *(len(sample["item"]) for sample in samples)])
    items = torch.cat([sample["item"] for sample in samples])
    number, target = (torch.stack([sample[name] for sample in samples]) for name in ("number", "target"))
    return Jagged(number, fs.Events(lengths.cumsum(0), {"item": items}), target)


class Model(nn.Module):
    """A loss for every sample, or for every event; padding and company do not change it."""

    def __init__(self, per_event: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.per_event = per_event
        self.items = nn.Embedding(ITEMS, 8, dtype=torch.float64)
        self.look = nn.Linear(8, 8, dtype=torch.float64)
        self.say = nn.Linear(8, 1, dtype=torch.float64)

    def forward(self, batch: Any) -> Tensor:
        if isinstance(batch, Jagged):
            lengths, target = batch.events.lengths, batch.target
            items = torch.zeros(len(lengths), max([0, *lengths.tolist()]), dtype=torch.int64)
            items[torch.arange(items.shape[1]) < lengths[:, None]] = batch.events["item"]
        else:
            items, lengths, target = batch["item"], batch["length"], batch["target"]
        held = torch.arange(items.shape[1]) < lengths[:, None]
        rows = self.items(items) * held[..., None]
        seen = rows + torch.tanh(self.look(rows.sum(1) / lengths.clamp(min=1)[:, None]))[:, None]
        off = (self.say(seen)[..., 0] - target[:, None] / ITEMS).square() * held
        return off.sum() if self.per_event else (off.sum(1) / lengths.clamp(min=1)).sum()


def loader_of(world: World, kind: str, **more: Any) -> tuple[DataLoader[Any], Any]:
    data = Histories()
    sampler = DistributedSampler(data, world.ranks, world.rank, shuffle=True, seed=7)
    collate = jagged if kind == "jagged" else padded
    return DataLoader(data, BATCH, sampler=sampler, collate_fn=collate, **more), sampler


def balanced(loader: Any, kind: str, per_event: bool, **more: Any) -> Any:
    terms: dict[str, Any] = {"terms": lambda lengths: lengths} if per_event else {}
    if kind == "jagged":
        return fs.BalancedLoader(loader, length=lambda b: b.events.lengths, cost=COST, **terms, **more)
    if kind == "placed":
        return fs.BalancedLoader(loader, length=LENGTHS, cost=COST, **terms, **more)
    names = {"item": 0}
    return fs.BalancedLoader(loader, length=lambda b: b["length"], cost=COST, padded=names, **terms, **more)


def of(batch: Any, name: str) -> Any:
    return batch[name] if isinstance(batch, dict) else getattr(batch, name)


def trained(world: World, kind: str, per_event: bool, **more: Any) -> tuple[list[list[int]], list[float], Any]:
    """Samples of each step on this rank, the work of each, and the weights in the end."""
    loader, sampler = loader_of(world, kind)
    given = loader if kind == "plain" else balanced(loader, kind, per_event, **more)
    model = DistributedDataParallel(Model(per_event))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    steps, work = [], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in given:
            numbers = of(batch, "number").tolist()
            steps.append(numbers)
            work.append(float(COST.of(LENGTHS[numbers]).sum()))
            if kind != "plain":
                (model(batch) * of(batch, "loss_scale")).backward()
                optimizer.step()
                optimizer.zero_grad()
    return steps, work, {name: value.detach().numpy() for name, value in model.module.named_parameters()}


def trained_alone(steps: list[list[int]], per_event: bool) -> dict[str, Any]:
    model, data = Model(per_event), Histories()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for numbers in steps:
        terms = LENGTHS[numbers].sum() if per_event else len(numbers)
        (model(padded([data[number] for number in numbers])) / terms).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


def together(results: list[Any]) -> list[list[int]]:
    return [sorted(n for numbers in of_step for n in numbers) for of_step in zip(*(r[0] for r in results), strict=True)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("per_event", [False, True], ids=["mean of samples", "mean of events"])
@pytest.mark.parametrize("kind", ["padded", "jagged", "placed"])
def test_balanced_batches_teach_what_their_samples_teach_on_one_rank(
    groups: dict[int, Ranks], ranks: int, kind: str, per_event: bool
) -> None:
    plain = groups[ranks].run(trained, "plain", per_event)
    dealt = groups[ranks].run(trained, kind, per_event)
    assert together(dealt) == together(plain)
    alone = trained_alone(together(plain), per_event)
    for _, _, weights in dealt:
        for name, value in alone.items():
            assert np.linalg.norm(weights[name] - value) < 1e-9 * np.linalg.norm(value), name
    before, after = (np.array([work for _, work, _ in results]) for results in (plain, dealt))
    waiting = [(work.max(axis=0) / work.mean(axis=0) - 1).mean() for work in (before, after)]
    assert waiting[1] < 0.6 * waiting[0]  # few samples per rank: more cannot be balanced


@pytest.mark.parametrize("kind", ["padded", "placed"])
def test_counts_are_equal_where_that_is_asked_for(groups: dict[int, Ranks], kind: str) -> None:
    results = groups[4].run(counted, kind)
    counts = np.array(results)
    assert (np.ptp(counts, axis=0) <= 1).all()


def counted(world: World, kind: str) -> list[int]:
    return [len(numbers) for numbers in trained(world, kind, False, equal_counts=True)[0]]


def unequally_long(world: World) -> list[tuple[list[int], float]]:
    """Rank r brings r + 1 batches, and the last one of every rank is small."""
    data = Histories()
    numbers = [[10 * world.rank + 3 * step, 10 * world.rank + 3 * step + 1] for step in range(world.rank + 1)]
    loader = [padded([data[number] for number in batch]) for batch in numbers]
    given = fs.BalancedLoader(loader, length=lambda b: b["length"], cost=COST, padded={"item": 0})
    return [(batch["number"].tolist(), batch["loss_scale"]) for batch in given]


def test_a_rank_whose_loader_ends_earlier_goes_on_with_what_others_give(groups: dict[int, Ranks]) -> None:
    results = groups[2].run(unequally_long)
    assert [len(rank) for rank in results] == [2, 2]
    for step, samples in enumerate(([0, 1, 10, 11], [13, 14])):
        assert sorted(results[0][step][0] + results[1][step][0]) == samples
        assert [rank[step][1] for rank in results] == [2 / len(samples)] * 2


def without_batches(world: World, empty: list[int]) -> str:
    data = Histories()
    loader = [] if world.rank in empty else [padded([data[0]]), padded([data[1]])]
    with pytest.raises(DataError) as caught:
        list(balanced(loader, "padded", False, timeout=20.0))
    return str(caught.value)


@pytest.mark.parametrize("empty", [[1], [0, 1]])
def test_a_loader_without_batches_is_named_on_all_ranks_at_once(groups: dict[int, Ranks], empty: list[int]) -> None:
    for said in groups[2].run(without_batches, empty):
        assert f"no batch at all: {', '.join(map(str, empty))}" in said
        assert "remedy" in said


def broken_off(world: World, kind: str, more: dict[str, Any]) -> tuple[list[list[int]], list[list[int]], int]:
    """Samples of each step: of three steps and then of all, and what the loader says is its length."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # may have workers
    loader, _ = loader_of(world, kind, drop_last=True, **more)
    given = loader if kind == "plain" else balanced(loader, kind, False)
    some, scales = [], []
    for batch in given:
        some.append(batch["number"].tolist())
        if len(some) == 3:
            break
    every = []
    for batch in given:
        every.append(batch["number"].tolist())
        scales.append(float(batch.get("loss_scale", 1 / BATCH)))
    assert scales == [1 / BATCH] * len(every)
    return some, every, len(given)


@pytest.mark.parametrize("more", [{}, {"num_workers": 2, "persistent_workers": True}], ids=["here", "workers"])
@pytest.mark.parametrize("kind", ["padded", "placed"])
def test_iteration_that_was_broken_off_begins_anew(groups: dict[int, Ranks], kind: str, more: dict[str, Any]) -> None:
    plain = groups[2].run(broken_off, "plain", {})
    dealt = groups[2].run(broken_off, kind, more)
    assert [rank[2] for rank in dealt] == [rank[2] for rank in plain] == [len(plain[0][1])] * 2
    for part in (0, 1):
        assert together([rank[part : part + 1] for rank in dealt]) == together(
            [rank[part : part + 1] for rank in plain]
        )


def of_another_rank(world: World) -> str:
    sampler = DistributedSampler(Histories(), 3, 0)
    with pytest.raises(UsageError, match="rank 0 of 3, but this is rank") as caught:
        balanced(DataLoader(Histories(), BATCH, sampler=sampler, collate_fn=padded), "placed", False)
    return str(caught.value)


def test_a_sampler_of_other_ranks_is_refused(groups: dict[int, Ranks]) -> None:
    assert all("remedy" in said for said in groups[2].run(of_another_rank))


def test_a_loader_made_before_the_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="init_process_group"):
        fs.BalancedLoader([], length=lambda b: b["length"], cost=COST)


def refused(world: World, kind: str) -> str:
    data = Histories()
    batch: Any = padded([data[number] for number in (world.rank, world.rank + 2)])
    given: dict[str, Any] = {"length": lambda b: b["length"], "padded": {"item": 0}}
    if kind == "not named as padded":
        given["padded"] = {}
    if kind == "a tuple":
        batch = tuple(batch.values())
        given |= {"length": lambda b: b[2], "padded": {"1": 0}}
    if kind == "shorter than its length":
        given["length"] = lambda b: b["length"] + 100
    if kind == "no row per sample":
        batch["temperature"] = torch.tensor([1.0, 2.0, 3.0])
    if kind == "padded on the left":
        batch["item"] = batch["item"].flip(1)
    if kind == "words of each sample":
        batch["user"] = ["anna", "bert"]
    if kind == "an array":
        batch["user"] = np.arange(2)
    if kind == "no such tensor":
        given["padded"] = {"itme": 0}
    if kind == "no order":
        given["length"] = LENGTHS
    try:
        list(fs.BalancedLoader([batch], cost=COST, **given))
    except (DataError, UsageError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("not named as padded", "/sample.item: int64["),
        ("a tuple", "a dict or a dataclass"),
        ("shorter than its length", "is padded to"),
        ("no row per sample", "'temperature' of a batch of 2 samples has the shape [3]"),
        ("padded on the left", "'item' holds something else than its padding of 0"),
        ("words of each sample", "'user' of a batch is of type list, and would stay behind"),
        ("an array", "'user' of a batch is of type ndarray"),
        ("no such tensor", "itme"),
        ("no order", "DistributedSampler"),
    ],
)
def test_what_cannot_be_balanced_is_refused_with_the_reason(groups: dict[int, Ranks], kind: str, said: str) -> None:
    for message in groups[2].run(refused, kind):
        assert said in message
        assert "remedy" in message


def test_without_other_ranks_only_the_scale_is_added() -> None:
    data = Histories()
    loader = [padded([data[0], data[1]]), padded([data[2]])]
    given = fs.BalancedLoader(loader, length=lambda b: b["length"], cost=COST)
    assert [batch["loss_scale"] for batch in given] == [0.5, 1.0]
    assert len(given) == 2
