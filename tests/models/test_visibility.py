"""What a query sees with `model.memory`: every implementation equals a dense reference with an explicit mask."""

import ctypes
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from freescale.balance.cost import sizes
from freescale.config import DataConfig, ModelConfig, RunConfig, TaskConfig
from freescale.data.batch import Batch, Events
from freescale.data.feature_schema import ANCHOR
from freescale.errors import UsageError
from freescale.models.attention import blocks, operators
from freescale.models.attention.reference import AttentionGradients, AttentionInputs
from freescale.models.encoders import build_encoder
from freescale.models.jagged import EventTimes, JaggedLayout, is_visible, time_bucket
from freescale.models.keyed import Keys
from freescale.models.ranking import Ranking
from freescale.models.retrieval import Retrieval
from freescale.models.tokens import TokenMap
from freescale.visibility import Visibility
from tests.models.attention_cases import inputs, relative_error, rules, upstream


class Token(NamedTuple):
    """A token of a history: the event it belongs to, or the segment that it summarises."""

    kind: str
    index: int


def tokens_of(rule: Visibility, events: int) -> list[Token]:
    """Return the tokens of a history, in words of the rule: a segment is summarised when an event follows it."""
    tokens = [Token("prefix", 0)] * rule.prefix
    for event in range(events):
        if rule.segment and event and event % rule.segment == 0:
            tokens += [Token("summary", event // rule.segment - 1)] * rule.summaries
        tokens += [Token("event", event)] * rule.per_event
    return tokens


def sees(rule: Visibility, query: int, tokens: list[Token], last: int, limit: int) -> list[bool]:
    """Return which keys before its limit a query at a position sees. `last`: the last token that is not after it."""

    def segment_of(token: Token) -> int:
        return token.index // rule.segment if token.kind == "event" else token.index

    if not rule.segment:
        nearest = query - rule.window * rule.per_event
        early = (token.kind == "prefix" or token.index < rule.first for token in tokens[:limit])
        return [seen or key >= nearest for key, seen in enumerate(early)]
    own = segment_of(tokens[last]) if limit and tokens[last].kind != "prefix" else None
    return [token.kind != "event" or segment_of(token) == own for token in tokens[:limit]]


def mask_of(rule: Visibility, events: int, anchors: list[int]) -> Tensor:
    """Return the explicit mask of a sample, query by query; candidates come after the history."""
    tokens = tokens_of(rule, events)
    count = len(tokens) + len(anchors)
    mask = torch.eye(count, dtype=torch.bool)
    limits = [*range(len(tokens)), *(len(tokens_of(rule, anchor)) for anchor in anchors)]
    for query, limit in enumerate(limits):
        last = query if query < len(tokens) else limit - 1
        mask[query, :limit] = torch.tensor(sees(rule, limit, tokens, last, limit), dtype=torch.bool)
    return mask


class Histories(NamedTuple):
    """A jagged batch in events: the events of each sample, and the anchors of its candidates."""

    rule: Visibility
    events: list[int]
    anchors: list[list[int]]

    @property
    def layout(self) -> JaggedLayout:
        """The layout as `TokenMap` makes it."""
        histories = [len(tokens_of(self.rule, events)) for events in self.events]
        lengths = [n + len(anchors) for n, anchors in zip(histories, self.anchors, strict=True)]
        limits = [self.rule.tokens(anchor) for anchors in self.anchors for anchor in anchors]
        counts = torch.tensor([len(anchors) for anchors in self.anchors], dtype=torch.int64)
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        anchored = torch.tensor(limits, dtype=torch.int64)
        layout = JaggedLayout(offsets, counts, anchors=anchored, visibility=self.rule)
        event = layout.position * 977 + layout.position**2
        return replace(layout, times=EventTimes(event, event + 40 * (layout.position % 7)))

    @property
    def masks(self) -> list[Tensor]:
        """The explicit mask of each sample."""
        return [mask_of(self.rule, n, anchors) for n, anchors in zip(self.events, self.anchors, strict=True)]


@st.composite
def histories(draw: st.DrawFn, most: int = 40) -> Histories:
    rule = replace(draw(rules()), per_event=draw(st.sampled_from([1, 1, 2])))
    lengths = st.one_of(st.integers(0, 9), st.integers(0, most), st.sampled_from([most, 3 * rule.segment % (most + 1)]))
    events = draw(st.lists(lengths, min_size=1, max_size=3))
    some = [st.lists(st.integers(0, n), max_size=8).map(sorted) for n in events]
    return Histories(rule, events, [draw(anchors) if draw(st.booleans()) else [] for anchors in some])


def dense(x: AttentionInputs, batch: Histories, layout: JaggedLayout) -> list[Tensor]:
    """Return output and all gradients of HSTU attention in fp64 with explicit masks."""
    leaves = [one.double().requires_grad_() for one in (x.q, x.k, x.v, x.position, x.time)]
    q, k, v, position, time = leaves
    outputs = [v[:0]]
    for (first, length, _), mask in zip(layout.spans.tolist(), batch.masks, strict=True):
        of = slice(first, first + length)
        distance = (layout.limits[of, None] - torch.arange(length)).clamp(min=0)
        bias = position[distance] + time[time_bucket(x.query_time[of, None], x.event_time[None, of])]
        weights = F.silu(torch.einsum("qhd,khd->hqk", q[of], k[of]) + bias) / x.scale
        outputs.append(torch.einsum("hqk,khd->qhd", weights * mask, v[of]))
    out = torch.cat(outputs)
    found = torch.autograd.grad(out, leaves, upstream(x.v).double(), allow_unused=True, materialize_grads=True)
    return [out.detach(), *found]


def require_equal(found: list[Tensor], exact: list[Tensor], within: float) -> None:
    """Compare output and gradients. Those of both biases are compared together: one of them may cancel to nothing."""
    together = [torch.cat([one.double() for one in result[4:]]) for result in (found, exact)]
    errors = [relative_error(one, other) for one, other in zip(found[:4], exact[:4], strict=True)]
    assert max([*errors, relative_error(*together)]) <= within, errors


@settings(max_examples=60)
@given(batch=histories())
def test_tokens_and_visible_pairs_are_those_of_the_explicit_mask(batch: Histories) -> None:
    layout, rule = batch.layout, batch.rule
    assert layout.begins is not None
    for (first, length, _), mask in zip(layout.spans.tolist(), batch.masks, strict=True):
        of, place = slice(first, first + length), torch.arange(length)
        limits, begins = layout.limits[of, None], layout.begins[of, None]
        assert torch.equal(is_visible(place[:, None], place, limits, begins, layout.far), mask)
    assert layout.pairs == sum(int(mask.sum()) for mask in batch.masks)
    seen = [sum(rule.seen(anchor) for anchor in anchors) for anchors in batch.anchors]
    tokens, pairs = sizes(batch.events, [len(anchors) for anchors in batch.anchors], seen, rule)
    assert tokens.tolist() == layout.lengths.tolist()
    assert pairs.tolist() == [int(mask.sum()) for mask in batch.masks]
    is_summary = [token.kind == "summary" for n in batch.events for token in tokens_of(rule, n)]
    found = torch.zeros(layout.tokens, dtype=torch.bool)
    if layout.summaries is not None:
        found[layout.summaries[0]] = True
        assert set(layout.summaries[1].tolist()) <= set(range(rule.summaries))
    assert found[layout.position < layout.history.repeat_interleave(layout.lengths)].tolist() == is_summary


@settings(max_examples=40)
@given(batch=histories())
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_blocks_and_c_equal_the_dense_reference(batch: Histories, dtype: torch.dtype, within: float) -> None:
    """fp64 runs on torch operators, fp32 on C code."""
    if dtype == torch.float32:
        assert isinstance(blocks.load_library(), ctypes.CDLL)
    layout = batch.layout
    x = inputs(layout, heads=2, width=4, dtype=dtype)
    with torch.no_grad():
        found = [blocks.forward(x), *blocks.backward(x, upstream(x.v))]
    require_equal(found, dense(x, batch, layout), within)


@pytest.mark.whole
@given(batch=histories(most=400))
@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_300_long_batches_equal_the_dense_reference(batch: Histories, dtype: torch.dtype, within: float) -> None:
    layout = batch.layout
    x = inputs(layout, heads=2, width=4, dtype=dtype, longest=5000)  # 400 events with 8 summary tokens each
    with torch.no_grad():
        found = [blocks.forward(x), *blocks.backward(x, upstream(x.v))]
    require_equal(found, dense(x, batch, layout), within)


@settings(max_examples=20)
@given(batch=histories())
def test_softmax_attention_equals_the_dense_reference(batch: Histories) -> None:
    layout = batch.layout
    x = inputs(layout, heads=2, width=4)
    q, k, v = leaves = [one.requires_grad_() for one in (x.q, x.k, x.v)]
    outputs = [v[:0]]
    for (first, length, _), mask in zip(layout.spans.tolist(), batch.masks, strict=True):
        of = slice(first, first + length)
        scores = torch.einsum("qhd,khd->hqk", q[of], k[of]) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v[of]))
    results = []
    for out in (operators.softmax_attention(q, k, v, layout), torch.cat(outputs)):
        found = torch.autograd.grad(out, leaves, upstream(x.v), allow_unused=True, materialize_grads=True)
        results.append([out, *found])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-11)


