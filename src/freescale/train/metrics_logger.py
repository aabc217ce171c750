"""Metrics of a run: measured over steps, printed as progress, and written to `metrics.jsonl` with one entry per line.

Rank 0 writes; the logger of other ranks does nothing. Each entry has a kind, a step and a time (Unix seconds):

start      training begins or continues: on how many ranks, and why
train      means since the previous train entry, every `train.log_every` steps
evaluate   metrics of the held-out part
validate   metrics of a partition before it is trained
autotune   the selected setting of a step, and milliseconds of a step with each setting
fault      a loss or gradient that is not finite
recovery   how long it took to continue after the loss of a rank
rewind     later steps were dropped because they are computed again; `reached` is the last of them
end        whether training finished

Reading entries imports no torch.
"""

import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from freescale.bubbles.records import IntervalRecord, replace_lines
from freescale.bubbles.summary import mean_over_ranks
from freescale.errors import DataError, reason
from freescale.log import warning_once
from freescale.progress import ProgressBar, on_terminal, progress

if TYPE_CHECKING:
    from torch import Tensor

    from freescale.balance.planner import Planner
    from freescale.train.step import StepState

METRICS_FILE = "metrics.jsonl"
_KEPT_BY_REWIND = ("start", "recovery", "rewind")
"""Kinds that describe what happened to the steps that a rewind drops."""
_MAX_STEP, _MAX_VALUE = 1 << 53, 1e30
_SUMMED = ("loss", "samples", "tokens", "ids", "unique_ids", "fetched_ids", "colliding_ids")
"""Values that differ between ranks and are summed over them, in the order of `MeterReading.sums`."""


def read_entries(run: Path) -> Iterator[dict[str, Any]]:
    """Return the entries of a run. Skips damaged lines: a killed process or a full disk may leave half a line."""
    return (entry for entry in _parse_lines(run) if entry is not None)


def count_damaged_lines(run: Path) -> int:
    """Return how many lines of the file hold no entry."""
    return sum(entry is None for entry in _parse_lines(run))


def entry_value(entry: Mapping[str, Any], name: str, default: float = math.nan) -> float:
    """Return a value of an entry, or the default if it is not a finite number. The file may have been edited."""
    value = entry.get(name)
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MAX_VALUE
    return float(value) if valid else default


def _parse_lines(run: Path) -> Iterator[dict[str, Any] | None]:
    """Return the entry of every line, or None where it holds none."""
    try:
        with contextlib.suppress(FileNotFoundError), (run / METRICS_FILE).open("rb") as file:
            yield from map(_parse_line, file)
    except OSError as error:
        what = f"the metrics of this run cannot be read: {reason(error)}"
        raise DataError(
            what, where=str(run / METRICS_FILE), remedy="make the file readable, or move it away"
        ) from error


def _parse_line(line: bytes) -> dict[str, Any] | None:
    entry = None
    with contextlib.suppress(ValueError, RecursionError):
        entry = json.loads(line)
    valid = isinstance(entry, dict) and isinstance(entry.get("kind"), str) and type(entry.get("step")) is int
    return entry if valid and 0 <= entry["step"] < _MAX_STEP else None


