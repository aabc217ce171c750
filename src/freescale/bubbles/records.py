"""The profile files of a run: writing and reading them. Their size is bounded for any number of ranks and steps.

RUN/bubbles/intervals.jsonl     a line per interval: milliseconds per step of every cause, by group of ranks
RUN/bubbles/rank-00000.jsonl    a line per sampled step of a sampled rank: all its events
RUN/bubbles/machine.json        device and world size
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from freescale.bubbles.events import CAUSES, TRAFFIC, RankStep, Span, Transfer
from freescale.bubbles.ledger import Ledger, account, last_arrivals, ledgers
from freescale.errors import DataError, reason
from freescale.log import warning_once

FOLDER, _MACHINE_FILE = "bubbles", "machine.json"
LINES, SAMPLED_STEPS, SAMPLED_RANKS, GROUPS = 1000, 32, 64, 256
"""Limits per run: lines, whole steps, ranks that write whole steps, groups of ranks per line."""
COLUMNS = (*CAUSES, *(f"hidden {kind}" for kind in TRAFFIC), "in flight", "overlapped", "ranks")
"""Sums over the ranks of a group: nanoseconds, and the number of ranks."""

Table = NDArray[np.float64]
T = TypeVar("T")
_WHOLE, _REAL = 1 << 62, 1e30
"""Bounds of plausible measurements."""


class IntervalRecord(NamedTuple):
    """Consecutive steps of all ranks."""

    step: int
    """The last one."""
    steps: int
    world_size: int
    clock_bound_us: float
    """Error bound of the clock alignment."""
    ms: Table
    """[groups of ranks, COLUMNS]: per step, mean of the group's ranks."""

    def column(self, column: str) -> Table:
        """Return one column: a value per group of ranks."""
        return self.ms[:, COLUMNS.index(column)]


class StepSample(NamedTuple):
    """One whole step of one rank, and when the last rank entered each of its collectives."""

    step: RankStep
    last: dict[str, int]


def group_of(rank: int, world_size: int) -> int:
    """Return the group of a rank: the row of the table that it adds to."""
    return rank * min(world_size, GROUPS) // world_size


