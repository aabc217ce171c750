"""The training loop: epochs, learning rates, progress, evaluation, checkpoints, and a clean end on request."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from freescale.config import TrainConfig
from freescale.data.batch import Batch
from freescale.errors import ConfigError, DataError, GuardError
from freescale.log import info_once
from freescale.overlap.autotune import Setting
from freescale.train.checkpoint_manager import CheckpointManager, TrainerComponents, TrainingProgress
from freescale.train.metrics_logger import MetricsLogger, StepMeter, busiest_owner
from freescale.train.nonfinite import FaultPolicy, NonFiniteFault, gather_samples
from freescale.train.step import LearningRates, StepState
from freescale.transport.world import restart_count

_SAME_CTRL_C_SECONDS = 2.0
_GUARDED_PARTITIONS = 8
"""Partitions before the current one that the guard compares with."""


class Trainer:
    """Trains until the configured number of steps is done, or until it receives a stop request."""

    def __init__(self, components: TrainerComponents, folder: Path, metrics: MetricsLogger) -> None:
        self.components, self.progress = components, TrainingProgress(components.loader.state_dict())
        self._train, self._metrics = components.config.train, metrics
        self.checkpoints = CheckpointManager(components, self.progress, folder, metrics)
        self._policy = FaultPolicy(self._train.on_fault)
        self._stopwatch = components.planner.stopwatch if components.planner is not None else None
        components.profiler.on_compute_time = self._stopwatch.record_time if self._stopwatch is not None else None
        components.profiler.on_interval = metrics.log_times
        self._meter = StepMeter(components.planner)
        self._loss_terms = LossTermCounter(components)
        self._stop_requested_at = 0.0

    def fit(self) -> bool:
        """Train, evaluate and save. Returns whether the run finished rather than being stopped."""
        self._metrics.print_line(self._describe_length())
        done, world = self.progress.done, self.components.world
        if done >= self.components.steps and world.is_rank_zero:
            message = f"the run is finished at step {done}, and nothing is left to train"
            info_once(f"{message}; raise train.epochs or train.max_steps to continue")
        self._metrics.log_start(done, world_size=world.world_size, reason=self._start_reason())
        main = threading.current_thread() is threading.main_thread()  # in another one, its program handles signals
        kinds = (signal.SIGINT, signal.SIGTERM) if main else ()
        before = {kind: signal.signal(kind, self._on_signal) for kind in kinds}
        try:
            stopped = self._run()
            with world.transport.guard("bubbles"):
                self.components.profiler.close()
            self.checkpoints.close()
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
        return not stopped

    def close(self, *, finished: bool = True) -> None:
        """Write the end entry, print what was left out and how much memory overlap took, and end all output."""
        self._metrics.write({"kind": "end", "step": self.progress.done, "finished": finished})
        components = self.components
        for line in [*components.loader.report(), *components.step.report(), *self._loss_terms.report()]:
            self._metrics.print_line(line)
        self._metrics.close()

    def _describe_length(self) -> str:
        """Return how many steps the run has, and what ends it."""
        steps, per_epoch, train = self.components.steps, len(self.components.loader), self._train
        length = f"{steps:,} steps, {per_epoch:,} per epoch"
        if steps < train.epochs * per_epoch:
            return f"{length}: train.max_steps = {train.max_steps} ends the run before train.epochs = {train.epochs}"
        if steps < train.max_steps:
            return f"{length}: train.epochs = {train.epochs} ends the run before train.max_steps = {train.max_steps}"
        return length

    def _start_reason(self) -> str:
        """Return why training begins or continues here, for the metrics."""
        if restart_count():
            return os.environ.get("FREESCALE_LOST", "restarted by the launcher")
        return "resumed" if self.progress.done else "new run"

    def _run(self) -> bool:
        if self._train.on_fault != "stop" and not self.progress.done:  # a rollback needs a first checkpoint
            self.checkpoints.save()
        while (stopped := self._train_until_rollback()) is None:
            self._roll_back()
        self.components.step.close()
        stopped_early = stopped and self.progress.done < self.components.steps
        if stopped_early:
            self._metrics.print_line(f"asked to stop: saving step {self.progress.done}; --resume continues from here")
        return stopped_early

    def _train_until_rollback(self) -> bool | None:
        """Train step by step. Returns whether a stop was requested, or None if training has to go back."""
        stopped, profiler, step = False, self.components.profiler, self.components.step
        self._validate_if_due()
        profiler.restart_step()
        batches = profiler.iterate("data", self._batches())
        item = next(batches, None)
        while item is not None and not stopped:
            batch, self.progress.cursor = item
            item = next(batches, None) if self.components.autotuner.begin_step() else None
            following = None if item is None else item[0]
            state = step.run(batch, self._learning_rates(), stop=self._stop_requested_at > 0, following=following)
            self.progress.done += 1
            self.components.autotuner.end_step(self._log_setting)
            self._loss_terms.count(state.loss_terms)
            self.checkpoints.log_recovery()
            with self.components.world.transport.guard("bubbles"):
                profiler.end_step(self._estimate_work(batch))
            stopped = state.stop
            if self._requires_rollback(state):
                return None
            with profiler.record("host"):
                self._log_if_due(state)
            self._evaluate_if_due()
            with profiler.record("host"):
                if self.checkpoints.is_due(stopped=stopped):
                    self.checkpoints.save()
            if not stopped:
                self._validate_if_due()
            if item is None and not stopped:
                item = next(batches, None)
        return stopped

    def _requires_rollback(self, state: StepState) -> bool:
        """Apply `train.on_fault` to a step with NaN or Inf. All ranks detect it in the same step."""
        fault = self._find_fault(state)
        rollback = self._policy.requires_rollback(fault, self.progress.excluded)
        if fault is not None:
            self.progress.excluded |= set(fault.samples) if rollback else set()
            self.components.step.nonfinite_samples = []
            self._metrics.write(fault.entry(kept=not rollback))
            consequence = "going back to leave them out" if rollback else "the step changes nothing"
            self._metrics.print_line(f"{fault}: {consequence}")
        return rollback

    def _find_fault(self, state: StepState) -> NonFiniteFault | None:
        transport, step = self.components.world.transport, self.components.step
        partially_applied = state.partially_applied
        if not partially_applied and not state.fault and self.checkpoints.is_due(stopped=state.stop):
            # Ranks would agree on it in the next step, after this one is saved.
            partially_applied = transport.sum(int(step.partially_applied), name="numbers") > 0
        if not partially_applied and not state.fault:
            return None
        what = state.fault or "the gradient of a row is not finite"
        samples = gather_samples(step.nonfinite_samples, transport)
        return NonFiniteFault(self.progress.done, what, samples, partially_applied=partially_applied)

    def _roll_back(self) -> None:
        """Load the newest checkpoint, to train again without the excluded samples."""
        self.components.step.discard_prefetched()
        self.checkpoints.wait_for_last()
        self.checkpoints.resume()
        with self.components.world.transport.guard("bubbles"):
            self.components.profiler.rewind(self.progress.done)
        self._meter.restart()

    def _batches(self) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Yield the remaining batches, each with the state of the loader after it."""
        remaining = self.components.steps - self.progress.done
        while remaining > 0:
            for batch in self.components.loader:
                yield batch.exclude(self.progress.excluded), self.components.loader.state_dict()
                remaining -= 1
                if not remaining:
                    return

    def _estimate_work(self, batch: Batch) -> float:
        """Return the estimated cost of this rank's part of a step. The stopwatch compares it with the measured time."""
        lengths = batch.history.lengths.numpy()
        candidates = np.zeros_like(lengths) if batch.candidates is None else batch.candidates.lengths.numpy()
        cost = self.components.cost
        visible = batch.visible_events(cost.visibility)
        if self._stopwatch is not None:
            self._stopwatch.record_samples(self.progress.done, lengths, candidates, visible, cost.visibility)
        return float(cost.of(lengths, candidates, visible).sum())

    def _learning_rates(self) -> LearningRates:
        factor = lr_factor(self.progress.done, self.components.steps, self._train)
        return LearningRates(dense=self._train.lr * factor, tables=self.components.config.tables.lr * factor)

    def _log_if_due(self, state: StepState) -> None:
        """Count the step. Every `log_every` steps, sum the counts over all ranks and log them."""
        self._meter.count(state)
        done, steps = self.progress.done, self.components.steps
        if done % self._train.log_every and done != steps:
            return
        reading, world = self._meter.read(), self.components.world
        proposal = self.checkpoints.propose_next(reading.seconds_per_step) if world.is_rank_zero else 0
        served = torch.tensor(reading.served_rows, dtype=torch.float64)
        values = torch.cat([torch.tensor([*reading.sums, proposal], dtype=torch.float64), served])
        total = world.transport.reduce_values(values, name="progress")
        largest = world.transport.reduce_values(served, name="progress", op=torch.distributed.ReduceOp.MAX)
        *sums, next_save = total[: -len(served)].tolist()
        self.checkpoints.set_next(int(next_save))
        entry = reading.entry(sums) | busiest_owner(total[-len(served) :], largest, world.world_size)
        if self.components.tables is not None and self.components.tables.dynamic is not None:
            entry |= self.components.tables.dynamic.reduce_counts(world.transport)
        entry |= {"lr": state.rates.dense, "tables_lr": state.rates.tables}
        self._metrics.log_progress(done, entry, seconds_left=(steps - done) * reading.seconds_per_step)

    def _log_setting(self, setting: Setting, ms: dict[str, float]) -> None:
        self._metrics.write({"kind": "autotune", "step": self.progress.done, "setting": str(setting), "ms": ms})
        times = ", ".join(f"{name} {value:.2f} ms" for name, value in ms.items())
        self._metrics.print_line(f"step {self.progress.done}: {setting} is selected; a step takes {times}")

    def _evaluate_if_due(self) -> None:
        steps, every, done = len(self.components.loader), self._train.evaluate_every, self.progress.done
        due = done == self.components.steps or (every and done % (steps * every) == 0)
        if self.components.evaluate is None or not due:
            return
        with self._meter.paused():
            self.components.step.synchronize()
            metrics = self.components.evaluate()
            self._metrics.write({"kind": "evaluate", "step": done, **metrics})
            text = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name != "users")
            self._metrics.print_line(f"step {done}: {text}")
        self.components.profiler.restart_step()

    def _validate_if_due(self) -> None:
        """Evaluate a partition before its first step. The guard compares it with the partitions before it."""
        done = self.progress.done
        partition = self.components.partitions.get(done)
        if partition is None or self.components.validate is None:
            return
        with self._meter.paused():
            self.components.step.synchronize()
            metrics = self.components.validate(partition)
        self._metrics.write({"kind": "validate", "step": done, "partition": partition, **metrics})
        text = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._metrics.print_line(f"step {done}, before {partition}: {text}")
        self.components.profiler.restart_step()
        name, progress = self._train.guard_metric, self.progress
        if not name:
            return
        if name not in metrics:
            known = ", ".join(metrics)
            raise ConfigError(f"train.guard_metric = '{name}' is no metric of this task", remedy=f"choose: {known}")
        try:
            check_guard(metrics[name], progress.validated, name=name, partition=partition, drop=self._train.guard_drop)
        except GuardError:
            self.checkpoints.wait_for_last()
            raise
        progress.validated = [*progress.validated, metrics[name]][-_GUARDED_PARTITIONS:]

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Stop after the step, or at once on a later second Ctrl-C. A terminal and a launcher may both send one."""
        now = time.monotonic()
        self._stop_requested_at = self._stop_requested_at or now
        if number == signal.SIGINT and now - self._stop_requested_at > _SAME_CTRL_C_SECONDS:
            raise KeyboardInterrupt


def lr_factor(step: int, steps: int, config: TrainConfig) -> float:
    """Return the share of the full learning rate at a step (counted from 0) of a run of so many steps."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "none":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    remaining = 1.0 - done if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.final_lr + (1.0 - config.final_lr) * remaining


