"""Injects seeded faults into real runs, and checks that none hangs or loses a step.

    python benchmarks/faults.py [--faults 200] [--only 7 11 ...] [--kinds kill stop ...] [--quick] [--out FILE.json]

The seed determines the kind of a fault, the world size, the transport, the victim and the step. The fault hits a real
`freescale train` under its launcher, on one host or on hosts of a lab. The run must end with bitwise the checkpoint of
the undisturbed run or, where it cannot continue, with one clear error in time. Two kinds, on request only, inject
several faults into one run.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import lab as labs

from fault_kinds import KINDS, OFTEN, ON_SMALL_DISK, SEVERAL, STEPS, Trial, finished, on_hosts
from freescale.train.metrics_logger import read_entries
from record import save
from watched import make_data, require


def trial_of(number: int, kind: str, data: Path, baselines: "Baselines", *, quick: bool = False) -> dict[str, Any]:
    """Inject one fault and return the outcome of the run."""
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
    """Results of undisturbed runs, by world size and hosts."""

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
                        runs = finished(on_hosts(calm, hosts))
                else:
                    runs = [calm.start()]
                require([run.ended() for run in runs] == [0] * len(runs), "an undisturbed run failed")
                self._known[key] = learnt(calm.place)
        return self._known.get(key, {})


def learnt(run: Path) -> dict[str, bytes]:
    """Return the last checkpoint."""
    folder = run / "checkpoints" / f"step-{STEPS:08d}"
    return {path.name: path.read_bytes() for path in folder.glob("rank-*.bytes")}


def metrics(run: Path) -> list[dict[str, Any]]:
    return list(read_entries(run))


def losses(run: Path) -> list[int]:
    """Return the logged steps in order."""
    return [entry["step"] for entry in metrics(run) if entry["kind"] == "train"]


class _DiskOf:
    """Provide the folder of a run: a small disk where it is to fill up."""

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


def kind_of(number: int) -> str:
    """Return all kinds in turn, the likely ones more often."""
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
