"""Imports traces of torch.profiler (Kineto) of any trainer, as the events that a `Recorder` would record. Torch-free.

Each trace is parsed alone: which events are compute, which are traffic, and where steps end. Then clocks are aligned.
"""

import gzip
import json
import re
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from freescale.bubbles.events import COMPUTE, RankStep, Span, Transfer, merge_intervals
from freescale.errors import DataError, reason
from freescale.log import warning_once
from freescale.progress import track

_READ = re.compile(r"kernel|gpu_memcpy|gpu_memset|(gpu_)?user_annotation|cpu_op|\w+_runtime|\w+_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)")
_PHASES = {
    "enumerate(DataLoader)": "data",
    "Optimizer.": "optimizer",
    "autograd::engine::evaluate_function": "backward",
}
"""Prefixes of annotation and operator names, and the phase of a thread inside of them."""
_TRAFFIC_KERNEL = re.compile(r"nccl|rccl|nvshmem|symm_?mem|multimem|(one|two)_shot_all_reduce", re.IGNORECASE)
_TRAFFIC_MARK = re.compile(r"nccl:|c10d::|freescale:|all_?(to_?all|gather|reduce)|reduce_?scatter", re.IGNORECASE)
_HOST_TRAFFIC, _HOST_LAUNCH = ("gloo:", "mpi:", "ucc:"), "c10d::"
_NO_COMPUTE = re.compile(r"c10d|record_param_comms|wait", re.IGNORECASE)
_COLLECTIVE = re.compile(
    "allreduce|reducescatter|allgather|alltoall|sendrecv|broadcast|barrier|reduce|scatter|gather|send|recv"
)
_PEER, _COPIES = "Memcpy PtoP", {"Memcpy HtoD": "data", "Memcpy DtoH": "host"}
"""Copies from and to the host are not compute. Other copies belong to their phase."""
_NOT_A_TRACE = (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
_NOT_A_TRACE += (RecursionError, MemoryError)
"""Errors that a malformed trace can raise."""
_ENDS_TOGETHER = ("allreduce", "reducescatter", "allgather", "alltoall", "barrier")
_NOISE = 10_000
"""Nanoseconds between the ends of one collective on one clock: a smaller difference is no clock offset."""
_FAR = 1 << 62
_Intervals = list[tuple[int, int]]


class _Event(NamedTuple):
    name: str
    category: str
    line: tuple[Any, Any]
    """Process and thread, or device and stream."""
    begin: int
    end: int
    args: Mapping[str, Any]


class _TracedTransfer(NamedTuple):
    """A transfer without a name yet."""

    kind: str
    collective: str
    group: str
    launched: int
    begin: int
    end: int


@dataclass(frozen=True)
class TracedRank:
    """The parsed trace of one rank."""

    rank: int
    bounds: dict[int, tuple[int, int]]
    spans: list[Span]
    transfers: list[Transfer]

    def names_in_flight(self, number: int) -> set[str]:
        """Return the names of transfers in flight during a step."""
        begin, end = self.bounds[number]
        return {t.name for t in self.transfers if t.arrived < end and t.done > begin}

    def step(self, number: int, names: set[str]) -> RankStep:
        """Return a step with the transfers of these names."""
        begin, end = self.bounds[number]
        spans = tuple(s for s in self.spans if s.begin < end and s.end > begin)
        return RankStep(self.rank, number, begin, end, spans, tuple(t for t in self.transfers if t.name in names))


def read_trace(path: Path) -> TracedRank:
    """Read the trace of one rank."""
    try:
        packed = path.read_bytes()
        trace = json.loads(gzip.decompress(packed) if path.suffix == ".gz" else packed, strict=False)
        number, events = _rank_number(trace, path), list(_events(trace))
        del trace, packed  # it may take hundreds of megabytes
        if events:
            return _TraceParser(number, events).rank()
    except _NOT_A_TRACE as error:
        what = f"not a whole trace of torch.profiler ({type(error).__name__}: {reason(error)})"
        raise DataError(what, where=str(path), remedy="let the profiler finish writing, or remove the file") from error
    raise DataError("a trace without any event", where=str(path), remedy="profile at least one step")


def _events(trace: Mapping[str, Any]) -> Iterator[_Event]:
    base = int(trace.get("baseTimeNanoseconds", 0))
    for raw in trace["traceEvents"]:
        category = str(raw.get("cat"))
        if raw.get("ph") == "X" and _READ.fullmatch(category):
            begin = base + round(raw["ts"] * 1000)
            end = begin + max(0, round(raw.get("dur", 0) * 1000))
            if not -_FAR < begin <= end < _FAR:
                raise ValueError("an event with an implausible time")
            yield _Event(raw["name"], category, (raw.get("pid"), raw.get("tid")), begin, end, raw.get("args") or {})


def _rank_number(trace: Mapping[str, Any], path: Path) -> int:
    rank = (trace.get("distributedInfo") or {}).get("rank")
    if isinstance(rank, int) and rank >= 0:
        return rank
    if named := re.search(r"rank[_-]?(\d+)", path.name, re.IGNORECASE):
        return int(named[1])
    remedy = "put the rank into the name of the file, as in rank0.json"
    raise DataError("a trace without a rank", where=str(path), remedy=remedy)


class _TraceParser:
    """Parses one trace."""

    def __init__(self, number: int, events: list[_Event]) -> None:
        self._number = number
        self._of = defaultdict[str, list[_Event]](list)
        for event in sorted(events, key=lambda e: e.begin):
            self._of[event.category].append(event)
        self._device = [event for category in _DEVICE for event in self._of[category]]
        runtime = [e for e in events if e.category.endswith(("_runtime", "_driver"))]
        self._launches = {e.args["correlation"]: e for e in runtime if "correlation" in e.args}
        host = [*self._of["user_annotation"], *self._of["cpu_op"]]
        self._inside = _unions(((_phase_of(e), e.line), e.begin, e.end) for e in host)
        marks = [(_STEP.match(event.name), event) for event in self._of["user_annotation"]]
        self._steps = {int(match[1]): (event.begin, event.end) for match, event in marks if match}
        if not self._steps:
            warning_once("no ProfilerStep in a trace: all of it counts as one step")
            self._steps = {0: (min(e.begin for e in events), max(e.end for e in events))}

    def rank(self) -> TracedRank:
        transfers, work = self._device_work()
        bounds = self._bounds(transfers, work)
        transfers = sorted([*transfers, *self._host_transfers()], key=lambda f: f.begin)
        # With a device, a wait of the host does not block compute.
        waits = {} if self._device else self._waits(sorted(f.end for f in transfers))
        spans = [span for _, span in work] if self._device else list(self._host_compute())
        spans += [Span("data", e.begin, e.end) for e in self._of["user_annotation"] if _phase_of(e) == "data"]
        spans += [Span("host", e.begin, e.end) for e in self._of["cpu_op"]]
        # Merge spans: a trace has one per kernel.
        kinds = _unions((span.kind, span.begin, span.end) for span in spans)
        merged = [Span(kind, *interval) for kind, intervals in kinds.items() for interval in intervals]
        return TracedRank(self._number, bounds, merged, list(self._named(transfers, waits)))

    def _at(self, event: _Event) -> str:
        """Return the phase of its thread when it began."""
        kinds = _PHASES.values()
        return next((k for k in kinds if _within(self._inside.get((k, event.line), []), event.begin)), "forward")

    def _device_work(self) -> tuple[list[_TracedTransfer], list[tuple[int, Span]]]:
        """Return traffic, and all other device work with its launch time."""
        transfers: list[_TracedTransfer] = []
        others: list[tuple[int, Span]] = []
        # Streams of traffic that run no kernel of another kind.
        streams = {e.line for e in self._device if _is_collective(e) or _PEER in e.name}
        streams -= {e.line for e in self._of["kernel"] if not _is_collective(e)}
        marks = self._of["gpu_user_annotation"]
        marked = _unions((m.line, m.begin, m.end) for m in marks if _TRAFFIC_MARK.search(m.name))
        for event in self._device:
            launch = self._launches.get(event.args.get("correlation"), event)
            phase, times = self._at(launch), (launch.begin, event.begin, event.end)
            marked_here = _within(marked.get(event.line, []), event.begin)
            if _is_collective(event):
                transfers.append(_collective_kernel(event, phase, times))
            elif event.category != "kernel" and (event.line in streams or marked_here or _PEER in event.name):
                # A copy waits for no rank. Its name is unique to this rank, so it never counts as a straggler.
                transfers.append(_TracedTransfer("other traffic", "copy", f"rank {self._number}", *times))
            else:
                kind = next((kind for copy, kind in _COPIES.items() if copy in event.name), phase)
                others.append((launch.begin, Span(kind, event.begin, event.end)))
        return transfers, others

    def _host_transfers(self) -> Iterator[_TracedTransfer]:
        """Yield collectives run and annotated by a host thread; another thread launched each before."""
        launches = defaultdict[str, list[_Event]](list)
        for event in self._of["cpu_op"]:
            if event.name.startswith(_HOST_LAUNCH):
                launches[_collective(event.name)].append(event)
        for event in self._of["user_annotation"]:
            if event.name.startswith(_HOST_TRAFFIC):
                collective = _collective(event.name)
                before = bisect_right(launches[collective], event.begin, key=lambda e: e.begin)
                launch = launches[collective][before - 1] if before else event
                dtype = str((event.args.get("Input type") or [""])[0])
                kind = _traffic(collective, self._at(launch), dtype)
                yield _TracedTransfer(kind, collective, "group", launch.begin, event.begin, event.end)

    def _host_compute(self) -> Iterator[Span]:
        """Yield compute without a device: operators, and the whole optimizer step."""
        for event in self._of["cpu_op"]:
            if not _NO_COMPUTE.search(event.name):
                yield Span(self._at(event), event.begin, event.end)
        for event in self._of["user_annotation"]:
            if _phase_of(event) == "optimizer":
                yield Span("optimizer", event.begin, event.end)

    def _waits(self, ends: list[int]) -> dict[int, _Intervals]:
        """Return waits by the end of the transfer. Few are annotated. Of the others, a thread launches a collective and
        records nothing until it is complete, which inside an operator would count as compute."""
        edges, silences = defaultdict[Any, list[int]](list), _Intervals()
        for event in [*self._of["user_annotation"], *self._of["cpu_op"]]:
            if not _NO_COMPUTE.search(event.name):
                edges[event.line] += [event.begin, event.end]
        edges = {line: sorted(moments) for line, moments in edges.items()}
        for event in self._of["cpu_op"]:
            if event.name.startswith(_HOST_LAUNCH):
                after = edges.get(event.line, [])
                silences += [(event.end, moment) for moment in after[bisect_right(after, event.end) :][:1]]
            elif "wait" in event.name.lower():
                silences.append((event.begin, event.end))
        found = defaultdict[int, _Intervals](list)
        for begin, end in silences:
            over = ends[bisect_right(ends, end) - 1] if ends else 0
            if begin < over <= end:
                found[over].append((begin, over))
        return found

    def _bounds(self, transfers: list[_TracedTransfer], work: list[tuple[int, Span]]) -> dict[int, tuple[int, int]]:
        """Return the bounds of steps. A step begins with its annotation, or later when the device completes the compute
        of earlier steps. It ends where the next begins, or when all its work is complete."""
        compute = [(launched, span.end) for launched, span in work if span.kind in COMPUTE]
        everything = [*((launched, span.end) for launched, span in work), *((f.launched, f.end) for f in transfers)]
        begins = {number: _through(compute, begin) for number, (begin, _) in self._steps.items()}
        ends = {number: _through(everything, end) for number, (_, end) in self._steps.items()}
        return {number: (begin, begins.get(number + 1, ends[number])) for number, begin in begins.items()}

    def _named(self, transfers: Iterable[_TracedTransfer], waits: Mapping[int, _Intervals]) -> Iterator[Transfer]:
        """Yield named transfers. Ranks launch the same collectives in the same order in a step, so names agree."""
        begins = sorted((begin, number) for number, (begin, _) in self._steps.items())
        count = Counter[Any]()
        for transfer in transfers:
            before = bisect_right(begins, transfer.launched, key=lambda b: b[0])
            where = f"of {transfer.group} in step {begins[before - 1][1] if before else 'none'}"
            count[transfer.collective, where] += 1
            name = f"{transfer.collective} {count[transfer.collective, where]} {where}"
            waited = tuple((max(begin, transfer.begin), end) for begin, end in waits.get(transfer.end, []))
            yield Transfer(transfer.kind, name, transfer.begin, transfer.end, waited)


def _phase_of(event: _Event) -> str:
    """Return the phase that an annotation or operator implies, if any."""
    return next((phase for prefix, phase in _PHASES.items() if event.name.startswith(prefix)), "")


def _is_collective(event: _Event) -> bool:
    return event.category == "kernel" and _TRAFFIC_KERNEL.search(event.name) is not None


def _collective_kernel(event: _Event, phase: str, times: tuple[int, int, int]) -> _TracedTransfer:
    collective = _collective(str(event.args.get("Collective name") or event.name))
    group = [str(event.args[key]) for key in ("Process Group Name", "Process Group Ranks") if key in event.args]
    kind = _traffic(collective, phase, str(event.args.get("dtype")))
    return _TracedTransfer(kind, collective, " ".join(["group", *group]), *times)


def _collective(name: str) -> str:
    """Return the collective that a kernel, operator or annotation names, in any spelling."""
    letters = re.sub("[^a-z]", "", name.lower())
    found = _COLLECTIVE.search(letters)
    return found[0] if found else letters


def _traffic(collective: str, phase: str, dtype: str) -> str:
    """Infer the kind of traffic of a collective."""
    if collective in ("allreduce", "reducescatter"):
        return "dense gradients"
    if collective in ("alltoall", "sendrecv"):
        whole_numbers = re.search("int|long", dtype.lower())
        return "row gradients" if phase == "backward" else "ids" if whole_numbers else "urgent rows"
    return "other traffic"


def _through(work: Iterable[tuple[int, int]], moment: int) -> int:
    """Return when all work launched before a time is complete; at least that time."""
    return max([moment, *(end for launched, end in work if launched < moment)])


def _unions(intervals: Iterable[tuple[Any, int, int]]) -> dict[Any, _Intervals]:
    """Return the disjoint intervals of each kind."""
    of_kind = defaultdict[Any, _Intervals](list)
    for kind, begin, end in intervals:
        of_kind[kind].append((begin, end))
    return {kind: merge_intervals(some) for kind, some in of_kind.items()}


def _within(apart: _Intervals, moment: int) -> bool:
    before = bisect_right(apart, moment, key=lambda interval: interval[0])
    return before > 0 and moment < apart[before - 1][1]


@dataclass(frozen=True)
class Traces:
    """The steps that all ranks have, on one clock."""

    steps: list[list[RankStep]]
    """One list per step, with every rank in order."""
    clock_bound: int
    """Clock error in nanoseconds: the median distance between the ends of collectives that all ranks leave together,
    on the worst rank. 0 without such collectives."""


def read_traces(folder: Path) -> Traces:
    """Read the traces of all ranks, one file each, from the folder that torch.profiler wrote them to."""
    ranks = _ranks(folder)
    numbers = _common_steps(ranks, folder)
    shifts, bound = _shifts(ranks)
    steps: list[list[RankStep]] = []
    missing = set[str]()
    for number in track(numbers, "aligning traces", unit="steps"):
        # A transfer in flight on one rank may be complete on another, whose arrival still counts.
        names = set[str]().union(*(rank.names_in_flight(number) for rank in ranks))
        steps.append([rank.step(number, names).shifted(by) for rank, by in zip(ranks, shifts, strict=True)])
        on_all = set.intersection(*({t.name for t in step.transfers} for step in steps[-1]))
        missing |= {name for name in names - on_all if " of rank " not in name}
    if missing:
        warning_once(
            f"some ranks lack collectives of others ('{min(missing)}'): last arrivals ignore the ranks without them"
        )
    return Traces(steps, bound)


def _ranks(folder: Path) -> list[TracedRank]:
    found: dict[int, tuple[TracedRank, Path]] = {}
    paths = sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")])
    for path in track(paths, "reading traces", unit="files"):
        rank = read_trace(path)
        if rank.rank in found:
            what = f"two traces of rank {rank.rank}: {found[rank.rank][1].name} and {path.name}"
            raise DataError(what, where=str(folder), remedy="keep one trace per rank, all of the same steps")
        found[rank.rank] = rank, path
    if not found:
        remedy = "give the folder that torch.profiler's tensorboard_trace_handler wrote to"
        raise DataError("no trace here: no *.json and no *.json.gz", where=str(folder), remedy=remedy)
    return [found[rank][0] for rank in sorted(found)]


def _common_steps(ranks: Sequence[TracedRank], folder: Path) -> list[int]:
    everywhere = set.intersection(*(set(rank.bounds) for rank in ranks))
    if not everywhere:
        remedy = "profile the same steps on all ranks"
        raise DataError("no step is in the traces of all ranks", where=str(folder), remedy=remedy)
    if others := sorted(set[int]().union(*(rank.bounds for rank in ranks)) - everywhere):
        warning_once(f"not in the traces of all ranks, so left out: step {', '.join(map(str, others))}")
    return sorted(everywhere)


def _shifts(ranks: Sequence[TracedRank]) -> tuple[list[int], int]:
    """Return what to add to each rank's clock, and the remaining distance between ends of collectives."""
    shifts: list[int] = []
    known, bound = dict[str, int](), 0
    for rank in ranks:
        ends = {t.name: t.done for t in rank.transfers if t.name.startswith(_ENDS_TOGETHER)}
        apart = [known[name] - end for name, end in ends.items() if name in known] or [0]
        if shifts and not known.keys() & ends.keys():
            warning_once(f"rank {rank.rank} shares no collective with lower ranks: its clock is not aligned")
        middle = median_low(apart)
        spread = median_low(abs(one - middle) for one in apart)
        shifts.append(middle if abs(middle) > _NOISE + 3 * spread else 0)
        bound = max(bound, median_low(abs(one - shifts[-1]) for one in apart))
        known = {name: end + shifts[-1] for name, end in ends.items()} | known
    return shifts, bound
