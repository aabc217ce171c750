"""Checks every transport, technique, kernel and recipe for correctness on the machines where it runs.

Each check is a method whose docstring states the guarantee. It returns why it is not possible here, or an empty text,
and raises if the guarantee does not hold. All ranks run all checks together, from the smallest upwards. A check that
does not end in time ends the process, after the stacks of its threads are written. After some faults, such as an error
of CUDA, no rank can go on: each returns the outcomes so far.
"""

import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from freescale.checkpoint import checkpoints
from freescale.config import DataConfig, ModelConfig, RunConfig, TaskConfig, TrainConfig, TransportConfig
from freescale.config.recipes import RECIPES
from freescale.data import synthetic
from freescale.data.synthetic_features import write_feature_log
from freescale.errors import TransportError, reason
from freescale.log import handled_by
from freescale.models.attention.operators import hstu_attention, softmax_attention
from freescale.models.attention.reference import AttentionProblem, relative_errors
from freescale.progress import track
from freescale.train.kernel_checks import kernel_errors
from freescale.transport.base import POLL_SECONDS
from freescale.transport.selection import TRANSPORTS, TransportFactory
from freescale.transport.world import World

_STEPS, _EXCHANGES = 8, 40
_RECIPE_STEPS, _RECIPE_HISTORY = 2, 64
_RECIPE_ROWS = 1000
_CHECK_SECONDS = 300.0
"""What a check may take; waits inside have the shorter timeout of the transport."""
_WRITE_SECONDS = 8.0
"""What the other ranks have to write their files, before a rank that cannot go on ends and a launcher ends them all."""
_END_SECONDS = 5.0
"""What ranks that wait for a failed one have to notice it, before this one counts as hanging."""
_FAILED = 2
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
_STATUS: tuple[Literal["passed"], Literal["not possible"], Literal["failed"]] = ("passed", "not possible", "failed")


@dataclass(frozen=True)
class CheckOutcome:
    """Result of a check."""

    check: str
    status: Literal["passed", "not possible", "failed"]
    why: str
    seconds: float = field(default=0.0, compare=False)
    trace: str = field(default="", compare=False)
    """Traceback of this rank, or the stacks of its threads if the check did not end."""


OnFailure = Callable[[list[CheckOutcome]], None]
"""Called with the outcomes so far when a check fails or does not end: the process may not get any further."""


