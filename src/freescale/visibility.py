"""What a query sees of its own history: the rules of `model.memory`, in plain integer arithmetic.

Without a rule, a token sees all tokens before its limit. A rule divides these into near keys, from `begins` on, and far
keys, of which a token sees only those that all later tokens see: the prefix, the first events, or summary tokens.
Arithmetic works on integers, numpy arrays and torch tensors alike, so the reference, the kernels and the cost model
share this one description.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from freescale.config import ModelConfig

# Integers, numpy arrays or tensors: operators only.
Positions = Any


class FarKeys(NamedTuple):
    """The positions that all later tokens see: the first `head`, then the end of every period from `segment` on."""

    head: int
    segment: int
    period: int

    def contains(self, key: Positions) -> Positions:
        """Return whether positions belong to the far keys."""
        return (key < self.head) | ((key - self.head) % self.period >= self.segment)

    def count_before(self, position: Positions) -> Positions:
        """Return the number of far keys before positions."""
        behind = (position > self.head) * (position - self.head)
        within = behind % self.period - self.segment
        in_head = position - behind
        return in_head + behind // self.period * (self.period - self.segment) + (within > 0) * within


@dataclass(frozen=True)
class Visibility:
    """A rule: segments with summary tokens, or, with `segment` = 0, the last and the first events."""

    segment: int = 0
    """Events of a segment; 0: the rule is local."""
    summaries: int = 0
    """Summary tokens behind each segment that has a later event."""
    window: int = 0
    """Events before its limit that a token sees."""
    first: int = 0
    """Events of the history that all later tokens see."""
    prefix: int = 0
    """Tokens before the history, which all later tokens see."""
    per_event: int = 1
    """Tokens of an event."""

    @staticmethod
    def of_model(model: ModelConfig, *, prefix: int = 0, per_event: int = 1) -> "Visibility | None":
        """Return the rule of a model; None if a token sees all earlier ones."""
        if model.memory == "full":
            return None
        if model.memory == "segments":
            return Visibility(model.segment, model.summaries, prefix=prefix, per_event=per_event)
        return Visibility(window=model.window, first=model.first, prefix=prefix, per_event=per_event)

    @property
    def far(self) -> FarKeys:
        """The keys that all later tokens see."""
        if self.segment:
            tokens = self.segment * self.per_event
            return FarKeys(self.prefix, tokens, tokens + self.summaries)
        return FarKeys(self.prefix + self.first * self.per_event, 1, 1)

    def first_token(self, event: Positions) -> Positions:
        """Return the position of the first token of events."""
        position = self.prefix + event * self.per_event
        return position + event // self.segment * self.summaries if self.segment else position

    def tokens(self, events: Positions) -> Positions:
        """Return the tokens of histories: a last segment without later events has no summary tokens.

        It is also the limit of a candidate that sees so many events.
        """
        tokens = self.prefix + events * self.per_event
        if not self.segment:
            return tokens
        return tokens + (events > 0) * (events - 1) // self.segment * self.summaries

    def is_summary(self, position: Positions) -> Positions:
        """Return whether positions of a history hold summary tokens."""
        return (position >= self.prefix) & self.far.contains(position) & (self.summaries > 0)

    def begins(self, last: Positions, limit: Positions) -> Positions:
        """Return the first near key of tokens.

        `last`: the token itself if it belongs to the history; for a candidate the last token that it sees. A candidate
        belongs to the segment of the last event that it sees.
        """
        if self.segment:
            begin = (last - self.prefix) // self.far.period * self.far.period + self.prefix
        else:
            begin = limit - self.window * self.per_event
        return (begin > 0) * begin

    def seen(self, events: Positions) -> Positions:
        """Return the keys besides itself that a candidate sees after so many events."""
        limit = self.tokens(events)
        begin = self.begins(limit - 1, limit)
        return limit - begin + self.far.count_before(begin)

    def pairs(self, events: Positions) -> Positions:
        """Return the pairs of tokens of a history that see each other, each token with itself included."""
        tokens, head = self.tokens(events), self.far.head
        if not self.segment:
            behind = tokens - self.window * self.per_event
            seen = _sum_capped(tokens, self.window * self.per_event) + _sum_capped((behind > 0) * behind, head)
            return seen + tokens
        period, summaries = self.far.period, self.summaries
        whole, rest = (tokens - head) // period, (tokens - head) % period
        near = whole * (period * (period - 1) // 2) + rest * (rest - 1) // 2
        far = summaries * (period * (whole * (whole - 1) // 2) + rest * whole)
        return near + far + head * (tokens - head) + head * (head - 1) // 2 + tokens


def _sum_capped(count: Positions, cap: int) -> Positions:
    """Return min(0, cap) + min(1, cap) + ... + min(count - 1, cap)."""
    beyond = (count > cap) * (count - cap)
    small = count - beyond
    return small * (small - 1) // 2 + beyond * cap
