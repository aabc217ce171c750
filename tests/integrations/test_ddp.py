"""BalancedLoader gives any DDP trainer the training result of the same samples on one rank."""

import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import freescale as fs
from freescale import log
from freescale.errors import DataError
from freescale.integrations.ddp import events_from_nested, nested_from_events
from tests.support.ddp_training import BATCH, COST, EPOCHS, LENGTHS, Histories, Model, balanced, loader_of, padded
from tests.support.in_process import ListHandler
from tests.support.ranks import Ranks, World


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
                (model(batch) * of(batch, "loss_weight")).backward()
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


@pytest.mark.parametrize("per_event", [False, True], ids=["mean of samples", "mean of events"])
@pytest.mark.parametrize("kind", ["padded", "placed"])
def test_with_padded_compute_the_slowest_rank_has_fewer_cells_and_the_result_is_the_same(
    groups: dict[int, Ranks], kind: str, per_event: bool
) -> None:
    plain = groups[4].run(trained, "plain", per_event)
    dealt = groups[4].run(padded_compute, kind, per_event)
    assert together(dealt) == together(plain)
    alone = trained_alone(together(plain), per_event)
    for _, _, weights in dealt:
        for name, value in alone.items():
            assert np.linalg.norm(weights[name] - value) < 1e-9 * np.linalg.norm(value), name
    before, after = (slowest_cells(results) for results in (plain, dealt))
    assert (after <= before).all()
    assert after.sum() < 0.8 * before.sum()


def padded_compute(world: World, kind: str, per_event: bool) -> Any:
    return trained(world, kind, per_event, compute="padded")


def slowest_cells(results: list[Any]) -> Any:
    """The padded cost of the slowest rank of each step: its count times its longest sample."""
    cells = [[len(n) * float(COST.of(LENGTHS[n]).max(initial=0.0)) for n in steps] for steps, _, _ in results]
    return np.array(cells).max(axis=0)


@pytest.mark.parametrize("kind", ["padded", "placed"])
def test_counts_are_equal_where_that_is_asked_for(groups: dict[int, Ranks], kind: str) -> None:
    results = groups[4].run(counted, kind)
    counts = np.array(results)
    assert (np.ptp(counts, axis=0) <= 1).all()


def counted(world: World, kind: str) -> list[int]:
    return [len(numbers) for numbers in trained(world, kind, False, equal_counts=True)[0]]


def uneven(world: World, counts: list[int]) -> tuple[list[tuple[list[int], float]], list[str]]:
    """Samples and loss weight of each step, and what was logged, where every rank has another number of batches."""
    data, first = Histories(), 20 * world.rank
    numbers = [[first + 2 * step, first + 2 * step + 1] for step in range(counts[world.rank])]
    loader = [padded([data[number] for number in batch]) for batch in numbers]
    log._logged.clear()  # a rank logs the same text once
    handler = ListHandler()
    with log.handled_by(handler):
        batches = balanced(loader, "padded", False, timeout=60.0)
        steps = [(batch["number"].tolist(), float(batch["loss_weight"])) for batch in batches]
    return steps, [text for text in handler.messages if "not used" in text or "no step" in text]


@pytest.mark.parametrize("counts", [[4, 2], [0, 3], [1, 2], [3, 3], [0, 0], [4, 5, 2, 3], [1, 1, 1, 0]])
def test_all_ranks_stop_after_the_last_step_for_which_each_has_a_batch(
    groups: dict[int, Ranks], counts: list[int]
) -> None:
    world_size, common = len(counts), min(counts)
    results = groups[world_size].run(uneven, counts)
    for rank, (steps, logged) in enumerate(results):
        assert len(steps) == common
        assert all(weight == world_size / (2 * world_size) for _, weight in steps)
        left = counts[rank] - common
        assert len(logged) == (left > 0 or common == 0)
        assert all(f"at least {left} batches" in text for text in logged if left)
    for step in range(common):
        expected = sorted(20 * rank + 2 * step + i for rank in range(world_size) for i in range(2))
        assert sorted(number for steps, _ in results for number in steps[step][0]) == expected


def resumed(world: World, kind: str, done: int) -> tuple[list[list[int]], list[list[int]], dict[str, int]]:
    """Samples of each step of an epoch, and those after a restart with the state of some step."""
    loader = balanced(loader_of(world, kind)[0], kind, False)
    loader.set_epoch(1)
    every, state = [], {}
    for step, batch in enumerate(loader):
        if step == done:
            state = loader.state_dict()
        every.append(of(batch, "number").tolist())
    again = balanced(loader_of(world, kind)[0], kind, False)
    again.load_state_dict(state)
    again.set_epoch(1)  # as a training loop does at the start of each epoch
    rest = [of(batch, "number").tolist() for batch in again]
    assert again.state_dict() == {"epoch": 1, "step": len(every)}
    again.set_epoch(2)
    assert again.state_dict() == {"epoch": 2, "step": 0}
    return every, rest, state


