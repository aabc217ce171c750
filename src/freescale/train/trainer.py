"""The loop around the step: epochs, learning rates, progress, evaluation, checkpoints, and a clean end when asked."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import torch

from freescale.data.batch import Batch
from freescale.log import info_once
from freescale.train import rates
from freescale.train.journal import Journal
from freescale.train.loss_terms import LossTerms
from freescale.train.meter import Meter
from freescale.train.numbers import Fault, Faults, gathered
from freescale.train.saving import Parts, Progress, Saving
from freescale.train.step import LearningRates, StepState
from freescale.transport.world import restart_count

_SAME_CTRL_C = 2.0


class Trainer:
    """Trains until the config says that it is enough, or until somebody asks it to stop."""

    def __init__(self, parts: Parts, folder: Path, journal: Journal) -> None:
        self.parts, self.at = parts, Progress(parts.loader.state_dict())
        self._train, self._journal = parts.config.train, journal
        self.saving = Saving(parts, self.at, folder, journal)
        self._faults = Faults(self._train.on_fault)
        self._stopwatch = parts.planner.stopwatch if parts.planner is not None else None
        parts.bubbles.on_compute_time = self._stopwatch.took if self._stopwatch is not None else None
        self._meter = Meter(parts.planner)
        self._terms = LossTerms(parts)
        self._asked_at = 0.0

    def fit(self) -> bool:
        """Train, evaluate and save. Gives whether the run came to its end rather than being stopped."""
        self._journal.say(self._length())
        if self.at.done >= self.parts.steps and self.parts.world.is_rank_zero:
            ended = f"the run is finished at step {self.at.done}, and nothing is left to train"
            info_once(f"{ended}; raise train.epochs or train.max_steps to continue")
        self._journal.start(self.at.done, world_size=self.parts.world.world_size, reason=self._start_reason())
        before = {kind: signal.signal(kind, self._on_signal) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            stopped = self._run()
            with self.parts.world.transport.guard("bubbles"):
                self.parts.bubbles.close()
            self.saving.close()
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
        return not stopped

    def close(self, *, finished: bool = True) -> None:
        """Say what was set aside and what was held, note how the run ended, and end all output."""
        self._journal.write({"kind": "end", "step": self.at.done, "finished": finished})
        for line in [*self.parts.loader.report(), *self.parts.step.report(), *self._terms.report()]:
            self._journal.say(line)
        self._journal.close()

    def _length(self) -> str:
        """How many steps the run has, and what ends it."""
        steps, per_epoch, train = self.parts.steps, len(self.parts.loader), self._train
        length = f"{steps:,} steps, {per_epoch:,} per epoch"
        if steps < train.epochs * per_epoch:
            return f"{length}: train.max_steps = {train.max_steps} ends the run before train.epochs = {train.epochs}"
        return length

    def _start_reason(self) -> str:
        """Why training begins or goes on here, for the journal."""
        if restart_count():
            return os.environ.get("FREESCALE_LOST", "restarted by the launcher")
        return "resumed" if self.at.done else "new run"

    def _run(self) -> bool:
        if self._train.on_fault != "stop" and not self.at.done:  # or there would be nothing to go back to
            self.saving.save()
        while (stopped := self._train_on()) is None:
            self._go_back()
        self.parts.step.close()
        if stopped and self.at.done < self.parts.steps:
            self._journal.say(f"asked to stop: saving step {self.at.done}; --resume continues from here")
        return stopped and self.at.done < self.parts.steps

    def _train_on(self) -> bool | None:
        """Step after step; gives whether somebody asked to stop, or None if training has to go back."""
        stopped, bubbles, step = False, self.parts.bubbles, self.parts.step
        bubbles.restart_step()
        batches = bubbles.iterate("data", self._batches())
        taken = next(batches, None)
        while taken is not None and not stopped:
            batch, self.at.cursor = taken
            taken = next(batches, None) if step.looks_ahead else None
            following = None if taken is None else taken[0]
            state = step.run(batch, self._rates(), stop=self._asked_at > 0, following=following)
            self.at.done += 1
            self._terms.count(state.loss_terms)
            self.saving.note_recovery()
            with self.parts.world.transport.guard("bubbles"):
                bubbles.end_step(self._work(batch))
            stopped = state.stop
            if self._has_to_go_back(state):
                return None
            with bubbles.record("host"):
                self._tell_if_due(state)
            self._evaluate_if_due()
            with bubbles.record("host"):
                if self.saving.is_due(stopped=stopped):
                    self.saving.save()
            if not step.looks_ahead and not stopped:
                taken = next(batches, None)
        return stopped

    def _has_to_go_back(self, state: StepState) -> bool:
        """Do what the config says about numbers that are none. All ranks see them in the same step."""
        fault = self._fault(state)
        goes_back = self._faults.go_back(fault, self.at.left_out)
        if fault is not None:
            self.at.left_out |= set(fault.samples) if goes_back else set()
            self.parts.step.nonfinite_samples = []
            self._journal.write(fault.entry(kept=not goes_back))
            self._journal.say(f"{fault}: {'going back to leave them out' if goes_back else 'the step changes nothing'}")
        return goes_back

    def _fault(self, state: StepState) -> Fault | None:
        transport, step = self.parts.world.transport, self.parts.step
        lacking = state.partially_applied
        if not lacking and not state.fault and self.saving.is_due(stopped=state.stop):
            lacking = transport.sum(int(step.partially_applied), name="numbers") > 0  # so that nothing unsound is saved
        if not lacking and not state.fault:
            return None
        what = state.fault or "the gradient of a row is not finite"
        return Fault(self.at.done, what, gathered(step.nonfinite_samples, transport), learnt=lacking)

    def _go_back(self) -> None:
        """Take the newest checkpoint and train on from there without what was found unsound."""
        self.parts.step.forget()
        self.saving.complete_the_last()
        self.saving.resume()
        with self.parts.world.transport.guard("bubbles"):
            self.parts.bubbles.rewind(self.at.done)
        self._meter.restart()

    def _batches(self) -> Iterator[tuple[Batch, dict[str, int | str]]]:
        """All batches that are still to be computed, and where the loader stands behind each."""
        left = self.parts.steps - self.at.done
        while left > 0:
            for batch in self.parts.loader:
                yield batch.exclude(self.at.left_out), self.parts.loader.state_dict()
                left -= 1
                if not left:
                    return

    def _work(self, batch: Batch) -> float:
        """What the cost model thinks of this rank's part of a step. Its time will be told later."""
        lengths = batch.history.lengths.numpy()
        candidates = np.zeros_like(lengths) if batch.candidates is None else batch.candidates.lengths.numpy()
        if self._stopwatch is not None:
            self._stopwatch.given(self.at.done, lengths, candidates)
        return float(self.parts.cost.of(lengths, candidates).sum())

    def _rates(self) -> LearningRates:
        part = rates.share(self.at.done, self.parts.steps, self._train)
        return LearningRates(dense=self._train.lr * part, tables=self.parts.config.tables.lr * part)

    def _tell_if_due(self, state: StepState) -> None:
        """Add up over all ranks what happened since the last time, and note it."""
        self._meter.count(state)
        if self.at.done % self._train.log_every and self.at.done != self.parts.steps:
            return
        taken, world = self._meter.take(), self.parts.world
        chosen = self.saving.choice(taken.seconds_per_step) if world.is_rank_zero else 0
        values = torch.tensor([*taken.sums, chosen], dtype=torch.float64, device=world.device)
        *sums, agreed = world.transport.all_reduce(values, name="progress").wait().tolist()
        self.saving.agree(int(agreed))
        entry = taken.entry(sums) | {"lr": state.rates.dense, "tables_lr": state.rates.tables}
        left = (self.parts.steps - self.at.done) * taken.seconds_per_step
        self._journal.progress(self.at.done, entry, seconds_left=left)

    def _evaluate_if_due(self) -> None:
        steps, every = len(self.parts.loader), self._train.evaluate_every
        due = self.at.done == self.parts.steps or (every and self.at.done % (steps * every) == 0)
        if self.parts.evaluate is None or not due:
            return
        self.parts.step.settle()
        metrics = self.parts.evaluate()
        self._journal.write({"kind": "evaluate", "step": self.at.done, **metrics})
        told = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name != "users")
        self._journal.say(f"step {self.at.done}: {told}")
        self._meter.restart()
        self.parts.bubbles.restart_step()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Stop after the step; at once if asked again later. A terminal and a launcher may both pass on one Ctrl-C."""
        now = time.monotonic()
        self._asked_at = self._asked_at or now
        if number == signal.SIGINT and now - self._asked_at > _SAME_CTRL_C:
            raise KeyboardInterrupt
