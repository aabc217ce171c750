"""The result of a sample, its randomness included, does not depend on its placement."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freescale.config import DataConfig, FeatureConfig, ModelConfig, RunConfig, TaskConfig
from freescale.data.batch import Batch, Events
from freescale.data.feature_schema import Feature
from freescale.data.vocabulary import ItemVocabulary
from freescale.hashing import splitmix64
from freescale.models.encoders import HSTU, SASRec
from freescale.models.heads import multi_task_loss
from freescale.models.jagged import EventTimes, JaggedLayout
from freescale.models.keyed import Keys
from freescale.models.protocol import Rows
from freescale.models.retrieval import Retrieval, sampled_softmax
from tests.models.attention_cases import LONGEST, layout_of

DIM = 8


def inputs(layout: JaggedLayout, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layout.tokens, *shape, dtype=torch.float64, generator=generator, requires_grad=True)


def encoder(kind: str) -> torch.nn.Module:
    torch.manual_seed(3)
    config = ModelConfig(kind=kind, dim=DIM, layers=2, heads=2, dropout=0.3)  # type: ignore[arg-type]
    return {"hstu": HSTU, "sasrec": SASRec}[kind](config, max_seq_len=LONGEST).double()


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8), chosen=st.data())
@settings(max_examples=20)
def test_a_sample_has_the_same_result_alone_and_in_a_batch_with_dropout(
    kind: str, lengths: list[int], chosen: st.DataObject
) -> None:
    model, layout = encoder(kind), layout_of(lengths)
    sample_id = torch.arange(len(lengths)) * 7919 + 5
    x = inputs(layout, DIM)
    together = model(x, layout, Keys.from_layout(layout, sample_id, seed=1, step=9))
    i = chosen.draw(st.integers(0, len(lengths) - 1))
    begin, end = layout.offsets[i], layout.offsets[i + 1]
    single = layout_of([lengths[i]])
    alone = model(x[begin:end], single, Keys.from_layout(single, sample_id[i : i + 1], seed=1, step=9))
    torch.testing.assert_close(together[begin:end], alone, rtol=1e-10, atol=1e-12)


EVENLY_SPACED = list(range(6, 121, 6))
EQUAL_AND_EMPTY = [0, 0, 1, *[119] * 9, *[120] * 8]


@pytest.mark.parametrize("anchors", [EVENLY_SPACED, EQUAL_AND_EMPTY], ids=["evenly spaced", "equal and empty"])
@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
def test_the_targets_of_one_history_have_the_results_of_separate_samples_with_dropout(
    kind: str, anchors: list[int]
) -> None:
    """Separate samples: the history up to each anchor, and the targets with that anchor."""
    model, history, generator = encoder(kind), 120, torch.Generator().manual_seed(1)
    event = torch.randint(10**6, (history + 20,), generator=generator).sort().values
    query, anchor = event + torch.randint(999, event.shape, generator=generator), torch.tensor(anchors)
    together = JaggedLayout(torch.tensor([0, len(event)]), torch.tensor([20]), EventTimes(event, query), anchor)
    distinct, counts = anchor.unique(return_counts=True)
    index = torch.cat([token for a in distinct for token in (torch.arange(a), history + (anchor == a).nonzero()[:, 0])])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (distinct + counts).cumsum(0)])
    separate = JaggedLayout(offsets, counts, EventTimes(event[index], query[index]))
    x, results = inputs(together, DIM), []
    for layout, tokens in ((together, torch.arange(len(event))), (separate, index)):
        keys = Keys.from_layout(layout, torch.full_like(layout.lengths, 77), seed=1, step=9)
        out = model(x[tokens], layout, keys)[tokens >= history]
        loss = (out * torch.arange(out.numel()).view_as(out).cos()).sum()
        results.append([out, *torch.autograd.grad(loss, [x, *model.parameters()], materialize_grads=True)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
def test_a_token_does_not_depend_on_the_future_or_other_candidates(kind: str) -> None:
    model, layout = encoder(kind), layout_of([12], [3])
    x = inputs(layout, DIM)
    out = model(x, layout)
    for token in range(12):
        (gradient,) = torch.autograd.grad(out[token].square().sum(), x, retain_graph=True)
        seen = gradient.abs().sum(1) > 0
        expected = [k <= token and (k < 9 or k == token) for k in range(12)]
        assert seen.tolist() == expected


def test_keyed_randomness_depends_on_sample_seed_step_and_salt_only() -> None:
    layout = layout_of([5, 3])
    ids = torch.tensor([11, 22])
    swapped = layout_of([3, 5])
    a = Keys.from_layout(layout, ids, seed=1, step=2).randint(64, 1000, salt=0)
    b = Keys.from_layout(swapped, ids.flip(0), seed=1, step=2).randint(64, 1000, salt=0)
    assert torch.equal(a[:5], b[3:])
    assert torch.equal(a[5:], b[:3])
    others = [
        Keys.from_layout(layout, ids, seed=2, step=2).randint(64, 1000, salt=0),
        Keys.from_layout(layout, ids, seed=1, step=3).randint(64, 1000, salt=0),
        Keys.from_layout(layout, ids, seed=1, step=2).randint(64, 1000, salt=1),
        a.roll(1, 0),
    ]
    for other in others:
        assert (a == other).float().mean() < 0.02


def test_candidates_have_the_keys_of_their_position_after_the_history() -> None:
    whole, plain, empty = layout_of([6, 4], [2, 3]), layout_of([6, 4]), layout_of([0], [0], [])
    explicit, anchored = layout_of([6, 4], [2, 3], [4, 4, 1, 1, 1]), layout_of([6, 4], [2, 3], [0, 3, 0, 0, 1])
    assert torch.equal(whole.key_position, plain.position)
    assert torch.equal(whole.limits, explicit.limits)
    assert torch.equal(explicit.key_position, plain.position)
    assert anchored.key_position.tolist() == [0, 1, 2, 3, 0, 3, 0, 0, 1, 1]
    assert empty.key_position.tolist() == empty.limits.tolist() == []


def test_keyed_dropout_has_its_probability_and_keeps_the_mean() -> None:
    layout = layout_of([400] * 10)
    keys = Keys.from_layout(layout, torch.arange(10), seed=0, step=0)
    dropped = keys.dropout(torch.ones(4000, 50, dtype=torch.float64), 0.2, salt=4)
    assert (dropped == 0).double().mean() == pytest.approx(0.2, abs=0.005)
    assert dropped.mean() == pytest.approx(1.0, abs=0.005)
    by_column = (dropped == 0).double().mean(0)
    assert by_column.min() > 0.17
    assert by_column.max() < 0.23


def test_keyed_dropout_is_finite_for_every_probability_below_one() -> None:
    layout = layout_of([400] * 10)
    keys = Keys.from_layout(layout, torch.arange(10), seed=0, step=0)
    ones = torch.ones(4000, 512, dtype=torch.float64)
    dropped = keys.dropout(ones, 1.0 - 2.0**-20, salt=4)
    assert dropped.isfinite().all()
    assert set(dropped.unique().tolist()) == {0.0, 65536.0}
    assert dropped.mean() == pytest.approx(1.0, abs=0.5)
    with pytest.raises(ValueError, match="below 1"):
        keys.dropout(ones, 1.0, salt=4)


def test_the_hash_is_splitmix64() -> None:
    from freescale.data.order import splitmix64 as numpy_splitmix64

    values = torch.tensor([0, 1, -1, 2**62, 123456789])
    assert (
        splitmix64(values).numpy().view("uint64").tolist() == numpy_splitmix64(values.numpy().view("uint64")).tolist()
    )


@pytest.mark.parametrize("rows", [40, 1000], ids=["scores of all rows", "scores of chosen rows"])
def test_sampled_softmax_is_the_cross_entropy_of_cosines_in_value_and_gradients(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randint, generator=generator)
    output = torch.randn(300, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    items = torch.randn(rows, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    right, wrong = draw(0, rows, (300,)), draw(0, rows, (300, 5))
    wrong[::3, 2] = right[::3]
    losses_by_token = []
    for t in range(300):
        kept = [int(right[t]), *(int(item) for item in wrong[t] if item != right[t])]
        cosines = torch.stack([torch.cosine_similarity(output[t], items[item], dim=0) for item in kept])
        losses_by_token.append(-(cosines / 0.05).log_softmax(0)[0])
    expected = torch.stack(losses_by_token).sum()
    got = sampled_softmax(output, items, positive=right, negatives=wrong, temperature=0.05)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    for fast, exact in zip(*(torch.autograd.grad(3 * x, [output, items]) for x in (got, expected)), strict=True):
        torch.testing.assert_close(fast, exact, rtol=1e-9, atol=1e-11)


def test_an_event_is_queried_at_the_time_of_the_next_event_of_its_own_sample() -> None:
    """The last event is queried at the time of its target, and at its own time without a target."""
    times = torch.tensor([10, 20, 35, 7, 9, 50])
    history = Events(torch.tensor([0, 3, 3, 5, 6]), {"item_id": torch.arange(6), "timestamp": times})
    targets = Events(torch.tensor([0, 1, 1, 1, 2]), {"timestamp": torch.tensor([40, 60])})
    model = Retrieval(RunConfig(data=DataConfig(path="none", max_history=8)), items=9)
    for held_out, expected in ((None, [20, 35, 35, 9, 9, 50]), (targets, [20, 35, 40, 9, 9, 60])):
        batch = Batch(0, 0, torch.arange(4), {}, history, None, held_out)
        layout = model.prepare_query(batch).layout
        assert layout.times is not None
        assert layout.times.query.tolist() == expected


def test_binary_cross_entropy_is_summed_over_tasks() -> None:
    logits, labels = torch.tensor([[0.0, 2.0], [1.0, -1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    each = -(labels * logits.sigmoid().log() + (1 - labels) * (1 - logits.sigmoid()).log())
    assert multi_task_loss(logits, labels, TaskConfig()).item() == pytest.approx(each.sum().item(), rel=1e-6)


def test_the_order_of_candidates_does_not_matter() -> None:
    model, layout = encoder("hstu"), layout_of([12], [3])
    assert layout.times is not None
    time = layout.times.event.clone()
    time[9:] = time[8]
    layout = replace(layout, times=EventTimes(time, time))
    x = inputs(layout, DIM)
    swapped = torch.cat([x[:9], x[9:].flip(0)])
    torch.testing.assert_close(model(x, layout)[9:], model(swapped, layout)[9:].flip(0), rtol=1e-10, atol=1e-12)


def test_interleaved_actions_are_tokens_that_predict_the_next_item() -> None:
    feature = FeatureConfig(scope="event", kind="bits", bits=2)
    task = TaskConfig(interleave=True, negatives=3)
    config = RunConfig(data=DataConfig(path="none", max_history=8), task=task, features={"action": feature})
    features = {"action": Feature("action", feature, "", ItemVocabulary(0, 1), config.model.dim)}
    model = Retrieval(config, items=9, features=features)
    columns = {"item_id": torch.tensor([1, 2, 3]), "timestamp": torch.tensor([10, 20, 35])}
    outputs = []
    for last in (0, 3):  # the action of the second event
        history = Events(torch.tensor([0, 3]), {**columns, "action": torch.tensor([1, last, 2])})
        inputs = model.prepare_query(Batch(0, 0, torch.arange(1), {}, history, None, None))
        assert inputs.layout.lengths.tolist() == [6]
        assert inputs.map.events.tolist() == [0, 2, 4]
        assert inputs.map.actions.tolist() == [1, 3, 5]
        assert inputs.layout.times is not None
        assert inputs.layout.times.query.tolist() == [10, 20, 20, 35, 35, 35]
        rows = {"item": Rows(torch.eye(9, config.model.dim), inputs.ids["item"])}
        outputs.append(model.encoder(model._embed(inputs, rows), inputs.layout, None))
    changed = (outputs[0] - outputs[1]).abs().sum(1) > 0
    assert changed.tolist() == [False, False, False, True, True, True], "an action is seen from its own token on"
