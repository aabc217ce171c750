"""Every implementation of attention equals the reference, in value and in every gradient."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from torch.utils.flop_counter import FlopCounterMode

from freescale import log
from freescale.config import ModelConfig
from freescale.errors import DataError
from freescale.models.attention import blocks, operators, reference
from freescale.models.attention.blocks import TorchPairs
from freescale.models.attention.reference import AttentionProblem
from freescale.models.encoders import HSTU, RelativeBias, SASRec
from freescale.models.jagged import time_bucket, time_bucket_table
from freescale.models.padded_batches import length_buckets
from tests.models.attention_cases import LONGEST, Batch, batches, inputs, layout_of, require_close, upstream

EDGES = [127, 128, 129, 256, 600]


@settings(max_examples=40)
@given(batch=batches(edges=EDGES, most=90, samples=9))
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_blocks_equal_the_reference_in_fp64(batch: Batch, heads: int) -> None:
    layout = layout_of(*batch)
    require_close(blocks.forward, blocks.backward, inputs(layout, heads=heads, width=8 // heads), layout, within=1e-12)


@settings(max_examples=40)
@given(batch=batches(edges=EDGES, most=90, samples=9))
@pytest.mark.parametrize("threads", [1, 2])
def test_c_pairs_equal_the_reference_in_fp32(batch: Batch, threads: int) -> None:
    assert isinstance(blocks.load_library(), ctypes.CDLL)
    layout, before = layout_of(*batch), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = inputs(layout, heads=2, width=5, dtype=torch.float32)
        require_close(blocks.forward, blocks.backward, x, layout, within=5e-6)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_operands_are_accumulated_in_fp32(dtype: torch.dtype) -> None:
    layout = layout_of([600, 3, 40])
    x = inputs(layout, heads=1, width=8, dtype=dtype)
    assert x.q.dtype == dtype
    require_close(blocks.forward, blocks.backward, x, layout, within=4e-3)


def test_torch_operators_are_used_without_a_compiler_and_the_reason_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(log, "_logged", set())
    blocks.load_library.cache_clear()
    try:
        assert blocks.load_library() == "no C compiler was found"
        layout = layout_of([130, 5, 70], [0, 2, 30], [1, 3, *range(0, 40, 2), *[40] * 10])
        x = inputs(layout, heads=2, width=4, dtype=torch.float32)
        assert isinstance(blocks.select_pairs(x), TorchPairs)
        assert "because no C compiler was found; C code takes a third of the time" in caplog.text
        require_close(blocks.forward, blocks.backward, x, layout, within=5e-6)
    finally:
        blocks.load_library.cache_clear()


def test_a_sample_longer_than_the_position_bias_is_refused() -> None:
    layout = layout_of([40])
    with pytest.raises(DataError, match="39 positions apart, but the position bias has 30"):
        blocks.forward(inputs(layout, heads=1, width=4, dtype=torch.float32, longest=30))


@pytest.mark.parametrize("anchor", [-1, 11])
def test_an_anchor_outside_of_its_history_is_refused(anchor: int) -> None:
    layout = layout_of([12, 9], [2, 0], [4, anchor])
    with pytest.raises(DataError, match="fewer than 0 tokens, or more than its history"):
        blocks.forward(inputs(layout, heads=1, width=4, dtype=torch.float32))


def test_nan_in_one_sample_does_not_reach_other_samples() -> None:
    layout = layout_of([9, 10, 9])
    x = inputs(layout, heads=1, width=4, dtype=torch.float32)
    x.q[3] = float("nan")
    gradients = blocks.backward(x, upstream(x.v))
    for name in ("q", "k", "v"):
        assert getattr(gradients, name)[9:].isfinite().all()


@settings(max_examples=40)
@given(batch=batches(edges=EDGES, most=90, samples=9))
@pytest.mark.parametrize("heads", [1, 2])
def test_softmax_attention_equals_the_reference(batch: Batch, heads: int) -> None:
    layout = layout_of(*batch)
    x = inputs(layout, heads=heads, width=4)
    q, k, v = learnt = [one.requires_grad_() for one in (x.q, x.k, x.v)]
    results = []
    for attend in (operators.softmax_attention, reference.softmax_attention):
        out = attend(q, k, v, layout)
        found = torch.autograd.grad(out, learnt, upstream(x.v), allow_unused=True, materialize_grads=True)
        results.append([out, *found])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("anchors", [None, [0, 4, 9]])
@pytest.mark.parametrize("kind", ["hstu", "softmax"])
def test_a_token_attends_to_itself_and_the_past_but_to_no_other_candidate(kind: str, anchors: list[int] | None) -> None:
    layout = layout_of([4, 12], [0, 3], anchors)
    x = inputs(layout, heads=1, width=8)
    v = x.v.requires_grad_()
    if kind == "hstu":
        bias = RelativeBias(12).double()()
        out = operators.hstu_attention(x.q, x.k, v, layout, bias=bias, scale=1.0)
    else:
        out = operators.softmax_attention(x.q, x.k, v, layout)
    for query in range(12):
        (gradient,) = torch.autograd.grad(out[4 + query].sum(), v, retain_graph=True)
        read = (gradient.abs().sum((1, 2)) > 0).nonzero().flatten().tolist()
        seen = query if query < 9 else (anchors or [9] * 3)[query - 9]
        assert read == [4 + key for key in range(12) if key < seen or key == query]


def test_operators_pass_opcheck() -> None:
    layout = layout_of([5, 0, 33], [2, 0, 3], [0, 3, 5, 20, 30])
    x = inputs(layout, heads=2, width=4)
    learnt = {"q", "k", "v", "position", "time"}
    x = x._replace(**{name: getattr(x, name).requires_grad_() for name in learnt})
    calls = [
        (operators.hstu_operator, tuple(x)),
        (operators.hstu_operator_backward, (upstream(x.v), *(one.detach() for one in x[:9]), x.scale)),
        (operators.softmax_operator, tuple(x[:5])),
        (operators.softmax_operator_backward, (upstream(x.v), *(one.detach() for one in x[:5]))),
    ]
    for operator, args in calls:
        results = torch.library.opcheck(operator, args)
        assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
def test_a_compiled_model_is_one_graph_with_the_same_results(kind: str, whole_form: bool) -> None:
    torch.manual_seed(3)
    config = ModelConfig(kind=kind, dim=8, layers=1, heads=2, dropout=0.0)  # type: ignore[arg-type]
    model = {"hstu": HSTU, "sasrec": SASRec}[kind](config, max_seq_len=LONGEST).double()
    backend = "inductor" if whole_form else "aot_eager"  # captures the same graph, faster
    dynamic = None if whole_form else True  # else it compiles twice: with fixed lengths first
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
    for lengths in ([5, 0, 33], [130, 2]):
        layout = layout_of(lengths)
        layout.limits, layout.spans  # noqa: B018  worked out before, as a batch's preparation does
        x = torch.randn(layout.tokens, 8, dtype=torch.float64, requires_grad=True)
        results = []
        for run in (model, compiled):
            out = run(x, layout)
            weights = [x, *model.parameters()]
            found = torch.autograd.grad(out.square().sum(), weights, allow_unused=True, materialize_grads=True)
            results.append([out, *found])
        for eager, other in zip(*results, strict=True):
            torch.testing.assert_close(eager, other, rtol=1e-9, atol=1e-11)


def test_the_flops_of_attention_are_those_that_torch_counts_over_visible_pairs() -> None:
    form = {"heads": 2, "width": 4, "dtype": torch.float64, "device": torch.device("cpu")}
    problem = AttentionProblem.random([4, 5], candidates=[0, 2], anchors=[1, 3], **form)  # type: ignore[arg-type]
    visible, all_pairs = 4 * 5 // 2 + 3 * 4 // 2 + (1 + 1) + (3 + 1), 4 * 4 + 5 * 5
    with FlopCounterMode(display=False) as counter:  # the reference multiplies by the invisible pairs as well
        problem.run(reference.hstu_attention)
    assert problem.flops * all_pairs == counter.get_total_flops() * visible


def test_time_buckets_are_logarithmic_and_symmetric() -> None:
    seconds = torch.tensor([0, 1, 2, 60, 3600, 86_400, 31_536_000, 2**40, 2**62])
    found = time_bucket(seconds, torch.zeros_like(seconds))
    assert found[:2].tolist() == [0, 0]
    assert (found[1:].double() - (seconds[1:].double().log() / 0.301).clamp(max=128)).abs().max() < 1.0
    assert torch.equal(found, time_bucket(torch.zeros_like(seconds), seconds))
    assert time_bucket_table(torch.device("cpu")).diff().min() >= 0


def test_buckets_have_little_padding_and_hold_every_token_once() -> None:
    torch.manual_seed(0)
    lengths = torch.randint(0, 1000, (128,)).tolist()
    layout = layout_of(lengths)
    held = length_buckets(layout.spans)
    assert sorted(torch.cat([b.index[b.valid] for b in held]).tolist()) == list(range(layout.tokens))
    padded = sum(b.index.shape[0] * b.index.shape[1] ** 2 for b in held)
    assert padded <= 1.6 * sum(n * n for n in lengths)


def test_the_cache_of_a_batch_is_freed_with_it() -> None:
    before = len(length_buckets._cache)
    layout = layout_of([3, 4])
    assert length_buckets(layout.spans) is length_buckets(layout.spans)
    assert len(length_buckets._cache) == before + 1
    del layout
    assert len(length_buckets._cache) == before
