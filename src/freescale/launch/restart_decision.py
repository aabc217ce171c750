"""Decides from the exit codes of all ranks whether a command ends or restarts. Pure: no clock, process or store."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from freescale.errors import INTERRUPTED, NOTHING_NEW, TransportError

PERMANENT = (2, 3, 4, 6, 7, 9)
"""Exit codes that a restart would repeat: wrong use, unusable data, faulty install, NaN, unwritable folder, a guard."""
_ENDS = (INTERRUPTED, NOTHING_NEW)
"""Exit codes of ranks that ended by themselves, in agreement."""


@dataclass(frozen=True)
class HostStatus:
    """What the deciding agent observed of all hosts."""

    exit_codes: Mapping[int, Sequence[int | None]]
    """Per host the exit codes of its ranks; None while a rank runs, negative for a signal."""
    unresponsive: Set[int]
    """Hosts whose agent does not answer."""
    pausing: bool
    """Whether ranks were asked to save and end, so that other hosts can join."""
    restarts_left: int


@dataclass(frozen=True)
class RestartDecision:
    """How the ranks end, and whether they restart."""

    code: int | None
    """Exit code of the whole command; None if ranks restart."""
    why: str = ""
    immediately: bool = False
    """Whether ranks that still run get no time to end by themselves."""
    lost_at: float = 0.0
    """When the loss was detected, in Unix seconds."""


def decide(status: HostStatus) -> RestartDecision | None:
    """Return the decision, or None while there is nothing to decide."""
    codes = [code for host in status.exit_codes.values() for code in host]
    failed = [code for code in codes if code]
    if not failed and not status.unresponsive:
        return None if None in codes or not codes else RestartDecision(0)
    if status.pausing and not status.unresponsive:
        return None if None in codes else RestartDecision(None, "other hosts join")
    why = _describe_failure(status)
    if status.unresponsive:
        return RestartDecision(None if status.restarts_left else TransportError.exit_code, why, immediately=True)
    for end in _ENDS:
        if end in failed and all(code in (end, 0, None) for code in codes):
            return None if None in codes else RestartDecision(end)  # the others still save
    permanent = [code for code in failed if code in PERMANENT]
    if permanent or not status.restarts_left:
        return RestartDecision(permanent[0] if permanent else _first_cause(failed), why)
    return RestartDecision(None, why)


def _first_cause(failed: Sequence[int]) -> int:
    """Return the exit code of the rank that failed first: the others exit with a code for a lost peer."""
    causes = [code for code in failed if code != TransportError.exit_code]
    return max(causes[0], 0) or 1 if causes else TransportError.exit_code


def _describe_failure(status: HostStatus) -> str:
    if status.unresponsive:
        return f"host {', '.join(map(str, sorted(status.unresponsive)))} does not answer"
    ranks = [(host, rank, code) for host, codes in status.exit_codes.items() for rank, code in enumerate(codes)]
    causes = [rank for rank in ranks if rank[2] and rank[2] != TransportError.exit_code]
    hanging = [rank for rank in ranks if rank[2] is None]
    host, rank, code = (causes or hanging or [rank for rank in ranks if rank[2]])[0]
    how = "does not end" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"local rank {rank} of host {host} {how}"
