"""The samples of a step depend on (seed, epoch, step) only, and an epoch contains every sample exactly once."""

import itertools
import tracemalloc
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.data.order import Cursor, EpochOrder, Permutation, RowGroupLayout, derive_key
from freescale.errors import ConfigError
from tests.support.datasets import histories, ids, loader, steps_over_ranks, write_dataset

RANKS = (1, 2, 3, 4, 8, 64)
KINDS = st.sampled_from(["shuffle", "log"])


def epoch_of(order: EpochOrder, ranks: int) -> list[list[tuple[int, int]]]:
    """Epoch positions and their samples, per rank."""
    result = []
    for rank in range(ranks):
        shares = [order.share(window, rank=rank, world_size=ranks) for window in range(order.windows)]
        result.append(
            [pair for share in shares for pair in zip(share.position.tolist(), share.sample_id.tolist(), strict=True)]
        )
    return result


@given(n=st.integers(1, 5000), key=st.integers(0, 2**63))
def test_a_keyed_permutation_is_a_bijection_and_its_inverse_undoes_it(n: int, key: int) -> None:
    permute = Permutation(n, derive_key(key))
    moved = permute(np.arange(n))
    assert np.array_equal(np.sort(moved), np.arange(n))
    assert np.array_equal(permute.inverse(moved), np.arange(n))


def test_a_keyed_permutation_maps_an_index_anywhere() -> None:
    n, keys = 50, 4000
    goes = np.array([Permutation(n, derive_key(key))(np.array([3, 17])) for key in range(keys)])
    for column in goes.T:
        counts = np.bincount(column, minlength=n)
        assert ((counts - keys / n) ** 2 / (keys / n)).sum() < 100, "chi-square with 49 degrees of freedom"
    assert abs(np.corrcoef(goes.T)[0, 1]) < 0.06


@given(counts=st.lists(st.integers(0, 7), min_size=1, max_size=60))
def test_a_layout_equals_the_plain_list_of_counts(counts: list[int]) -> None:
    layout = RowGroupLayout.from_counts(counts)
    groups = np.arange(len(counts))
    assert layout.rows == sum(counts)
    assert layout.group_rows(groups).tolist() == counts
    assert layout.first_rows(groups).tolist() == [0, *itertools.accumulate(counts)][:-1]


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=70),
    shards=st.integers(1, 80),
    kind=KINDS,
    seed=st.integers(0, 99),
    epoch=st.integers(0, 5),
    ranks=st.sampled_from(RANKS),
)
def test_an_epoch_is_a_permutation_of_the_log_partitioned_over_ranks(
    counts: list[int], shards: int, kind: Literal["shuffle", "log"], seed: int, epoch: int, ranks: int
) -> None:
    order = EpochOrder(RowGroupLayout.from_counts(counts), kind, shards, seed, epoch)
    alone = epoch_of(order, 1)[0]
    assert [position for position, _ in alone] == list(range(sum(counts)))
    assert sorted(sample for _, sample in alone) == list(range(sum(counts)))
    if kind == "log":
        assert [sample for _, sample in alone] == list(range(sum(counts)))
    assert sorted(sum(epoch_of(order, ranks), [])) == alone


