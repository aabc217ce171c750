"""The agent of one host: starts its ranks, watches them, and restarts or ends them as decided.

The agent that serves the rendezvous store decides for all.
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
from freescale.launch.local_ranks import LocalRanks
from freescale.launch.rendezvous import UNRESPONSIVE_SECONDS, Rendezvous
from freescale.launch.restart_decision import HostStatus, RestartDecision, decide
from freescale.log import info_once, logger, warning_once

_POLL_SECONDS = 0.1
_HEARTBEAT_SECONDS = 1.0
_LAST_CALL_SECONDS = 3.0
"""How long to wait for further hosts once there are enough."""
_JOIN_SECONDS = 600.0
_SECONDS_TO_REPORT = 6.0
"""Time for ranks that lost a peer to report it and end by themselves."""
SECONDS_TO_SAVE = 300.0


class Agent:
    """Runs `freescale WORDS` on the ranks of this host until the whole command has ended."""

    def __init__(self, rendezvous: Rendezvous, words: Sequence[str], *, nproc: int, restarts: int) -> None:
        self._rendezvous, self._words, self._nproc, self._restarts_left = rendezvous, words, nproc, restarts
        self._local: LocalRanks | None = None
        self._starting = False
        self._signaled_at = self._paused_at = 0.0
        self._polled_at, self._heartbeat_at = time.monotonic(), 0.0
        self._ended = threading.Event()
        self._last_decision: RestartDecision | None = None

    def run(self) -> int:
        """Start and restart the ranks; return the exit code of the command."""
        before = {kind: signal.signal(kind, self._on_signal) for kind in (signal.SIGINT, signal.SIGTERM)}
        threading.Thread(target=self._watch_store, daemon=True).start()
        if self._rendezvous.serves and self._rendezvous.hosts.most > 1:
            address, port = self._rendezvous.address
            info_once(f"this host serves the store at {address}:{port}; if it is lost, the run ends on every host")
        code = None
        try:
            restart = self._rendezvous.newest_restart()
            while code is None:
                code = self._run_once(restart)
                restart += 1
            self._ended.set()
            self._rendezvous.leave()
        except RuntimeError as error:  # from torch, if the connection was closed
            raise self._store_lost(reason(error)) from error
        finally:
            self._ended.set()
            if self._local is not None:
                self._local.end()
            for kind, handler in before.items():
                signal.signal(kind, handler)
        return code

    def _run_once(self, restart: int) -> int | None:
        """Run the ranks until they end; return the exit code of the command, or None if they restart."""
        first, world_size = self._wait_for_ranks(restart)
        if self._rendezvous.id in first:
            self._start(self._environments(restart, first[self._rendezvous.id], world_size))
        decision = self._last_decision = self._wait_for_decision(restart, first)
        if self._local is not None:
            self._local.end()
            self._local = None
        if decision.why and self._rendezvous.serves:
            follows = "ranks restart" if decision.code is None else "no restarts are left"
            follows = follows if decision.code in (None, 1, 5) else "the run ends"
            warning_once(f"restart {restart}: {decision.why}; {follows}" if restart else f"{decision.why}; {follows}")
        return decision.code

    def _start(self, environments: list[dict[str, str]]) -> None:
        """Start the ranks of this host. A signal that arrives meanwhile is forwarded once all have started."""
        self._starting = True
        self._local = LocalRanks(self._words, environments)
        self._starting = False
        if self._signaled_at:
            self._local.signal(signal.SIGTERM)

    def _wait_for_ranks(self, restart: int) -> tuple[dict[int, int], int]:
        """Wait until ranks are assigned to hosts. The serving agent assigns them when enough hosts have joined."""
        self._rendezvous.join(restart)
        since = changed = time.monotonic()
        previous: dict[int, int] = {}
        while (ranks := self._rendezvous.read_ranks(restart)) is None:
            self._poll()
            if not self._rendezvous.serves:
                continue
            alive = self._rendezvous.alive_agents()
            joined = self._rendezvous.joined_agents(restart, alive)
            if joined != previous:
                previous, changed = joined, time.monotonic()
            if self._are_enough(restart, len(joined), len(alive), time.monotonic() - changed):
                self._assign_ranks(restart, joined)
            elif time.monotonic() - since > _JOIN_SECONDS:
                raise TransportError(
                    f"{len(joined)} of {self._rendezvous.hosts.least} hosts joined at {self._rendezvous.address}",
                    remedy="start the agents of the others, or request fewer: --hosts",
                )
        return ranks

    def _are_enough(self, restart: int, joined: int, alive: int, waited: float) -> bool:
        """Return whether to start with the joined hosts. `waited`: seconds since the last one joined."""
        hosts = self._rendezvous.hosts
        complete = restart > 0 and joined == alive
        return joined >= hosts.most or (joined >= hosts.least and (complete or waited > _LAST_CALL_SECONDS))

    def _assign_ranks(self, restart: int, agents: dict[int, int]) -> None:
        first, world_size = {}, 0
        for agent, nproc in list(agents.items())[: self._rendezvous.hosts.most]:
            first[agent], world_size = world_size, world_size + nproc
        self._rendezvous.publish_ranks(restart, first, world_size)

    def _wait_for_decision(self, restart: int, first: dict[int, int]) -> RestartDecision:
        """Watch the ranks of this host and report their exit codes until a decision is published."""
        reported: list[int | None] | None = None
        self._paused_at = lost_at = 0.0
        while (decision := self._rendezvous.read_decision(restart)) is None:
            self._poll()
            if self._local is not None:
                if (codes := self._exit_codes(self._local)) != reported:
                    reported = codes
                    self._rendezvous.report_exit_codes(restart, codes)
                if not self._paused_at and self._rendezvous.is_pausing(restart):
                    self._paused_at = time.monotonic()
                    self._local.signal(signal.SIGTERM)
            if self._rendezvous.serves:
                lost_at = self._decide_if_due(restart, first, lost_at)
        return decision

    def _exit_codes(self, local: LocalRanks) -> list[int | None]:
        """Return the exit codes. After a signal, a rank that ended without saving counts as interrupted too."""
        end_requested_at = self._signaled_at or self._paused_at
        if end_requested_at and time.monotonic() - end_requested_at > SECONDS_TO_SAVE:
            local.end()
        lost, codes = TransportError.exit_code, local.exit_codes()  # `lost`: another rank ended first
        return [INTERRUPTED if self._signaled_at and code and (code < 0 or code == lost) else code for code in codes]

    def _decide_if_due(self, restart: int, first: dict[int, int], lost_at: float) -> float:
        """Decide for all hosts, after ranks that lost a peer had time to report it. Returns when a rank was lost."""
        rendezvous, alive = self._rendezvous, self._rendezvous.alive_agents()
        newcomers = rendezvous.joined_agents(restart, set(alive) - set(first))
        if newcomers and len(first) < rendezvous.hosts.most and not rendezvous.is_pausing(restart):
            rendezvous.request_pause(restart)
        codes, pausing = rendezvous.exit_codes(restart, first), rendezvous.is_pausing(restart)
        decision = decide(HostStatus(codes, set(first) - set(alive), pausing, self._restarts_left))
        if decision is None:
            return lost_at
        lost_at = lost_at or time.time()
        running = any(code is None for host in codes.values() for code in host)
        if decision.immediately or not running or time.time() - lost_at > _SECONDS_TO_REPORT:
            self._restarts_left -= decision.code is None and not pausing
            rendezvous.publish_decision(restart, replace(decision, lost_at=lost_at))
        return lost_at

    def _environments(self, restart: int, first: int, world_size: int) -> list[dict[str, str]]:
        """Return the environment variables of each rank of this host."""
        address, port = self._rendezvous.address
        shared = {
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": self._nproc,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": restart,
            AGENT: os.getpid(),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or self._rendezvous.interface(),
        }
        if (last := self._last_decision) is not None:
            shared |= {"FREESCALE_LOST_AT": last.lost_at, "FREESCALE_LOST": last.why}
        ranks = [shared | {"RANK": first + local, "LOCAL_RANK": local} for local in range(self._nproc)]
        return [{name: str(value) for name, value in variables.items()} for variables in ranks]

    def _poll(self) -> None:
        """Sleep a moment and send a heartbeat if one is due."""
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()
        if now - self._heartbeat_at > _HEARTBEAT_SECONDS:
            self._rendezvous.heartbeat()
            self._heartbeat_at = now
        self._polled_at = time.monotonic()

    def _watch_store(self) -> None:
        """End this host if the store does not answer: a call over a broken link may never return."""
        while time.monotonic() - self._polled_at < UNRESPONSIVE_SECONDS:
            if self._ended.wait(_POLL_SECONDS):
                return
        if self._local is not None:
            self._local.end()
        error = self._store_lost(f"no answer for {UNRESPONSIVE_SECONDS:.0f} s")
        logger.error("%s", error)
        os._exit(error.exit_code)

    def _store_lost(self, why: str) -> TransportError:
        address, port = self._rendezvous.address
        return TransportError(
            f"this host lost the store at {address}:{port}",
            where=why,
            remedy="check that the host is up and reachable; start this agent again to rejoin",
        )

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Forward it: the ranks of all hosts agree to end after a step, and save."""
        if self._local is None and not self._starting:
            raise KeyboardInterrupt
        self._signaled_at = self._signaled_at or time.monotonic()
        if self._local is not None:
            self._local.signal(signal.Signals(number))
