"""Batches for attention, and the comparison of an implementation with the reference."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from freescale.models.attention import reference
from freescale.models.attention.reference import AttentionGradients, AttentionInputs
from freescale.models.jagged import TIME_BUCKETS, BiasTables, EventTimes, JaggedLayout, is_visible, time_bucket
from freescale.visibility import Visibility

SCALE = 50.0
LONGEST = 700


class Batch(NamedTuple):
    """Lengths of samples, the candidates among their tokens, and the anchors of all candidates."""

    lengths: list[int]
    candidates: list[int] | None = None
    anchors: list[int] | None = None


def layout_of(
    lengths: Sequence[int],
    candidates: Sequence[int] | None = None,
    anchors: Sequence[int] | None = None,
    visibility: Visibility | None = None,
) -> JaggedLayout:
    """Build samples whose events and queries have their own times."""
    counts, limits = (None if x is None else torch.tensor(x, dtype=torch.int64) for x in (candidates, anchors))
    layout = JaggedLayout(torch.tensor([0, *lengths]).cumsum(0), counts, anchors=limits, visibility=visibility)
    event = layout.position * 977 + layout.position**2
    return replace(layout, times=EventTimes(event, event + 40 * (layout.position % 7)))


def inputs(
    layout: JaggedLayout, *, heads: int, width: int, dtype: torch.dtype = torch.float64, longest: int = LONGEST
) -> AttentionInputs:
    """Draw operands of the magnitude of a model, the same for the same layout."""
    generator = torch.Generator().manual_seed(layout.tokens)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = (drawn(layout.tokens, heads, width) for _ in range(3))
    assert layout.times is not None
    times = layout.times
    biases = drawn(longest), drawn(TIME_BUCKETS)
    rule = layout.begins, layout.far
    return AttentionInputs(q, k, v, layout.spans, layout.limits, times.query, times.event, *biases, SCALE, *rule)


def upstream(like: Tensor) -> Tensor:
    """Return the gradient of the output."""
    return torch.arange(like.numel(), dtype=torch.float64).reshape(like.shape).cos().to(like.dtype)


def reference_result(x: AttentionInputs, layout: JaggedLayout) -> tuple[Tensor, AttentionGradients]:
    """Return output and gradients of the reference, in fp64."""
    learnt = [one.double().requires_grad_() for one in (x.q, x.k, x.v, x.position, x.time)]
    q, k, v, position, time = learnt
    out = reference.hstu_attention(q, k, v, layout, bias=BiasTables(position, time), scale=x.scale)
    found = torch.autograd.grad(out, learnt, upstream(x.v).double(), allow_unused=True, materialize_grads=True)
    return out.detach(), AttentionGradients(*found)


def rounded_result(
    x: AttentionInputs, layout: JaggedLayout, rounded: Callable[[Tensor], Tensor]
) -> tuple[Tensor, AttentionGradients]:
    """Return output and gradients in fp64, except that operands of matrix products are rounded.

    This is what tensor cores compute, apart from the rounding of sums. The gradients of biases are no products.
    """
    q, k, v, d_out = (rounded(one.double()) for one in (x.q, x.k, x.v, upstream(x.v)))
    out, d_q, d_k, d_v = (torch.zeros_like(one) for one in (v, q, k, v))
    d_position, d_time = torch.zeros_like(x.position).double(), torch.zeros_like(x.time).double()
    for begin, length, _ in layout.spans.tolist():
        token, place = slice(begin, begin + length), torch.arange(length)
        limit = x.limits[token, None]
        distance = (limit - place).clamp(min=0)
        bucket = time_bucket(x.query_time[token, None], x.event_time[None, token])
        bias = x.position.double()[distance] + x.time.double()[bucket]
        score = torch.einsum("qhd,khd->hqk", q[token], k[token]) + bias
        visible, gate = is_visible(place[:, None], place[None, :], limit), score.sigmoid()
        weights = rounded(torch.where(visible, score * gate, 0.0))
        d_score = torch.einsum("qhd,khd->hqk", d_out[token], v[token]) * gate * (1 + score * (1 - gate))
        d_score = torch.where(visible, d_score, 0.0)
        out[token] = torch.einsum("hqk,khd->qhd", weights, v[token])
        d_v[token] = torch.einsum("hqk,qhd->khd", weights, d_out[token])
        d_q[token] = torch.einsum("hqk,khd->qhd", rounded(d_score), k[token])
        d_k[token] = torch.einsum("hqk,qhd->khd", rounded(d_score), q[token])
        d_position.index_add_(0, distance.flatten(), d_score.sum(0).flatten())
        d_time.index_add_(0, bucket.flatten().long(), d_score.sum(0).flatten())
    return out / x.scale, AttentionGradients(*(one / x.scale for one in (d_q, d_k, d_v, d_position, d_time)))


def as_tf32(x: Tensor) -> Tensor:
    """Return x with the 10 bits of mantissa that tensor cores read of fp32; the rest is cut off."""
    return (x.float().view(torch.int32) & ~0x1FFF).view(torch.float32).double()


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the relative error of a result."""
    return float((result.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def errors(out: Tensor, gradients: AttentionGradients, x: AttentionInputs, layout: JaggedLayout) -> dict[str, float]:
    """Return the relative errors of output and gradients against the reference.

    Biases are compared together: of candidates alone, the gradient of position is one number in which everything may
    cancel, and fp32 leaves no digits to compare.
    """
    expected_out, expected = reference_result(x, layout)
    together = [torch.cat([one.position.double(), one.time.double()]) for one in (gradients, expected)]
    found = {name: relative_error(getattr(gradients, name), getattr(expected, name)) for name in ("q", "k", "v")}
    return {"out": relative_error(out, expected_out), **found, "biases": relative_error(*together)}


def require_close(
    forward: Callable[[AttentionInputs], Tensor],
    backward: Callable[[AttentionInputs, Tensor], AttentionGradients],
    x: AttentionInputs,
    layout: JaggedLayout,
    *,
    within: float,
) -> None:
    """Compare an implementation with the reference, forward and every gradient."""
    with torch.no_grad():
        out, gradients = forward(x), backward(x, upstream(x.v))
    found = errors(out, gradients, x, layout)
    assert all(error <= within for error in found.values()), found


def random_anchors(lengths: Sequence[int], candidates: Sequence[int], seed: int) -> list[int]:
    """Draw ascending anchors, many of them equal, or 0, or the whole history."""
    rng, anchors = random.Random(seed), []
    for length, count in zip(lengths, candidates, strict=True):
        history = length - count
        anchors += sorted(rng.choice([0, history // 2, history, rng.randint(0, history)]) for _ in range(count))
    return anchors


def rules() -> st.SearchStrategy[Visibility]:
    """Draw rules of visibility: short and long segments, windows that are wider than samples, and prefixes."""
    prefix = st.sampled_from([0, 3])
    segments = st.builds(Visibility, st.sampled_from([1, 3, 7, 50, 190]), st.sampled_from([1, 2, 8]), prefix=prefix)
    windows, first = st.sampled_from([1, 5, 40, 300]), st.sampled_from([0, 2, 30])
    return segments | st.builds(Visibility, window=windows, first=first, prefix=prefix)


@st.composite
def batches(draw: st.DrawFn, *, edges: Sequence[int], most: int, samples: int) -> Batch:
    """Draw lengths and candidates: few and many, 0 and 1, around block boundaries, one long sample among short ones.

    Candidates see the whole history, or as much as their anchors say.
    """
    short = st.integers(0, 12)
    length = st.one_of(short, st.sampled_from(edges), st.integers(0, most))
    lengths = draw(
        st.one_of(st.lists(length, max_size=samples), st.tuples(st.just(most), short, short, short).map(list))
    )
    share = draw(st.sampled_from([None, 0.0, 0.2, 1.0]))
    if share is None:
        return Batch(lengths)
    candidates, seed = [int(share * n) for n in lengths], draw(st.one_of(st.none(), st.integers(0, 99)))
    return Batch(lengths, candidates, None if seed is None else random_anchors(lengths, candidates, seed))
