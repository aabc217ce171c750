"""Does a run lose anything, or hang, whatever happens to it?

    python benchmarks/faults.py [--faults 200] [--only 7 11 ...] [--kinds kill stop ...] [--quick] [--out FILE.json]

Every fault is seeded: its kind, how many ranks, which way their rows take, who is hit and after which step. It hits a
real `freescale train`, under the launcher as users start it, on one host or on hosts of a lab. The run must end with
the checkpoint of the undisturbed run, to the last bit, or, where nobody could go on, with one clear error in time.
Two kinds, which are only there if asked for, let many faults hit one run, each before the last is forgotten.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import lab as labs
from disk import failing_disk_at
from freescale.train.journal import entries
from record import save

STEPS, SAVE_EVERY, DEADLINE = 60, 6, 8.0
HANGS_AFTER = 240.0
RECIPE = ["train", "tiny", "--train.epochs", "99", "--train.max-steps", str(STEPS), "--train.log-every", "1"]
RECIPE += ["--train.save-every", str(SAVE_EVERY), "--train.deadline", str(DEADLINE), "--restarts", "4"]
WAYS = ("auto", "c10d", "host_staged", "shared_memory")
_LATEST_STEP = STEPS - 15


class Run:
    """A training that is watched: what it says, and where it stands."""

    def __init__(self, folder: Path, words: Sequence[str], *, host: str = "", **environment: str) -> None:
        inside = ["ip", "netns", "exec", host] if host else []
        command = [*inside, sys.executable, "-m", "freescale", *words, "--out", str(folder)]
        self.folder, self.said, self._reached = folder, "", 0
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def wait_for(self, step: int, other: "Run | None" = None) -> None:
        """Return when a step was told: here, or by another host, since either may hold the rank that tells."""
        runs, until = [self, *([other] if other else [])], time.monotonic() + HANGS_AFTER
        while all(run._reached < step for run in runs):
            ended = all(not run._reader.is_alive() for run in runs)
            _require(not ended and time.monotonic() < until, f"step {step} was not reached: {self.said[-2000:]}")
            time.sleep(0.005)

    def wait_for_ranks(self, count: int) -> None:
        """Return when so many have been started."""
        while len(self.ranks()) < count:
            _require(self._reader.is_alive(), f"no ranks were started: {self.said[-2000:]}")
            time.sleep(0.01)

    def ranks(self) -> list[int]:
        """Processes of the ranks, in order."""
        return [rank for child in _children(self.agent) for rank in _children(child)]

    @property
    def agent(self) -> int:
        """The process that started them: `ip netns exec` becomes it."""
        return self._process.pid

    def ended(self) -> int | None:
        """The exit code; None if it hangs, and then it is no more."""
        try:
            code = self._process.wait(HANGS_AFTER)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reader.join(5)
        return code

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said += line
            if line.startswith("step ") and "/" in line:
                self._reached = max(self._reached, int(line.split()[1].split("/")[0]))


class Trial:
    """One fault: what it is, whom it hits and when. All drawn from its number."""

    def __init__(self, number: int, kind: str, data: Path, place: Path, *, quick: bool = False) -> None:
        """`quick`: never more than two ranks, which start sooner."""
        self.random = np.random.default_rng((number, 7))
        self.kind, self.data, self.place, self.quick = kind, data, place, quick
        self.on_hosts = kind in ON_HOSTS
        self.count = 2 if self.on_hosts else int(self.random.choice([2, 2, 2, 3, 4]))
        self.victim = int(self.random.integers(self.count))
        self.step = int(self.random.integers(2, _LATEST_STEP))
        self.ways = [str(self.random.choice(WAYS)) for _ in range(2)]
        if self.on_hosts:
            self.ways = ["c10d", "c10d"]
        if quick:
            self.count, self.victim = 2, self.victim % 2
        self.hit_by, self.started = [kind], list[Run]()
        self.expected = (0,)
        """Exit codes that are right."""
        self.same = True
        """Whether the run must end with what the undisturbed one learnt."""

    def words(self, *more: str) -> list[str]:
        """Of the command, but for where it writes."""
        ways = ["--transport.urgent", self.ways[0], "--transport.deferred", self.ways[1]]
        return [*RECIPE, "--data", str(self.data), *ways, *more]

    def start(self, *more: str, **environment: str) -> Run:
        return self.watched(Run(self.place, self.words("--nproc", str(self.count), *more), **environment))

    def watched(self, run: Run) -> Run:
        """A run that is not left behind if something is wrong."""
        self.started.append(run)
        return run

    def moments(self, *faults: str) -> Iterator[int]:
        """Of faults that hit one run: after which step each does."""
        self.hit_by = list(faults)
        apart = _LATEST_STEP // len(faults)
        return (apart * number + int(self.random.integers(2, 6)) for number in range(len(faults)))


# --- What happens -------------------------------------------------------------------------------------------------


def kill(trial: Trial) -> list[Run]:
    """A rank is killed (-9), after a step or while it starts."""
    run = trial.start()
    if trial.random.random() < 0.2:
        run.wait_for_ranks(trial.count)
        time.sleep(float(trial.random.uniform(0.0, 3.0)))
    else:
        run.wait_for(trial.step)
        time.sleep(float(trial.random.uniform(0.0, 0.05)))
    _signal(run, trial.victim, signal.SIGKILL)
    return [run]


def stop(trial: Trial) -> list[Run]:
    """A rank is stopped and does not go on."""
    run = trial.start()
    run.wait_for(trial.step)
    _signal(run, trial.victim, signal.SIGSTOP)
    return [run]


def pause(trial: Trial) -> list[Run]:
    """A rank is stopped for less than the deadline: nobody has to start again."""
    run = trial.start("--restarts", "0")
    run.wait_for(trial.step)
    _pause_for_a_while(run, trial.victim)
    return [run]


def _pause_for_a_while(run: Run, rank: int) -> None:
    _signal(run, rank, signal.SIGSTOP)
    time.sleep(DEADLINE / 4)
    _signal(run, rank, signal.SIGCONT)


def agent(trial: Trial) -> list[Run]:
    """The launcher itself is killed: its ranks end with it, and somebody starts the run again by hand."""
    run = trial.start()
    run.wait_for(trial.step)
    ranks = run.ranks()
    os.kill(run.agent, signal.SIGKILL)
    run.ended()
    _require(not _alive(ranks), "ranks outlive their agent")
    again = trial.start(*(["--resume"] if any(trial.place.glob("checkpoints/step-*[0-9]/facts.json")) else []))
    return [again]


def corrupt(trial: Trial) -> list[Run]:
    """A rank is killed, and the newest checkpoint is cut or changed before anybody reads it."""
    run = trial.start()
    run.wait_for(max(trial.step, 2 * SAVE_EVERY + 3))
    _signal(run, trial.victim, signal.SIGKILL)
    _spoil_newest(trial)
    return [run]


def _spoil_newest(trial: Trial) -> None:
    newest = sorted(trial.place.glob("checkpoints/step-*[0-9]"))[-1]
    file = sorted(newest.iterdir())[int(trial.random.integers(2 * trial.count + 1))]
    content = bytearray(file.read_bytes())
    content[int(trial.random.integers(len(content)))] ^= 1 << int(trial.random.integers(8))
    file.write_bytes(content if trial.random.random() < 0.5 else content[: len(content) // 2])


def full(trial: Trial) -> list[Run]:
    """The disk fills up for a while."""
    run = trial.start()
    run.wait_for(trial.step)
    fill(trial.place / "ballast")
    run.wait_for(min(STEPS - 4, trial.step + 2 * SAVE_EVERY))
    (trial.place / "ballast").unlink()
    return [run]


def full_for_good(trial: Trial) -> list[Run]:
    """The disk fills up and stays so: the last checkpoint cannot be written."""
    trial.expected, trial.same = (1,), False
    run = trial.start("--restarts", "0")
    run.wait_for(trial.step)
    fill(trial.place / "ballast")
    return [run]


def fsync(trial: Trial) -> list[Run]:
    """One call of one rank to the disk of the checkpoints fails: it opens, writes, syncs or renames."""
    return [trial.start(**_failing_disk(trial, before=40))]


def _failing_disk(trial: Trial, *, before: int) -> dict[str, str]:
    """What tells the victim's disk which call it is to fail."""
    call, error = str(int(trial.random.integers(1, before))), str(int(trial.random.choice([5, 28])))
    return {
        "LD_PRELOAD": str(failing_disk_at(trial.place.parent)),
        "FAILING_DISK": str(trial.place / "checkpoints"),
        "FAILING_CALL": call,
        "FAILING_ERROR": error,
        "FAILING_RANK": str(trial.victim),
    }