def test_every_epoch_and_every_seed_has_another_order() -> None:
    layout = RowGroupLayout.from_counts([16] * 40)
    orders = {
        tuple(s for _, s in epoch_of(EpochOrder(layout, "shuffle", 8, seed, epoch), 1)[0])
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_samples_of_one_window_have_another_order_in_every_epoch() -> None:
    layout = RowGroupLayout.from_counts([16] * 8)
    orders = [EpochOrder(layout, "shuffle", 8, 0, epoch) for epoch in range(3)]
    assert [order.windows for order in orders] == [1] * 3
    assert len({tuple(order.share(0, rank=0, world_size=1).sample_id.tolist()) for order in orders}) == 3


def test_ten_billion_samples_take_little_memory_and_time() -> None:
    layout = RowGroupLayout(10_000_000, 1000, np.array([9_999_999]), np.array([500]))
    tracemalloc.start()
    order = EpochOrder(layout, "shuffle", 4096, 0, 3)
    cursor = Cursor(0, "shuffle", 262_144, 4096, layout.rows, epoch=3, step=20_000)
    windows = order.windows_in(*cursor.span(cursor.step))
    shares = [order.share(window, rank=17, world_size=2048) for window in windows]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6
    assert all(len(np.unique(share.sample_id)) == len(share.sample_id) for share in shares)
    assert order.window_start(order.windows) == layout.rows == cursor.samples


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("order") / "data"
    write_dataset(path, histories([1 + i % 5 for i in range(1003)]), rows_per_group=7)
    return path


@pytest.mark.parametrize("kind", ["shuffle", "log"])
def test_step_i_has_the_same_samples_for_any_world_size_and_workers(dataset: Path, kind: str) -> None:
    reference = steps_over_ranks(dataset, 1, order=kind)
    assert sorted(sum(reference, [])) == list(range(1003))
    assert [len(step) for step in reference] == [16] * 62 + [11]
    for ranks, workers in [(r, (i + 1) % 5) for i, r in enumerate(RANKS)] + [(2, w) for w in range(5)]:
        assert steps_over_ranks(dataset, ranks, order=kind, workers=workers) == reference, (ranks, workers)


def test_log_order_yields_the_rows_in_file_order(dataset: Path) -> None:
    steps = [ids(batch) for batch in loader(dataset, order="log")]
    assert sum(steps, []) == list(range(1003))


def test_with_a_small_log_some_ranks_are_empty_but_all_take_equally_many_steps(tmp_path: Path) -> None:
    write_dataset(tmp_path / "few", histories([3, 2, 4]), rows_per_group=2)
    batches = [list(loader(tmp_path / "few", rank=rank, world_size=8, global_batch=2)) for rank in range(8)]
    assert {len(b) for b in batches} == {2}
    assert sorted(sum((ids(b) for part in batches for b in part), [])) == [0, 1, 2]
    empty = batches[7][0]
    assert len(empty) == 0
    assert empty.history["item_id"].dtype == batches[0][0].history["item_id"].dtype
    assert empty.history.offsets.tolist() == [0]


@settings(max_examples=5)
@given(
    kind=KINDS,
    stops=st.lists(st.integers(1, 80), min_size=1, max_size=3),
    worlds=st.lists(st.tuples(st.sampled_from(RANKS), st.integers(0, 4)), min_size=4, max_size=4),
)
def test_resuming_with_another_world_size_or_workers_reads_every_sample_once(
    dataset: Path, kind: str, stops: list[int], worlds: list[tuple[int, int]]
) -> None:
    config = {"order": kind, "global_batch": 48}
    reference = [*steps_over_ranks(dataset, 1, **config)]
    second = loader(dataset, **config)
    for _ in second:
        pass
    reference += [sorted(ids(batch)) for batch in second]

    seen: list[list[int]] = []
    state = None
    for (ranks, workers), count in zip(worlds, [*stops, 2 * 21], strict=False):
        parts, states = [], []
        for rank in range(ranks):
            source = loader(dataset, rank=rank, world_size=ranks, workers=workers, **config)
            if state is not None:
                source.load_state_dict(state)
            taken = []
            while len(taken) < count and len(seen) + len(taken) < len(reference):
                for batch in source:
                    taken.append(ids(batch))
                    if len(taken) == count or len(seen) + len(taken) == len(reference):
                        break
            parts.append(taken)
            states.append(source.state_dict())
        assert all(other == states[0] for other in states), "one state for all ranks"
        state = states[0]
        seen += [sorted(sum(step, [])) for step in zip(*parts, strict=True)]
    assert seen == reference[: len(seen)]


def test_the_state_is_small(dataset: Path) -> None:
    state = loader(dataset).state_dict()
    assert all(isinstance(value, int | str) for value in state.values())
    assert len(state) == 8


def test_a_state_of_another_order_is_refused_with_the_field(dataset: Path) -> None:
    state = loader(dataset, global_batch=16).state_dict()
    with pytest.raises(ConfigError, match="global_batch = 16, this run has 32"):
        loader(dataset, global_batch=32).load_state_dict(state)
    with pytest.raises(ConfigError, match="at step 99 of epoch 0, which does not exist"):
        loader(dataset).load_state_dict({**state, "step": 99})
    with pytest.raises(ConfigError, match="no 'step'"):
        loader(dataset).load_state_dict({name: value for name, value in state.items() if name != "step"})


def test_log_order_warns_when_ranks_are_empty(dataset: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader(dataset, order="log", world_size=9, global_batch=20)
    assert "about 3 row groups of 7, so most of 9 ranks are empty" in caplog.text
    caplog.clear()
    loader(dataset, order="log", world_size=8, global_batch=160)
    loader(dataset, order="shuffle", world_size=8, global_batch=16)
    assert not caplog.text


def test_more_ranks_than_shards_is_refused_with_the_remedy(dataset: Path) -> None:
    with pytest.raises(ConfigError, match="cannot feed 65 ranks") as caught:
        loader(dataset, world_size=65)
    assert "set data.shards to 65" in str(caught.value)
