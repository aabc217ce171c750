"""States of users answer as the trained model does on the whole history, with every `model.memory` that forgets."""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from freescale.serving import serve, states
from freescale.serving.package import write_package
from freescale.transport.world import destroy_world, init_world
from freescale.visibility import Visibility
from tests.serving.test_package import KNOWN, columns, config_of, expected, trained
from tests.support.datasets import write_dataset

SEGMENTS: dict[str, Any] = {"memory": "segments", "segment": 5, "summaries": 2}
LOCAL: dict[str, Any] = {"memory": "local", "window": 4, "first": 2}
MODELS = {
    "retrieval": SEGMENTS,
    "ranking": LOCAL,
    "retrieval of a vocabulary": LOCAL,
    "ranking of a vocabulary": SEGMENTS,
}


class Served(NamedTuple):
    """An export, and the answers of the model that it was made from."""

    name: str
    model: states.StatefulRecommender
    requests: list[dict[str, Any]]
    expected: dict[int, dict[str, Any]]
    per_event: list[str]


@pytest.fixture(
    scope="module",
    params=["retrieval", "ranking", *(pytest.param(n, marks=pytest.mark.whole) for n in MODELS if "vocabulary" in n)],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    place, table = tmp_path_factory.mktemp("states"), pa.table(columns(16))
    write_dataset(place / "data", table, rows_per_group=8, items=KNOWN)
    config = config_of(request.param, place / "data")
    config = replace(config, model=replace(config.model, **MODELS[request.param]))
    of = trained(config, init_world(timeout=60), place / "run")
    write_package(of, place / "model", "pt2")
    answers = expected(of)
    destroy_world()
    model = states.StatefulRecommender(place / "model")
    per_event = [column["column"] for column in model.facts["programs"]["append"].values() if column["per_entry"]]
    requests = pl.DataFrame(table).drop("label_click", "label_dwell").to_dicts()
    return Served(request.param, model, requests, answers, per_event)


def parts(served: Served, request: dict[str, Any], cuts: list[int]) -> list[dict[str, Any]]:
    """Return a request for each part of a history."""
    edges = [0, *cuts, len(request["item_id"])]
    return [
        request | {name: request[name][begin:end] for name in served.per_event}
        for begin, end in itertools.pairwise(edges)
        if end > begin
    ]


def state_of(served: Served, request: dict[str, Any], cuts: list[int]) -> states.State:
    first, *others = parts(served, request, cuts)
    (state,) = served.model.encode([first])
    for part in others:
        (state,) = served.model.append([state], [part])
    return state


def require_answers(served: Served, state: states.State, request: dict[str, Any]) -> None:
    right = dict(served.expected[request["user_id"]])
    right.pop("item_id", None)
    if "vector" in right:
        (answer,) = served.model.recommend_from([state], [request], k=10)
        answer["vector"] = served.model.query_from([state], [request])[0].tolist()
    else:
        (answer,) = served.model.score([state], [request])
    for name, values in right.items():
        assert np.abs(np.array(answer[name]) - values[values > -np.inf]).max() <= 1e-6, (served.name, name)


def test_answers_after_any_appends_are_those_of_the_trained_model(served: Served) -> None:
    rng = np.random.default_rng(1)
    for request in served.requests:
        events = len(request["item_id"])
        some = (
            sorted(rng.choice(np.arange(1, events), min(3, events - 1), replace=False).tolist()) if events > 1 else []
        )
        for cuts in ([], some, list(range(1, events))):
            require_answers(served, state_of(served, request, cuts), request)


def test_a_state_holds_what_later_events_see_and_comes_back_from_bytes(served: Served) -> None:
    request = max(served.requests, key=lambda request: len(request["item_id"]))
    state = state_of(served, request, [])
    prefix, per_event = served.model.facts["tokens"]
    settings = {name: value for name, value in MODELS[served.name].items() if name != "memory"}
    rule = Visibility(**settings, prefix=prefix, per_event=per_event)
    begin = rule.begins(state.tokens, state.tokens)
    seen = [place for place in range(state.tokens) if place >= begin or rule.far.contains(place)]
    assert state.kept["place"][0].tolist() == seen
    stored, (_, heads, tokens, width) = served.model.dump(state), state.kept["values"].shape
    assert len(stored) <= 2000 + tokens * (16 + 4 * heads * width)
    loaded = served.model.load(stored)
    require_answers(served, loaded, request)
    assert served.model.dump(loaded) == stored


def test_states_that_are_damaged_or_of_another_version_are_refused(served: Served) -> None:
    request = served.requests[3]
    stored = served.model.dump(state_of(served, request, []))
    for damaged in (b"", stored[:40], stored[:-3], stored[:-1] + bytes([stored[-1] ^ 1])):
        with pytest.raises(states.StateError, match="damaged"):
            served.model.load(damaged)
    other = state_of(served, request, [])._replace(version="0-7")
    with pytest.raises(states.StateError, match=r"version 0-7 of the model, which is now .*: encode the history anew"):
        served.model.load(served.model.dump(other))
    with pytest.raises(states.StateError, match="encode the history anew"):
        served.model.append([other], [request])


def test_a_history_that_grows_beyond_the_trained_length_is_refused(served: Served) -> None:
    request = max(served.requests, key=lambda request: len(request["item_id"]))
    state = state_of(served, request, [])._replace(events=30)
    with pytest.raises(serve.RequestError, match="and the model was trained with 30: encode the last ones anew"):
        served.model.append([state], [request])
