"""The kinds of faults that `faults` injects into a run. The number of a fault determines its details."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tests.support import lab as labs
from tests.support.failing_disk import failing_disk_at

from watched import WatchedRun, alive, require

STEPS, SAVE_EVERY, DEADLINE = 60, 6, 8.0
RECIPE = ["train", "tiny", "--train.epochs", "99", "--train.max-steps", str(STEPS), "--train.log-every", "1"]
RECIPE += ["--train.save-every", str(SAVE_EVERY), "--train.timeout", str(DEADLINE), "--restarts", "4"]
WAYS = ("auto", "c10d", "host_staged", "shared_memory")
_LATEST_STEP = STEPS - 15


class Trial:
    """One fault: its kind, victim and time, all drawn from its number."""

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
        self.hit_by, self.started = [kind], list[WatchedRun]()
        self.expected = (0,)
        """Expected exit codes."""
        self.same = True
        """Whether the run must end with the result of the undisturbed one."""

    def words(self, *more: str) -> list[str]:
        """Return the arguments of the command, except its output folder."""
        ways = ["--transport.urgent", self.ways[0], "--transport.deferred", self.ways[1]]
        return [*RECIPE, "--data", str(self.data), *ways, *more]

    def start(self, *more: str, **environment: str) -> WatchedRun:
        return self.watched(WatchedRun(self.place, self.words("--nproc", str(self.count), *more), **environment))

    def watched(self, run: WatchedRun) -> WatchedRun:
        """Start a run that is ended if a check fails."""
        self.started.append(run)
        return run

    def moments(self, *faults: str) -> Iterator[int]:
        """Return after which step each of several faults hits the run."""
        self.hit_by = list(faults)
        apart = _LATEST_STEP // len(faults)
        return (apart * number + int(self.random.integers(2, 6)) for number in range(len(faults)))


# --- On one host -----------------------------------------------------------------------------------------------------


def kill(trial: Trial) -> list[WatchedRun]:
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


def stop(trial: Trial) -> list[WatchedRun]:
    """A rank hangs."""
    run = trial.start()
    run.wait_for(trial.step)
    _signal(run, trial.victim, signal.SIGSTOP)
    return [run]


def pause(trial: Trial) -> list[WatchedRun]:
    """A rank is stopped for less than the timeout: no restart is needed."""
    run = trial.start("--restarts", "0")
    run.wait_for(trial.step)
    _pause_for_a_while(run, trial.victim)
    return [run]


def _pause_for_a_while(run: WatchedRun, rank: int) -> None:
    _signal(run, rank, signal.SIGSTOP)
    time.sleep(DEADLINE / 4)
    _signal(run, rank, signal.SIGCONT)


def agent(trial: Trial) -> list[WatchedRun]:
    """The launcher itself is killed: its ranks end with it, and the run is restarted manually."""
    run = trial.start()
    run.wait_for(trial.step)
    ranks = run.ranks()
    os.kill(run.agent, signal.SIGKILL)
    run.ended()
    require(not alive(ranks), "ranks outlive their agent")
    again = trial.start(*(["--resume"] if any(trial.place.glob("checkpoints/step-*[0-9]/facts.json")) else []))
    return [again]


def corrupt(trial: Trial) -> list[WatchedRun]:
    """A rank is killed, and the newest checkpoint is truncated or changed before it is read."""
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


def full(trial: Trial) -> list[WatchedRun]:
    """The disk fills up for a while."""
    run = trial.start()
    run.wait_for(trial.step)
    fill(trial.place / "ballast")
    run.wait_for(min(STEPS - 4, trial.step + 2 * SAVE_EVERY))
    (trial.place / "ballast").unlink()
    return [run]


def full_for_good(trial: Trial) -> list[WatchedRun]:
    """The disk fills up and stays so: the last checkpoint cannot be written."""
    trial.expected, trial.same = (1,), False
    run = trial.start("--restarts", "0")
    run.wait_for(trial.step)
    fill(trial.place / "ballast")
    return [run]


def fsync(trial: Trial) -> list[WatchedRun]:
    """One call of one rank to the disk of the checkpoints fails: it opens, writes, syncs or renames."""
    return [trial.start(**_failing_disk(trial, before=40))]


def _failing_disk(trial: Trial, *, before: int) -> dict[str, str]:
    """Return the environment that makes a call of the victim fail."""
    call, error = str(int(trial.random.integers(1, before))), str(int(trial.random.choice([5, 28])))
    return {
        "LD_PRELOAD": str(failing_disk_at(trial.place.parent)),
        "FAILING_DISK": str(trial.place / "checkpoints"),
        "FAILING_CALL": call,
        "FAILING_ERROR": error,
        "FAILING_RANK": str(trial.victim),
    }


def bad_sample(trial: Trial) -> list[WatchedRun]:
    """A row of the data cannot be used: the run ends at once, names the row, and does not restart."""
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


def _signal(run: WatchedRun, rank: int, kind: signal.Signals) -> None:
    os.kill(run.ranks()[rank], kind)


def fill(path: Path) -> None:
    """Fill a disk."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * (1 << 16)):
            pass


# --- Between hosts ---------------------------------------------------------------------------------------------------


