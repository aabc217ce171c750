"""HSTU attention block by block of queries, with torch's products of matrices: on a CPU, and where no kernel fits.

Memory follows the tokens: of the matrix of all pairs there is one block at a time, small enough for the cache, and
backward computes it anew. What happens to the pairs of a block is the business of `pairs`, or of its twin in C.
"""

import torch
from torch import Tensor

from freescale.log import warning_once
from freescale.models.attention import native
from freescale.models.attention.matrix import Room, matrices
from freescale.models.attention.operands import Gradients, Inputs
from freescale.models.attention.pairs import Pairs
from freescale.models.sequence import Times

OnPairs = Pairs | native.Pairs
"""What turns scores [samples * heads, rows, keys] of a block into weights, in place, and its gradients back."""


def forward(x: Inputs) -> Tensor:
    """Mix the values that every query sees."""
    out = torch.empty_like(x.v, memory_format=torch.contiguous_format)
    pairs, room = _on_pairs(x), Room()
    for matrix in matrices(x.q, x.k, x.v, x.spans, Times(x.event, x.asked)):
        mixed = torch.empty_like(matrix.v)
        for rows in matrix.rows():
            seen = slice(0, rows.stop)
            weights = room.product(matrix.q[:, rows], matrix.k[:, seen].mT)
            pairs.weigh_(weights, matrix, rows)
            torch.bmm(weights, matrix.v[:, seen], out=mixed[:, rows])
        matrix.put(mixed.div_(x.scale), out)
    return out


def backward(x: Inputs, d_out: Tensor) -> Gradients:
    """Gradients of all that `forward` reads, from that of what it gives."""
    d_q, d_k, d_v = (torch.empty_like(one, memory_format=torch.contiguous_format) for one in (x.q, x.k, x.v))
    pairs, room, more_room = _on_pairs(x), Room(), Room()
    for matrix in matrices(x.q, x.k, x.v, x.spans, Times(x.event, x.asked)):
        gradient = matrix.get(d_out) / x.scale
        of_q, of_k, of_v = torch.empty_like(matrix.q), torch.zeros_like(matrix.k), torch.zeros_like(matrix.v)
        for rows in matrix.rows():
            seen = slice(0, rows.stop)
            weights = room.product(matrix.q[:, rows], matrix.k[:, seen].mT)
            d_score = more_room.product(gradient[:, rows], matrix.v[:, seen].mT)
            pairs.weigh_back_(weights, d_score, matrix, rows)
            of_v[:, seen].baddbmm_(weights.mT, gradient[:, rows])
            of_k[:, seen].baddbmm_(d_score.mT, matrix.q[:, rows])
            torch.bmm(d_score, matrix.k[:, seen], out=of_q[:, rows])
        for found, into in ((of_q, d_q), (of_k, d_k), (of_v, d_v)):
            matrix.put(found, into)
    d_position, d_time = pairs.of_biases()
    return Gradients(d_q, d_k, d_v, d_position.to(x.position.dtype), d_time.to(x.time.dtype))


def _on_pairs(x: Inputs) -> OnPairs:
    """C where there is a compiler; it has no fp64, which is for proofs."""
    if x.q.device.type != "cpu" or x.q.dtype == torch.float64:
        return Pairs(x)
    library = native.library()
    if isinstance(library, str):
        warning_once(f"attention: pairs by torch operators, since {library}; compiled they take a third of the time")
        return Pairs(x)
    return native.Pairs(x, library)
