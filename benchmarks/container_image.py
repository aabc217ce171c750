"""Executes the steps of examples/kubernetes/Containerfile in a plain root, and runs the pods of train.yaml from it.

    python benchmarks/container_image.py [--rounds 5] [--without-image] [--out FILE.json]

The root is debootstrap's, in a temporary folder. A pod is a chroot whose command is process 1 of its own process
numbers, as user 1000, on a network namespace of its own. Two pods of one rank train the recipe tiny with the arguments
of the manifest. Each round sends SIGTERM to one pod and measures the time until both have saved and ended. Then a pod
is killed with SIGKILL and started again, as the Job does. Needs root, debootstrap and iproute2.

--without-image: the pods see this machine's files instead of an image, under an overlay that takes what they write.
FREESCALE_IMAGE_BIND: files and folders of this machine that pip needs, separated by colons.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.lab import ADDRESS, Lab, lab

import record
from freescale.train.metrics_logger import read_entries

ROOT = Path(__file__).parents[1]
IMAGE, MANIFEST = ROOT / "examples/kubernetes/Containerfile", ROOT / "examples/kubernetes/train.yaml"
GRACE, HANGS_AFTER = 30.0, 600.0
CONFIG = ["--train.epochs", "10000", "--train.max-steps", "0", "--train.log-every", "1", "--data.path", "/data"]
_INSIDE = """
set -e
mount --rbind /dev {root}/dev; mount -t tmpfs -o size=1g shm {root}/dev/shm; mount -t proc proc {root}/proc
for path in {binds}; do
  if [ -d "$path" ]; then mkdir -p "{root}$path"; else mkdir -p "$(dirname "{root}$path")"; touch "{root}$path"; fi
  mount --bind "$path" "{root}$path"
done
ip link set lo up
exec chroot --userspec={user} {root} env -i {variables} sh -c 'cd {folder} && exec "$@"' sh {command}
"""


class Image:
    """A root in a folder, built by the steps of a Containerfile."""

    def __init__(self, root: Path, steps: Path) -> None:
        self.root, self._text = root, steps.read_text().replace("\\\n", "")
        self._variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self._arguments: dict[str, str] = {}
        self._user, self._folder = "0", "/"
        self.entrypoint: list[str] = []
        self.seconds: dict[str, float] = {}

    def build(self) -> None:
        """Execute all steps in order."""
        for line in self._text.splitlines():
            if line and not line.startswith("#"):
                began = time.perf_counter()
                self._step(*line.split(maxsplit=1))
                self.seconds[line] = round(time.perf_counter() - began, 1)
                print(f"{self.seconds[line]:6.1f} s  {line}", flush=True)

    @contextlib.contextmanager
    def overlay(self) -> Iterator[None]:
        """Use this machine's files, and this environment's FreeScale, instead of the steps."""
        layers = {name: self.root.with_name(name) for name in ("upperdir", "workdir")}
        for folder in (self.root, *layers.values()):
            folder.mkdir()
        options = ",".join(["lowerdir=/", *(f"{name}={folder}" for name, folder in layers.items())])
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, self.root], check=True)
        self.entrypoint = [sys.executable, "-m", "freescale"]
        self._variables["PYTHONPATH"] = str(ROOT / "src")
        try:
            yield
        finally:
            subprocess.run(["umount", self.root], check=True)

    def _step(self, kind: str, rest: str) -> None:
        if kind == "FROM":
            release = re.fullmatch(r"docker\.io/library/debian:(\w+)-slim", rest)
            assert release is not None, rest
            subprocess.run(["debootstrap", "--variant=minbase", release[1], self.root], check=True, capture_output=True)
            shutil.copy("/etc/resolv.conf", self.root / "etc")
        elif kind == "ARG":
            name, _, default = rest.partition("=")
            self._arguments |= {name: os.environ.get(name, default)}
        elif kind == "ENV":
            self._variables |= dict([rest.split("=", 1)])
        elif kind == "RUN":
            arguments = {name: value for name, value in self._arguments.items() if value}
            subprocess.run(self.command(["sh", "-c", rest], **arguments, **_pip_settings()), check=True)
        elif kind == "COPY":
            *sources, target = rest.split()
            for source in sources:
                place = self.root / target.strip("/")
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, place)
        elif kind == "USER":
            self._user = rest
        elif kind == "WORKDIR":
            self._folder = rest
        elif kind == "ENTRYPOINT":
            self.entrypoint = json.loads(rest)
        else:
            raise ValueError(f"{kind} is not known here")

    def command(self, words: list[str], *, network: str = "", **variables: str) -> list[str]:
        """Return a command that runs words in the root, as process 1. `network`: a namespace, else this machine's."""
        home = {"HOME": "/root" if self._user == "0" else self._folder}
        environment = shlex.join(f"{n}={v}" for n, v in {**home, **self._variables, **variables}.items())
        binds = os.environ.get("FREESCALE_IMAGE_BIND", "").replace(":", " ") if self._user == "0" else ""
        script = _INSIDE.format(
            root=self.root,
            binds=binds,
            user=f"{self._user}:{self._user}",
            variables=environment,
            folder=self._folder,
            command=shlex.join(words),
        )
        spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts"]
        inside = ["nsenter", f"--net=/run/netns/{network}"] if network else []
        return [*inside, *spaces, "bash", "-c", script]


def _pip_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


