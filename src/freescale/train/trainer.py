"""The loop around the step: epochs, learning rates, progress, evaluation, checkpoints, and a clean end when asked."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.balance.ahead import Batches
from freescale.balance.cost import Cost
from freescale.balance.plan import Planner
from freescale.bubbles.book import Bubbles
from freescale.checkpoint import state as states
from freescale.checkpoint import store
from freescale.checkpoint.files import CheckpointError, DamagedError, Part
from freescale.config import RunConfig, to_toml
from freescale.data.batch import Batch
from freescale.embedding.sharded import ShardedTables
from freescale.errors import reason
from freescale.log import notice
from freescale.train import rates
from freescale.train.interval import Interval
from freescale.train.journal import Journal
from freescale.train.network import Network
from freescale.train.numbers import Fault, gathered
from freescale.train.step import Flight, Rates, Step
from freescale.transport.world import World, apart, generation

_SAME_CTRL_C = 2.0
_MOST_FAULTS_IN_A_ROW = 10


@dataclass(frozen=True)
class Parts:
    """What a trainer is made of; `build` makes it."""

    config: RunConfig
    world: World
    loader: Batches
    planner: Planner | None
    """Of the loader's batches, where they are balanced."""
    steps: int
    """Of the whole run."""
    network: Network
    tables: ShardedTables | None
    optimizer: torch.optim.Optimizer
    step: Step
    bubbles: Bubbles
    cost: Cost
    """Of a sample, for the report."""
    evaluate: Callable[[], dict[str, float]] | None
    """Metrics over the held-out part, the same on all ranks; None where nothing is held out."""