def by_kernels(batch: Histories) -> list[Tensor]:
    """Return output and gradients of the Triton kernels, by the interpreter."""
    from freescale.models.attention import triton_launch
    from freescale.models.attention.tiles import Tile

    torch.set_num_threads(1)
    layout, tile = batch.layout, Tile(32, 16, 4, 1)
    x = inputs(layout, heads=1, width=16, dtype=torch.float32, longest=max(1, int(layout.lengths.max())))
    out = torch.zeros_like(x.v)
    if not layout.tokens:
        return [out, *(torch.zeros_like(one) for one in (x.q, x.k, x.v, x.position, x.time))]
    d_q, d_position, d_time = triton_launch.backward_rows(x, upstream(x.v), tile)
    d_k, d_v = triton_launch.backward_columns(x, upstream(x.v), tile)
    return [triton_launch.forward(x, tile), *AttentionGradients(d_q, d_k, d_v, d_position, d_time)]


def require_kernels_equal(interpreter: Any, batch: Histories) -> None:
    layout = batch.layout
    x = inputs(layout, heads=1, width=16, dtype=torch.float32, longest=max(1, int(layout.lengths.max())))
    require_equal(interpreter.submit(by_kernels, batch).result(), dense(x, batch, layout), 1e-5)


@pytest.mark.parametrize("rule", [Visibility(7, 2, prefix=1), Visibility(window=9, first=4, prefix=2)])
def test_kernels_equal_the_dense_reference(interpreter: Any, rule: Visibility) -> None:
    require_kernels_equal(interpreter, Histories(rule, [36, 0, 2], [[0, 7, 7, 20, 36], [], [1, 2]]))