@pytest.mark.parametrize("kind", ["padded", "jagged", "placed"])
def test_training_resumes_within_an_epoch(groups: dict[int, Ranks], kind: str) -> None:
    for every, rest, state in groups[2].run(resumed, kind, 3):
        assert state == {"epoch": 1, "step": 4}
        assert rest == every[4:]


def in_halves(world: World) -> list[tuple[list[int], float]]:
    """Balance each half of the ranks for itself."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data, half = Histories(), world.rank // 2
    loader = [padded([data[number] for number in (4 * world.rank, 4 * world.rank + 1, 4 * world.rank + 2)])]
    return [
        (b["number"].tolist(), float(b["loss_weight"]))
        for b in balanced(loader, "padded", False, process_group=halves[half])
    ]


def test_a_process_group_limits_the_ranks_that_share_work(groups: dict[int, Ranks]) -> None:
    results = groups[4].run(in_halves)
    for half in (0, 1):
        ranks = results[2 * half : 2 * half + 2]
        assert sorted(n for ((numbers, _),) in ranks for n in numbers) == [8 * half + n for n in (0, 1, 2, 4, 5, 6)]
        assert [weight for ((_, weight),) in ranks] == [2 / 6] * 2


def test_nested_tensors_convert_to_events_and_back() -> None:
    parts = [torch.arange(3), torch.arange(0), torch.arange(2)]
    item = torch.nested.nested_tensor(parts, layout=torch.jagged)
    events = events_from_nested({"item": item})
    assert events.lengths.tolist() == [3, 0, 2]
    back = nested_from_events(fs.Events(events.offsets, {"item": events["item"], "price": events["item"] * 2.0}))
    assert [part.tolist() for part in back["item"].unbind()] == [part.tolist() for part in parts]
    assert (back["item"] + back["price"]).values().tolist() == [0, 3, 6, 0, 3]
    other = torch.nested.nested_tensor(parts[::-1], layout=torch.jagged)
    with pytest.raises(DataError, match="lengths of item, other differ"):
        events_from_nested({"item": item, "other": other})


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
        scales.append(float(batch.get("loss_weight", 1 / BATCH)))
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


def with_lengths_of(world: World, convert: str) -> list[list[int]]:
    """The samples of each step, where the function of the lengths returns a tensor, an array or a list."""
    converters: dict[str, Any] = {"tensor": lambda x: x, "array": lambda x: x.numpy(), "list": lambda x: x.tolist()}
    loader, of_batch = loader_of(world, "padded")[0], converters[convert]
    balanced = fs.BalancedLoader(loader, lengths=lambda b: of_batch(b["length"]), cost=COST, pad_values={"item": 0})
    return [batch["number"].tolist() for batch in balanced]


@pytest.mark.parametrize("world_size", [1, 2])
def test_lengths_of_a_batch_may_be_a_tensor_an_array_or_a_list(groups: dict[int, Ranks], world_size: int) -> None:
    expected = groups[world_size].run(with_lengths_of, "tensor")
    assert groups[world_size].run(with_lengths_of, "array") == expected
    assert groups[world_size].run(with_lengths_of, "list") == expected


def whole_rows(world: World) -> list[tuple[list[int], list[int]]]:
    """Numbers and last entries of the samples, where rows are padded on the left to one width, without pad_values."""
    data = Histories()
    loader = []
    for step in range(3):
        batch = padded([data[20 * world.rank + 3 * step + n] for n in range(3)])
        batch["item"] = nn.functional.pad(batch["item"].flip(1), (60 - batch["item"].shape[1], 0))
        loader.append(batch)
    batches = fs.BalancedLoader(loader, lengths=lambda b: b["length"], cost=COST)
    return [(b["number"].tolist(), b["item"][:, -1].tolist()) for b in batches]


def test_rows_padded_to_one_width_move_whole(groups: dict[int, Ranks]) -> None:
    data, moved = Histories(), 0
    for rank, steps in enumerate(groups[2].run(whole_rows)):
        for numbers, last in steps:
            assert last == [int(data[number]["item"][0]) for number in numbers]
            moved += sum(number // 20 != rank for number in numbers)
    assert moved


def test_without_other_ranks_only_the_scale_is_added_and_that_is_logged() -> None:
    data = Histories()
    loader = [padded([data[0], data[1]]), padded([data[2]])]
    log._logged.clear()  # a process logs the same text once
    handler = ListHandler()
    with log.handled_by(handler):
        given = fs.BalancedLoader(loader, lengths=lambda b: b["length"], cost=COST)
    assert handler.messages == ["balance: there is one rank, and nothing to balance"]
    assert [batch["loss_weight"] for batch in given] == [0.5, 1.0]
    assert len(given) == 2