class Selftest:
    """All checks in order; `run` returns their outcomes, the same on every rank."""

    def __init__(
        self,
        world: World,
        folder: Path,
        *,
        only: str = "*",
        on_failure: OnFailure = lambda _: None,
        seconds: float = _CHECK_SECONDS,
    ) -> None:
        """`folder`: for a run that all ranks resume. `only`: pattern of names. `seconds`: what a check may take."""
        self._world, self._shared, self._only = world, folder, only
        self._on_failure, self._seconds = on_failure, seconds
        self.is_cut_short = False
        """Whether the ranks could not go on after a check."""
        self._transports = TransportFactory(world)
        self._broken: set[str] = set()
        self._outcomes: list[CheckOutcome] = []

    def run(self) -> list[CheckOutcome]:
        """Run every check on every rank, whatever fails, as long as the ranks can communicate."""
        self._outcomes = []
        with tempfile.TemporaryDirectory() as folder:
            synthetic.write_log(Path(folder) / "data", "ml1m", users=200, catalogue=300)
            self._folder = Path(folder)
            checks = {name: check for name, check in self._checks().items() if fnmatch(name, self._only)}
            for name, check in track(checks.items(), "checking", unit="checks"):
                self._outcomes.append(self._outcome(name, check))
                if self.is_cut_short:
                    self._on_failure(self._outcomes)
                    time.sleep(_WRITE_SECONDS)
                    break
        return self._outcomes

    def _checks(self) -> dict[str, Callable[[], str]]:
        """Return the checks by name, the smallest first."""
        first = {"device": self._device, "collectives": self._collectives}
        each = {f"transport {name}": partial(self._transport, name) for name in TRANSPORTS}
        kernels = {"attention": self._attention, "fused kernels": self._fused, "copy engine": self._copy_engine}
        priority = {f"prioritized over {name}": partial(self._prioritized, name) for name in TRANSPORTS}
        training = {"repeatable": self._repeatable, "balanced": self._balanced, "resumed": self._resumed}
        recipes = {f"recipe {name}": partial(self._recipe, name) for name in RECIPES}
        return {**first, **each, **kernels, **priority, **training, **recipes}

    def _outcome(self, name: str, check: Callable[[], str]) -> CheckOutcome:
        """Run a check; return the worst outcome of any rank."""
        began, trace, ended = time.monotonic(), "", threading.Event()
        threading.Thread(target=self._watch, args=(name, ended), daemon=True).start()
        try:
            why = check()
            status = 1 if why else 0
        except Exception as error:  # any error is a failed check; the other checks still run
            why, status, trace = f"rank {self._world.rank}: {reason(error)}", _FAILED, traceback.format_exc()
            # After an error of its device, a process may not get beyond the next call.
            self._on_failure([*self._outcomes, CheckOutcome(name, "failed", why, _seconds_since(began), trace)])
        try:
            worst = self._world.transport.max(status, name=f"outcome of {name}")
        except Exception as error:
            worst, self.is_cut_short = _FAILED, True
            if status != _FAILED:
                why, status, trace = f"rank {self._world.rank}: {reason(error)}", _FAILED, traceback.format_exc()
            if not isinstance(error, TransportError):
                self._world.transport.peers.transport_error(name, error)  # the other ranks stop waiting
        finally:
            ended.set()
        if worst == _FAILED:
            self._broken.add(name.removeprefix("transport "))
        why = why if status == worst else "on another rank"
        return CheckOutcome(name, _STATUS[worst], why, _seconds_since(began), trace)

    def _watch(self, name: str, ended: threading.Event) -> None:
        """End the process of a check that does not end: nothing else stops a call that hangs in a library."""
        began = time.monotonic()
        until, has_peer_failed = began + self._seconds, self._has_peer_failed()
        while (remaining := until - time.monotonic()) > 0:
            if ended.wait(min(POLL_SECONDS, remaining)):
                return
            if not has_peer_failed and self._has_peer_failed():
                # Ranks that wait for others end by themselves. This one hangs, and the others end soon.
                until, has_peer_failed = min(until, time.monotonic() + _END_SECONDS), True
        why = f"rank {self._world.rank}: did not end within {_seconds_since(began):.0f} s"
        self._on_failure([*self._outcomes, CheckOutcome(name, "failed", why, _seconds_since(began), stacks())])
        os._exit(1)

    def _has_peer_failed(self) -> bool:
        try:
            self._world.transport.peers.raise_if_peer_failed()
        except RuntimeError:
            return True
        return False

    def _device(self) -> str:
        """Products and sums on this device are those of the CPU, to rounding."""
        values = torch.linspace(-1, 1, 64 * 48, dtype=torch.float64).view(64, 48)
        here = values.to(self._world.device)
        for got, expected in ((here @ here.T, values @ values.T), (here.sum(0), values.sum(0))):
            _require(torch.allclose(got.cpu(), expected, rtol=1e-12, atol=1e-12), "a product or a sum is wrong")
        return ""

    def _collectives(self) -> str:
        """Sums and gathers over all ranks hold the value of every rank."""
        transport, world_size = self._world.transport, self._world.world_size
        gathered = transport.all_gather(torch.tensor([self._world.rank], device=transport.device), name="ranks")
        _require(gathered.wait_on_host().flatten().tolist() == list(range(world_size)), "a rank is missing")
        total = transport.sum(self._world.rank + 1, name="ranks")
        _require(total == world_size * (world_size + 1) // 2, f"the ranks sum up to {total}")
        return ""

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

    def _repeatable(self) -> str:
        """Two runs with one seed give the same bits; on a device also softmax attention in 16 bits."""
        config = self._config()
        variants = [config]
        if self._world.device.type != "cpu":  # whose sums have an order in any precision
            model, train = replace(config.model, kind="sasrec"), replace(config.train, precision="bf16")
            variants.append(replace(config, model=model, train=train))
        for variant in variants:
            one, other = self._train(variant), self._train(variant)
            what = f"of {variant.model.kind} in {variant.train.precision}"
            for name, value in one.items():
                _require(torch.equal(value, other[name]), f"{name} {what} differs after {_STEPS} steps")
        return ""

    def _resumed(self) -> str:
        """A run that is saved, ended and resumed gives the bits of an uninterrupted one."""
        run = self._new_shared_folder()
        if run is None:
            return f"{self._shared} is not one folder for all ranks"
        whole = self._train(self._config())
        half = replace(self._config(), train=replace(self._config().train, max_steps=_STEPS // 2))
        self._train(half, run)
        resumed = self._train(self._config(), run)
        if self._world.is_rank_zero:
            shutil.rmtree(run)
        for name, value in whole.items():
            _require(torch.equal(value, resumed[name]), f"{name} differs after {_STEPS} steps")
        return ""

    def _new_shared_folder(self) -> Path | None:
        """Return an empty folder that every rank sees, if there is one."""
        transport, is_first = self._world.transport, self._world.is_rank_zero
        number = transport.max(os.getpid() if is_first else 0, name="name of the shared folder")
        folder = self._shared / f"resumed-{number:.0f}"
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        transport.max(0, name="the shared folder exists")
        is_missing = transport.max(0 if folder.is_dir() else 1, name="the shared folder is seen")
        return None if is_missing else folder

    def _recipe(self, name: str) -> str:
        """The recipe trains here: its model in full size, on short histories, with small tables of features."""
        config = RECIPES[name]
        log = "features" if config.features else "ranking" if config.task.kind == "ranking" else "data"
        data = self._folder / log
        if log == "features" and not data.exists():
            write_feature_log(data, "yambda", users=64, shorter=200)
        elif not data.exists():
            synthetic.write_planted_log(data, users=64)
        features = {n: replace(f, rows=min(f.rows, _RECIPE_ROWS)) for n, f in config.features.items()}
        sizes = {"global_batch": 2 * self._world.world_size, "workers": 0, "shards": 8}
        history = min(config.data.max_history, _RECIPE_HISTORY)
        split = "none" if config.features else config.data.split
        config = replace(
            config,
            features=features,
            data=replace(config.data, path=str(data), max_history=history, split=split, **sizes),
            transport=TransportConfig(urgent="c10d", deferred="c10d"),
            train=replace(config.train, max_steps=_RECIPE_STEPS, epochs=1, timeout=self._world.transport.timeout),
        )
        weights = self._train(config)
        wrong = [key for key, value in weights.items() if value.is_floating_point() and not value.isfinite().all()]
        _require(not wrong, f"not finite after {_RECIPE_STEPS} steps: {', '.join(wrong)}")
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
        """HSTU's and softmax attention on this device compute the result and gradients of the reference."""
        limits = {torch.float32: 1e-5} | ({torch.bfloat16: 2e-2} if self._world.device.type != "cpu" else {})
        for dtype, limit in limits.items():
            problem = AttentionProblem.edge_cases(heads=2, width=25, dtype=dtype, device=self._world.device)
            for attend in (hstu_attention, softmax_attention):
                error_of = relative_errors(problem, attend, softmax=attend is softmax_attention)
                wrong = {name: error for name, error in error_of.items() if not error <= limit}  # NaN fails too
                _require(not wrong, f"{dtype} is off by {wrong} in {attend.__name__}")
        return ""

    def _fused(self) -> str:
        """Hashes, dropout, the retrieval loss and row updates on this device are those of the CPU."""
        for width in (25, 64):
            wrong = {name: error for name, error in kernel_errors(self._world.device, width).items() if error > 1e-5}
            _require(not wrong, f"width {width} is off by {wrong}")
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

    def _train(self, config: RunConfig, run: Path | None = None) -> dict[str, Tensor]:
        """Train a few steps, in a new folder or from the checkpoint of `run`; return weights and this rank's rows."""
        from freescale.train.build import build  # torchrec takes seconds to import

        with tempfile.TemporaryDirectory() as folder, handled_by(logging.NullHandler()):
            trainer = build(config, self._world, run or Path(folder), quiet=True)
            if run is not None and checkpoints.complete_checkpoints(run / "checkpoints"):
                trainer.checkpoints.resume()
            trainer.fit()
            trainer.close()
            tables = trainer.components.tables
            rows = {} if tables is None else tables.shard.state()
            return {name: value.clone() for name, value in (trainer.components.module.state_dict() | rows).items()}


def _seconds_since(began: float) -> float:
    return round(time.monotonic() - began, 3)


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)


def stacks() -> str:
    """Return the stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"{names.get(i, i)}:\n{''.join(traceback.format_stack(frame))}" for i, frame in frames)