@pytest.mark.whole
def test_kernels_equal_the_dense_reference_on_300_batches(interpreter: Any) -> None:
    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(batch=histories(most=40))
    def prove(batch: Histories) -> None:
        require_kernels_equal(interpreter, batch)

    prove()


def events_of(values: list[list[int]], name: str) -> Events:
    offsets = torch.tensor([0, *map(len, values)]).cumsum(0)
    ids = torch.tensor([one for sample in values for one in sample], dtype=torch.int64)
    return Events(offsets, {name: ids, "timestamp": ids * 10})


def batch_of(values: list[list[int]], anchors: list[list[int]] | None = None) -> Batch:
    candidates = None
    if anchors is not None:
        offered = [[sample[min(a, len(sample) - 1)] for a in of] for sample, of in zip(values, anchors, strict=True)]
        candidates = events_of(offered, "candidate_id")
        flat = torch.tensor([a for of in anchors for a in of], dtype=torch.int64)
        labels = torch.arange(len(flat), dtype=torch.float32) % 2
        candidates.features.update({ANCHOR: flat, "label": labels, "candidate_timestamp": flat * 10})
    ids = torch.arange(len(values))
    return Batch(0, 0, ids, {"user_id": ids}, events_of(values, "item_id"), candidates=candidates, targets=None)


