"""What happens to every pair of a query and a key, by torch's operators: any type, any device.

Biases are looked up, never computed: a distance is a shifted view of the amounts, a span of time a table indexed by the
leading bits of a float.
"""

import torch
import torch.nn.functional as F  # noqa: N812  the name that everyone knows
from torch import Tensor

from freescale.models.attention.matrix import Matrix, computed_in
from freescale.models.attention.operands import Inputs
from freescale.models.sequence import CELL_SHIFT, bucket_of_cell, visible


class Pairs:
    """Scores to weights, and gradients of weights to those of scores and biases."""

    def __init__(self, x: Inputs) -> None:
        kind = computed_in(x.q)
        self._position, self._time = x.position.to(kind), x.time.to(kind)
        self._bucket_of_cell = bucket_of_cell(x.q.device)
        self._of_position, self._of_time = torch.zeros_like(self._position), torch.zeros_like(self._time)

    def weigh_(self, score: Tensor, matrix: Matrix, rows: slice) -> None:
        """silu(score + biases), and 0 where a query does not see a key."""
        _add_(score, self._added(matrix, rows, self._buckets(matrix, rows)))
        _hide_(F.silu(score, inplace=True), matrix, rows)

    def weigh_back_(self, score: Tensor, d_weights: Tensor, matrix: Matrix, rows: slice) -> None:
        """The same; gradients of weights become those of scores, and add to those of the biases."""
        buckets = self._buckets(matrix, rows)
        _add_(score, self._added(matrix, rows, buckets))
        d_score = d_weights.copy_(torch.ops.aten.silu_backward(d_weights, score))
        _hide_(F.silu(score, inplace=True), matrix, rows)
        _hide_(d_score, matrix, rows)
        by_sample = d_score.unflatten(0, (matrix.samples, -1)).sum(1)
        self._of_time.index_add_(0, buckets.flatten(), by_sample.flatten())
        if matrix.bucket.history is None:
            _add_along_diagonals(by_sample.sum(0), self._of_position)
        else:
            self._of_position.index_add_(0, _distance(matrix, rows).flatten(), by_sample.flatten())

    def of_biases(self) -> tuple[Tensor, Tensor]:
        """Gradients of position and time, over all blocks so far."""
        return self._of_position, self._of_time

    def _buckets(self, matrix: Matrix, rows: slice) -> Tensor:
        """Time buckets [samples, queries, keys]."""
        assert matrix.times is not None
        apart = matrix.times.asked[:, rows, None] - matrix.times.event[:, None, : rows.stop]
        cells = apart.float().abs_().view(torch.int32).bitwise_right_shift_(CELL_SHIFT)
        return self._bucket_of_cell.index_select(0, cells.flatten()).view(cells.shape)

    def _added(self, matrix: Matrix, rows: slice, buckets: Tensor) -> Tensor:
        added = self._time.index_select(0, buckets.flatten()).view(buckets.shape)
        if matrix.bucket.history is None:
            return added.add_(_band(self._position, rows))
        distance = _distance(matrix, rows)
        return added.add_(self._position.index_select(0, distance.flatten()).view(distance.shape))


def _add_(score: Tensor, added: Tensor) -> None:
    """What is added is the same for all heads of a sample."""
    score.unflatten(0, (len(added), -1)).add_(added[:, None])


def _hide_(pairs: Tensor, matrix: Matrix, rows: slice) -> None:
    """Pairs of which none sees the other become 0."""
    if matrix.bucket.history is None:
        pairs[:, :, rows].tril_()
    else:
        seen = visible(*matrix.places(rows), matrix.bucket.history[:, None, None])
        pairs.unflatten(0, (matrix.samples, -1)).mul_(seen[:, None])


def _band(position: Tensor, rows: slice) -> Tensor:
    """What is added for distances in positions, without candidates: [queries, keys]."""
    count = rows.stop - rows.start
    amounts = F.pad(position[: rows.stop].flip(0), (0, count))  # behind them: pairs that do not count
    return amounts.as_strided((count, rows.stop), (1, 1)).flip(0)


def _add_along_diagonals(pairs: Tensor, by_distance: Tensor) -> None:
    """Rows are shifted until pairs that are as far apart stand in a column."""
    rows, keys = pairs.shape
    shifted = pairs.new_zeros(rows * (rows + keys))
    shifted.as_strided(pairs.shape, (rows + keys - 1, 1), rows - 1).copy_(pairs)
    by_distance[:keys] += shifted.view(rows, rows + keys).sum(0)[:keys].flip(0)


def _distance(matrix: Matrix, rows: slice) -> Tensor:
    """In positions. Candidates stand side by side."""
    query, key = matrix.places(rows)
    assert matrix.bucket.history is not None
    return (torch.minimum(query, matrix.bucket.history[:, None, None]) - key).clamp_(min=0)