def bad_sample(trial: Trial) -> list[Run]:
    """A row of the data cannot be used: the run ends at once, with the row, and is not started again."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    trial.expected, trial.same = (3,), False
    copy = trial.place.parent / "bad data"
    copy.mkdir()
    for path in sorted(trial.data.glob("*.parquet"))[:1]:
        table = pq.read_table(path)
        row = int(trial.random.integers(len(table)))
        items = table["item_id"].to_pylist()
        items[row] = [None, *items[row][1:]]
        place = table.schema.get_field_index("item_id")
        pq.write_table(table.set_column(place, "item_id", pa.array(items, table["item_id"].type)), copy / path.name)
    (copy / "manifest.json").write_bytes((trial.data / "manifest.json").read_bytes())
    trial.data = copy
    return [trial.start()]


def slow_link(trial: Trial) -> list[Run]:
    """The links between hosts become slow for a while."""
    with labs.lab(2) as hosts:
        runs = _on_hosts(trial, hosts)
        runs[0].wait_for(trial.step, runs[1])
        _slow_for_a_while(trial, hosts)
        return _finished(runs)


def _slow_for_a_while(trial: Trial, hosts: labs.Lab) -> None:
    hosts.shape(float(trial.random.uniform(1.0, 5.0)))
    time.sleep(3.0)
    hosts.shape(None)


def cut_link(trial: Trial) -> list[Run]:
    """The link of a host is cut for good, and no run is possible on fewer: an error on both sides."""
    trial.expected, trial.same = (5,), False
    with labs.lab(2) as hosts:
        runs = _on_hosts(trial, hosts, "--restarts", "0")
        runs[0].wait_for(trial.step, runs[1])
        hosts.cut(1)
        return _finished(runs)


def cut_and_mended(trial: Trial) -> list[Run]:
    """The link of a host is cut for a few seconds."""
    with labs.lab(2) as hosts:
        runs = _on_hosts(trial, hosts)
        runs[0].wait_for(trial.step, runs[1])
        _cut_for_a_while(trial, hosts)
        return _finished(runs)


def _cut_for_a_while(trial: Trial, hosts: labs.Lab) -> None:
    hosts.cut(1)
    time.sleep(float(trial.random.uniform(0.5, 4.0)))
    hosts.mend(1)


def lost_host(trial: Trial) -> list[Run]:
    """A host is cut off until it has given up; then it comes back, as a new agent."""
    with labs.lab(2) as hosts:
        runs = _on_hosts(trial, hosts)
        runs[0].wait_for(trial.step, runs[1])
        return _finished([runs[0], _lost_and_back(trial, hosts, runs[1])])


def _lost_and_back(trial: Trial, hosts: labs.Lab, run: Run) -> Run:
    hosts.cut(1)
    code = run.ended()
    _require(code == 5, f"the host that was cut off ended with {code}")
    hosts.mend(1)
    return _on_host(trial, hosts, 1)


def lost_store(trial: Trial) -> list[Run]:
    """The host that serves the store is lost: the other ends with an error, and somebody starts the run again."""
    with labs.lab(2) as hosts:
        runs = _on_hosts(trial, hosts)
        runs[0].wait_for(max(trial.step, SAVE_EVERY + 2), runs[1])
        return _finished(_started_again(trial, hosts, runs))


def _started_again(trial: Trial, hosts: labs.Lab, runs: Sequence[Run]) -> list[Run]:
    os.killpg(runs[0].agent, signal.SIGKILL)
    code = runs[1].ended()
    _require(code == 5 and "is lost, and with it this host" in runs[1].said, f"it ended with {code}: {runs[1].said}")
    return [_on_host(trial, hosts, host, "--resume") for host in (0, 1)]


def several_on_one_host(trial: Trial) -> list[Run]:
    """One after another; a call to the disk fails besides, and does so again whenever ranks were started again."""
    killed, paused, spoilt, stopped, filled = trial.moments("kill", "pause", "corrupt", "stop", "full")
    trial.hit_by.append("fsync")
    run = trial.start(**_failing_disk(trial, before=16))
    run.wait_for(killed)
    _signal(run, trial.victim, signal.SIGKILL)
    run.wait_for(paused)
    _pause_for_a_while(run, trial.victim)
    run.wait_for(spoilt)
    _signal(run, trial.victim, signal.SIGKILL)
    _spoil_newest(trial)
    run.wait_for(stopped)
    _signal(run, trial.victim, signal.SIGSTOP)
    run.wait_for(filled)
    fill(trial.place / "ballast")
    run.wait_for(filled + SAVE_EVERY)
    (trial.place / "ballast").unlink()
    return [run]


def several_between_hosts(trial: Trial) -> list[Run]:
    """One after another, until the host that serves the store is lost and somebody starts the run again."""
    slowed, cut, killed, lost, ended = trial.moments("slow link", "cut and mended", "kill", "lost host", "lost store")
    with labs.lab(2) as hosts:
        runs = _on_hosts(trial, hosts)
        runs[0].wait_for(slowed, runs[1])
        _slow_for_a_while(trial, hosts)
        runs[0].wait_for(cut, runs[1])
        _cut_for_a_while(trial, hosts)
        runs[0].wait_for(killed, runs[1])
        _signal(runs[trial.victim], 0, signal.SIGKILL)
        runs[0].wait_for(lost, runs[1])
        runs[1] = _lost_and_back(trial, hosts, runs[1])
        runs[0].wait_for(ended, runs[1])
        return _finished(_started_again(trial, hosts, runs))


KINDS: dict[str, Callable[[Trial], list[Run]]] = {
    "kill": kill,
    "stop": stop,
    "corrupt": corrupt,
    "full": full,
    "fsync": fsync,
    "cut and mended": cut_and_mended,
    "slow link": slow_link,
    "bad sample": bad_sample,
    "lost host": lost_host,
    "lost store": lost_store,
    "agent": agent,
    "cut link": cut_link,
    "full for good": full_for_good,
    "pause": pause,
}
SEVERAL: dict[str, Callable[[Trial], list[Run]]] = {
    "several on one host": several_on_one_host,
    "several between hosts": several_between_hosts,
}
ON_HOSTS = ("cut and mended", "slow link", "lost host", "lost store", "cut link", "several between hosts")
ON_SMALL_DISK = ("full", "full for good", "several on one host")
OFTEN = ("kill", "kill", "kill", "kill", "stop", "stop", "corrupt", "corrupt", "full", "fsync", "fsync")


# --- One of them --------------------------------------------------------------------------------------------------


def trial_of(number: int, kind: str, data: Path, baselines: "Baselines", *, quick: bool = False) -> dict[str, Any]:
    """Let one fault happen, and look what became of the run."""
    with tempfile.TemporaryDirectory() as folder, _DiskOf(kind, Path(folder)) as place:
        trial = Trial(number, kind, data, place, quick=quick)
        expected = baselines.of(trial)
        began = time.monotonic()
        runs, wrong = [], []
        try:
            runs = (KINDS | SEVERAL)[kind](trial)
        except AssertionError as error:
            wrong.append(str(error))
            for run in trial.started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(run.agent, signal.SIGKILL)
        codes = [run.ended() for run in runs]
        wrong += [f"exit code {code}" for code in codes if code not in trial.expected]
        if trial.same and not wrong and learnt(place) != expected:
            wrong.append("it learnt something else")
        if trial.same and not wrong and losses(place) != list(range(1, STEPS + 1)):
            wrong.append("steps are missing or there twice")
        errors = [run.said.count("\nerror: ") + run.said.startswith("error: ") for run in runs]
        if trial.expected != (0,) and not all(errors):
            wrong.append("it ended without an error")
        entries = metrics(place)
        recoveries = [round(entry["seconds"], 1) for entry in entries if entry["kind"] == "recovery"]
        return {
            "fault": number,
            "kind": kind,
            "ranks": trial.count,
            "victim": trial.victim,
            "step": trial.step,
            **({"hit_by": trial.hit_by} if kind in SEVERAL else {}),
            "outcome": "; ".join(wrong) or ("error, as it must be" if trial.expected != (0,) else "the same weights"),
            "ok": not wrong,
            "recoveries_s": recoveries,
            "seconds": round(time.monotonic() - began, 1),
            "said": [run.said[-3000:] for run in runs] if wrong else [],
        }


class Baselines:
    """What undisturbed runs learn, by the number of ranks and where they are."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], dict[str, bytes]] = {}

    def of(self, trial: Trial) -> dict[str, bytes]:
        key = trial.count, trial.on_hosts
        if key not in self._known and trial.kind not in ("bad sample", "cut link", "full for good"):
            with tempfile.TemporaryDirectory() as folder:
                calm = Trial(0, trial.kind, trial.data, Path(folder) / "run", quick=trial.quick)
                calm.count, calm.ways = trial.count, ["c10d", "c10d"]
                if trial.on_hosts:
                    with labs.lab(2) as hosts:
                        runs = _finished(_on_hosts(calm, hosts))
                else:
                    runs = [calm.start()]
                _require([run.ended() for run in runs] == [0] * len(runs), "an undisturbed run failed")
                self._known[key] = learnt(calm.place)
        return self._known.get(key, {})


