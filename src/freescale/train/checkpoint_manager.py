"""Checkpoints of a training: which state they hold, when they are saved, and how training resumes from them."""

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from freescale.balance.cost import Cost
from freescale.balance.planner import Planner
from freescale.balance.sample_exchange import Batches
from freescale.bubbles.step_profiler import StepProfiler
from freescale.checkpoint import checkpoints
from freescale.checkpoint.checkpoints import CheckpointWriter
from freescale.checkpoint.run_folder import checkpoint_path
from freescale.checkpoint.tensor_files import CheckpointError, DamagedError, LocalRows, MismatchError
from freescale.config import RunConfig, to_toml
from freescale.data.vocabulary import DataIdentity, check_recorded_identity
from freescale.embedding.sharded import ShardedTables
from freescale.errors import reason
from freescale.log import warning_once
from freescale.train.metrics_logger import MetricsLogger
from freescale.train.sharded_model import SequenceModule
from freescale.train.step import Step
from freescale.train.step_autotuner import StepAutotuner
from freescale.transport.host_layout import HostLayout
from freescale.transport.world import World, new_group, restart_count

_LOADED, _DAMAGED, _MISMATCH = range(3)
_FIRST_INTERVAL_SECONDS = 60.0
"""Interval until the cost of saving is measured."""
Review = Callable[[Path, dict[str, Any]], None]


@dataclass(frozen=True)
class TrainerComponents:
    """What `build` makes a trainer from."""

    config: RunConfig
    world: World
    loader: Batches
    planner: Planner | None
    """Places the samples of the loader's batches; None without balancing."""
    steps: int
    """Number of steps of the whole run."""
    module: SequenceModule
    tables: ShardedTables | None
    optimizer: torch.optim.Optimizer
    step: Step
    autotuner: StepAutotuner
    profiler: StepProfiler
    cost: Cost
    """Cost model of a sample, for the report."""
    data: DataIdentity
    """Identity of the training data."""
    evaluate: Callable[[], dict[str, float]] | None
    """Returns metrics over the held-out part, the same on all ranks; None where nothing is held out."""
    partitions: Mapping[int, str] = field(default_factory=dict)
    """In continuous training: the partitions by their first step."""
    validate: Callable[[str], dict[str, float]] | None = None
    """In continuous training: returns metrics over the events of a partition, the same on all ranks."""


@dataclass
class TrainingProgress:
    """Position of a training, the same on all ranks."""

    cursor: dict[str, Any]
    """Loader state after the last computed batch."""
    done: int = 0
    """Steps done."""
    excluded: set[int] = field(default_factory=set)
    """Samples with a NaN or infinite loss or gradient, which training leaves out."""
    validated: list[float] = field(default_factory=list)
    """In continuous training: the guarded metric of the last partitions."""


class CheckpointInterval:
    """Chooses how often to save, by Young's rule.

    With a cost of c seconds per checkpoint and a failure every m seconds, an interval of sqrt(2 c m) seconds loses the
    least time. The configured expectation counts as one observed failure.
    """

    def __init__(self, *, hours_between_failures: float) -> None:
        self._expected = 3600.0 * hours_between_failures
        self._cost, self._failures = 0.0, 0
        self._seconds_before, self._since = 0.0, time.monotonic()

    def record_save(self, seconds: float) -> None:
        """Record how long training stood still to save."""
        self._cost = seconds

    def record_failure(self) -> None:
        """Record the loss of a rank."""
        self._failures += 1

    @property
    def seconds(self) -> float:
        """Time between two checkpoints."""
        between_failures = (self._expected + self._runtime) / (1 + self._failures)
        return math.sqrt(2.0 * self._cost * between_failures) if self._cost else _FIRST_INTERVAL_SECONDS

    @property
    def _runtime(self) -> float:
        return self._seconds_before + time.monotonic() - self._since

    def state_dict(self) -> list[float]:
        """Return runtime, failures and cost."""
        return [self._runtime, self._failures, self._cost]

    def load_state_dict(self, state: list[float]) -> None:
        """Restore runtime, failures and cost."""
        self._seconds_before, self._since = state[0], time.monotonic()
        self._failures, self._cost = int(state[1]), state[2]