def _on_host(trial: Trial, hosts: labs.Lab, host: int, *more: str) -> WatchedRun:
    meet = f"{labs.ADDRESS.format(1)}:29471"
    words = trial.words("--nproc", "1", "--hosts", "2", "--rdzv-endpoint", meet, *more)
    return trial.watched(WatchedRun(trial.place, words, host=hosts.hosts[host]))


def on_hosts(trial: Trial, hosts: labs.Lab, *more: str) -> list[WatchedRun]:
    """A rank on each of two hosts. The first serves the store."""
    return [_on_host(trial, hosts, host, *more) for host in (0, 1)]


def finished(runs: list[WatchedRun]) -> list[WatchedRun]:
    """Wait while the hosts are still there."""
    for run in runs:
        run.ended()
    return runs


def slow_link(trial: Trial) -> list[WatchedRun]:
    """The links between hosts become slow for a while."""
    with labs.lab(2) as hosts:
        runs = on_hosts(trial, hosts)
        runs[0].wait_for(trial.step, runs[1])
        _slow_for_a_while(trial, hosts)
        return finished(runs)


def _slow_for_a_while(trial: Trial, hosts: labs.Lab) -> None:
    hosts.shape(float(trial.random.uniform(1.0, 5.0)))
    time.sleep(3.0)
    hosts.shape(None)


def cut_link(trial: Trial) -> list[WatchedRun]:
    """The link of a host is cut for good, and no run is possible on fewer: an error on both sides."""
    trial.expected, trial.same = (5,), False
    with labs.lab(2) as hosts:
        runs = on_hosts(trial, hosts, "--restarts", "0")
        runs[0].wait_for(trial.step, runs[1])
        hosts.cut(1)
        return finished(runs)


def cut_and_mended(trial: Trial) -> list[WatchedRun]:
    """The link of a host is cut for a few seconds."""
    with labs.lab(2) as hosts:
        runs = on_hosts(trial, hosts)
        runs[0].wait_for(trial.step, runs[1])
        _cut_for_a_while(trial, hosts)
        return finished(runs)


def _cut_for_a_while(trial: Trial, hosts: labs.Lab) -> None:
    hosts.cut(1)
    time.sleep(float(trial.random.uniform(0.5, 4.0)))
    hosts.mend(1)


def lost_host(trial: Trial) -> list[WatchedRun]:
    """A host is cut off until it gives up; then it rejoins as a new agent."""
    with labs.lab(2) as hosts:
        runs = on_hosts(trial, hosts)
        runs[0].wait_for(trial.step, runs[1])
        return finished([runs[0], _lost_and_back(trial, hosts, runs[1])])


def _lost_and_back(trial: Trial, hosts: labs.Lab, run: WatchedRun) -> WatchedRun:
    hosts.cut(1)
    code = run.ended()
    require(code == 5, f"the host that was cut off ended with {code}")
    hosts.mend(1)
    return _on_host(trial, hosts, 1)


def lost_store(trial: Trial) -> list[WatchedRun]:
    """The host that serves the store is lost: the other ends with an error, and the run is restarted manually."""
    with labs.lab(2) as hosts:
        runs = on_hosts(trial, hosts)
        runs[0].wait_for(max(trial.step, SAVE_EVERY + 2), runs[1])
        return finished(_started_again(trial, hosts, runs))


def _started_again(trial: Trial, hosts: labs.Lab, runs: Sequence[WatchedRun]) -> list[WatchedRun]:
    os.killpg(runs[0].agent, signal.SIGKILL)
    code = runs[1].ended()
    require(code == 5 and "this host lost the store" in runs[1].said, f"it ended with {code}: {runs[1].said}")
    return [_on_host(trial, hosts, host, "--resume") for host in (0, 1)]


# --- Several, each before the last is forgotten ----------------------------------------------------------------------


def several_on_one_host(trial: Trial) -> list[WatchedRun]:
    """Several faults in turn; a call to the disk also fails, again after every restart."""
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


def several_between_hosts(trial: Trial) -> list[WatchedRun]:
    """Several faults in turn, until the host of the store is lost and the run is restarted manually."""
    slowed, cut, killed, lost, ended = trial.moments("slow link", "cut and mended", "kill", "lost host", "lost store")
    with labs.lab(2) as hosts:
        runs = on_hosts(trial, hosts)
        runs[0].wait_for(slowed, runs[1])
        _slow_for_a_while(trial, hosts)
        runs[0].wait_for(cut, runs[1])
        _cut_for_a_while(trial, hosts)
        runs[0].wait_for(killed, runs[1])
        _signal(runs[trial.victim], 0, signal.SIGKILL)
        runs[0].wait_for(lost, runs[1])
        runs[1] = _lost_and_back(trial, hosts, runs[1])
        runs[0].wait_for(ended, runs[1])
        return finished(_started_again(trial, hosts, runs))


KINDS: dict[str, Callable[[Trial], list[WatchedRun]]] = {
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
SEVERAL: dict[str, Callable[[Trial], list[WatchedRun]]] = {
    "several on one host": several_on_one_host,
    "several between hosts": several_between_hosts,
}
ON_HOSTS = ("cut and mended", "slow link", "lost host", "lost store", "cut link", "several between hosts")
ON_SMALL_DISK = ("full", "full for good", "several on one host")
OFTEN = ("kill", "kill", "kill", "kill", "stop", "stop", "corrupt", "corrupt", "full", "fsync", "fsync")
