"""A trained model as functions of padded tensors: what `torch.export` traces. The modules are those of training.

Every program takes its weights as inputs, so that new weights need no new program. Retrieval has one,
`query`: the vector of each user. Ranking has two: `history` returns the keys and values of a history, `candidates`
scores any number of candidates with them, now or later.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from freescale.config import RunConfig
from freescale.data.feature_schema import Feature, candidate_column
from freescale.errors import UsageError
from freescale.models.feature_embedding import FeatureValues, Part
from freescale.models.jagged import EventTimes, time_bucket_table
from freescale.models.plain_layout import PlainCandidates, PlainHistories
from freescale.models.protocol import Rows
from freescale.models.ranking import Ranking
from freescale.models.retrieval import Retrieval

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Program:
    """A function of weights and inputs, with example inputs to trace it with."""

    module: nn.Module
    example: dict[str, Tensor]
    sizes: dict[str, tuple[str, ...]]
    """The name of the size of each dimension of each input."""


class ServedModel(nn.Module):
    """A model with its tables, on padded tensors."""

    def __init__(self, config: RunConfig, model: Retrieval | Ranking, tables: Tensors) -> None:
        super().__init__()
        _require_supported(config, model)
        self.config, self.model = config, model
        self.tables = nn.ParameterDict({name: nn.Parameter(rows, requires_grad=False) for name, rows in tables.items()})
        self.register_buffer("time_buckets", time_bucket_table(torch.device("cpu")).clone())

    def weights(self) -> dict[str, Tensor]:
        """Return all weights, which are inputs of the programs."""
        return {name: value.detach() for name, value in self.state_dict().items()}

    def encode(self, inputs: Tensors) -> tuple[Tensor, PlainHistories]:
        """Encode histories: [samples, tokens, dim]."""
        samples, columns = inputs["item"].shape
        inputs = {name: _unified(value, samples, columns) for name, value in inputs.items()}
        x, event, query = self.embed("history", inputs, inputs["item"]), inputs["timestamp"], self._query_times(inputs)
        if users := self.model.features.applicable("sample"):
            prefix = torch.stack([self._feature(one, inputs[one.column]) for one in users], dim=1)
            position = torch.arange(columns, device=x.device)
            tokens = prefix[:, position.clamp(max=len(users) - 1)].to(x.dtype)
            x = torch.where((position < len(users))[:, None], tokens, x)
            query = torch.where(position < len(users), 0, query)
        layout = PlainHistories(EventTimes(event, query), buckets=self.time_buckets)
        return self.model.encoder(x.flatten(0, 1), layout).unflatten(0, x.shape[:2]), layout

    def _query_times(self, inputs: Tensors) -> Tensor:
        """Return when each event is asked for the next one: at its time, and the last one at the time of the request.

        Candidates of ranking come last, so that events are asked at their own time.
        """
        event = inputs["timestamp"]
        if isinstance(self.model, Ranking):
            return event
        position = torch.arange(event.shape[1], device=event.device)
        following = event[:, (position + 1).clamp(max=event.shape[1] - 1)]
        last = self.prefix + inputs["length"][:, None] - 1
        return torch.where(position == last, inputs["time"][:, None], following)

    @property
    def prefix(self) -> int:
        """Number of prefix tokens."""
        return len(self.model.features.applicable("sample"))

    def embed(self, part: Part, inputs: Tensors, items: Tensor) -> Tensor:
        """Return the embeddings of events or candidates: [samples, columns, dim]."""
        x = F.embedding(items, self.tables["item"])
        for feature in self.model.features.applicable(part):
            column = inputs[candidate_column(feature.column) if part == "candidates" else feature.column]
            x = x + self._feature(feature, column).to(x.dtype)
        return x

    def _feature(self, feature: Feature, column: Tensor) -> Tensor:
        """Return the embedding of a feature: [..., dim]."""
        features, flat = self.model.features, column.flatten()
        if not feature.table:
            value, rows = FeatureValues(dense=features.dense(feature, flat)), {}
        else:
            ids = features.ids(feature, flat)
            value, rows = FeatureValues(rows=slice(None)), {feature.table: Rows(self.tables[feature.table], ids)}
        embedded = features({feature.name: value}, rows)
        assert embedded is not None
        return embedded.unflatten(0, column.shape)


def query(served: ServedModel, inputs: Tensors) -> dict[str, Tensor]:
    """Return the unit vector of each user, to compare with the vectors of items; 0 without events."""
    output, _ = served.encode(inputs)
    last = (served.prefix + inputs["length"] - 1).clamp(min=0)
    at_last = output.gather(1, last[:, None, None].expand(-1, -1, output.shape[2]))[:, 0]
    return {"vector": F.normalize(at_last, dim=-1) * (inputs["length"] > 0)[:, None]}


def history(served: ServedModel, inputs: Tensors) -> dict[str, Tensor]:
    """Return the keys and values of histories: [layers, 2, samples, heads, tokens, width]."""
    _, layout = served.encode(inputs)
    return {"kept": torch.stack(layout.kept)}


def candidates(served: ServedModel, inputs: Tensors) -> dict[str, Tensor]:
    """Return one output per candidate and label, after histories that are kept: a probability, or a number."""
    model = served.model
    assert isinstance(model, Ranking)
    samples, columns = inputs["candidate_id"].shape
    events = inputs["timestamp"].shape[1]
    of_history = {name: _unified(inputs[name], samples, events) for name in ("timestamp", "length", "time")}
    of_candidates = {n: _unified(v, samples, columns) for n, v in inputs.items() if n.startswith("candidate_")}
    x = served.embed("candidates", of_candidates, of_candidates["candidate_id"]) + model.is_candidate
    times, lengths = EventTimes(of_history["timestamp"], of_history["time"]), served.prefix + of_history["length"]
    layout = PlainCandidates(lengths, times, inputs["kept"], columns=columns, buckets=served.time_buckets)
    outputs = model.head(model.encoder(x.flatten(0, 1), layout))
    is_number = torch.tensor([label in model.task.regression for label in model.task.labels])
    return {"outputs": torch.where(is_number, outputs, outputs.sigmoid()).unflatten(0, (samples, columns))}


class ServedFunction(nn.Module):
    """One of the functions above on a model."""

    def __init__(self, served: ServedModel, compute: Callable[[ServedModel, Tensors], dict[str, Tensor]]) -> None:
        super().__init__()
        self.served, self._compute = served, compute

    def forward(self, inputs: Tensors) -> dict[str, Tensor]:
        """Call it."""
        return self._compute(self.served, inputs)


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
    of_history = _history_inputs(served)
    if isinstance(served.model, Retrieval):
        return {"query": _program(served, query, of_history)}
    kept = history(served, _ones(of_history))["kept"]
    sizes = ("layers", "two", "samples", "heads", "events", "width")
    per_candidate = (3, 5), torch.int64, ("samples", "candidates")
    of_candidates = {name: of_history[name] for name in ("timestamp", "length")}
    of_candidates |= {"time": of_history["length"], "kept": (tuple(kept.shape), kept.dtype, sizes)}
    of_candidates |= {"candidate_id": per_candidate}
    for feature in served.model.features.applicable("candidates"):
        of_candidates[candidate_column(feature.column)] = per_candidate[0], _kind(feature), per_candidate[2]
    return {
        "history": _program(served, history, of_history),
        "candidates": _program(served, candidates, of_candidates),
    }


def _unified(x: Tensor, samples: int, columns: int) -> Tensor:
    """Return an input as it is. Tracing learns that its sizes are those of other inputs."""
    return x.expand(samples, columns) if x.dim() == 2 else x.expand(samples)


_Input = tuple[tuple[int, ...], torch.dtype, tuple[str, ...]]


def _history_inputs(served: ServedModel) -> dict[str, _Input]:
    """Return shape, dtype and named sizes of the inputs of a history. Prefix tokens are its first columns."""
    grid = (3, served.prefix + 7), torch.int64, ("samples", "events")
    per_sample = (3,), torch.int64, ("samples",)
    inputs: dict[str, _Input] = {"item": grid, "timestamp": grid, "length": per_sample}
    if isinstance(served.model, Retrieval):
        inputs["time"] = per_sample
    for feature in served.model.features.applicable("history"):
        inputs[feature.column] = grid[0], _kind(feature), grid[2]
    for feature in served.model.features.applicable("sample"):
        inputs[feature.column] = per_sample[0], _kind(feature), per_sample[2]
    return inputs


def _kind(feature: Feature) -> torch.dtype:
    return torch.float64 if feature.config.kind == "number" else torch.int64


def _ones(inputs: Mapping[str, _Input]) -> dict[str, Tensor]:
    return {name: torch.ones(shape, dtype=kind) for name, (shape, kind, _) in inputs.items()}


def _program(
    served: ServedModel,
    compute: Callable[[ServedModel, Tensors], dict[str, Tensor]],
    inputs: Mapping[str, _Input],
) -> Program:
    sizes = {name: sizes for name, (_, _, sizes) in inputs.items()}
    return Program(WithWeights(ServedFunction(served, compute)), _ones(inputs), sizes)


def _require_supported(config: RunConfig, model: Retrieval | Ranking) -> None:
    """Refuse what the programs do not compute."""
    features = [f for part in ("sample", "history", "candidates") for f in model.features.applicable(part)]  # type: ignore[arg-type]
    for feature in features:
        if feature.config.kind in ("set", "cross"):
            what = f'feature "{feature.name}" is a {feature.config.kind}, which programs for serving do not have yet'
            raise UsageError(what, remedy="export with --format safetensors")
    if config.task.interleave:
        what = "task.interleave: programs for serving have no action tokens yet"
        raise UsageError(what, remedy="export with --format safetensors")
