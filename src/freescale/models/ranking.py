"""The ranking task: predict labels of the candidates that follow a history, or of events inside it (anchors)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from freescale.config import RunConfig
from freescale.data.batch import Batch
from freescale.data.device_copy import to_device
from freescale.data.feature_schema import Feature
from freescale.models.encoders import build_encoder
from freescale.models.feature_embedding import FeatureEmbedding, FeatureValues, TableIds
from freescale.models.heads import build_heads, multi_task_loss
from freescale.models.jagged import JaggedLayout
from freescale.models.keyed import Keys
from freescale.models.protocol import Rows
from freescale.models.tokens import TokenMap
from freescale.visibility import Visibility


class PreparedFeatures(NamedTuple):
    """The features of a batch, by the group whose entries have them."""

    users: dict[str, FeatureValues]
    events: dict[str, FeatureValues]
    candidates: dict[str, FeatureValues]


@dataclass(frozen=True)
class RankingInputs:
    """Histories, each followed by its candidates."""

    ids: dict[str, Tensor]
    """`item`: of events and candidates, in the order of the tokens."""
    map: TokenMap
    items: Tensor | None
    """The tokens of events and candidates, ascending. None: all."""
    keys: Keys
    features: PreparedFeatures
    labels: Tensor
    """[candidates, tasks]; NaN: no label."""
    count: int
    """Number of labels."""

    @property
    def layout(self) -> JaggedLayout:
        """The layout of the tokens."""
        return self.map.layout


class Ranking(nn.Module):
    """An encoder with one head per label on its candidates."""

    def __init__(self, config: RunConfig, *, items: int, features: Mapping[str, Feature] | None = None) -> None:
        super().__init__()
        dim = config.model.dim
        self._seed, self.task = config.seed, config.task
        self.features = FeatureEmbedding(features or {}, dim, deviation=config.tables.init)
        self.tables = {"item": (items, dim), **self.features.tables}
        self._prefix = len(self.features.applicable("sample"))
        self._visibility = Visibility.of_model(config.model, prefix=self._prefix)
        tokens = (self._visibility or Visibility(prefix=self._prefix)).tokens(config.data.max_history)
        self.encoder = build_encoder(config.model, max_seq_len=tokens + 1)
        self.is_candidate = nn.Parameter(torch.empty(dim).normal_(std=dim**-0.5))
        self.head = build_heads(config.task, dim)

    def prepare(self, batch: Batch) -> RankingInputs:
        """Append the candidates of each sample to its history: on the host."""
        return to_device(self._lay_out(batch.on_host), batch.device)

    def _lay_out(self, batch: Batch) -> RankingInputs:
        assert batch.candidates is not None  # `build` refuses data without candidates
        history, candidates = batch.history, batch.candidates
        tokens = TokenMap.from_batch(batch, prefix=self._prefix, candidates=True, visibility=self._visibility)
        count, table_ids = len(history["item_id"]) + len(candidates["candidate_id"]), TableIds()
        both = (tokens.events, history["item_id"]), (tokens.candidates, candidates["candidate_id"])
        size = tokens.layout.tokens
        item_ids = tokens.place(*both, tokens=size)
        items = None if size == count else torch.cat([tokens.events, tokens.candidates]).sort().values
        table_ids.add("item", item_ids if items is None else item_ids[items])
        event = tokens.place(
            (tokens.events, history["timestamp"]), (tokens.candidates, _candidate_times(batch)), tokens=size
        )
        features = PreparedFeatures(
            self.features.prepare(batch, "sample", table_ids),
            self.features.prepare(batch, "history", table_ids),
            self.features.prepare(batch, "candidates", table_ids),
        )
        labels = torch.stack([candidates[name] for name in self.task.labels], dim=1)
        return RankingInputs(
            ids=table_ids.joined(self.tables, history["item_id"]),
            map=tokens.with_times(event, event),
            items=items,
            keys=Keys.from_layout(tokens.layout, batch.sample_id, seed=self._seed, step=batch.step_key),
            features=features,
            labels=labels,
            count=int(labels.isfinite().sum()),
        )

    def forward(self, inputs: RankingInputs, rows: Mapping[str, Rows]) -> Tensor:
        """Return the sum of the losses of all labels."""
        return multi_task_loss(self._outputs(inputs, rows, inputs.keys), inputs.labels, self.task)

    def outputs(self, inputs: RankingInputs, rows: Mapping[str, Rows]) -> Tensor:
        """Return the output of every head for every candidate [candidates, tasks], without dropout.

        A logit for a binary label, else the predicted number.
        """
        return self._outputs(inputs, rows, None)

    def _outputs(self, inputs: RankingInputs, rows: Mapping[str, Rows], keys: Keys | None) -> Tensor:
        tokens, features = inputs.map, inputs.features
        x = self._embed_items(inputs, rows)
        if features.users:
            users = self.features.tokens(features.users, rows)
            x = x.index_copy(0, tokens.prefix, users.flatten(0, 1).to(x.dtype))
        for index, values in ((tokens.events, features.events), (tokens.candidates, features.candidates)):
            added = self.features(values, rows)
            x = x if added is None else x.index_add(0, index, added.to(x.dtype))
        x = x.index_add(0, tokens.candidates, self.is_candidate.expand(len(tokens.candidates), -1).to(x.dtype))
        output = self.encoder(x, tokens.layout, keys)
        return self.head(output[tokens.candidates])

    def _embed_items(self, inputs: RankingInputs, rows: Mapping[str, Rows]) -> Tensor:
        """Return the item rows of all tokens, 0 for prefix tokens."""
        tokens, table = inputs.map, rows["item"]
        count = len(tokens.events) + len(tokens.candidates)
        items = F.embedding(table.index[:count], table.values)
        if inputs.items is None:
            return items
        return items.new_zeros(tokens.layout.tokens, items.shape[1]).index_copy(0, inputs.items, items)


def _candidate_times(batch: Batch) -> Tensor:
    """Return the time of each candidate: its own, else that of the last event of its sample, 0 without events."""
    assert batch.candidates is not None
    if "candidate_timestamp" in batch.candidates.features:
        return batch.candidates["candidate_timestamp"]
    time, nonempty = batch.history["timestamp"], batch.history.lengths > 0
    last = time.new_zeros(len(batch))
    last[nonempty] = time[batch.history.offsets[1:][nonempty] - 1]
    return last.repeat_interleave(batch.candidates.lengths)
