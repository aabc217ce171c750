"""Answers requests with an exported model whose `model.memory` is not "full", from the states of users.

    model = states.Recommender("model/")
    (state,) = model.encode([{"item_id": [3, 17, 5], "timestamp": [100, 160, 220]}])
    (state,) = model.append([state], [{"item_id": [8], "timestamp": [300]}])     # the new events alone
    model.recommend_from([state], [{"time": 330}], k=10)                          # retrieval
    model.score([state], [{"candidate_id": [8, 9], "time": 330}])                 # ranking
    state = model.load(model.dump(state))                                         # bytes, for any store

A state holds what later events see: keys and values of summary tokens and of the open segment, or of the last and the
first events. To append takes time proportional to them. In retrieval an event is encoded when the next one is known, at
whose time it is asked; until then its columns wait in the state. A state belongs to one version of the weights.
"""

import hashlib
import json
import sys
from typing import Any, NamedTuple

import numpy as np
import torch

if __package__:
    from freescale.serving import serve
else:
    import serve  # type: ignore[missing-import]  # in the folder of an export

RequestError = serve.RequestError
read_safetensors = serve.read_safetensors
_CHUNK = 512
"""Events that are encoded at a time: a matrix of so many tokens and what they see is in memory."""


class StateError(ValueError):
    """A state that cannot be used, and why."""


class State(NamedTuple):
    """What is kept of the history of a user."""

    version: str
    """Of the weights."""
    events: int
    tokens: int
    """That are encoded."""
    last_time: int
    """Of the last event that is encoded."""
    kept: dict[str, torch.Tensor]
    """place, event and values of the tokens that later ones see."""
    waiting: dict[str, torch.Tensor]
    """Retrieval: the columns of the last event."""


