"""Every row has one position, owners are equally busy, and any contiguous block of positions is dealt in zig-zag."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.embedding.row_order import Owners, RowOrder, bit_reversal, interleave
from freescale.embedding.tables import Table


def positions(order: RowOrder) -> np.ndarray:
    return order.position(np.arange(order.rows), bit_reversal(order.shards))


@given(rows=st.integers(1, 5000), owners=st.sampled_from(["zigzag", "block"]), data=st.data())
def test_every_row_has_one_position_and_every_other_position_is_empty(
    rows: int, owners: Owners, data: st.DataObject
) -> None:
    order = RowOrder.of(rows, owners)
    at = order.rows_at(np.arange(order.positions))
    assert (at[positions(order)] == np.arange(rows)).all()
    begin = data.draw(st.integers(0, order.positions))
    end = data.draw(st.integers(begin, order.positions))
    assert order.count(range(begin, end)) == (at[begin:end] >= 0).sum()
    assert order.count(range(order.positions)) == rows


@pytest.mark.parametrize("ranks", [2, 8, 32, 128])
def test_rows_are_dealt_to_the_owners_in_zigzag(ranks: int) -> None:
    table = Table("item", 50_000, 4, "zigzag")
    owner = (positions(table.order) // table.block(ranks))[: 20 * ranks].reshape(20, ranks)
    for dealt, following in pairwise(owner):
        assert sorted(dealt.tolist()) == list(range(ranks)), "every owner has one of so many consecutive rows"
        assert (dealt == following[::-1]).all(), "the next ones are dealt in reverse order"


@pytest.mark.parametrize("ranks", [3, 7, 12, 24, 33, 100])
def test_other_numbers_of_owners_are_nearly_equally_busy(ranks: int) -> None:
    share = 1 / np.arange(1, 50_001) ** 0.7  # Zipf, most popular first
    requested = -np.expm1(-4000 * share / share.sum())  # by each rank, of the distinct ids of 4,000 events
    table = Table("item", 50_000, 4, "zigzag")
    busy = np.bincount(positions(table.order) // table.block(ranks), requested, minlength=ranks)
    blocks = np.add.reduceat(requested, np.arange(0, 50_000, -(-50_000 // ranks)))
    assert busy.max() / busy.mean() < 1.05 < 1.4 < blocks.max() / blocks.mean()


def test_the_order_does_not_depend_on_the_number_of_ranks() -> None:
    table = Table("item", 1003, 4, "zigzag")
    for ranks in (1, 2, 5, 64):
        owned = [table.owned(rank, ranks) for rank in range(ranks)]
        assert [position for block in owned for position in block] == list(range(table.order.positions))


def test_interleave_makes_contiguous_blocks_equally_busy() -> None:
    popularity = 1 / np.arange(1, 10_001) ** 0.9
    counts = np.random.default_rng(0).permutation(popularity)
    rows = interleave(counts)
    assert sorted(rows.tolist()) == list(range(len(counts)))
    requested = -np.expm1(-4000 * counts / counts.sum())
    for ranks in (8, 30):
        busy = np.bincount(rows // -(-len(counts) // ranks), requested, minlength=ranks)
        assert busy.max() / busy.mean() < 1.05