class CheckpointManager:
    """Saves a training and restores it. `progress` is updated in place when a checkpoint is loaded."""

    def __init__(
        self, components: TrainerComponents, progress: TrainingProgress, folder: Path, metrics: MetricsLogger
    ) -> None:
        self._components, self._progress, self._metrics = components, progress, metrics
        self._train = components.config.train
        transport = new_group(timeout=self._train.timeout)  # a group of its own: training and saving run concurrently
        self._writer = CheckpointWriter(folder / "checkpoints", keep=self._train.keep, transport=transport)
        self._interval = CheckpointInterval(hours_between_failures=self._train.hours_between_failures)
        self.on_complete: Callable[[Path], None] | None = None
        """Called on all ranks with each complete checkpoint, in the same order."""
        self._saving: Path | None = None
        self._last = self._next = 0
        """Steps of the last checkpoint, and of the next one inside an epoch as chosen by rank 0."""

    def is_due(self, *, stopped: bool) -> bool:
        """Return whether to save after this step."""
        done, every = self._progress.done, self._train.save_every
        if stopped or done == self._components.steps or done in self._components.partitions:
            return True
        return done % every == 0 if every else done % len(self._components.loader) == 0 or done == self._next

    def propose_next(self, seconds_per_step: float) -> int:
        """Return the step after which this rank would save next."""
        return max(self._progress.done + 1, self._last + math.ceil(self._interval.seconds / seconds_per_step))

    def set_next(self, step: int) -> None:
        """Adopt the proposal of rank 0."""
        self._next = step

    def save(self) -> None:
        """Copy the state of training now, and write it while training continues."""
        began = time.perf_counter()
        self._components.step.synchronize()
        self.wait_for_last()
        self._writer.save(self._progress.done, self._tensors(), self._facts())
        self._saving = checkpoint_path(self._writer.folder, self._progress.done)
        self._interval.record_save(time.perf_counter() - began)
        self._last = self._progress.done

    def wait_for_last(self) -> None:
        """Wait for the last checkpoint. A failed write is only logged here, since the next one may succeed."""
        try:
            self._writer.wait()
        except CheckpointError as error:
            if error.__cause__ is not None or self._components.world.is_rank_zero:
                warning_once(f"{error}\n  training continues, and tries the next checkpoint")
            self._saving = None
        self._report_complete()

    def close(self) -> None:
        """Finish saving. A failed write of the last checkpoint raises."""
        self._writer.close()
        self._report_complete()

    def _report_complete(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None and self.on_complete is not None:
            self.on_complete(saving)

    def resume(self, review: Review | None = None) -> None:
        """Continue from the newest checkpoint that all ranks can read, whatever world size wrote it.

        `review`: may refuse a checkpoint by its facts before it is loaded, on all ranks alike.
        """
        transport = self._components.world.transport
        while (newest := checkpoints.newest(self._writer.folder, transport)) is not None:
            error = self._load(newest, review)
            status = _LOADED if error is None else _DAMAGED if isinstance(error, DamagedError) else _MISMATCH
            worst = transport.max(status, name="loading")
            if worst == _LOADED:
                tables = self._components.tables
                if tables is not None and tables.replicated is not None:
                    tables.replicated.gather()
                self.continue_from_here(f"resumed from {newest} at step {self._progress.done}")
                return
            if worst == _MISMATCH:
                raise error or CheckpointError(f"another rank reports that {newest} does not fit this run")
            if error is not None:
                warning_once(str(error))
            if self._components.world.is_rank_zero:
                self._metrics.print_line(f"{newest} is damaged and set aside; trying the one before it")
                checkpoints.set_aside(newest)
        remedy = "start anew with another --out; the damaged checkpoints are kept"
        # Restarted ranks begin again from nothing. A user who asked to resume gets an error instead.
        kind = CheckpointError if restart_count() else MismatchError
        raise kind("there is no checkpoint that can be read", where=str(self._writer.folder), remedy=remedy)

    def log_recovery(self) -> None:
        """Log once, after the first step that follows the loss of a rank, how long the recovery took."""
        lost_at = float(os.environ.pop("FREESCALE_LOST_AT", "0"))
        if not lost_at:
            return
        self._interval.record_failure()
        why, seconds = os.environ.get("FREESCALE_LOST", ""), time.time() - lost_at
        entry = {"kind": "recovery", "step": self._progress.done, "restart_count": restart_count()}
        self._metrics.write(entry | {"why": why, "seconds": seconds})
        self._metrics.print_line(f"recovered in {seconds:.1f} s: {why}")

    def continue_from_here(self, message: str) -> None:
        """Drop metrics of later steps, which a lost start has left, and print the message."""
        self._metrics.rewind(self._progress.done)
        self._metrics.print_line(message)

    def _load(self, checkpoint: Path, review: Review | None) -> CheckpointError | None:
        """Restore everything from a checkpoint; return the error if it cannot be used."""
        world_size = self._components.world.world_size
        try:
            facts, tensors = checkpoints.read_facts(checkpoint), self._tensors()
            check_recorded_identity(facts.get("data"), self._components.data, where=self._components.config.data.path)
            if review is not None:
                review(checkpoint, facts)
            if facts["ranks"] != world_size:
                del tensors[self._generator]
                change = f"resumed on {world_size} ranks a checkpoint of {facts['ranks']}"
                warning_once(f"{change}: torch's random generators start anew")
            elif "hosts" in facts and HostLayout(tuple(facts["hosts"])).sums != self._layout.sums:
                warning_once("resumed on other hosts: row gradients are added in another order, which changes rounding")
            checkpoints.load(checkpoint, tensors, self._components.tables)
            self._restore(facts)
        except CheckpointError as error:
            return error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return DamagedError(f"facts.json lacks the position of training: {reason(error)}", where=str(checkpoint))
        if self._generator in tensors:
            torch.set_rng_state(tensors[self._generator].local)
        return None

    def _restore(self, facts: dict[str, Any]) -> None:
        """Restore what a checkpoint holds beside its tensors."""
        components, progress = self._components, self._progress
        components.loader.load_state_dict(facts["cursor"])
        if components.planner is not None and facts["balance"] is not None:
            components.planner.load_state_dict(facts["balance"])
        components.step.grad_norm_monitor.load_state_dict(facts["norms"])
        if "autotune" in facts:
            components.autotuner.load_state_dict(facts["autotune"])
        self._interval.load_state_dict(facts["interval"])
        progress.cursor, progress.done = facts["cursor"], facts["step"]
        progress.excluded |= set(facts["left_out"])
        progress.validated = list(facts.get("validated", []))
        self._last, self._next, components.profiler.step = progress.done, 0, progress.done
        components.step.done = progress.done

    @property
    def _generator(self) -> str:
        return f"generator.{self._components.world.rank}"

    @property
    def _layout(self) -> HostLayout:
        """The hosts of the ranks; without sharded tables they do not matter."""
        tables = self._components.tables
        layout = None if tables is None else tables.layout
        return layout or HostLayout.of([0] * self._components.world.world_size)

    def _tensors(self) -> dict[str, LocalRows]:
        components, world = self._components, self._components.world
        model = checkpoints.model_tensors(
            components.module, components.tables, rank=world.rank, world_size=world.world_size
        )
        optimizer = checkpoints.optimizer_tensors(components.module, components.optimizer)
        return model | optimizer | checkpoints.generator_tensors(world.rank)

    def _facts(self) -> dict[str, object]:
        components, progress = self._components, self._progress
        tables = components.tables.tables if components.tables is not None else []
        return {
            "cursor": progress.cursor,
            "left_out": sorted(progress.excluded),
            "validated": progress.validated,
            "norms": components.step.grad_norm_monitor.state_dict(),
            "autotune": components.autotuner.state_dict(),
            "interval": self._interval.state_dict(),
            "balance": components.planner.state_dict() if components.planner is not None else None,
            "data": asdict(components.data),
            "hosts": list(self._layout.host_of),
            "buckets": {t.name: t.layout.buckets for t in tables if t.layout is not None},
            "config": to_toml(components.config),
        }
