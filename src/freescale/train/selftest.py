"""Checks every transport and every technique for correctness on the machines where it runs, in seconds.

Each check is a method whose docstring states the guarantee. It returns why it is not possible here, or an empty text,
and raises if the guarantee does not hold. All ranks run all checks together.
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
class CheckOutcome:
    """Result of a check."""

    check: str
    status: Literal["passed", "not possible", "failed"]
    why: str


class Selftest:
    """All checks in order; `run` returns their outcomes, the same on every rank."""

    def __init__(self, world: World) -> None:
        self._world, self._transports = world, TransportFactory(world)
        self._broken: set[str] = set()

    def run(self) -> list[CheckOutcome]:
        """Run every check on every rank, whatever fails."""
        with tempfile.TemporaryDirectory() as folder:
            synthetic.write_log(Path(folder) / "data", "ml1m", users=200, catalogue=300)
            self._folder = Path(folder)
            checks = track(self._checks().items(), "checking", unit="checks")
            return [self._outcome(name, check) for name, check in checks]

    def _checks(self) -> dict[str, Callable[[], str]]:
        each = {f"transport {name}": partial(self._transport, name) for name in TRANSPORTS}
        priority = {f"prioritized over {name}": partial(self._prioritized, name) for name in TRANSPORTS}
        rest = {"balanced": self._balanced, "attention": self._attention, "copy engine": self._copy_engine}
        return {**each, **priority, **rest}

    def _outcome(self, name: str, check: Callable[[], str]) -> CheckOutcome:
        """Run a check; return the worst outcome of any rank."""
        try:
            why = check()
            status = 1 if why else 0
        except Exception as error:  # any error is a failed check; the other checks still run
            why, status = f"rank {self._world.rank}: {reason(error)}", _FAILED
        worst = self._world.transport.max(status, name=f"outcome of {name}")
        if worst == _FAILED:
            self._broken.add(name.removeprefix("transport "))
        return CheckOutcome(name, _STATUS[worst], why if status == worst else "on another rank")

    def _transport(self, name: str) -> str:
        """Uneven all-to-alls of every dtype, empty ones included, deliver each row to its target rank."""
        if name in self._transports.unavailable:
            return self._transports.unavailable[name]
        transport, rank, world_size = self._transports.create(name), self._world.rank, self._world.world_size
        wrong = []  # raised at the end, so that no rank waits for another
        for number in range(_EXCHANGES):
            splits = np.random.default_rng(number).integers(0, 2000, (world_size, world_size)) * (number % 3)
            sent = torch.cat([self._rows(splits, number, rank, to) for to in range(world_size)])
            send, receive = splits[rank].tolist(), splits[:, rank].tolist()
            received = transport.all_to_all(sent, send, receive, name=f"exchange {number} by {name}").wait()
            expected = torch.cat([self._rows(splits, number, source, rank) for source in range(world_size)])
            wrong += [] if torch.equal(received, expected) else [number]
        _require(not wrong, f"{len(wrong)} of {_EXCHANGES} exchanges delivered wrong rows")
        return ""

    def _rows(self, splits: np.ndarray, number: int, source: int, target: int) -> Tensor:
        rows = torch.arange(int(splits[source, target]), device=self._world.device)
        return ((rows + 17 * source + 5 * target) % 199).to(_DTYPES[number % len(_DTYPES)])

    def _prioritized(self, name: str) -> str:
        """Prioritized embedding communication (PEC) trains bitwise the same as synchronous communication."""
        if self._world.world_size == 1:
            return "a single rank exchanges no rows"
        if name in self._transports.unavailable:
            return self._transports.unavailable[name]
        if name in self._broken:
            return "the transport itself failed"
        config = self._config()
        off = replace(config, tables=replace(config.tables, overlap="off"))
        on = replace(config, transport=TransportConfig(urgent=name, deferred=name))  # type: ignore[arg-type]
        synchronous, prioritized = self._train(off), self._train(on)
        for name, value in synchronous.items():
            _require(torch.equal(value, prioritized[name]), f"{name} differs after {_STEPS} steps")
        return ""

    def _balanced(self) -> str:
        """Balanced batches train the same as unbalanced ones, to rounding in fp64."""
        if self._world.world_size == 1:
            return "a single rank has nothing to balance"
        config = replace(self._config(), train=replace(self._config().train, precision="fp64"))
        stay, move = (replace(config, balance=replace(config.balance, mode=mode)) for mode in ("off", "on"))
        unbalanced, balanced = self._train(stay), self._train(move)
        for name, value in unbalanced.items():
            difference = float((value - balanced[name]).norm() / value.norm().clamp_min(1e-300))
            _require(difference < 1e-9, f"{name} differs by {difference:.1e} after {_STEPS} steps")
        return ""

    def _attention(self) -> str:
        """HSTU attention on this device computes the result and gradients of the reference."""
        limits = {torch.float32: 1e-5} | ({torch.bfloat16: 2e-2} if self._world.device.type == "cuda" else {})
        for dtype, limit in limits.items():
            problem = AttentionProblem.edge_cases(heads=2, width=25, dtype=dtype, device=self._world.device)
            error_of = relative_errors(problem, hstu_attention)
            wrong = {name: error for name, error in error_of.items() if not error <= limit}  # NaN fails too
            _require(not wrong, f"{dtype} is off by {wrong}")
        return ""

    def _copy_engine(self) -> str:
        """Copy engines, not kernels, move rows between GPUs, as a profile shows."""
        if "copy_engine" in self._transports.unavailable:
            return self._transports.unavailable["copy_engine"]
        from freescale.transport.copy_engine import kernels_launched_by

        transport = self._transports.create("copy_engine")
        counts = [1 << 20] * self._world.world_size
        rows = torch.zeros(sum(counts), device=self._world.device)
        kernels = kernels_launched_by(lambda: transport.all_to_all(rows, counts, counts, name="profiled").wait())
        _require(not kernels, f"fell back to kernels: {', '.join(kernels)}")
        return ""

    def _config(self) -> RunConfig:
        return RunConfig(
            data=DataConfig(path=str(self._folder / "data"), global_batch=32, max_history=48, workers=0),
            model=ModelConfig(dim=16, layers=1, heads=1),
            task=TaskConfig(negatives=8),
            transport=TransportConfig(urgent="c10d", deferred="c10d"),
            train=TrainConfig(max_steps=_STEPS, lr=0.01, timeout=self._world.transport.timeout),
        )

    def _train(self, config: RunConfig) -> dict[str, Tensor]:
        """Train a few steps; return the dense weights and this rank's rows."""
        from freescale.train.build import build  # torchrec takes seconds to import

        with tempfile.TemporaryDirectory() as folder, handled_by(logging.NullHandler()):
            trainer = build(config, self._world, Path(folder), quiet=True)
            trainer.fit()
            trainer.close()
            tables = trainer.components.tables
            rows = {} if tables is None else tables.shard.state()
            return {name: value.clone() for name, value in (trainer.components.module.state_dict() | rows).items()}


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)
