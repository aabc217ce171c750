"""A trained model as functions of padded tensors: what `torch.export` traces. The modules are those of training.

Every program takes its weights as inputs, so that new weights need no new program. Retrieval has one,
`query`: the vector of each user. Ranking has two: `history` returns the keys and values of a history, `candidates`
scores any number of candidates with them, now or later. With a rule of visibility, `append` stands for `query` and
`history`: it encodes the next tokens of histories of which what later tokens see is kept.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from freescale.config import RunConfig
from freescale.data.feature_schema import Feature, candidate_column
from freescale.errors import UsageError
from freescale.models.feature_embedding import FeatureValues
from freescale.models.jagged import EventTimes, time_bucket_table
from freescale.models.plain_layout import KeptTokens, PlainAppended, PlainCandidates, PlainHistories
from freescale.models.protocol import Rows
from freescale.models.ranking import Ranking
from freescale.models.retrieval import Retrieval
from freescale.serving.request_columns import RAW, RequestColumn, candidate_columns, history_columns
from freescale.visibility import Visibility

Tensors = Mapping[str, Tensor]
_EXTENTS = {"samples": 3, "events": 7, "candidates": 5}
"""Of the examples that are traced."""
_OTHER_SIZES = {
    "length": ("samples",),
    "position": ("tokens",),
    "kept": ("samples", "heads", "tokens", "width"),
    "event": ("samples", "tokens"),
    "tokens": ("samples",),
    "last": ("samples",),
    "place": ("samples", "tokens"),
    "begin_token": ("samples",),
    "end_token": ("samples",),
    "first_event": ("samples",),
    "last_time": ("samples",),
    "kept_place": ("samples", "kept"),
    "kept_event": ("samples", "kept"),
    "kept_values": ("samples", "heads", "kept", "width"),
}
"""Sizes of the inputs that are no columns: the numbers of events, the tokens, and what is kept of a history."""


@dataclass(frozen=True)
class Program:
    """A function of weights and inputs, with example inputs to trace it with."""

    module: nn.Module
    columns: dict[str, RequestColumn]
    """The inputs that requests hold."""
    example: dict[str, Tensor]
    sizes: dict[str, tuple[str, ...]]
    """The name of the size of each dimension of each input."""


class ServedModel(nn.Module):
    """A model with its tables, on padded tensors."""

    def __init__(self, config: RunConfig, model: Retrieval | Ranking, tables: Tensors) -> None:
        super().__init__()
        self.config, self.model = config, model
        self.tables = nn.ParameterDict({name: nn.Parameter(rows, requires_grad=False) for name, rows in tables.items()})
        self.register_buffer("time_buckets", time_bucket_table(torch.device("cpu")).clone())

    def weights(self) -> dict[str, Tensor]:
        """Return all weights, which are inputs of the programs."""
        return {name: value.detach() for name, value in self.state_dict().items()}

    def encode(self, inputs: Tensors) -> tuple[Tensor, PlainHistories]:
        """Encode histories: [samples, tokens, dim]. The tokens: prefix, then events, or items and actions in turn.

        They are selected, not joined: Inductor miscompiles joined integers, and torch.export their sizes.
        """
        position = inputs["position"]
        after_prefix = position - self.prefix
        of_event, is_prefix = after_prefix.clamp(min=0) // self.per_event, after_prefix < 0
        is_action = after_prefix % self.per_event == self.per_event - 1  # without interleaving every event is one
        event, query = inputs["timestamp"][:, of_event], self.query_times(inputs)[:, of_event]
        items, actions = self.embed_events(inputs)
        x = items[:, of_event]
        if self.per_event > 1:
            x = torch.where(is_action[:, None], actions[:, of_event], x)
        if self.prefix:
            prefix = self.embed_users(inputs).to(x.dtype)
            x = torch.where(is_prefix[:, None], prefix[:, position.clamp(max=self.prefix - 1)], x)
        query = torch.where(is_prefix, 0, torch.where(is_action, query, event))
        event = torch.where(is_prefix, 0, event)
        layout = PlainHistories(EventTimes(event, query), buckets=self.time_buckets)
        return self.model.encoder(x.flatten(0, 1), layout).unflatten(0, x.shape[:2]), layout

    def embed_events(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """Return the embeddings of item and of action tokens; without interleaving the latter are 0."""
        features = self.model.features.applicable("history")
        actions = [feature for feature in features if self.per_event > 1 and feature.config.scope == "event"]
        x = F.embedding(inputs["item"], self.tables["item"])
        items = self.add(x, {feature: inputs[feature.column] for feature in features if feature not in actions})
        return items, self.add(torch.zeros_like(items), {feature: inputs[feature.column] for feature in actions})

    def embed_users(self, inputs: Tensors) -> Tensor:
        """Return the embeddings of prefix tokens."""
        users = self.model.features.applicable("sample")
        return torch.stack([self._feature(feature, inputs[feature.column]) for feature in users], dim=1)

    def query_times(self, inputs: Tensors) -> Tensor:
        """Return when each event is asked for the next one: at its time, and the last one at the time of the request.

        Candidates of ranking come last, so that events are asked at their own time.
        """
        event = inputs["timestamp"]
        if isinstance(self.model, Ranking):
            return event
        position = torch.arange(event.shape[1], device=event.device)
        following = event[:, (position + 1).clamp(max=event.shape[1] - 1)]
        at_request = torch.where(inputs["time"] < 0, last_times(inputs), inputs["time"])
        return torch.where(position == inputs["length"][:, None] - 1, at_request[:, None], following)

    @property
    def prefix(self) -> int:
        """Number of prefix tokens."""
        return len(self.model.features.applicable("sample"))

    @property
    def per_event(self) -> int:
        """Number of tokens of an event."""
        return 1 + self.config.task.interleave

    @property
    def rule(self) -> Visibility | None:
        """What a token sees; None: all earlier ones."""
        return Visibility.of_model(self.config.model, prefix=self.prefix, per_event=self.per_event)

    def add(self, x: Tensor, columns: Mapping[Feature, Tensor]) -> Tensor:
        """Add the embeddings of features to those of events or candidates: [samples, columns, dim]."""
        for feature, column in columns.items():
            x = x + self._feature(feature, column).to(x.dtype)
        return x

    def _feature(self, feature: Feature, column: Tensor) -> Tensor:
        """Return the embedding of a feature: [..., dim]. Of sets, -1 is no id."""
        features, entries, rows = self.model.features, column.shape, {}
        if feature.config.kind == "set":
            entries, sets = (
                column.shape[:-1],
                column.flatten(0, -2),
            )  # in 4 dimensions torch.export asks for memory formats
            vectors = F.embedding(sets.clamp(min=0), self.tables[feature.table]) * (sets >= 0)[..., None]
            value = FeatureValues(dense=vectors.sum(1))
        elif not feature.table:
            value = FeatureValues(dense=features.dense(feature, column.flatten()))
        else:
            ids = column if feature.config.kind == "cross" else features.ids(feature, column)
            value, rows = (
                FeatureValues(rows=slice(None)),
                {feature.table: Rows(self.tables[feature.table], ids.flatten())},
            )
        embedded = features({feature.name: value}, rows)
        assert embedded is not None
        return embedded.unflatten(0, entries)


def last_times(inputs: Tensors) -> Tensor:
    """Return the time of the last event of each sample."""
    return inputs["timestamp"].gather(1, (inputs["length"] - 1).clamp(min=0)[:, None])[:, 0]


def query(served: ServedModel, inputs: Tensors) -> dict[str, Tensor]:
    """Return the unit vector of each user, to compare with the vectors of items; 0 without events."""
    output, _ = served.encode(inputs)
    last = (served.prefix + served.per_event * inputs["length"] - 1).clamp(min=0)
    at_last = output.gather(1, last[:, None, None].expand(-1, -1, output.shape[2]))[:, 0]
    return {"vector": F.normalize(at_last, dim=-1) * (inputs["length"] > 0)[:, None]}


def history(served: ServedModel, inputs: Tensors) -> dict[str, Tensor]:
    """Return what candidates read of histories. `kept`: keys and values, [samples, heads, tokens, width]."""
    _, layout = served.encode(inputs)
    event = layout.times.event
    kept = torch.cat(layout.kept, dim=-1).unflatten(0, (event.shape[0], served.config.model.heads))
    tokens = served.prefix + served.per_event * inputs["length"]
    return {"kept": kept, "event": event, "tokens": tokens, "last": last_times(inputs)}


def append(served: ServedModel, inputs: Tensors) -> dict[str, Tensor]:
    """Encode the tokens from `begin_token` to `end_token`; return what is kept with them, and which of it to keep.

    Columns hold the events from `first_event` on. A summary token may follow an event before them, at `last_time`.
    """
    rule = served.rule
    assert rule is not None
    place = inputs["begin_token"][:, None] + inputs["position"]
    after_prefix, tokens = (place - rule.prefix).clamp(min=0), rule.segment * rule.per_event
    period = rule.far.period if rule.segment else 1 << 40
    within = after_prefix % period
    event_index = after_prefix // period * rule.segment + within.clamp(max=(tokens or period) - 1) // rule.per_event
    column = event_index - inputs["first_event"][:, None]
    is_prefix, is_summary = place < rule.prefix, rule.is_summary(place)
    is_action = within % rule.per_event == rule.per_event - 1  # without interleaving every event is one

    def of_column(values: Tensor) -> Tensor:
        index = column.clamp(min=0, max=values.shape[1] - 1)
        return values.gather(
            1, index.reshape(*index.shape, *[1] * (values.dim() - 2)).expand(-1, -1, *values.shape[2:])
        )

    items, actions = served.embed_events(inputs)
    x = of_column(items)
    if rule.per_event > 1:
        x = torch.where(is_action[:, :, None], of_column(actions), x)
    x = torch.where(is_summary[:, :, None], 0.0, x)
    if rule.prefix:
        users = served.embed_users(inputs).to(x.dtype)
        index = place.clamp(max=rule.prefix - 1)[:, :, None].expand(-1, -1, users.shape[2])
        x = torch.where(is_prefix[:, :, None], users.gather(1, index), x)
    event = torch.where(column >= 0, of_column(inputs["timestamp"]), inputs["last_time"][:, None])
    query = torch.where(is_action & ~is_summary, of_column(served.query_times(inputs)), event)
    event, query = (torch.where(is_prefix, 0, times) for times in (event, query))
    kept = KeptTokens(inputs["kept_place"], inputs["kept_event"], inputs["kept_values"])
    end = inputs["end_token"][:, None]
    position = torch.where(place < end, place, -1)
    layout = PlainAppended(position, EventTimes(event, query), kept, rule=rule, buckets=served.time_buckets)
    output = served.model.encoder(x.flatten(0, 1), layout).unflatten(0, x.shape[:2])
    key = layout.key_position
    result = {
        "place": key,
        "event": layout.key_time,
        "values": torch.cat(layout.kept, dim=-1).unflatten(0, (x.shape[0], served.config.model.heads)),
        "keep": (key >= 0) & ((key >= rule.begins(end, end)) | rule.far.contains(key)),
    }
    if isinstance(served.model, Retrieval):
        last = (inputs["end_token"] - inputs["begin_token"] - 1).clamp(min=0)
        at_last = output.gather(1, last[:, None, None].expand(-1, -1, output.shape[2]))[:, 0]
        result["vector"] = F.normalize(at_last, dim=-1)
    return result


def candidates(served: ServedModel, inputs: Tensors) -> dict[str, Tensor]:
    """Return one output per candidate and label, after histories that are kept: a probability, or a number."""
    model = served.model
    assert isinstance(model, Ranking)
    samples, columns = inputs["candidate_id"].shape
    time = torch.where(inputs["time"] < 0, inputs["last"], inputs["time"])
    position = (
        inputs["place"] if "place" in inputs else torch.arange(inputs["kept"].shape[2]).expand_as(inputs["event"])
    )
    kept = KeptTokens(position, inputs["event"], inputs["kept"])
    layout = PlainCandidates(
        inputs["tokens"], time, kept, columns=columns, buckets=served.time_buckets, rule=served.rule
    )
    x = F.embedding(inputs["candidate_id"], served.tables["item"]) + model.is_candidate
    x = served.add(x, _candidate_features(served, {**inputs, "candidate_timestamp": time}))
    outputs = model.head(model.encoder(x.flatten(0, 1), layout))
    is_number = torch.tensor([label in model.task.regression for label in model.task.labels])
    return {"outputs": torch.where(is_number, outputs, outputs.sigmoid()).unflatten(0, (samples, columns))}


def _candidate_features(served: ServedModel, inputs: Tensors) -> dict[Feature, Tensor]:
    """Return the column of each feature of candidates; of crosses their rows."""
    samples, columns = inputs["candidate_id"].shape
    features = served.model.features.applicable("candidates")

    def repeat(values: Tensor) -> Tensor:
        return values[:, None].expand(samples, columns, *values.shape[1:])

    contexts = {candidate_column(feature.column) for feature in features if feature.config.scope == "context"}
    read = {name: repeat(value) if name.removesuffix(RAW) in contexts else value for name, value in inputs.items()}
    hashed = read | {name.removesuffix(RAW): value for name, value in read.items() if name.endswith(RAW)}
    return {
        feature: served.model.features.cross(feature, hashed, hashed, repeat=repeat)
        if feature.config.kind == "cross"
        else read[candidate_column(feature.column)]
        for feature in features
    }


class ServedFunction(nn.Module):
    """One of the functions above on a model."""

    def __init__(
        self,
        served: ServedModel,
        compute: Callable[[ServedModel, Tensors], dict[str, Tensor]],
        sizes: Mapping[str, tuple[str, ...]],
    ) -> None:
        super().__init__()
        self.served, self._compute, self._sizes = served, compute, sizes

    def forward(self, inputs: Tensors) -> dict[str, Tensor]:
        """Call it. Tracing learns here that sizes with the same name are the same."""
        known = {
            n: size for name, value in inputs.items() for n, size in zip(self._sizes[name], value.shape, strict=True)
        }
        expanded = {name: value.expand([known[n] for n in self._sizes[name]]) for name, value in inputs.items()}
        return self._compute(self.served, expanded)


class WithWeights(nn.Module):
    """A function whose weights are inputs."""

    def __init__(self, function: ServedFunction) -> None:
        super().__init__()
        self._held = (function,)  # not a submodule: its own weights are not part of the program

    def forward(self, weights: dict[str, Tensor], inputs: dict[str, Tensor]) -> Any:
        """Call the function with these weights."""
        named = {f"served.{name}": value for name, value in weights.items()}
        return torch.func.functional_call(self._held[0], named, (inputs,))


def programs_of(served: ServedModel) -> dict[str, Program]:
    """Return the programs of a model by name."""
    _require_free_names(served.model)
    tokens, columns = served.prefix + served.per_event * _EXTENTS["events"], history_columns(served.model)
    sizes = {"length": torch.zeros(_EXTENTS["samples"], dtype=torch.int64), "position": torch.arange(tokens)}
    if served.rule is not None:
        first, name = _program(served, append, columns, sizes | _example_state(served)), "append"
    elif isinstance(served.model, Retrieval):
        first, name = _program(served, query, columns, sizes), "query"
    else:
        first, name = _program(served, history, columns, sizes), "history"
    if isinstance(served.model, Retrieval):
        return {name: first}
    of_candidates = candidate_columns(served.model, dynamic_items="item" in served.config.features)
    if served.rule is None:
        kept = history(served, first.example)
    else:
        state = _example_state(served)
        kept = {"kept": state["kept_values"], "event": state["kept_event"], "tokens": state["end_token"]}
        kept |= {"last": state["last_time"], "place": state["kept_place"]}
    return {name: first, "candidates": _program(served, candidates, of_candidates, kept)}


def _example_state(served: ServedModel) -> dict[str, Tensor]:
    """Return the inputs of `append` that are the state of users, in the order in which `states.py` gives them."""
    model, samples, kept = served.config.model, _EXTENTS["samples"], 4
    zeros = partial(torch.zeros, dtype=torch.int64)  # a tensor each: torch.export takes two names of one for one input
    values = torch.zeros(samples, model.heads, kept, 2 * model.layers * model.dim // model.heads)
    numbers = {name: zeros(samples) for name in ("begin_token", "end_token", "first_event", "last_time")}
    tokens = {name: zeros(samples, kept) for name in ("kept_place", "kept_event")}
    return numbers | tokens | {"kept_values": values}


def _program(
    served: ServedModel,
    compute: Callable[[ServedModel, Tensors], dict[str, Tensor]],
    columns: dict[str, RequestColumn],
    others: Tensors,
) -> Program:
    """`others`: examples of the inputs that are no columns of requests."""
    sizes = {name: column.sizes for name, column in columns.items()} | {name: _OTHER_SIZES[name] for name in others}
    example = {
        name: torch.zeros([_EXTENTS.get(size, 4) for size in column.sizes], dtype=column.dtype)
        for name, column in columns.items()
    }
    return Program(WithWeights(ServedFunction(served, compute, sizes)), columns, {**example, **others}, sizes)


def _require_free_names(model: Retrieval | Ranking) -> None:
    """Refuse columns that have the name of another input."""
    for feature in [f for part in ("sample", "history") for f in model.features.applicable(part)]:  # type: ignore[arg-type]
        if feature.column in ("item", "time", *_OTHER_SIZES):
            what = f"[features.{feature.name}]: column '{feature.column}' has the name of an input of serving programs"
            raise UsageError(what, remedy="rename the column, or export with --format safetensors")