def group_name(group: int, world_size: int) -> str:
    """Return the ranks of a group, as text."""
    groups = min(world_size, GROUPS)
    first, last = -(-group * world_size // groups), -(-(group + 1) * world_size // groups) - 1
    return f"{first}" if first == last else f"{first}-{last}"


def ledger_row(ledger: Ledger) -> Table:
    """Return a ledger as a row of COLUMNS."""
    return np.array([*ledger.causes, *ledger.hidden, ledger.in_flight, ledger.overlapped, 0], dtype=np.float64)


def place_row(row: Table, rank: int, world_size: int) -> Table:
    """Return the table of all groups with only the row of a rank's group set."""
    table = np.zeros((min(world_size, GROUPS), len(COLUMNS)))
    table[group_of(rank, world_size)] = row
    return table


def build_interval(total: Table, *, step: int, steps: int, world_size: int, clock_bound: int) -> IntervalRecord:
    """Convert nanoseconds summed over steps and ranks to milliseconds per step."""
    members = np.bincount([group_of(rank, world_size) for rank in range(world_size)]).astype(float)
    ms = total / (1e6 * steps * members[:, None])
    ms[:, -1] = members
    return IntervalRecord(step, steps, world_size, clock_bound / 1e3, ms)


class RecordWriter:
    """Appends to the files of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)

    def write_machine(self, machine: "MachineRecord") -> None:
        """Write what the run runs on."""
        (self._folder / _MACHINE_FILE).write_text(json.dumps(machine._asdict()))

    def truncate_after(self, step: int) -> None:
        """Drop records of an earlier run beyond a step, and an incomplete last line."""
        for path in self._folder.glob("*.jsonl"):
            kept = _lines(path, lambda facts: _up_to(step, facts))
            replace_lines(path, (_line(facts) for facts in kept if facts))

    def write_interval(self, interval: IntervalRecord) -> None:
        """Append an interval."""
        columns = dict(zip(COLUMNS, interval.ms.T.round(4).tolist(), strict=True))
        self._append("intervals.jsonl", [interval._asdict() | {"ms": columns}])

    def write_samples(self, samples: Sequence[StepSample]) -> None:
        """Append steps of one rank."""
        if samples:
            self._append(
                f"rank-{samples[0].step.rank:05d}.jsonl", [s.step._asdict() | {"last": s.last} for s in samples]
            )

    def _append(self, name: str, lines: list[dict[str, Any]]) -> None:
        try:
            with (self._folder / name).open("a", encoding="utf-8") as file:
                file.writelines(_line(facts) + "\n" for facts in lines)
        except OSError as error:  # a profile must not end a training
            warning_once(f"{self._folder / name} is incomplete: {reason(error)}")


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace the lines of a file, which may be read from itself: one at a time, to bound memory."""
    temporary = path.with_suffix(".new")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    temporary.replace(path)


def _up_to(step: int, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a line that covers steps up to a given one; empty if there is none.

    An interval that spans the step keeps its mean for the earlier steps, so that a resumed run counts them.
    """
    beyond = max(0, facts["step"] - step)
    if not beyond:
        return facts
    steps = facts.get("steps", 0) - beyond
    return facts | {"step": step, "steps": steps} if steps > 0 else {}


def _line(facts: dict[str, Any]) -> str:
    return json.dumps(facts, separators=(",", ":"))


class MachineRecord(NamedTuple):
    """What a run ran on."""

    device: str
    """Product name, or cpu."""
    world_size: int


class RunRecord(NamedTuple):
    """All profile records of a run."""

    intervals: list[IntervalRecord]
    samples: dict[int, list[StepSample]]


def read(run: Path) -> RunRecord:
    """Read all records of a run."""
    return RunRecord(read_intervals(run), read_samples(run))


def from_steps(steps: Sequence[Sequence[RankStep]], clock_bound: int) -> RunRecord:
    """Convert whole steps of all ranks to the records of a run."""
    intervals, samples = [], {}
    for of_ranks in steps:
        world_size, number, last = len(of_ranks), of_ranks[0].step, last_arrivals(of_ranks)
        shares = [place_row(ledger_row(ledger), place, world_size) for place, ledger in enumerate(ledgers(of_ranks))]
        intervals.append(
            build_interval(np.sum(shares, axis=0), step=number, steps=1, world_size=world_size, clock_bound=clock_bound)
        )
        samples[number] = [StepSample(step, {t.name: last[t.name] for t in step.transfers}) for step in of_ranks]
    return RunRecord(intervals, samples)


def read_intervals(run: Path) -> list[IntervalRecord]:
    """Read all intervals of a run, in order. A resumed run may have several world sizes."""
    path = run / FOLDER / "intervals.jsonl"
    found = list(_lines(path, _interval)) if path.exists() else []
    if not found:
        remedy = "name the folder of a training, such as runs/latest; it is written after the first log interval"
        what = "nothing was recorded of the bubbles of this run" if run.is_dir() else f"there is no run '{run}'"
        if (run / FOLDER / _MACHINE_FILE).exists():  # a profiler was created, and the first step is warm-up
            what = "a profiler was created, but no interval of steps was written"
            remedy = (
                "call profiler.end_step() after every step and profiler.close() at the end; profile two steps or more"
            )
        raise DataError(what, where=str(path), remedy=remedy)
    return found


def is_recorded(run: Path) -> bool:
    """Return whether a run has recorded an interval."""
    with contextlib.suppress(FileNotFoundError), (run / FOLDER / "intervals.jsonl").open("rb") as file:
        return file.readline().endswith(b"\n")
    return False


def read_machine(run: Path) -> MachineRecord:
    """Read what a run ran on."""
    path = run / FOLDER / _MACHINE_FILE
    if not path.exists():
        remedy = "name the folder of a training by this version, or use --from-data"
        raise DataError("this run has no record of what it ran on", where=str(path), remedy=remedy)
    (machine,) = _lines(path, _machine, whole=True)
    return machine


def read_samples(run: Path) -> dict[int, list[StepSample]]:
    """Read sampled steps with the ranks that wrote them, both in order."""
    found: dict[int, dict[int, StepSample]] = {}
    for path in sorted((run / FOLDER).glob("rank-*.jsonl")):
        for sample in _lines(path, _sample):
            found.setdefault(sample.step.step, {})[sample.step.rank] = sample
    return {step: [ranks[rank] for rank in sorted(ranks)] for step, ranks in sorted(found.items())}


def _machine(facts: dict[str, Any]) -> MachineRecord:
    found = MachineRecord(**facts)
    _check(isinstance(found.device, str) and found.world_size >= 1, found.world_size)
    return found


def _interval(facts: dict[str, Any]) -> IntervalRecord:
    table = np.array([facts["ms"][name] for name in COLUMNS], dtype=np.float64).T
    found = IntervalRecord(**facts | {"ms": table})
    _check(table.shape == (min(found.world_size, GROUPS), len(COLUMNS)), found.step, found.steps, found.world_size)
    _check(min(found.steps, found.world_size, *table[:, -1]) >= 1 and 0 <= found.clock_bound_us < _REAL)
    _check(bool(((table >= 0) & (table < _REAL)).all()))
    return found


def _sample(facts: dict[str, Any]) -> StepSample:
    last, spans = facts.pop("last"), tuple(Span(*span) for span in facts["spans"])
    transfers = tuple(
        Transfer(kind, name, arrived, done, tuple((begin, end) for begin, end in waits), *rest)
        for kind, name, arrived, done, waits, *rest in facts["transfers"]
    )
    step = RankStep(**facts | {"spans": spans, "transfers": transfers})
    moments = [n for t in step.transfers for n in (t.arrived, t.done, *(m for wait in t.waits for m in wait))]
    moments += [n for span in step.spans for n in (span.begin, span.end)]
    _check(0 <= step.work < _REAL, step.rank, step.step, step.begin, step.end, *moments, *last.values())
    account(step, last)  # validates kinds and names
    return StepSample(step, last)


def _check(right: bool, *whole: Any) -> None:
    if not right or not all(type(number) is int and abs(number) < _WHOLE for number in whole):
        raise ValueError("a value that no run writes")


def _lines(path: Path, make: Callable[[dict[str, Any]], T], *, whole: bool = False) -> Iterator[T]:
    """Parse complete lines; a killed run may leave an incomplete last one. `whole`: the file is one object."""
    done = 0
    try:
        with path.open("rb") as file:
            for line in [file.read()] if whole else file:
                if whole or line.endswith(b"\n"):
                    yield make(json.loads(line))
                done += 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        what = f"line {done + 1} is not what a training writes ({type(error).__name__}: {reason(error)})"
        raise DataError(what, where=str(path), remedy="remove that line, or the file") from error
