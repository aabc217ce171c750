"""A trained model as functions of padded tensors: what `torch.export` traces. The modules are those of training.

Every program takes its weights as inputs, so that new weights need no new program. `Programs.query` is retrieval: the
vector of each user. Ranking has two: `history` returns the keys and values of a history, `candidates` scores any number
of candidates with them, now or later.
"""

from collections.abc import Mapping
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
_TABLES = "tables."


@dataclass(frozen=True)
class Program:
    """A function of weights and inputs, with inputs of the smallest dynamic sizes to trace it with."""

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
        x, event, query = self._embed("history", inputs, inputs["item"]), inputs["timestamp"], self._query_times(inputs)
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

    def _embed(self, part: Part, inputs: Tensors, items: Tensor) -> Tensor:
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


class QueryProgram(nn.Module):
    """Retrieval: the vector of each user."""

    def __init__(self, served: ServedModel) -> None:
        super().__init__()
        self.served = served

    def forward(self, inputs: Tensors) -> dict[str, Tensor]:
        """Return unit vectors, to compare with the vectors of items; 0 without events."""
        output, _ = self.served.encode(inputs)
        last = (self.served.prefix + inputs["length"] - 1).clamp(min=0)
        at_last = output.gather(1, last[:, None, None].expand(-1, -1, output.shape[2]))[:, 0]
        return {"vector": F.normalize(at_last, dim=-1) * (inputs["length"] > 0)[:, None]}


class HistoryProgram(nn.Module):
    """Ranking: the keys and values of histories."""

    def __init__(self, served: ServedModel) -> None:
        super().__init__()
        self.served = served

    def forward(self, inputs: Tensors) -> dict[str, Tensor]:
        """Return [layers, 2, samples, heads, tokens, width]."""
        _, layout = self.served.encode(inputs)
        return {"kept": torch.stack(layout.kept)}


class CandidateProgram(nn.Module):
    """Ranking: the outputs of candidates after histories whose keys and values are kept."""

    def __init__(self, served: ServedModel) -> None:
        super().__init__()
        self.served = served

    def forward(self, inputs: Tensors) -> dict[str, Tensor]:
        """Return one output per candidate and label: a probability, or the predicted number."""
        served, model = self.served, self.served.model
        assert isinstance(model, Ranking)
        samples, columns = inputs["candidate_id"].shape
        events = inputs["timestamp"].shape[1]
        of_history = {name: _unified(inputs[name], samples, events) for name in ("timestamp", "length", "time")}
        of_candidates = {n: _unified(v, samples, columns) for n, v in inputs.items() if n.startswith("candidate_")}
        inputs = {"kept": inputs["kept"], **of_history, **of_candidates}
        x = served._embed("candidates", inputs, inputs["candidate_id"]) + model.is_candidate
        times, lengths = EventTimes(inputs["timestamp"], inputs["time"]), served.prefix + inputs["length"]
        layout = PlainCandidates(lengths, times, inputs["kept"], columns=columns, buckets=served.time_buckets)
        outputs = model.head(model.encoder(x.flatten(0, 1), layout))
        is_number = torch.tensor([label in model.task.regression for label in model.task.labels])
        return {"outputs": torch.where(is_number, outputs, outputs.sigmoid()).unflatten(0, (samples, columns))}


class WithWeights(nn.Module):
    """A program whose weights are inputs."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self._held = (program,)  # not a submodule: its own weights are not part of the program

    def forward(self, weights: dict[str, Tensor], inputs: dict[str, Tensor]) -> Any:
        """Call the program with these weights."""
        named = {f"served.{name}": value for name, value in weights.items()}
        return torch.func.functional_call(self._held[0], named, (inputs,))


def programs_of(served: ServedModel) -> dict[str, Program]:
    """Return the programs of a model by name."""
    history = _history_inputs(served)
    if isinstance(served.model, Retrieval):
        return {"query": _program(QueryProgram(served), history)}
    kept = HistoryProgram(served)({name: torch.ones(shape, dtype=kind) for name, (shape, kind, _) in history.items()})
    events = {name: history[name] for name in ("timestamp", "length")}
    time = {"time": ((3,), torch.int64, ("samples",))}
    shape = tuple(kept["kept"].shape)
    sizes = ("layers", "two", "samples", "heads", "events", "width")
    candidates = {"candidate_id": ((3, 5), torch.int64, ("samples", "candidates"))}
    for feature in served.model.features.applicable("candidates"):
        name = candidate_column(feature.column)
        candidates[name] = ((3, 5), _kind(feature), ("samples", "candidates"))
    of_candidates = events | time | {"kept": (shape, kept["kept"].dtype, sizes)} | candidates
    return {
        "history": _program(HistoryProgram(served), history),
        "candidates": _program(CandidateProgram(served), of_candidates),
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


def _program(module: nn.Module, inputs: Mapping[str, _Input]) -> Program:
    example = {name: torch.ones(shape, dtype=kind) for name, (shape, kind, _) in inputs.items()}
    return Program(WithWeights(module), example, {name: sizes for name, (_, _, sizes) in inputs.items()})


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