def check_guard(value: float, before: Sequence[float], *, name: str, partition: str, drop: float) -> None:
    """Raise GuardError if a metric is further below its mean over earlier partitions than the guard allows."""
    mean = sum(before) / len(before) if before else 0.0
    if value >= (1.0 - drop) * mean:
        return
    fall = f"{name} is {value:.4f}, and was {mean:.4f} in the mean of the last {len(before)} partitions"
    remedy = "check the data of this partition and the model; a larger train.guard_drop lets training continue"
    raise GuardError(f"the guard stops training before it reads {partition}: {fall}", remedy=remedy)


class LossTermCounter:
    """Counts the terms of the loss over all ranks: a run without any trains nothing, and must not succeed."""

    def __init__(self, components: TrainerComponents) -> None:
        self._task, self._data = components.config.task.kind, components.config.data
        self._min_steps = min(len(components.loader), components.steps)
        self._steps = self._empty = 0

    def count(self, terms: int) -> None:
        """Count a step. Raises DataError if a whole epoch, or a shorter run, had no term."""
        self._steps += 1
        self._empty += not terms
        if self._empty == self._steps >= self._min_steps:
            raise self._error()

    def report(self) -> list[str]:
        """Return how many steps had only samples that are too short."""
        return [f"{self._empty:,} of {self._steps:,} steps had no loss term"] if self._empty else []

    def _error(self) -> DataError:
        if self._task == "ranking":
            why, remedy = "no history has a candidate", "give a data set with candidates and labels"
        else:
            held_out = " after the held-out ones" if self._data.split != "none" else ""
            why = f"no history has two events{held_out}, and the loss is that of the next event"
            remedy = 'give a log with longer histories, or data.split = "none"'
        what = f"the training data has no loss term in {self._steps:,} steps: {why}"
        return DataError(what, where=self._data.path, remedy=remedy)
