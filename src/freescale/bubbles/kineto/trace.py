"""One trace of torch.profiler: which of its many events are compute, which are traffic, and where its steps end.

Knows the format of a trace and nothing of other ranks; no torch, no GPU.
"""

import gzip
import json
import re
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from freescale.bubbles.events import COMPUTE, RankStep, Span, Transfer, joined
from freescale.errors import DataError, reason
from freescale.log import warning_once

_READ = re.compile(r"kernel|gpu_memcpy|gpu_memset|(gpu_)?user_annotation|cpu_op|\w+_runtime|\w+_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)")
_PHASES = {
    "enumerate(DataLoader)": "data",
    "Optimizer.": "optimizer",
    "autograd::engine::evaluate_function": "backward",
}
"""What the names of marks and operators begin with, and what a thread is at inside of them."""
_TRAFFIC_KERNEL = re.compile(r"nccl|rccl|nvshmem|symm_?mem|multimem|(one|two)_shot_all_reduce", re.IGNORECASE)
_TRAFFIC_MARK = re.compile(r"nccl:|c10d::|freescale:|all_?(to_?all|gather|reduce)|reduce_?scatter", re.IGNORECASE)
_HOST_TRAFFIC, _HOST_LAUNCH = ("gloo:", "mpi:", "ucc:"), "c10d::"
_NO_COMPUTE = re.compile(r"c10d|record_param_comms|wait", re.IGNORECASE)
_COLLECTIVE = re.compile(
    "allreduce|reducescatter|allgather|alltoall|sendrecv|broadcast|barrier|reduce|scatter|gather|send|recv"
)
_PEER, _COPIES = "Memcpy PtoP", {"Memcpy HtoD": "data", "Memcpy DtoH": "host"}
"""Copies from the host bring batches, copies to it serve the host: neither is compute. Others are a phase's work."""
_NOT_A_TRACE = (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
_NOT_A_TRACE += (RecursionError, MemoryError)
"""What something raises that is not built like a trace, wherever it differs."""
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


class _Flight(NamedTuple):
    """A transfer that has no name yet."""

    kind: str
    collective: str
    group: str
    launched: int
    begin: int
    end: int


@dataclass(frozen=True)
class TracedRank:
    """What is kept of one trace."""

    rank: int
    bounds: dict[int, tuple[int, int]]
    spans: list[Span]
    transfers: list[Transfer]

    def under_way(self, number: int) -> set[str]:
        """Names of transfers that go on in a step."""
        begin, end = self.bounds[number]
        return {t.name for t in self.transfers if t.arrived < end and t.done > begin}

    def step(self, number: int, names: set[str]) -> RankStep:
        """A step with the transfers that have these names."""
        begin, end = self.bounds[number]
        spans = tuple(s for s in self.spans if s.begin < end and s.end > begin)
        return RankStep(self.rank, number, begin, end, spans, tuple(t for t in self.transfers if t.name in names))


def read_trace(path: Path) -> TracedRank:
    """Read what one rank did."""
    try:
        packed = path.read_bytes()
        trace = json.loads(gzip.decompress(packed) if path.suffix == ".gz" else packed, strict=False)
        number, events = _rank_number(trace, path), list(_events(trace))
        del trace, packed  # Of hundreds of megabytes, little is needed from here on.
        if events:
            return _Reading(number, events).rank()
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
                raise ValueError("an event that lies centuries away")
            yield _Event(raw["name"], category, (raw.get("pid"), raw.get("tid")), begin, end, raw.get("args") or {})


def _rank_number(trace: Mapping[str, Any], path: Path) -> int:
    rank = (trace.get("distributedInfo") or {}).get("rank")
    if isinstance(rank, int) and rank >= 0:
        return rank
    if named := re.search(r"rank[_-]?(\d+)", path.name, re.IGNORECASE):
        return int(named[1])
    remedy = "put the rank into the name of the file, as in rank0.json"
    raise DataError("a trace that does not say of which rank it is", where=str(path), remedy=remedy)


class _Reading:
    """One trace while it is looked through."""

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
            warning_once("no ProfilerStep in a trace: all of it is taken as one step")
            self._steps = {0: (min(e.begin for e in events), max(e.end for e in events))}

    def rank(self) -> TracedRank:
        flights, work = self._device_work()
        bounds = self._bounds(flights, work)
        flights = sorted([*flights, *self._host_flights()], key=lambda f: f.begin)
        # On a device, a wait of the host holds nothing up.
        waits = {} if self._device else self._waits(sorted(f.end for f in flights))
        spans = [span for _, span in work] if self._device else list(self._host_compute())
        spans += [Span("data", e.begin, e.end) for e in self._of["user_annotation"] if _phase_of(e) == "data"]
        spans += [Span("host", e.begin, e.end) for e in self._of["cpu_op"]]
        # In as few spans as possible: a trace has one per kernel.
        kinds = _unions((span.kind, span.begin, span.end) for span in spans)
        merged = [Span(kind, *interval) for kind, intervals in kinds.items() for interval in intervals]
        return TracedRank(self._number, bounds, merged, list(self._named(flights, waits)))

    def _at(self, event: _Event) -> str:
        """What its thread was at when it began."""
        kinds = _PHASES.values()
        return next((k for k in kinds if _within(self._inside.get((k, event.line), []), event.begin)), "forward")

    def _device_work(self) -> tuple[list[_Flight], list[tuple[int, Span]]]:
        """Traffic, and everything else with the moment of its launch."""
        flights: list[_Flight] = []
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
                flights.append(_collective_kernel(event, phase, times))
            elif event.category != "kernel" and (event.line in streams or marked_here or _PEER in event.name):
                # A copy waits for nobody: named for this rank alone, it is never a wait for a slower one.
                flights.append(_Flight("other traffic", "copy", f"rank {self._number}", *times))
            else:
                kind = next((kind for copy, kind in _COPIES.items() if copy in event.name), phase)
                others.append((launch.begin, Span(kind, event.begin, event.end)))
        return flights, others

    def _host_flights(self) -> Iterator[_Flight]:
        """Collectives that a thread of the host carries out and marks, each launched by another thread before."""
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
                yield _Flight(kind, collective, "group", launch.begin, event.begin, event.end)

    def _host_compute(self) -> Iterator[Span]:
        """Without a device, operators are compute, and so is all of an optimizer's step."""
        for event in self._of["cpu_op"]:
            if not _NO_COMPUTE.search(event.name):
                yield Span(self._at(event), event.begin, event.end)
        for event in self._of["user_annotation"]:
            if _phase_of(event) == "optimizer":
                yield Span("optimizer", event.begin, event.end)

    def _waits(self, ends: list[int]) -> dict[int, _Intervals]:
        """Waits by the end of what was waited for. Few are marked; of the others one sees that a thread launched a
        collective and was silent until it was over, which inside an operator would pass for compute."""
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

    def _bounds(self, flights: list[_Flight], work: list[tuple[int, Span]]) -> dict[int, tuple[int, int]]:
        """A step begins with its mark, or later: when the device is through with the compute of earlier steps. It
        ends where the next begins; without a next one, when all that was launched in it is over."""
        compute = [(launched, span.end) for launched, span in work if span.kind in COMPUTE]
        everything = [*((launched, span.end) for launched, span in work), *((f.launched, f.end) for f in flights)]
        begins = {number: _through(compute, begin) for number, (begin, _) in self._steps.items()}
        ends = {number: _through(everything, end) for number, (_, end) in self._steps.items()}
        return {number: (begin, begins.get(number + 1, ends[number])) for number, begin in begins.items()}

    def _named(self, flights: Iterable[_Flight], waits: Mapping[int, _Intervals]) -> Iterator[Transfer]:
        """Ranks launch the same collectives in the same order in each step, so their names are the same."""
        begins = sorted((begin, number) for number, (begin, _) in self._steps.items())
        count = Counter[Any]()
        for flight in flights:
            before = bisect_right(begins, flight.launched, key=lambda b: b[0])
            where = f"of {flight.group} in step {begins[before - 1][1] if before else 'none'}"
            count[flight.collective, where] += 1
            name = f"{flight.collective} {count[flight.collective, where]} {where}"
            waited = tuple((max(begin, flight.begin), end) for begin, end in waits.get(flight.end, []))
            yield Transfer(flight.kind, name, flight.begin, flight.end, waited)


def _phase_of(event: _Event) -> str:
    """What a thread is at inside of this mark or operator, if that says it."""
    return next((phase for prefix, phase in _PHASES.items() if event.name.startswith(prefix)), "")


def _is_collective(event: _Event) -> bool:
    return event.category == "kernel" and _TRAFFIC_KERNEL.search(event.name) is not None


def _collective_kernel(event: _Event, phase: str, times: tuple[int, int, int]) -> _Flight:
    collective = _collective(str(event.args.get("Collective name") or event.name))
    group = [str(event.args[key]) for key in ("Process Group Name", "Process Group Ranks") if key in event.args]
    kind = _traffic(collective, phase, str(event.args.get("dtype")))
    return _Flight(kind, collective, " ".join(["group", *group]), *times)


def _collective(name: str) -> str:
    """Which one a kernel, an operator or a mark names, in whatever spelling."""
    letters = re.sub("[^a-z]", "", name.lower())
    found = _COLLECTIVE.search(letters)
    return found[0] if found else letters


def _traffic(collective: str, phase: str, dtype: str) -> str:
    """What a collective of an unknown trainer most likely carries."""
    if collective in ("allreduce", "reducescatter"):
        return "dense gradients"
    if collective in ("alltoall", "sendrecv"):
        whole_numbers = re.search("int|long", dtype.lower())
        return "row gradients" if phase == "backward" else "ids" if whole_numbers else "urgent rows"
    return "other traffic"


def _through(work: Iterable[tuple[int, int]], moment: int) -> int:
    """When everything launched before a moment is over; that moment, if it is then."""
    return max([moment, *(end for launched, end in work if launched < moment)])


def _unions(intervals: Iterable[tuple[Any, int, int]]) -> dict[Any, _Intervals]:
    """The same instants of each kind, in intervals that lie apart."""
    of_kind = defaultdict[Any, _Intervals](list)
    for kind, begin, end in intervals:
        of_kind[kind].append((begin, end))
    return {kind: joined(some) for kind, some in of_kind.items()}


def _within(apart: _Intervals, moment: int) -> bool:
    before = bisect_right(apart, moment, key=lambda interval: interval[0])
    return before > 0 and moment < apart[before - 1][1]
