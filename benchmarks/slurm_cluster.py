"""A SLURM cluster on one machine, for benchmarks: Debian's munged, slurmctld and slurmd, in a private folder.

Every node is a network namespace with its own host name, addresses and process numbers. Needs root and the packages
slurmctld, slurmd, slurm-client and munge; none of their services has to run.
"""

import contextlib
import os
import re
import secrets
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.lab import ADDRESS, Lab, lab

WAITS = 900.0
_CONTROLLER = "n1"
_CONFIG = """
ClusterName=loopback
SlurmctldHost=n1({controller})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=30
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """Nodes n1, n2, ... of a cluster. n1 also runs the controller, and the commands of users."""

    def __init__(self, folder: Path, hosts: Lab) -> None:
        self.folder, self._hosts = folder, hosts.hosts
        self.nodes = [f"n{number + 1}" for number in range(len(self._hosts))]
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def start(self) -> None:
        """Start all daemons and wait until every node is idle."""
        addresses = {node: ADDRESS.format(number + 1) for number, node in enumerate(self.nodes)}
        gpus = [self.folder / f"gpu{number}" for number in range(8)]
        for file in gpus:
            os.mknod(file, stat.S_IFCHR | 0o600, os.stat(os.devnull).st_rdev)  # slurmd wants devices
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{len(gpus) - 1}]\n")
        lines = [f"NodeName={n} NodeAddr={a} CPUs=8 RealMemory=1024 Gres=gpu:8" for n, a in addresses.items()]
        text = _CONFIG.format(folder=self.folder, controller=addresses[_CONTROLLER], nodes="\n".join(lines))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "hosts").write_text(
            "".join(f"{a} {n}\n" for n, a in addresses.items()) + "127.0.0.1 localhost\n"
        )
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        self._start_munge()
        self._daemons.append(self._on_host(0, ["slurmctld", "-D"]))
        self._daemons += [self._on_host(number, ["slurmd", "-D"]) for number in range(len(self.nodes))]
        self.wait_until(lambda: self.ask("sinfo", "-h", "-o", "%T").strip() == "idle", "the nodes are not idle")

    def stop(self) -> None:
        """End all daemons; the processes of a node end with its slurmd."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()

    def ask(self, *command: str, folder: Path | None = None) -> str:
        """Run a user's command on n1 and return its output."""
        inside = ["ip", "netns", "exec", self._hosts[0], *command]
        done = subprocess.run(
            inside, cwd=folder or self.folder, env=self._environment, capture_output=True, text=True, check=False
        )
        return done.stdout if done.returncode == 0 else f"error: {done.stderr.strip()}"

    def submit(self, script: Path, *options: str) -> str:
        """Run sbatch in the folder of a script; return the number of the job."""
        said = self.ask("sbatch", "--parsable", *options, script.name, folder=script.parent).strip()
        assert said.isdigit(), said
        return said

    def job(self, number: str) -> dict[str, str]:
        """Return what scontrol shows of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.ask("scontrol", "show", "job", number)))

    def wait_for_end(self, number: str) -> dict[str, str]:
        """Return what scontrol shows once the job will not run again."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_until(lambda: self.job(number).get("JobState") in ended, f"job {number} does not end")
        return self.job(number)

    def wait_until(self, met: Callable[[], bool], what: str) -> None:
        """Return when it is met; an error shows what the controller logged."""
        until = time.monotonic() + WAITS
        while not met():
            if time.monotonic() > until:
                raise AssertionError(f"{what}: {self.controller_log()[-3000:]}")
            time.sleep(0.2)

    def task(self, number: str, rank: int) -> int:
        """Return the process of a task of a job, waiting until it runs."""
        wanted = {f"SLURM_JOB_ID={number}", "SLURM_STEP_ID=0", f"SLURM_PROCID={rank}"}  # the script is in no step
        pids: list[int] = []

        def find() -> bool:
            pids[:] = [pid for pid in _processes_with(wanted) if "slurmstepd" not in _command_line(pid)]
            return bool(pids)

        self.wait_until(find, f"task {rank} of job {number} does not run")
        return min(pids)

    def controller_log(self) -> str:
        """Return what slurmctld logged."""
        path = self.folder / "slurmctld.log"
        return path.read_text() if path.exists() else ""

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        files = {"key-file": key, "socket": self.folder / "munge.socket", "pid-file": self.folder / "munge.pid"}
        files |= {"log-file": self.folder / "munge.log", "seed-file": self.folder / "munge.seed"}
        options = [f"--{name}={path}" for name, path in files.items()]
        self._daemons.append(
            subprocess.Popen(["munged", "--foreground", "--force", *options], stderr=subprocess.DEVNULL)
        )
        self.wait_until(files["socket"].exists, "munged does not start")

    def _on_host(self, number: int, command: list[str]) -> "subprocess.Popen[bytes]":
        """Start a daemon in a namespace, with the host name of its node and all names of the cluster."""
        node = self.nodes[number]
        inside = f'echo {node} > /proc/sys/kernel/hostname; mount --bind {self.folder}/hosts /etc/hosts; exec "$@"'
        spaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words = ["nsenter", f"--net=/run/netns/{self._hosts[number]}", *spaces, "bash", "-c", inside, "bash", *command]
        with (self.folder / f"{command[0]}-{node}.out").open("wb") as out:
            return subprocess.Popen(words, env=self._environment, stdout=out, stderr=out, cwd=self.folder)


def _processes_with(wanted: set[str]) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted <= set((place / "environ").read_bytes().decode(errors="replace").split("\0")):
                found.append(int(place.name))
    return found


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    return "slurmstepd"  # it has ended


@contextlib.contextmanager
def slurm_cluster(folder: Path, nodes: int) -> Iterator[SlurmCluster]:
    """Start a cluster and end all of it afterwards."""
    with lab(nodes) as hosts:
        cluster = SlurmCluster(folder, hosts)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def shown(job: dict[str, str]) -> dict[str, Any]:
    """Return how a job ended."""
    return {"state": job["JobState"], "exit_code": job["ExitCode"], "requeued": int(job["Restarts"])}