def learnt(run: Path) -> dict[str, bytes]:
    """The last checkpoint, whole."""
    folder = run / "checkpoints" / f"step-{STEPS:08d}"
    return {path.name: path.read_bytes() for path in folder.glob("rank-*.bytes")}


def metrics(run: Path) -> list[dict[str, Any]]:
    return list(entries(run))


def losses(run: Path) -> list[int]:
    """Steps that were noted, in order."""
    return [entry["step"] for entry in metrics(run) if entry["kind"] == "train"]


class _DiskOf:
    """Where a run writes: a small disk of its own, where it is to fill up."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._mounted = folder / "disk" if kind in ON_SMALL_DISK else None
        self._place = (self._mounted or folder) / "run"

    def __enter__(self) -> Path:
        if self._mounted is not None:
            self._mounted.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", self._mounted], check=True)
        return self._place

    def __exit__(self, *_: object) -> None:
        if self._mounted is not None:
            subprocess.run(["umount", "-l", self._mounted], check=True)


def _on_host(trial: Trial, hosts: labs.Lab, host: int, *more: str) -> Run:
    meet = f"{labs.ADDRESS.format(1)}:29471"
    words = trial.words("--nproc", "1", "--hosts", "2", "--meet", meet, *more)
    return trial.watched(Run(trial.place, words, host=hosts.hosts[host]))


def _on_hosts(trial: Trial, hosts: labs.Lab, *more: str) -> list[Run]:
    """A rank on each of two hosts. The first serves the store."""
    return [_on_host(trial, hosts, host, *more) for host in (0, 1)]


def _finished(runs: list[Run]) -> list[Run]:
    """Wait while the hosts are still there."""
    for run in runs:
        run.ended()
    return runs


def _children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in children.read_text().split()] if children.exists() else []


def _signal(run: Run, rank: int, kind: signal.Signals) -> None:
    os.kill(run.ranks()[rank], kind)


def _alive(pids: Sequence[int]) -> list[int]:
    """Those that still run a while later."""
    until = time.monotonic() + 5
    while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def fill(path: Path) -> None:
    """Take all the room that a disk has."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * (1 << 16)):
            pass


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def make_data(folder: Path) -> Path:
    """A log that every run trains on."""
    words = ["data", "synth", "--preset", "ml1m", "--users", "600", "--items", "500", str(folder)]
    subprocess.run([sys.executable, "-m", "freescale", *words], check=True, capture_output=True)
    return folder