class MeterReading(NamedTuple):
    """What a meter of this rank measured since the previous reading."""

    sums: list[float]
    """To be summed over the ranks; see _SUMMED."""
    seconds: float
    steps: int
    usable_steps: int
    """Steps without a fault. Loss and gradient norm are means over them."""
    grad_norm: tuple[float, float]
    """Mean and maximum, the same on all ranks."""
    balance: dict[str, float]
    """Means over the planned placements; empty without balancing."""
    served_rows: list[float]
    """Per step, the rows of sharded tables that this rank sent to all ranks."""

    @property
    def seconds_per_step(self) -> float:
        """Wall-clock time of a step."""
        return self.seconds / self.steps

    def entry(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the values of a train entry. `sums`: those of all ranks added up."""
        total = dict(zip(_SUMMED, sums, strict=True))
        values = {
            "loss": total["loss"] / self.usable_steps if self.usable_steps else math.nan,
            "samples/s": total["samples"] / self.seconds,
            "tokens/s": total["tokens"] / self.seconds,
            "seconds": self.seconds_per_step,
        }
        if self.usable_steps:
            values |= {"grad_norm": self.grad_norm[0], "grad_norm_max": self.grad_norm[1]}
        if total["ids"]:
            values["unique_ids"] = total["unique_ids"] / total["ids"]
        if total["fetched_ids"]:
            values["colliding_ids"] = total["colliding_ids"] / total["fetched_ids"]
        return values | self.balance


class StepMeter:
    """Accumulates what steps computed. Counts are on the host; only a reading waits for the device, once."""

    def __init__(self, planner: "Planner | None") -> None:
        self._planner = planner
        self.restart()

    def restart(self) -> None:
        """Drop what was counted and count from here."""
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._steps = 0
        self._served: list[float] = []
        self._counts = np.zeros(len(_SUMMED) - 1)
        self._planned = None if self._planner is None else self._planner.sums
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside out of the reading, and keep what was counted."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def count(self, state: "StepState") -> None:
        """Count a finished step."""
        self._steps += 1
        self._served.append(float(state.embedding.served_rows))
        self._counts += len(state.batch), int(state.batch.history.offsets[-1]), *_count_ids(state)
        if not state.fault and state.grad_norm is not None:
            self._losses += [loss.detach() for loss in state.losses]
            self._norms.append(state.grad_norm)

    def read(self) -> MeterReading:
        """Return what was counted, and restart."""
        import torch  # not at the top: reading entries needs no torch

        loss = mean = largest = 0.0
        if self._norms:
            norms = torch.stack(self._norms).double()
            values = torch.stack([torch.stack(self._losses).double().sum(), norms.mean(), norms.max()])
            loss, mean, largest = values.tolist()
        seconds = time.perf_counter() - self._since
        sums = [loss, *self._counts.tolist()]
        reading = MeterReading(
            sums, seconds, self._steps, len(self._norms), (mean, largest), self._balance(), self._served
        )
        self.restart()
        return reading

    def _balance(self) -> dict[str, float]:
        if self._planner is None or self._planned is None:
            return {}
        plans, *sums = (self._planner.sums - self._planned).tolist()
        names = ("imbalance_before", "imbalance_after", "moved_tokens")
        return {name: value / plans for name, value in zip(names, sums, strict=True)} if plans else {}


def busiest_owner(total: "Tensor", largest: "Tensor", world_size: int) -> dict[str, float]:
    """Return the rows that the busiest rank serves, over the mean of all ranks; mean of the steps. Both are by step."""
    served = total > 0
    if not served.any():
        return {}
    return {"busiest_owner": float((largest[served] / (total[served] / world_size)).mean())}


def _count_ids(state: "StepState") -> tuple[int, int, int, int]:
    """Return the ids looked up; the distinct ones; of a prefetched batch also the distinct and the colliding ones."""
    ids = sum(unique.inverse.numel() for part in state.unique_ids for unique in part.values())
    unique_ids = sum(len(unique.unique) for unique in state.embedding.unique_ids.values())
    arrives = state.embedding.fetch_split
    if arrives is None:
        return ids, unique_ids, 0, 0
    return ids, unique_ids, unique_ids, sum(map(sum, arrives.shared.requested))


def _is_later(entry: Mapping[str, Any], step: int) -> bool:
    """Whether a training that continues after a step writes the entry again."""
    if entry["kind"] == "validate":  # it precedes the step that it is counted with
        return bool(entry["step"] >= step)
    return bool(entry["step"] > step) and entry["kind"] not in _KEPT_BY_REWIND


class MetricsSink(Protocol):
    """Receives metrics of a run."""

    def write(self, entry: Mapping[str, Any]) -> None:
        """Take an entry, with its kind, step and time."""

    def close(self) -> None:
        """Send what is pending."""


class MetricsLogger:
    """Writes `metrics.jsonl` and progress on the terminal (plain lines elsewhere), and passes entries to sinks."""

    def __init__(
        self,
        folder: Path,
        *,
        is_rank_zero: bool,
        steps: int,
        sinks: Sequence[MetricsSink] = (),
        quiet: bool = False,
    ) -> None:
        """`quiet`: print nothing. `sinks`: of rank 0."""
        self._is_rank_zero, self._steps, self._path, self._unwritten = is_rank_zero, steps, folder / METRICS_FILE, b""
        if is_rank_zero:
            folder.mkdir(parents=True, exist_ok=True)
        self._prints = is_rank_zero and not quiet
        self._sinks = sinks
        self._last, self._display = "", contextlib.ExitStack()
        self._bar: ProgressBar | None = None
        if self._prints and on_terminal():
            self._bar = self._display.enter_context(progress("training", total=steps, unit="steps", at_once=True))

    def print_line(self, text: str) -> None:
        """Print a human-readable line."""
        if self._prints:
            sys.stderr.write(text + "\n")

    def log_progress(self, step: int, values: Mapping[str, float], *, seconds_left: float) -> None:
        """Write a train entry and show the progress."""
        self.write({"kind": "train", "step": step, **values})
        speeds = [f"{values[name]:,.0f} {name}" for name in ("samples/s", "tokens/s")]
        details = [f"loss {values['loss']:.4f}", *speeds]
        self._last = "  ".join([f"step {step}/{self._steps}", *details])
        if self._bar is not None:
            self._bar.update(step, details=details, seconds_left=seconds_left)
        else:
            left = time.strftime("%H:%M:%S", time.gmtime(seconds_left))
            self.print_line(f"{self._last}  {left} left")

    def log_start(self, step: int, *, world_size: int, reason: str) -> None:
        """Write a start entry. Drops entries of later steps, which a lost start has left."""
        if self._path.exists():
            self.rewind(step)
        self.write({"kind": "start", "step": step, "world_size": world_size, "reason": reason})

    def write(self, entry: Mapping[str, Any]) -> None:
        """Add an entry to the file."""
        if self._is_rank_zero:
            timed = {**entry, "time": round(time.time(), 3)}
            self._append(json.dumps(timed) + "\n")
            self._send(timed)

    def log_times(self, interval: IntervalRecord) -> None:
        """Pass where the time of an interval of steps went to the sinks, in milliseconds; files have it already."""
        means = mean_over_ranks([interval])
        self._send({**means, "kind": "time", "step": interval.step, "time": round(time.time(), 3)})

    def _send(self, entry: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(entry)

    def rewind(self, step: int) -> None:
        """Drop entries of later steps, which will be computed again, and half a line that a crash may have left.

        Starts stay, and a rewind entry says how far the dropped steps went.
        """
        if not self._is_rank_zero:
            return
        stored = partial(read_entries, self._path.parent)
        reached, until = step, 0.0
        for entry in stored():
            if _is_later(entry, step):
                reached, until = max(reached, entry["step"]), max(until, entry_value(entry, "time", 0.0))
        kept = (entry for entry in stored() if not _is_later(entry, step))
        rewind = [{"kind": "rewind", "step": step, "reached": reached, "time": until}] if reached > step else []
        replace_lines(self._path, map(json.dumps, itertools.chain(kept, rewind)))
        self._unwritten = b""

    def _append(self, line: str) -> None:
        """Append a line. After a failed write, the next one retries what is missing."""
        self._unwritten += line.encode()
        try:
            with self._path.open("ab", buffering=0) as file:
                while self._unwritten:
                    self._unwritten = self._unwritten[file.write(self._unwritten) :]
        except OSError as error:
            warning_once(f"{self._path} lacks the newest entries: {reason(error)}; later entries retry")

    def close(self) -> None:
        """End all output."""
        self._display.close()
        if self._bar is not None and self._last:
            self.print_line(self._last)
        for sink in self._sinks:
            sink.close()