class Pod:
    """A pod of the Job: the image's entry point with the manifest's arguments, as process 1."""

    def __init__(self, image: Image, hosts: Lab, number: int) -> None:
        listed = re.findall(
            r"^            - (\S+)$", MANIFEST.read_text().split("args:\n")[1].split("resources:")[0], re.M
        )
        fewer = {"--nproc=8": "--nproc=1", "--hosts=4": "--hosts=2"}
        words = image.command(
            [*image.entrypoint, *(fewer.get(word, word) for word in listed)],
            network=hosts.hosts[number],
            OMP_NUM_THREADS="1",
        )
        self._log = image.root.with_name(f"pod-{number}-{time.monotonic_ns()}")
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(words, stdout=out, stderr=out)

    @property
    def said(self) -> str:
        """What the pod printed."""
        return self._log.read_text()

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def send(self, kind: signal.Signals) -> None:
        """Send a signal to its process 1."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        os.kill(int(children[0]), kind)

    def ended(self) -> int:
        """Return the exit code of its process 1."""
        return self._process.wait(HANGS_AFTER)

    def end(self) -> None:
        """End it if it runs."""
        self._process.kill()
        self._process.wait()


def prepare(image: Image) -> None:
    """Write the config, the data and the folder of the run, as the volumes of a pod have them."""
    for name in ("config", "data", "runs"):
        (image.root / name).mkdir()
        os.chown(image.root / name, 1000, 1000)
    synth = ["data", "synth", "--preset", "ml1m", "--users", "2000", "--items", "10000", "/data", "--quiet"]
    subprocess.run(image.command([*image.entrypoint, *synth]), check=True)
    config = image.command([*image.entrypoint, "config", "tiny", *CONFIG])
    text = subprocess.run(config, check=True, capture_output=True, text=True).stdout
    (image.root / "config" / "run.toml").write_text(text)


def last_step(run: Path) -> int:
    """Return the last step in the metrics; 0 if there is none."""
    return max((entry["step"] for entry in read_entries(run) if entry["kind"] == "train"), default=0)


def wait_for_steps(run: Path, count: int, pods: list[Pod]) -> None:
    """Return when so many further steps are logged."""
    begun, until = last_step(run), time.monotonic() + HANGS_AFTER
    while last_step(run) < begun + count:
        if time.monotonic() > until or not any(pod.runs for pod in pods):
            raise AssertionError("".join(pod.said[-2000:] for pod in pods))
        time.sleep(0.05)


def terminate(image: Image, hosts: Lab, turn: int) -> dict[str, Any]:
    """Start both pods, send SIGTERM to one, and wait until both have ended."""
    run = image.root / "runs" / "mine"
    pods = [Pod(image, hosts, number) for number in range(2)]
    try:
        wait_for_steps(run, 10, pods)
        began = time.perf_counter()
        pods[turn % 2].send(signal.SIGTERM)
        codes = [pod.ended() for pod in pods]
        seconds = time.perf_counter() - began
        said = "".join(pod.said for pod in pods)
        saved = [int(step) for step in re.findall(r"saving step (\d+)", said)]
        complete = (run / "checkpoints" / f"step-{saved[0]:08d}" / "facts.json").exists() if saved else False
    finally:
        for pod in pods:
            pod.end()
    result = {"signaled_pod": turn % 2, "exit_codes": codes, "saved_step": saved, "complete": complete}
    return result | {"resumed_at": re.findall(r"at step (\d+)", said)[:1], "seconds": round(seconds, 2)}


def kill(image: Image, hosts: Lab) -> dict[str, Any]:
    """Kill a pod, start it again, and let both continue."""
    run = image.root / "runs" / "mine"
    pods = [Pod(image, hosts, number) for number in range(2)]
    try:
        wait_for_steps(run, 10, pods)
        pods[1].send(signal.SIGKILL)
        code = pods[1].ended()
        killed_at = time.perf_counter()
        time.sleep(10.0)  # the Job's first back-off
        pods.append(Pod(image, hosts, 1))
        while "recovered in" not in pods[0].said and time.perf_counter() < killed_at + HANGS_AFTER:
            time.sleep(0.1)
        seconds = time.perf_counter() - killed_at
        wait_for_steps(run, 5, pods)
        pods[0].send(signal.SIGTERM)
        codes = [pods[0].ended(), pods[2].ended()]
        told = re.findall(r"recovered in .*", pods[0].said)
    finally:
        for pod in pods:
            pod.end()
    return {"exit_code_of_the_killed": code, "recovered_after_s": round(seconds, 1), "told": told, "exit_codes": codes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-image", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, lab(2) as hosts, contextlib.ExitStack() as stack:
        image = Image(Path(place) / "root", IMAGE)
        if options.without_image:
            stack.enter_context(image.overlay())
        else:
            image.build()
        names = [f"{ADDRESS.format(number + 1)} train-{number}.freescale" for number in range(2)]
        prepare(image)
        (image.root / "etc" / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        rounds = []
        for turn in range(options.rounds):
            rounds.append(terminate(image, hosts, turn))
            print(json.dumps(rounds[-1]), flush=True)
            record.save(options.out, [{"image": image.seconds}, *rounds])
        assert all(result["seconds"] < GRACE and result["complete"] for result in rounds), rounds
        killed = kill(image, hosts)
        print(json.dumps(killed), flush=True)
    record.save(options.out, [{"image": image.seconds}, *rounds, killed])


if __name__ == "__main__":
    main()