def kind_of(number: int) -> str:
    """Every kind in turn, the likely ones more often."""
    kinds = [*KINDS, *OFTEN]
    return kinds[number % len(kinds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--only", type=int, nargs="+", help="these numbers, out of all")
    parser.add_argument("--kinds", nargs="+", choices=KINDS | SEVERAL)
    parser.add_argument("--quick", action="store_true", help="never more than two ranks")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    baselines, found = Baselines(), []
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder) / "data")
        for number in options.only or range(options.faults):
            kind = options.kinds[number % len(options.kinds)] if options.kinds else kind_of(number)
            found.append(trial_of(number, kind, data, baselines, quick=options.quick))
            print(json.dumps(found[-1]), flush=True)
            save(options.out, [summary_of(found), *found])
    print(json.dumps(summary_of(found)), flush=True)


def summary_of(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Outcomes and recovery times by kind."""
    table = {}
    for kind in sorted({one["kind"] for one in found}):
        of_kind = [one for one in found if one["kind"] == kind]
        took = [seconds for one in of_kind for seconds in one["recoveries_s"]]
        outcomes = {one["outcome"]: sum(o["outcome"] == one["outcome"] for o in of_kind) for one in of_kind}
        times = {"median_s": statistics.median(took), "most_s": max(took)} if took else {}
        table[kind] = {"faults": len(of_kind), "outcomes": outcomes, **times}
    return {"faults": len(found), "ok": sum(one["ok"] for one in found), "by_kind": table}


if __name__ == "__main__":
    main()