class StatefulRecommender(serve.Recommender):
    """An exported model with states of users."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.segment, self.summaries, self.heads, self.width = self.facts["states"]
        self.is_retrieval = self.facts["task"] == "retrieval"
        self.version = f"{self.facts['files']['weights.safetensors']['sha256'][:16]}-{self.facts['step']}"
        self.most = self.facts["programs"]["append"]["item"]["most"][0]

    def encode(self, requests: list[dict[str, Any]]) -> list[State]:
        """Return the state of each user after the history of a request."""
        return [self._extend(self._empty(), request) for request in self._checked(requests)]

    def append(self, states: list[State], requests: list[dict[str, Any]]) -> list[State]:
        """Return the states after the events of requests, which come after those of the states."""
        pairs = zip(states, self._checked(requests), strict=True)
        return [self._extend(self._require(state), request) for state, request in pairs]

    def query(self, requests: list[dict[str, Any]]) -> torch.Tensor:
        """Return the unit vector of each user, to compare with those of items.npy."""
        return self.query_from(self.encode(requests), requests)

    def query_from(self, states: list[State], requests: list[dict[str, Any]]) -> torch.Tensor:
        """Return the unit vectors of states at the `time` of requests, by default that of the last event."""
        vectors = []
        for state, request in zip(states, requests, strict=True):
            column = self.facts["programs"]["append"]["time"]
            time = int(self._values(column, request.get("time"), column["most"]))
            first = self._require(state).events - 1
            end = self._tokens(first) + self.facts["tokens"][1]
            vectors.append(self._run(state, state.waiting, first, (0, 1), end, time)["vector"])
        return torch.cat(vectors)

    def recommend_from(
        self, states: list[State], requests: list[dict[str, Any]], k: int = 10
    ) -> list[dict[str, list[Any]]]:
        """Return the best items for states at the `time` of requests, without those of `item_id` if they are seen."""
        return self.recommend(requests, k, self.query_from(states, requests))

    def score(self, kept: list[Any], requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the outputs of the candidates of each request, by label, after the history of each state."""
        return super().score([self._of_candidates(self._require(state)) for state in kept], requests)

    def dump(self, state: State) -> bytes:
        """Return a state as bytes: the size of the header, the header in JSON, then the tensors."""
        tensors = {f"{part}.{n}": v for part in ("kept", "waiting") for n, v in getattr(state, part).items()}
        arrays = {name: np.ascontiguousarray(value.numpy()) for name, value in tensors.items()}
        data = b"".join(value.tobytes() for value in arrays.values())
        entries = [[name, value.dtype.str, list(value.shape)] for name, value in arrays.items()]
        header = json.dumps([*state[:4], entries]).encode()
        return len(header).to_bytes(8, "little") + hashlib.sha256(header + data).digest() + header + data

    def load(self, stored: bytes) -> State:
        """Return a state that was stored; a damaged one, or one of another version, is refused."""
        begin = 40 + int.from_bytes(stored[:8], "little")
        if hashlib.sha256(stored[40:]).digest() != stored[8:40]:
            raise StateError("the state is damaged: encode the history anew")
        (version, events, tokens, last_time, entries), offset = json.loads(stored[40:begin]), begin
        parts: dict[str, dict[str, torch.Tensor]] = {"kept": {}, "waiting": {}}
        for name, dtype, shape in entries:
            value = np.frombuffer(stored, dtype, int(np.prod(shape)), offset).reshape(shape)
            part, _, name = name.partition(".")
            offset, parts[part][name] = offset + value.nbytes, torch.from_numpy(value.copy())
        return self._require(State(version, events, tokens, last_time, **parts))

    def _checked(self, requests: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
        if not isinstance(requests, list) or not requests:
            self._inputs("append", requests)  # which refuses it
        return [self._inputs("append", [request]) for request in requests]

    def _require(self, state: State) -> State:
        if state.version != self.version:
            what = f"the state belongs to version {state.version} of the model, which is now {self.version}"
            raise StateError(f"{what}: encode the history anew")
        return state

    def _empty(self) -> State:
        place, values = torch.full((1, 0), -1), torch.zeros(1, self.heads, 0, self.width)
        return State(self.version, 0, 0, 0, {"place": place, "event": place, "values": values}, {})

    def _tokens(self, event: int) -> int:
        """Return the tokens before an event."""
        prefix, per_event = self.facts["tokens"]
        return prefix + event * per_event + (event // self.segment * self.summaries if self.segment else 0)

    def _extend(self, state: State, inputs: dict[str, torch.Tensor]) -> State:
        """Encode new events in chunks. In retrieval the last one waits, and the one that waited comes first."""
        count, facts = int(inputs["length"]), self.facts["programs"]["append"]
        per_event = {name for name, column in facts.items() if column["per_entry"]}
        columns = {name: inputs[name][:, :count] if name in per_event else inputs[name] for name in facts}
        if state.events + count > self.most:
            what = f"the history has {state.events + count} events, and the model was trained with {self.most}"
            raise RequestError(f"{what}: encode the last ones anew")
        if state.waiting:
            columns |= {n: torch.cat(_same_members(state.waiting[n], columns[n]), dim=1) for n in per_event}
        first, events = state.events - bool(state.waiting), state.events + count
        encoded = events - self.is_retrieval
        for begin in range(first, max(encoded, first + 1), _CHUNK):
            end = min(begin + _CHUNK, encoded)
            tokens = self._tokens(end) if end < events else self._tokens(end - 1) + self.facts["tokens"][1]
            following = int(columns["timestamp"][0, end - first]) if end < events else -1
            if tokens > state.tokens:
                state = self._encode(state, columns, first, (begin - first, end - first), tokens, following)
        waiting = {n: v[:, -1:] if n in per_event else v for n, v in columns.items()} if self.is_retrieval else {}
        return state._replace(events=events, waiting=waiting)

    def _encode(
        self, state: State, columns: dict[str, Any], first: int, part: tuple[int, int], end: int, time: int
    ) -> State:
        found = self._run(state, columns, first + part[0], part, end, time)
        keep = found["keep"][0]
        kept = {name: found[name][:, keep] for name in ("place", "event")}
        kept["values"] = found["values"][:, :, keep]
        last_time = int(columns["timestamp"][0, part[1] - 1]) if part[1] > part[0] else state.last_time
        return state._replace(tokens=end, last_time=last_time, kept=kept)

    def _run(
        self, state: State, columns: dict[str, Any], first: int, part: tuple[int, int], end: int, time: int
    ) -> dict[str, torch.Tensor]:
        """Run the program on the events `part` of columns, the first of which is `first` of the history."""
        inputs = {}
        for name, column in self.facts["programs"]["append"].items():
            value = columns[name]
            if column["per_entry"]:
                value = value[:, slice(*part)] if part[1] > part[0] else value[:, :1]
                value = torch.cat([value, value], dim=1) if value.shape[1] < 2 else value  # programs take two at least
            inputs[name] = torch.tensor([time]) if name == "time" and self.is_retrieval else value
        inputs["length"] = torch.tensor([part[1] - part[0]])
        inputs["position"] = torch.arange(max(2, end - state.tokens))
        numbers = {"begin_token": state.tokens, "end_token": end, "first_event": first, "last_time": state.last_time}
        inputs |= {name: torch.tensor([value]) for name, value in numbers.items()}
        inputs |= {f"kept_{name}": value for name, value in _padded(state.kept).items()}
        return self.programs["append"](self.weights, inputs)

    def _of_candidates(self, state: State) -> dict[str, torch.Tensor]:
        kept = _padded(state.kept)
        numbers = {"tokens": torch.tensor([state.tokens]), "last": torch.tensor([state.last_time])}
        return {"kept": kept["values"], "event": kept["event"], **numbers, "place": kept["place"]}


def _padded(kept: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad what is kept to two tokens, which programs take at least."""
    more, pad = max(0, 2 - kept["place"].shape[1]), torch.nn.functional.pad
    padded = {name: pad(kept[name], (0, more), value=-1) for name in ("place", "event")}
    return padded | {"values": pad(kept["values"], (0, 0, 0, more))}


def _same_members(earlier: torch.Tensor, later: torch.Tensor) -> list[torch.Tensor]:
    """Pad sets of ids to the same number."""
    if earlier.dim() < 3:
        return [earlier, later]
    most = max(earlier.shape[2], later.shape[2])
    return [torch.nn.functional.pad(x, (0, most - x.shape[2]), value=-1) for x in (earlier, later)]


Recommender = StatefulRecommender
"""The name under which `follow` finds the class in this module or in `serve`."""


if __name__ == "__main__":
    Recommender(sys.argv[1]).check()
