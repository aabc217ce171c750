"""The job scripts and manifests for clusters are valid, and agree with what the launcher does.

benchmarks/slurm.py and benchmarks/container_image.py execute them.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from freescale.launch.agent import SECONDS_TO_SAVE
from freescale.launch.restart_decision import PERMANENT

ROOT = Path(__file__).parents[2]
MANIFESTS = [ROOT / "examples" / "kubernetes" / name for name in ("train.yaml", "continuous.yaml")]
READ = "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(open(sys.argv[1])))))"
TRAINS = """#!{python}
import signal, sys, time

def end(*_):
    time.sleep(0.5)
    sys.exit(130)

signal.signal(signal.SIGTERM, end)
print("trains", flush=True)
time.sleep({seconds})
sys.exit({code})
"""


@pytest.fixture(scope="module")
def validator(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which kubernetes-validate is installed."""
    packages = tmp_path_factory.mktemp("kubernetes")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", packages]
    subprocess.run([*command, "-r", ROOT / "requirements" / "kubernetes.txt"], check=True)
    return {**os.environ, "PYTHONPATH": str(packages)}


@pytest.fixture(scope="module")
def resources(validator: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The resources of the manifests, by kind."""
    read = [
        subprocess.run([sys.executable, "-c", READ, path], env=validator, check=True, capture_output=True).stdout
        for path in MANIFESTS
    ]
    return {resource["kind"]: resource for text in read for resource in json.loads(text)}


def validate(validator: dict[str, str], path: Path) -> int:
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "--quiet", path]
    return subprocess.run(command, env=validator, check=False).returncode


def test_manifests_are_valid(validator: dict[str, str], tmp_path: Path) -> None:
    for path in MANIFESTS:
        assert validate(validator, path) == 0, path
        wrong = tmp_path / path.name
        wrong.write_text(path.read_text().replace("terminationGracePeriodSeconds", "gracePeriodSeconds"))
        assert validate(validator, wrong) != 0, "the validator knows every field"


def test_pods_are_given_the_time_that_the_agent_gives_its_ranks_to_save(resources: dict[str, dict[str, Any]]) -> None:
    for job in (resources["Job"]["spec"], resources["CronJob"]["spec"]["jobTemplate"]["spec"]):
        assert SECONDS_TO_SAVE < job["template"]["spec"]["terminationGracePeriodSeconds"] <= SECONDS_TO_SAVE + 60


def test_failures_that_would_repeat_are_not_repeated_by_any_cluster(resources: dict[str, dict[str, Any]]) -> None:
    for job in (resources["Job"]["spec"], resources["CronJob"]["spec"]["jobTemplate"]["spec"]):
        (rule,) = [rule for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
        assert tuple(rule["onExitCodes"]["values"]) == PERMANENT
    page = (ROOT / "docs" / "how-to" / "slurm.md").read_text()
    cases = re.findall(r"^  ([\d |]+)\) ;;", page, re.MULTILINE)
    assert [tuple(map(int, case.split("|"))) for case in cases] == [(0, *PERMANENT)] * 2


def test_the_pods_of_the_job_are_as_many_agents_as_it_names_and_meet_at_its_service(
    resources: dict[str, dict[str, Any]],
) -> None:
    service, job = resources["Service"], resources["Job"]
    pod, hosts = job["spec"]["template"]["spec"], job["spec"]["completions"]
    arguments = pod["containers"][0]["args"]
    name = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert f"--hosts={hosts}" in arguments
    assert job["spec"]["parallelism"] == hosts
    assert f"--nproc={pod['containers'][0]['resources']['limits']['nvidia.com/gpu']}" in arguments
    assert f"--rdzv-endpoint={name}:{service['spec']['ports'][0]['port']}" in arguments
    assert name in pod["initContainers"][0]["command"][-1]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["publishNotReadyAddresses"], "agents meet before any pod is ready"


@pytest.mark.parametrize(
    ("code", "stopped", "expected"),
    [(0, False, 0), (8, False, 0), (9, False, 9), (1, False, 1), (130, False, 130), (0, True, 130)],
    ids=["trained", "nothing new", "the guard", "failed", "interrupted", "SIGTERM to the pod"],
)
def test_a_pod_of_continuous_training_passes_sigterm_on_and_ends_as_training_does(
    resources: dict[str, dict[str, Any]], tmp_path: Path, code: int, stopped: bool, expected: int
) -> None:
    spec = resources["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (train,) = [container for container in spec["initContainers"] if container["name"] == "train"]
    stand_in = tmp_path / "freescale"
    stand_in.write_text(TRAINS.format(python=sys.executable, seconds=30 if stopped else 0, code=code))
    stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [*train["command"], *train["args"]]
    pod = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert pod.stdout is not None
    assert pod.stdout.readline() == "trains\n"
    began = time.monotonic()
    if stopped:
        pod.send_signal(signal.SIGTERM)
    assert pod.wait(timeout=20) == expected
    assert not stopped or time.monotonic() - began > 0.4, "the shell waits until training has saved"
