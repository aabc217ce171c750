"""The agent of one host: starts its ranks of every generation, watches them, and does what was decided.

The agent that serves the store decides, for all.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType

from freescale.errors import INTERRUPTED, TransportError, reason
from freescale.launch import AGENT
from freescale.launch.decide import Seen, Verdict, decide
from freescale.launch.meeting import SILENT_SECONDS, Meeting
from freescale.launch.ranks import LocalRanks
from freescale.log import info_once, logger, warning_once

_LOOK_SECONDS = 0.1
_BEAT_SECONDS = 1.0
_LAST_CALL_SECONDS = 3.0
"""For other hosts to come, once there are enough."""
_JOIN_SECONDS = 600.0
_SECONDS_TO_NAME = 6.0
"""For ranks that lost another, to say which and to end by themselves."""
_SECONDS_TO_SAVE = 300.0


class Agent:
    """Runs `freescale WORDS` on the ranks of this host until the whole command has ended."""

    def __init__(self, meeting: Meeting, words: Sequence[str], *, ranks: int, restarts: int) -> None:
        self._meeting, self._words, self._ranks, self._restarts = meeting, words, ranks, restarts
        self._local: LocalRanks | None = None
        self._starting = False
        self._asked_at = self._paused_at = 0.0
        self._looked, self._beaten = time.monotonic(), 0.0
        self._ended = threading.Event()
        self._before: Verdict | None = None
        """How the generation before ended."""

    def run(self) -> int:
        """Generation after generation; gives the exit code of the command."""
        before = {kind: signal.signal(kind, self._on_signal) for kind in (signal.SIGINT, signal.SIGTERM)}
        threading.Thread(target=self._watch_the_store, daemon=True).start()
        if self._meeting.serves and self._meeting.hosts.most > 1:
            address, port = self._meeting.address
            info_once(f"this host serves the store at {address}:{port}; without it the run ends on every host")
        generation, code = 0, None
        try:
            while code is None:
                code = self._generation(generation)
                generation += 1
            self._ended.set()
            self._meeting.leave()
        except RuntimeError as error:  # torch's, of a connection that was closed
            raise self._without_store(reason(error)) from error
        finally:
            self._ended.set()
            if self._local is not None:
                self._local.end()
            for kind, handler in before.items():
                signal.signal(kind, handler)
        return code

    def _generation(self, number: int) -> int | None:
        """One generation from its beginning to its verdict."""
        first, ranks = self._opened(number)
        if self._meeting.id in first:
            self._start(self._environments(number, first[self._meeting.id], ranks))
        verdict = self._before = self._verdict(number, first)
        if self._local is not None:
            self._local.end()
            self._local = None
        if verdict.why and self._meeting.serves:
            follows = "ranks start again" if verdict.code is None else "no restarts are left"
            follows = follows if verdict.code in (None, 1, 5) else "the run ends"
            warning_once(f"restart {number}: {verdict.why}; {follows}" if number else f"{verdict.why}; {follows}")
        return verdict.code

    def _start(self, environments: list[dict[str, str]]) -> None:
        """Start the ranks of this host. A signal that comes meanwhile is passed on as soon as all are there."""
        self._starting = True
        self._local = LocalRanks(self._words, environments)
        self._starting = False
        if self._asked_at:
            self._local.signal(signal.SIGTERM)

    def _opened(self, number: int) -> tuple[dict[int, int], int]:
        """Wait for a generation to begin; who serves the store begins it when enough hosts are there."""
        self._meeting.come(number)
        since = changed = time.monotonic()
        known: dict[int, int] = {}
        while (opened := self._meeting.opened(number)) is None:
            self._look()
            if not self._meeting.serves:
                continue
            alive = self._meeting.alive()
            here = self._meeting.here(number, alive)
            if here != known:
                known, changed = here, time.monotonic()
            if self._are_enough(number, len(here), len(alive), time.monotonic() - changed):
                self._open(number, here)
            elif time.monotonic() - since > _JOIN_SECONDS:
                raise TransportError(
                    f"{len(here)} of {self._meeting.hosts.least} hosts came to {self._meeting.address}",
                    remedy="start the agents of the others, or ask for fewer: --hosts",
                )
        return opened

    def _are_enough(self, number: int, here: int, alive: int, waited: float) -> bool:
        """Whether to begin with those that have come; `waited`: since the last of them did."""
        hosts = self._meeting.hosts
        nobody_is_missing = number > 0 and here == alive
        return here >= hosts.most or (here >= hosts.least and (nobody_is_missing or waited > _LAST_CALL_SECONDS))

    def _open(self, number: int, agents: dict[int, int]) -> None:
        first, ranks = {}, 0
        for agent, count in list(agents.items())[: self._meeting.hosts.most]:
            first[agent], ranks = ranks, ranks + count
        self._meeting.open(number, first, ranks)

    def _verdict(self, number: int, first: dict[int, int]) -> Verdict:
        """Watch the ranks of this host until it is decided what becomes of all."""
        told: list[int | None] | None = None
        self._paused_at = lost_at = 0.0
        while (verdict := self._meeting.concluded(number)) is None:
            self._look()
            if self._local is not None:
                if (codes := self._codes(self._local)) != told:
                    told = codes
                    self._meeting.report(number, codes)
                if not self._paused_at and self._meeting.paused(number):
                    self._paused_at = time.monotonic()
                    self._local.signal(signal.SIGTERM)
            if self._meeting.serves:
                lost_at = self._conclude_if_due(number, first, lost_at)
        return verdict

    def _codes(self, local: LocalRanks) -> list[int | None]:
        """Of ranks that were asked to end, some may not have known yet how to do so well, and some never do."""
        asked_at = self._asked_at or self._paused_at
        if asked_at and time.monotonic() - asked_at > _SECONDS_TO_SAVE:
            local.end()
        lost = TransportError.exit_code  # which ranks say when another ended first
        return [
            INTERRUPTED if self._asked_at and code and (code < 0 or code == lost) else code for code in local.codes()
        ]

    def _conclude_if_due(self, number: int, first: dict[int, int], lost_at: float) -> float:
        """Decide, for all hosts, once ranks that lost another have had the time to say so. Gives when one was lost."""
        meeting, alive = self._meeting, self._meeting.alive()
        newcomers = meeting.here(number, set(alive) - set(first))
        if newcomers and len(first) < meeting.hosts.most and not meeting.paused(number):
            meeting.pause(number)
        codes, pausing = meeting.reported(number, first), meeting.paused(number)
        decided = decide(Seen(codes, set(first) - set(alive), pausing, self._restarts))
        if decided is None:
            return lost_at
        lost_at = lost_at or time.time()
        runs = any(code is None for of_host in codes.values() for code in of_host)
        if decided.at_once or not runs or time.time() - lost_at > _SECONDS_TO_NAME:
            self._restarts -= decided.code is None and not pausing
            meeting.conclude(number, replace(decided, lost_at=lost_at))
        return lost_at

    def _environments(self, number: int, first: int, ranks: int) -> list[dict[str, str]]:
        """What each rank of this host has to know."""
        address, port = self._meeting.address
        shared = {
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": self._ranks,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": number,
            AGENT: os.getpid(),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or self._meeting.interface(),
        }
        if self._before is not None:
            shared |= {"FREESCALE_LOST_AT": self._before.lost_at, "FREESCALE_LOST": self._before.why}
        ranked = [shared | {"RANK": first + local, "LOCAL_RANK": local} for local in range(self._ranks)]
        return [{name: str(value) for name, value in one.items()} for one in ranked]

    def _look(self) -> None:
        """Take a breath, and give a sign of life."""
        time.sleep(_LOOK_SECONDS)
        now = time.monotonic()
        if now - self._beaten > _BEAT_SECONDS:
            self._meeting.beat()
            self._beaten = now
        self._looked = time.monotonic()

    def _watch_the_store(self) -> None:
        """A call to a store behind a link that was cut may never return: then this host is alone, and ends."""
        while time.monotonic() - self._looked < SILENT_SECONDS:
            if self._ended.wait(_LOOK_SECONDS):
                return
        if self._local is not None:
            self._local.end()
        error = self._without_store(f"no answer for {SILENT_SECONDS:.0f} s")
        logger.error("%s", error)
        os._exit(error.exit_code)

    def _without_store(self, why: str) -> TransportError:
        address, port = self._meeting.address
        return TransportError(
            f"the store at {address}:{port} is lost, and with it this host",
            where=why,
            remedy="see whether that host is up and reachable; start this agent again to take part again",
        )

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Pass it on: the ranks of all hosts agree to end after a step, and save."""
        if self._local is None and not self._starting:
            raise KeyboardInterrupt
        self._asked_at = self._asked_at or time.monotonic()
        if self._local is not None:
            self._local.signal(signal.Signals(number))