def config_of(task: TaskConfig, kind: str = "hstu", **model: Any) -> RunConfig:
    of = ModelConfig(kind=kind, dim=8, layers=2, heads=2, dropout=0.3, **model)  # type: ignore[arg-type]
    return RunConfig(model=of, task=task, data=DataConfig(max_history=40))


SEGMENTS = {"memory": "segments", "segment": 5, "summaries": 2}
LOCAL = {"memory": "local", "window": 4, "first": 2}


def test_summary_tokens_follow_their_segments_with_the_time_of_its_last_event() -> None:
    batch = batch_of([list(range(1, 12)), [], [20, 21, 22, 23, 24]])
    tokens = TokenMap.from_batch(batch, prefix=1, visibility=Visibility(5, 2, prefix=1))
    assert tokens.layout.lengths.tolist() == [1 + 11 + 4, 1, 1 + 5]
    assert tokens.events.tolist() == [*range(1, 6), *range(8, 13), 15, *range(18, 23)]
    times = tokens.place((tokens.events, batch.history["timestamp"]), tokens=tokens.layout.tokens)
    tokens = tokens.with_times(times, times + 1)
    assert tokens.layout.summaries is not None
    assert tokens.layout.summaries[0].tolist() == [6, 7, 13, 14]
    assert tokens.layout.summaries[1].tolist() == [0, 1, 0, 1]
    assert tokens.layout.times is not None
    assert tokens.layout.times.event[tokens.layout.summaries[0]].tolist() == [50, 50, 100, 100]
    assert tokens.layout.times.query[tokens.layout.summaries[0]].tolist() == [50, 50, 100, 100]


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
def test_a_layer_reads_earlier_segments_only_through_their_summary_tokens(kind: str) -> None:
    """Through one layer nothing of an earlier segment arrives, through two layers the summary tokens carry it."""
    for layers, reached in ((1, False), (2, True)):
        torch.manual_seed(0)
        config = ModelConfig(kind=kind, dim=8, layers=layers, dropout=0.0, **SEGMENTS)  # type: ignore[arg-type]
        rule = Visibility.of_model(config)
        tokens = TokenMap.from_batch(batch_of([list(range(1, 13))]), visibility=rule)
        times = torch.arange(tokens.layout.tokens)
        tokens = tokens.with_times(times, times)
        encoder = build_encoder(config, max_seq_len=40).double()
        x = torch.randn(tokens.layout.tokens, 8, dtype=torch.float64, requires_grad=True)
        out = encoder(x, tokens.layout)
        (gradient,) = torch.autograd.grad(out[tokens.events[-1]].square().sum(), x)
        read = gradient[tokens.events].abs().sum(1) > 0
        assert read.tolist() == [reached] * 10 + [True] * 2


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
@pytest.mark.parametrize("rule", [SEGMENTS, LOCAL], ids=["segments", "local"])
def test_candidates_have_the_results_of_separate_samples_with_dropout(kind: str, rule: dict[str, Any]) -> None:
    torch.manual_seed(1)
    config = config_of(TaskConfig(kind="ranking", labels=("label",)), kind, **rule)
    visibility = Visibility.of_model(config.model)
    history, anchors = list(range(3, 20)), [0, 3, 5, 5, 6, 10, 11, 17]
    encoder = build_encoder(config.model, max_seq_len=60).double()
    embedded = torch.randn(len(history) + len(anchors), 8, dtype=torch.float64)
    results = []
    for samples in ([(17, range(len(anchors)))], [(a, [i]) for i, a in enumerate(anchors)]):
        batch = batch_of([history[:n] or [1][:0] for n, _ in samples])
        offered = Events(
            torch.tensor([0, *(len(of) for _, of in samples)]).cumsum(0),
            {"candidate_id": torch.zeros(len(anchors), dtype=torch.int64), ANCHOR: torch.tensor(anchors)},
        )
        batch = replace(batch, candidates=offered)
        tokens = TokenMap.from_batch(batch, candidates=True, visibility=visibility)
        x = tokens.place(
            (tokens.events, torch.cat([embedded[:n] for n, _ in samples])),
            (tokens.candidates, embedded[len(history) :]),
            tokens=tokens.layout.tokens,
        )
        of_events = torch.cat([torch.arange(n) for n, _ in samples]) * 60
        of_candidates = torch.tensor(anchors) * 60
        parts = (tokens.events, of_events), (tokens.candidates, of_candidates)
        times = tokens.place(*parts, tokens=tokens.layout.tokens)
        tokens = tokens.with_times(times, times)
        ids = torch.full((len(samples),), 77)
        keys = replace_same_position(Keys.from_layout(tokens.layout, ids, seed=1, step=9), tokens)
        results.append(encoder(x, tokens.layout, keys)[tokens.candidates])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def replace_same_position(keys: Keys, tokens: TokenMap) -> Keys:
    """Give candidates one key: those with equal anchors have different ones in one sample, but not alone."""
    return Keys(keys.token.index_fill(0, tokens.candidates, 5))


