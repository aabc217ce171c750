"""What a training is made of and where it stands; when that is saved, and how it is taken up again."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from freescale.balance.cost import Cost
from freescale.balance.planner import Planner
from freescale.balance.prefetch import Batches
from freescale.bubbles.step_profiler import StepProfiler
from freescale.checkpoint import state, store
from freescale.checkpoint.files import CheckpointError, DamagedError, MismatchError, Part
from freescale.config import RunConfig, to_toml
from freescale.data.vocabulary import DataIdentity, check_recorded_identity
from freescale.embedding.sharded import ShardedTables
from freescale.errors import reason
from freescale.log import warning_once
from freescale.train.interval import Interval
from freescale.train.journal import Journal
from freescale.train.network import Network
from freescale.train.step import Step
from freescale.transport.world import World, new_group, restart_count

_FITS, _DAMAGED, _OF_ANOTHER = range(3)
Review = Callable[[Path, dict[str, Any]], None]


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
    bubbles: StepProfiler
    cost: Cost
    """Of a sample, for the report."""
    data: DataIdentity
    """Of the training data."""
    evaluate: Callable[[], dict[str, float]] | None
    """Metrics over the held-out part, the same on all ranks; None where nothing is held out."""


@dataclass
class Progress:
    """Where a training stands, the same on all ranks."""

    cursor: dict[str, int | str]
    """Behind the last batch that was computed."""
    done: int = 0
    """Steps."""
    left_out: set[int] = field(default_factory=set)
    """Samples that gave what is not a number, and are trained on no more."""


class Saving:
    """Saves a training and takes it up again. `at` is where it stands, and is moved when it goes back."""

    def __init__(self, parts: Parts, at: Progress, folder: Path, journal: Journal) -> None:
        self._parts, self._at, self._journal, self._train = parts, at, journal, parts.config.train
        transport = new_group(timeout=self._train.timeout)  # since training and saving go on at once
        self._store = store.Store(folder / "checkpoints", keep=self._train.keep, transport=transport)
        self._interval = Interval(hours_between_failures=self._train.hours_between_failures)
        self._last = self._next = 0
        """Steps: of the last checkpoint, and of the next between two epochs as rank 0 has chosen it."""

    def is_due(self, *, stopped: bool) -> bool:
        """Whether to save after this step."""
        done, every = self._at.done, self._train.save_every
        if stopped or done == self._parts.steps:
            return True
        return done % every == 0 if every else done % len(self._parts.loader) == 0 or done == self._next

    def choice(self, seconds_per_step: float) -> int:
        """When to save next, as this rank sees it."""
        return max(self._at.done + 1, self._last + math.ceil(self._interval.seconds / seconds_per_step))

    def agree(self, step: int) -> None:
        """Take rank 0's choice."""
        self._next = step

    def save(self) -> None:
        """Save where training stands, behind the steps that follow."""
        began = time.perf_counter()
        self._parts.step.settle()
        self.complete_the_last()
        self._store.save(self._at.done, self._tensors(), self._facts())
        self._interval.saved(time.perf_counter() - began)
        self._last = self._at.done

    def complete_the_last(self) -> None:
        """A disk that refuses a checkpoint amid training may have room for the next. For the last one it may not."""
        try:
            self._store.wait()
        except CheckpointError as error:
            if error.__cause__ is not None or self._parts.world.is_rank_zero:
                warning_once(f"{error}\n  training goes on, and the next checkpoint will be tried")

    def close(self) -> None:
        """Finish saving."""
        self._store.close()

    def resume(self, review: Review | None = None) -> None:
        """Continue from the newest checkpoint that all ranks can read, whatever number of ranks wrote it.

        `review`: may refuse a checkpoint by what it says of itself, on all ranks alike, before it is loaded.
        """
        transport = self._parts.world.transport
        while (newest := store.newest(self._store.folder, transport)) is not None:
            error = self._load(newest, review)
            own = _FITS if error is None else _DAMAGED if isinstance(error, DamagedError) else _OF_ANOTHER
            worst = transport.max(own, name="loading")
            if worst == _FITS:
                self.go_on(f"resumed from {newest} at step {self._at.done}")
                return
            if worst == _OF_ANOTHER:
                raise error or CheckpointError(f"another rank says that {newest} does not fit this run")
            if error is not None:
                warning_once(str(error))
            if self._parts.world.is_rank_zero:
                self._journal.say(f"{newest} is damaged and set aside: the one before it is taken")
                store.set_aside(newest)
        remedy = "start anew with another --out; what was damaged is still there"
        # Ranks that were restarted begin again from nothing. For a user who asked to resume, that would be a surprise.
        kind = CheckpointError if restart_count() else MismatchError
        raise kind("there is no checkpoint that can be read", where=str(self._store.folder), remedy=remedy)

    def note_recovery(self) -> None:
        """Once, when the first step is done after a start that followed a loss: how long that took."""
        lost_at = float(os.environ.pop("FREESCALE_LOST_AT", "0"))
        if not lost_at:
            return
        self._interval.failed()
        why, seconds = os.environ.get("FREESCALE_LOST", ""), time.time() - lost_at
        entry = {"kind": "recovery", "step": self._at.done, "generation": restart_count()}
        self._journal.write(entry | {"why": why, "seconds": seconds})
        self._journal.say(f"recovered in {seconds:.1f} s: {why}")

    def go_on(self, how: str) -> None:
        """From where training stands: drop what was noted beyond here by who was lost, and say it."""
        self._journal.rewind(self._at.done)
        self._journal.say(how)

    def _load(self, checkpoint: Path, review: Review | None) -> CheckpointError | None:
        """Read a checkpoint into everything that goes on from it; gives what is wrong with it, if anything."""
        try:
            facts, tensors = store.read_facts(checkpoint), self._tensors()
            check_recorded_identity(facts.get("data"), self._parts.data, where=self._parts.config.data.path)
            if review is not None:
                review(checkpoint, facts)
            if facts["ranks"] != self._parts.world.world_size:
                del tensors[self._generator]
                told = f"resumed on {self._parts.world.world_size} ranks what {facts['ranks']} wrote"
                warning_once(f"{told}: torch's own generators start anew")
            store.load(checkpoint, tensors)
            self._take(facts)
        except CheckpointError as error:
            return error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return DamagedError(f"facts.json does not say where to go on: {reason(error)}", where=str(checkpoint))
        if self._generator in tensors:
            torch.set_rng_state(tensors[self._generator].local)
        return None

    def _take(self, facts: dict[str, Any]) -> None:
        """Go on from what a checkpoint says beside its tensors."""
        parts, at = self._parts, self._at
        parts.loader.load_state_dict(facts["cursor"])
        if parts.planner is not None and facts["balance"] is not None:
            parts.planner.load_state_dict(facts["balance"])
        parts.step.grad_norm_monitor.load_state_dict(facts["norms"])
        self._interval.load_state_dict(facts["interval"])
        at.cursor, at.done = facts["cursor"], facts["step"]
        at.left_out |= set(facts["left_out"])
        self._last, self._next, parts.bubbles.step = at.done, 0, at.done

    @property
    def _generator(self) -> str:
        return f"generator.{self._parts.world.rank}"

    def _tensors(self) -> dict[str, Part]:
        parts, rank = self._parts, self._parts.world.rank
        model = state.of_model(parts.network, parts.tables, rank=rank, world_size=parts.world.world_size)
        return model | state.of_optimizer(parts.network, parts.optimizer) | state.of_generator(rank)

    def _facts(self) -> dict[str, object]:
        parts, at = self._parts, self._at
        return {
            "cursor": at.cursor,
            "left_out": sorted(at.left_out),
            "norms": parts.step.grad_norm_monitor.state_dict(),
            "interval": self._interval.state_dict(),
            "balance": parts.planner.state_dict() if parts.planner is not None else None,
            "data": asdict(parts.data),
            "config": to_toml(parts.config),
        }