class Trainer:
    """Trains until the config says that it is enough, or until somebody asks it to stop."""

    def __init__(self, parts: Parts, folder: Path, journal: Journal) -> None:
        self.parts, self.done = parts, 0
        self._train, self._journal = parts.config.train, journal
        saving = apart(deadline=self._train.deadline)  # since training and saving go on at once
        self._store = store.Store(folder / "checkpoints", keep=self._train.keep, transport=saving)
        self._stopwatch = parts.planner.stopwatch if parts.planner is not None else None
        parts.bubbles.watcher = self._stopwatch.took if self._stopwatch is not None else None
        self._meter = _Meter()
        self._cursor = parts.loader.state_dict()
        self._asked_at = 0.0
        self._interval = Interval(hours_between_failures=self._train.hours_between_failures)
        self._saved_at = self._save_at = 0
        """Steps: of the last checkpoint, and of the next as rank 0 has chosen it."""
        self._left_out: set[int] = set()
        """Samples that gave what is not a number, and are trained on no more."""
        self._faults_in_a_row = 0

    def fit(self) -> bool:
        """Train, evaluate and save. Gives whether the run came to its end rather than being stopped."""
        before = {kind: signal.signal(kind, self._on_signal) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            stopped = self._run()
            with self.parts.world.transport.named("bubbles"):
                self.parts.bubbles.close()
            self._store.close()
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
        return not stopped

    def resume(self) -> None:
        """Continue from the newest checkpoint that all ranks can read, whatever number of ranks wrote it."""
        transport = self.parts.world.transport
        while (newest := store.newest(self._store.folder, transport)) is not None:
            error, damaged = self._load(newest), 1
            worst = transport.largest(
                0 if error is None else damaged + (not isinstance(error, DamagedError)), name="loading"
            )
            if not worst:
                self._go_on(f"resumed from {newest} at step {self.done}")
                return
            if worst > damaged:
                raise error or CheckpointError(f"another rank says that {newest} does not fit this run")
            if error is not None:
                notice(str(error))
            if self.parts.world.leads:
                self._journal.say(f"{newest} is damaged, as a rank says, and set aside: the one before it is taken")
                store.set_aside(newest)
        raise CheckpointError(
            "there is no checkpoint that can be read",
            where=str(self._store.folder),
            remedy="start anew with another --out; what was damaged is still there",
        )

    def begin_again(self) -> None:
        """Train from the beginning, where an earlier start of this run ended before its first checkpoint."""
        self._go_on("there is no checkpoint yet: training begins again")

    def _go_on(self, how: str) -> None:
        """Drop what was noted beyond here by who was lost, and say it."""
        self._journal.rewind(self.done)
        self._journal.say(how)

    def close(self) -> None:
        """Say what was set aside and what was held, and end all output."""
        for line in [*self.parts.loader.report(), *self.parts.step.report()]:
            self._journal.say(line)
        self._journal.close()

    def _run(self) -> bool:
        if self._train.on_fault != "stop" and not self.done:
            self._save()  # what to go back to
        while (stopped := self._train_on()) is None:
            self._go_back()
        self.parts.step.close()
        return stopped and self.done < self.parts.steps

    def _train_on(self) -> bool | None:
        """Step after step; gives whether somebody asked to stop, or None if training has to go back."""
        stopped, bubbles, step = False, self.parts.bubbles, self.parts.step
        bubbles.restart()
        batches = bubbles.each("data", self._batches())
        taken = next(batches, None)
        while taken is not None and not stopped:
            batch, self._cursor = taken
            taken = next(batches, None) if step.looks_ahead else None
            following = None if taken is None else taken[0]
            flight = step.run(batch, self._rates(), stop=self._asked_at > 0, following=following)
            self.done += 1
            self._note_recovery()
            with self.parts.world.transport.named("bubbles"):
                bubbles.end_step(self._work(batch))
            stopped = flight.stop
            if self._has_to_go_back(flight):
                return None
            with bubbles.during("host"):
                self._tell_if_due(flight)
            self._evaluate_if_due()
            with bubbles.during("host"):
                self._save_if_due(stopped)
            if not step.looks_ahead and not stopped:
                taken = next(batches, None)
        return stopped

    def _has_to_go_back(self, flight: Flight) -> bool:
        """Do what the config says about numbers that are none. All ranks see them in the same step."""
        transport, step = self.parts.world.transport, self.parts.step
        lacking = flight.lacking
        if not lacking and not flight.fault and self._saves_now(flight.stop):  # nothing unsound is ever saved
            lacking = transport.total(int(step.lacking), name="numbers") > 0
        if not lacking and not flight.fault:
            self._faults_in_a_row = 0
            return False
        self._faults_in_a_row += 1
        samples = gathered(step.culprits, transport)
        fault = Fault(self.done, flight.fault or "the gradient of a row is not finite", samples)
        if self._train.on_fault == "stop" or self._faults_in_a_row > _MOST_FAULTS_IN_A_ROW:
            raise fault.error()
        goes_back = lacking or (self._train.on_fault == "rollback" and bool(set(samples) - self._left_out))
        if goes_back and not set(samples) - self._left_out:
            raise fault.error()  # nobody is left to leave out
        self._left_out |= set(samples) if goes_back else set()
        self._journal.write(fault.entry(kept=not goes_back))
        self._journal.say(f"{fault}: {'going back to leave them out' if goes_back else 'the step changes nothing'}")
        step.culprits = []
        return goes_back

    def _go_back(self) -> None:
        """Take the newest checkpoint and train on from there without what was found unsound."""
        self.parts.step.forget()
        self._complete_the_last()
        self.resume()
        with self.parts.world.transport.named("bubbles"):
            self.parts.bubbles.go_back(self.done)
        self._meter.restart()

    def _note_recovery(self) -> None:
        """Once, when the first step is done after a start that followed a loss: how long that took."""
        lost_at = float(os.environ.pop("FREESCALE_LOST_AT", "0"))
        if lost_at:
            entry = {"kind": "recovery", "step": self.done, "generation": generation()}
            self._interval.failed()
            why, seconds = os.environ.get("FREESCALE_LOST", ""), time.time() - lost_at
            self._journal.write(entry | {"why": why, "seconds": seconds})
            self._journal.say(f"recovered in {seconds:.1f} s: {why}")

    def _batches(self) -> Iterator[tuple[Batch, dict[str, int | str]]]:
        """All batches that are still to be computed, and where the loader stands behind each."""
        left = self.parts.steps - self.done
        while left > 0:
            for batch in self.parts.loader:
                yield batch.without(self._left_out), self.parts.loader.state_dict()
                left -= 1
                if not left:
                    return

    def _work(self, batch: Batch) -> float:
        """What the cost model thinks of this rank's part of a step. Its time will be told later."""
        lengths = batch.history.lengths.numpy()
        candidates = np.zeros_like(lengths) if batch.candidates is None else batch.candidates.lengths.numpy()
        if self._stopwatch is not None:
            self._stopwatch.given(self.done, lengths, candidates)
        return float(self.parts.cost.of(lengths, candidates).sum())

    def _rates(self) -> Rates:
        part = rates.share(self.done, self.parts.steps, self._train)
        return Rates(dense=self._train.lr * part, tables=self.parts.config.tables.lr * part)

    def _tell_if_due(self, flight: Flight) -> None:
        """Add up over all ranks what happened since the last time, and note it."""
        self._meter.count(flight)
        if self.done % self._train.log_every and self.done != self.parts.steps:
            return
        values, seconds = self._meter.take()
        chosen = self._saved_at + math.ceil(self._interval.seconds * float(values[-1]) / seconds)
        values = torch.cat([values, torch.tensor([chosen if self.parts.world.leads else 0.0])])
        values = values.to(self.parts.world.device)
        total = self.parts.world.transport.all_reduce(values, name="progress").wait().tolist()
        steps, (loss, samples, tokens) = total[3] / self.parts.world.ranks, total[:3]
        self._save_at = max(int(total[4]), self.done + 1)
        entry = {"loss": loss / steps, "samples/s": samples / seconds, "tokens/s": tokens / seconds}
        entry |= {"lr": flight.rates.dense, "seconds": seconds / steps}
        self._journal.progress(self.done, entry, seconds_left=(self.parts.steps - self.done) * seconds / steps)

    def _evaluate_if_due(self) -> None:
        steps, every = len(self.parts.loader), self._train.evaluate_every
        due = self.done == self.parts.steps or (every and self.done % (steps * every) == 0)
        if self.parts.evaluate is None or not due:
            return
        self.parts.step.settle()
        metrics = self.parts.evaluate()
        self._journal.write({"kind": "evaluate", "step": self.done, **metrics})
        told = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name != "users")
        self._journal.say(f"step {self.done}: {told}")
        self._meter.restart()
        self.parts.bubbles.restart()

    def _saves_now(self, stopped: bool) -> bool:
        if stopped or self.done == self.parts.steps or self._train.save_every:
            return stopped or self.done == self.parts.steps or self.done % self._train.save_every == 0
        return self.done % len(self.parts.loader) == 0 or self.done == self._save_at

    def _save(self) -> None:
        began = time.perf_counter()
        self.parts.step.settle()
        self._complete_the_last()
        self._store.save(self.done, self._state(), self._facts())
        self._interval.saved(time.perf_counter() - began)
        self._saved_at = self.done

    def _save_if_due(self, stopped: bool) -> None:
        if self._saves_now(stopped):
            self._save()
        if stopped and self.done < self.parts.steps:
            self._journal.say(f"asked to stop: saving step {self.done}; --resume continues from here")

    def _complete_the_last(self) -> None:
        """A disk that refuses a checkpoint amid training may have room for the next. For the last one it may not."""
        try:
            self._store.wait()
        except CheckpointError as error:
            if error.__cause__ is not None or self.parts.world.leads:
                notice(f"{error}\n  training goes on, and the next checkpoint will be tried")

    def _load(self, checkpoint: Path) -> CheckpointError | None:
        """Read a checkpoint into everything that goes on from it; gives what is wrong with it, if anything."""
        parts = self.parts
        try:
            facts, state = store.read_facts(checkpoint), self._state()
            if facts["ranks"] != parts.world.ranks:
                del state[self._generator]
                told = f"resumed on {parts.world.ranks} ranks what {facts['ranks']} wrote"
                notice(f"{told}: torch's own generators start anew")
            store.load(checkpoint, state)
        except CheckpointError as error:
            return error
        try:
            self._take(facts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return DamagedError(f"facts.json does not say where to go on: {reason(error)}", where=str(checkpoint))
        if self._generator in state:
            torch.set_rng_state(state[self._generator].local)
        return None

    def _take(self, facts: dict[str, Any]) -> None:
        """Go on from what a checkpoint says beside its tensors."""
        parts = self.parts
        parts.loader.load_state_dict(facts["cursor"])
        if parts.planner is not None and facts["balance"] is not None:
            parts.planner.load_state_dict(facts["balance"])
        parts.step.judge.load_state_dict(facts["norms"])
        self._left_out |= set(facts["left_out"])
        self._interval.load_state_dict(facts["interval"])
        self._cursor, self.done = facts["cursor"], facts["step"]
        self._saved_at, self._save_at = self.done, 0
        parts.bubbles.step = self.done

    @property
    def _generator(self) -> str:
        return f"generator.{self.parts.world.rank}"

    def _state(self) -> dict[str, Part]:
        parts, rank = self.parts, self.parts.world.rank
        model = states.of_model(parts.network, parts.tables, rank=rank, ranks=parts.world.ranks)
        return model | states.of_optimizer(parts.network, parts.optimizer) | states.of_generator(rank)

    def _facts(self) -> dict[str, object]:
        return {
            "cursor": self._cursor,
            "interval": self._interval.state_dict(),
            "norms": self.parts.step.judge.state_dict(),
            "left_out": sorted(self._left_out),
            "balance": self.parts.planner.state_dict() if self.parts.planner is not None else None,
            "config": to_toml(self.parts.config),
        }

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Stop after the step; at once if asked again later. A terminal and a launcher may both pass on one Ctrl-C."""
        now = time.monotonic()
        self._asked_at = self._asked_at or now
        if number == signal.SIGINT and now - self._asked_at > _SAME_CTRL_C:
            raise KeyboardInterrupt


class _Meter:
    """What happened since it was last read, on this rank."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._losses: list[Tensor] = []
        self._steps = self._samples = self._tokens = 0
        self._since = time.perf_counter()

    def count(self, flight: Flight) -> None:
        self._losses += [loss.detach() for loss in flight.losses if not flight.fault]
        self._samples += len(flight.batch)
        self._tokens += int(flight.batch.history.offsets[-1])
        self._steps += 1

    def take(self) -> tuple[Tensor, float]:
        """Loss, samples, tokens and steps, and the seconds they took; counting starts anew."""
        loss = torch.stack(self._losses).double().sum().cpu() if self._losses else 0.0
        values = torch.tensor([float(loss), self._samples, self._tokens, self._steps], dtype=torch.float64)
        seconds = time.perf_counter() - self._since
        self.restart()
        return values, seconds