@pytest.mark.parametrize("rule", [SEGMENTS, LOCAL], ids=["segments", "local"])
@pytest.mark.parametrize("interleave", [False, True])
def test_the_loss_counts_events_and_no_summary_tokens(rule: dict[str, Any], interleave: bool) -> None:
    batch = batch_of([list(range(1, 25)), [5], []])
    task = TaskConfig(negatives=3, interleave=interleave)
    full, narrow = (Retrieval(config_of(task, **model), items=99) for model in ({}, rule))
    assert full.prepare(batch).count == narrow.prepare(batch).count == 23
    inputs = narrow.prepare(batch)
    assert torch.equal(full.prepare(batch).ids["item"][:25], inputs.ids["item"][:25])
    assert len(inputs.map.actions) == 25
    ranking = Ranking(config_of(TaskConfig(kind="ranking", labels=("label",)), **rule), items=99)
    assert ranking.prepare(batch_of([list(range(1, 25))], [[0, 5, 24]])).count == 3


def test_a_batch_that_is_laid_out_for_another_rule_is_refused() -> None:
    tokens = TokenMap.from_batch(batch_of([[1, 2, 3]]))
    encoder = build_encoder(ModelConfig(dim=8, memory="local"), max_seq_len=9)
    with pytest.raises(UsageError, match=r"built for model.memory = local, but its batch is laid out for full"):
        encoder(torch.zeros(3, 8), tokens.with_times(torch.arange(3), torch.arange(3)).layout)


def test_work_follows_the_visible_pairs() -> None:
    """Computed pairs, padding of blocks included, against visible ones, for long histories with candidates."""
    from freescale.models.padded_batches import plan_blocks

    for rule, most in ((Visibility(512, 16), 1.35), (Visibility(window=512, first=64), 1.35)):
        events, anchors = 8000, np.linspace(0, 8000, 400).astype(int).tolist()
        layout = JaggedLayout(
            torch.tensor([0, rule.tokens(events) + len(anchors)]),
            torch.tensor([len(anchors)]),
            anchors=torch.tensor([rule.tokens(anchor) for anchor in anchors]),
            visibility=rule,
        )
        (plan,) = plan_blocks(layout.spans, layout.limits, layout.begins, layout.far)
        history = [block for block in plan.blocks if block.rows.stop <= rule.tokens(events)]
        computed = sum((block.rows.stop - block.rows.start) * block.keys for block in history)
        assert computed <= most * rule.pairs(events)
