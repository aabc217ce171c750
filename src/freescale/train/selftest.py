"""Correctness of every way and every technique on the machines where it runs, in seconds.

Each check is a function whose docstring says what it proves. It gives why it is not possible here, or nothing; it
raises when what it promises does not hold. All ranks run all checks together.
"""

import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from freescale.config import DataConfig, ModelConfig, RunConfig, TaskConfig, TrainConfig, TransportConfig
from freescale.data import synthetic
from freescale.errors import reason
from freescale.log import handled_by
from freescale.models.attention.operators import hstu_attention
from freescale.models.attention.reference import AttentionProblem, relative_errors
from freescale.progress import track
from freescale.transport.selection import TRANSPORTS, TransportFactory
from freescale.transport.world import World

_STEPS, _EXCHANGES = 8, 40
_FAILED = 2
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
_STATUS: tuple[Literal["passed"], Literal["not possible"], Literal["failed"]] = ("passed", "not possible", "failed")


@dataclass(frozen=True)
class Outcome:
    """What became of a check."""

    check: str
    status: Literal["passed", "not possible", "failed"]
    why: str


class Selftest:
    """All checks, in order; `run` gives their outcomes, the same on every rank."""

    def __init__(self, world: World) -> None:
        self._world, self._ways = world, TransportFactory(world)
        self._broken: set[str] = set()

    def run(self) -> list[Outcome]:
        """Every check on every rank, whatever fails."""
        with tempfile.TemporaryDirectory() as folder:
            synthetic.write_log(Path(folder) / "data", "ml1m", users=200, catalogue=300)
            self._folder = Path(folder)
            checks = track(self._checks().items(), "checking", unit="checks")
            return [self._outcome(name, check) for name, check in checks]

    def _checks(self) -> dict[str, Callable[[], str]]:
        each = {f"transport {way}": partial(self._transport, way) for way in TRANSPORTS}
        priority = {f"prioritized over {way}": partial(self._prioritized, way) for way in TRANSPORTS}
        rest = {"balanced": self._balanced, "attention": self._attention, "copy engine": self._copy_engine}
        return {**each, **priority, **rest}

    def _outcome(self, name: str, check: Callable[[], str]) -> Outcome:
        """Run a check; the worst that happened on any rank counts."""
        try:
            why = check()
            status = 1 if why else 0
        except Exception as error:  # whatever it is, the user is to see it and the other checks are to run
            why, status = f"rank {self._world.rank}: {reason(error)}", _FAILED
        worst = self._world.transport.max(status, name=f"outcome of {name}")
        if worst == _FAILED:
            self._broken.add(name.removeprefix("transport "))
        return Outcome(name, _STATUS[worst], why if status == worst else "on another rank")

    def _transport(self, way: str) -> str:
        """Uneven exchanges of every dtype, zeros among them, bring each row to the rank that it was meant for."""
        if way in self._ways.unavailable:
            return self._ways.unavailable[way]
        transport, rank, world_size = self._ways.create(way), self._world.rank, self._world.world_size
        wrong = []  # said at the end, so that no rank waits for another one
        for number in range(_EXCHANGES):
            splits = np.random.default_rng(number).integers(0, 2000, (world_size, world_size)) * (number % 3)
            mine = torch.cat([self._rows(splits, number, rank, to) for to in range(world_size)])
            send, receive = splits[rank].tolist(), splits[:, rank].tolist()
            got = transport.all_to_all(mine, send, receive, name=f"exchange {number} by {way}").wait()
            expected = torch.cat([self._rows(splits, number, source, rank) for source in range(world_size)])
            wrong += [] if torch.equal(got, expected) else [number]
        _require(not wrong, f"{len(wrong)} of {_EXCHANGES} exchanges brought other rows than were sent")
        return ""

    def _rows(self, splits: np.ndarray, number: int, source: int, target: int) -> Tensor:
        rows = torch.arange(int(splits[source, target]), device=self._world.device)
        return ((rows + 17 * source + 5 * target) % 199).to(_DTYPES[number % len(_DTYPES)])

    def _prioritized(self, way: str) -> str:
        """Rows that travel behind compute teach bitwise what rows that are waited for teach."""
        if self._world.world_size == 1:
            return "one rank has nobody to exchange rows with"
        if way in self._ways.unavailable:
            return self._ways.unavailable[way]
        if way in self._broken:
            return "the way itself failed"
        config = self._config()
        off = replace(config, tables=replace(config.tables, overlap="off"))
        on = replace(config, transport=TransportConfig(urgent=way, deferred=way))  # type: ignore[arg-type]
        plain, prioritized = self._learnt(off), self._learnt(on)
        for name, value in plain.items():
            _require(torch.equal(value, prioritized[name]), f"{name} differs after {_STEPS} steps")
        return ""

    def _balanced(self) -> str:
        """Samples that move between ranks teach what samples that stay teach, to rounding in fp64."""
        if self._world.world_size == 1:
            return "one rank has nobody to balance with"
        config = replace(self._config(), train=replace(self._config().train, precision="fp64"))
        stay, move = (replace(config, balance=replace(config.balance, mode=mode)) for mode in ("off", "on"))
        one, other = self._learnt(stay), self._learnt(move)
        for name, value in one.items():
            apart = float((value - other[name]).norm() / value.norm().clamp_min(1e-300))
            _require(apart < 1e-9, f"{name} differs by {apart:.1e} after {_STEPS} steps")
        return ""

    def _attention(self) -> str:
        """HSTU attention of this device gives the reference's result and gradients."""
        limits = {torch.float32: 1e-5} | ({torch.bfloat16: 2e-2} if self._world.device.type == "cuda" else {})
        for dtype, limit in limits.items():
            found = relative_errors(
                AttentionProblem.edge_cases(heads=2, width=25, dtype=dtype, device=self._world.device), hstu_attention
            )
            wrong = {name: error for name, error in found.items() if not error <= limit}  # NaN is wrong
            _require(not wrong, f"{dtype} is off by {wrong}")
        return ""

    def _copy_engine(self) -> str:
        """No kernel moves rows: a transfer between GPUs is done by copy engines, as its profile shows."""
        if "copy_engine" in self._ways.unavailable:
            return self._ways.unavailable["copy_engine"]
        from freescale.transport.copy_engine import kernels_launched_by

        transport = self._ways.create("copy_engine")
        counts = [1 << 20] * self._world.world_size
        rows = torch.zeros(sum(counts), device=self._world.device)
        found = kernels_launched_by(lambda: transport.all_to_all(rows, counts, counts, name="profiled").wait())
        _require(not found, f"fell back to kernels: {', '.join(found)}")
        return ""

    def _config(self) -> RunConfig:
        return RunConfig(
            data=DataConfig(path=str(self._folder / "data"), global_batch=32, max_history=48, workers=0),
            model=ModelConfig(dim=16, layers=1, heads=1),
            task=TaskConfig(negatives=8),
            transport=TransportConfig(urgent="c10d", deferred="c10d"),
            train=TrainConfig(max_steps=_STEPS, lr=0.01, timeout=self._world.transport.timeout),
        )

    def _learnt(self, config: RunConfig) -> dict[str, Tensor]:
        """Dense weights and own rows after a few steps."""
        from freescale.train.build import build  # torchrec takes seconds to import

        with tempfile.TemporaryDirectory() as folder, handled_by(logging.NullHandler()):
            trainer = build(config, self._world, Path(folder), quiet=True)
            trainer.fit()
            trainer.close()
            tables = trainer.parts.tables
            rows = {} if tables is None else tables.shard.state()
            return {name: value.clone() for name, value in (trainer.parts.network.state_dict() | rows).items()}


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)
