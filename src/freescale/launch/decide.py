"""What becomes of a generation, decided from what is known of its ranks. Pure: no clocks, no processes, no store."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from freescale.errors import INTERRUPTED, TransportError

_LASTING = (2, 3, 4, 6, 7)
"""Exit codes of what would fail again: wrong use, unusable data, a faulty install, NaN, an unwritable folder."""


@dataclass(frozen=True)
class Seen:
    """What the deciding agent knows of the hosts of a generation."""

    codes: Mapping[int, Sequence[int | None]]
    """Of each host, the exit codes of its ranks; None while a rank runs, below 0 a signal."""
    silent: Set[int]
    """Hosts whose agent does not answer."""
    pausing: bool
    """Whether ranks were asked to save and end, so that others may join."""
    restarts: int
    """Left."""


@dataclass(frozen=True)
class Verdict:
    """How a generation ends."""

    code: int | None
    """Of the whole command; None if another generation follows."""
    why: str = ""
    at_once: bool = False
    """Whether ranks that still run get no time to end by themselves."""
    lost_at: float = 0.0
    """When that was seen, in seconds since 1970."""


def decide(seen: Seen) -> Verdict | None:
    """The verdict, or None while there is nothing to decide."""
    codes = [code for of_host in seen.codes.values() for code in of_host]
    failed = [code for code in codes if code]
    if not failed and not seen.silent:
        return None if None in codes or not codes else Verdict(0)
    if seen.pausing and not seen.silent:
        return None if None in codes else Verdict(None, "other hosts join")
    why = _why(seen)
    if seen.silent:
        return Verdict(None if seen.restarts else TransportError.exit_code, why, at_once=True)
    if INTERRUPTED in failed and all(code in (INTERRUPTED, 0, None) for code in codes):
        return None if None in codes else Verdict(INTERRUPTED)  # they save meanwhile
    lasting = [code for code in failed if code in _LASTING]
    if lasting or not seen.restarts:
        return Verdict(lasting[0] if lasting else _code(failed), why)
    return Verdict(None, why)


def _code(failed: Sequence[int]) -> int:
    """That of whoever failed first: others lost it, and say so with a code of their own."""
    causes = [code for code in failed if code != TransportError.exit_code]
    return max(causes[0], 0) or 1 if causes else TransportError.exit_code


def _why(seen: Seen) -> str:
    if seen.silent:
        return f"host {', '.join(map(str, sorted(seen.silent)))} does not answer"
    ranks = [(host, rank, code) for host, codes in seen.codes.items() for rank, code in enumerate(codes)]
    causes = [one for one in ranks if one[2] and one[2] != TransportError.exit_code]
    hanging = [one for one in ranks if one[2] is None]
    host, rank, code = (causes or hanging or [one for one in ranks if one[2]])[0]
    how = "does not end" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"local rank {rank} of host {host} {how}"
