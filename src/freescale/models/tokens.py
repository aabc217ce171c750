"""Where prefix tokens, events and candidates of a batch are among its tokens, and when each happened.

The tokens of a sample: one prefix token per user feature, the events (with interleaving each as an item token and an
action token; with `memory = "segments"` summary tokens follow each segment of events), then the candidates.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freescale.data.batch import Batch, Events
from freescale.data.feature_schema import ANCHOR
from freescale.models.jagged import EventTimes, JaggedLayout
from freescale.visibility import Visibility


@dataclass(frozen=True)
class TokenMap:
    """The layout of a batch, and the token of each prefix feature, event and candidate."""

    layout: JaggedLayout
    prefix: Tensor
    """Sample after sample."""
    events: Tensor
    actions: Tensor
    """The action token of each event; the event's own token without interleaving."""
    candidates: Tensor

    @staticmethod
    def from_batch(
        batch: Batch,
        *,
        prefix: int = 0,
        interleave: bool = False,
        candidates: bool = False,
        visibility: Visibility | None = None,
    ) -> "TokenMap":
        """Lay out a batch without times. `prefix`: tokens before the history. `visibility`: that of the model.

        A batch on the host is laid out there, so that no size has to be read from a device.
        """
        history, rule = batch.history, visibility or Visibility(prefix=prefix, per_event=1 + interleave)
        tokens = rule.tokens(history.lengths)
        offered = batch.candidates if candidates else None
        counts = None if offered is None else offered.lengths
        lengths = tokens if counts is None else tokens + counts
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        first = offsets[:-1]
        begin, index = _of_entries(history, first, len(history["item_id"]))
        events = begin + rule.first_token(index)
        targets, anchors = events[:0], None
        if offered is not None:
            begin, index = _of_entries(offered, first + tokens, len(offered["candidate_id"]))
            targets = begin + index
            anchors = rule.tokens(offered[ANCHOR]) if ANCHOR in offered.features else None
        places = torch.arange(prefix, device=first.device)
        layout = JaggedLayout(offsets, counts, anchors=anchors, visibility=visibility)
        actions = events + 1 if interleave else events
        return TokenMap(layout, (first[:, None] + places).flatten(), events, actions, targets)

    def with_times(self, event: Tensor, query: Tensor) -> "TokenMap":
        """Return the map with the times of all tokens, and with all that follows from its offsets.

        A summary token has the time of the last event of its segment.
        """
        if self.layout.summaries is not None:
            summaries, place = self.layout.summaries
            last = event[summaries - place - 1]
            event, query = (times.index_copy(0, summaries, last) for times in (event, query))
        return replace(self, layout=replace(self.layout, times=EventTimes(event, query)).computed())

    def place(self, *parts: tuple[Tensor, Tensor], tokens: int) -> Tensor:
        """Return a tensor of all tokens, 0 where no part has a value. A part: the tokens and their values."""
        placed = parts[0][1].new_zeros(tokens, *parts[0][1].shape[1:])
        for index, values in parts:
            placed = placed.index_copy(0, index, values)
        return placed


def _of_entries(events: Events, first: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return for each entry of a jagged group the value of its sample in `first`, and its index in the sample."""
    sample_first, offset = (
        x.repeat_interleave(events.lengths, output_size=count) for x in (first, events.offsets[:-1])
    )
    return sample_first, torch.arange(count, device=first.device) - offset
