"""split finds the ids that two batches share, and masks survive packing."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.embedding.ids import pack, packed_sizes, split, unpack

IDS = st.lists(st.integers(0, 30), max_size=40)


@given(IDS, IDS)
def test_shared_ids_are_those_in_both(this: list[int], following: list[int]) -> None:
    shared = split(torch.tensor(this, dtype=torch.int64), torch.tensor(following, dtype=torch.int64))
    assert shared.in_next.tolist() == [one in following for one in this]
    assert shared.in_this.tolist() == [one in this for one in following]


def test_ids_of_a_table_of_ten_billion_rows_are_no_different() -> None:
    this, following = torch.tensor([10**10 - 1, 5, 7]), torch.tensor([7, 10**10 - 1])
    assert split(this, following).in_next.tolist() == [True, False, True]


@given(st.lists(st.lists(st.booleans(), max_size=20), min_size=1, max_size=5))
def test_masks_travel_as_bits(masks: list[list[bool]]) -> None:
    sizes = [len(mask) for mask in masks]
    together = torch.tensor([bit for mask in masks for bit in mask], dtype=torch.bool)
    packed = pack(together, sizes)
    assert len(packed) == sum(packed_sizes(sizes)) == sum(-(-size // 8) for size in sizes)
    assert torch.equal(unpack(packed, sizes), together)
    first = pack(together[: sizes[0]], sizes[:1])
    assert torch.equal(packed[: len(first)], first)  # each begins with a byte of its own
