"""Monitoring shows what the files of a run hold, listens where it is told to, and never ends a training."""

import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from freescale import log as logs
from freescale.bubbles.events import CAUSES
from freescale.bubbles.records import read_intervals
from freescale.bubbles.summary import mean_over_ranks
from freescale.config import RunConfig
from freescale.errors import InstallError, UsageError
from freescale.train import metric_sinks
from freescale.train.build import build
from freescale.train.metric_sinks import MonitoringOptions
from freescale.train.metrics_logger import MetricsLogger, read_entries
from freescale.train.prometheus import METRICS, MetricsServer, PrometheusSink, RunGauges, exposition, parse_address
from tests.exact.test_dynamic_ids import STEPS, dynamic, write_drifting
from tests.support.in_process import ListHandler
from tests.support.ranks import Ranks, World
from tests.support.training import joined

ROOT = Path(__file__).parents[2]
PAGE, DASHBOARD = (ROOT / "docs" / "how-to" / name for name in ("monitor-a-training.md", "grafana-dashboard.json"))
SAMPLE = re.compile(r'freescale_(\w+)\{((?:\w+="(?:[^"\\]|\\.)*",?)+)\} (\S+)')
SHOWN = {
    ("loss",): "loss",
    ("tokens_per_second",): "tokens/s",
    ("step_seconds",): "seconds",
    ("grad_norm", "max"): "grad_norm_max",
    ("learning_rate", "tables"): "tables_lr",
    ("imbalance", "after"): "imbalance_after",
    ("busiest_owner_ratio",): "busiest_owner",
    ("table_load_ratio", "artist"): "ids/artist/load",
    ("table_ids", "artist", "new"): "ids/artist/new",
}
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse(text: str) -> dict[tuple[str, ...], float]:
    """Values by the name and the labels of a metric, without the run."""
    found: dict[tuple[str, ...], float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            labels: list[str] = [value for name, value in LABEL.findall(match[2]) if name != "run"]
            found[match[1], *labels] = float(match[3])
    return found


def fetch(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def monitored(world: World, config: RunConfig, folder: str, port: int) -> str:
    """Train; gives what rank 0 serves before it ends."""
    options = MonitoringOptions(metrics_address=str(port), metrics_file=Path(folder) / "run.prom")
    trainer = build(config, joined(world), Path(folder), monitoring=options, quiet=True)
    trainer.fit()
    served = fetch(port) if world.rank == 0 else ""
    trainer.close()
    return served


def test_what_is_served_agrees_with_the_files_of_the_run(groups: dict[int, Ranks], tmp_path: Path) -> None:
    config = dynamic(write_drifting(tmp_path / "data"), train={"log_every": 7})
    served, _ = groups[2].run(monitored, config, str(tmp_path / "run"), free_port())
    found, written = parse(served), parse((tmp_path / "run" / "run.prom").read_text())
    train = [entry for entry in read_entries(tmp_path / "run") if entry["kind"] == "train"][-1]
    assert {key: found.get(key) for key in SHOWN} == {key: train.get(name) for key, name in SHOWN.items()}
    assert len(train.keys() & set(SHOWN.values())) >= 8, "the last steps may be placed without a plan"
    means = mean_over_ranks(read_intervals(tmp_path / "run")[-1:])
    assert found["cause_seconds", "forward", "compute"] == pytest.approx(means["forward"] / 1e3, abs=1e-7)
    causes = [value for key, value in found.items() if key[0] == "cause_seconds"]
    assert sum(causes) == pytest.approx(sum(means[name] for name in CAUSES) / 1e3, rel=1e-3)
    assert (found["step",], found["steps",], found["world_size",], found["starts",]) == (STEPS, STEPS, 2, 1)
    assert (found["finished",], written["finished",]) == (0, 1)


def test_any_value_and_any_name_can_be_read_back() -> None:
    gauges = RunGauges(steps=3)
    gauges.update({"kind": "train", "step": 1, "time": 5.0, "loss": float("nan"), "ids/a b/load": 1e-300})
    gauges.update({"kind": "evaluate", "step": 1, "time": 6.0, 'hr"\\\n': 0.1 + 0.2})
    text = exposition(gauges.values, run='odd "name"\n')
    assert r'run="odd \"name\"\n"' in text
    found = parse(text)
    assert found["quality", "held_out", r"hr\"\\\n"] == 0.1 + 0.2
    assert found["table_load_ratio", "a b"] == 1e-300
    assert found["loss",] != found["loss",]
    gauges.update({"kind": "train", "step": 2, "time": 7.0})
    assert ("loss", ()) not in gauges.values, "an entry without a loss shows no old one"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", ("127.0.0.1", 9464)),
        (":9464", ("127.0.0.1", 9464)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[::1]:80", ("::1", 80)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
    ],
)
def test_an_address_without_a_host_is_the_loopback_address(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "x", "1.2.3.4:", "1:0", "1:65536", "1:-5", "1:\u0661"])
def test_an_address_without_a_port_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="has no port"):
        parse_address(text)


@pytest.mark.parametrize(
    ("given", "bound"), [("{}", "0100007F"), ("127.0.0.2:{}", "0200007F"), ("0.0.0.0:{}", "00000000")]
)
def test_the_port_binds_to_one_address_unless_told_otherwise(given: str, bound: str) -> None:
    port = free_port()
    server = MetricsServer(parse_address(given.format(port)))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    all_lines = lines + [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    listening = [line[1].split(":")[0] for line in all_lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"]
    server.close()
    assert listening == [bound]


def test_a_taken_port_and_another_page_are_refused_and_a_silent_client_blocks_nobody_for_long(tmp_path: Path) -> None:
    port = free_port()
    sink = PrometheusSink(tmp_path, steps=1, address=str(port))
    with pytest.raises(UsageError, match="cannot be served"):
        PrometheusSink(tmp_path, steps=1, address=str(port))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(port, "/etc/passwd")
    sink.write({"kind": "end", "step": 1, "finished": True})
    with socket.create_connection(("127.0.0.1", port)):
        assert parse(fetch(port))["finished",] == 1
    sink.close()
    with pytest.raises(urllib.error.URLError):
        fetch(port)


def test_a_reader_of_the_file_finds_whole_texts_only(tmp_path: Path) -> None:
    path, over, torn = tmp_path / "run.prom", threading.Event(), []

    def read() -> None:
        while not over.is_set():
            text = path.read_text()
            if not text.endswith("\n") or len(parse(text)) != size:
                torn.append(text)

    sink = PrometheusSink(tmp_path, steps=1, file=path)
    sink.write({"kind": "train", "step": 0, "loss": 0.5})
    size = len(parse(path.read_text()))
    reader = threading.Thread(target=read)
    reader.start()
    for step in range(100):
        sink.write({"kind": "train", "step": step, "loss": 0.5})
    over.set()
    reader.join()
    assert not torn
    assert [one.name for one in tmp_path.iterdir()] == ["run.prom"]


def test_a_file_that_cannot_be_written_is_logged_once(tmp_path: Path) -> None:
    sink = PrometheusSink(tmp_path, steps=1, file=tmp_path / "no" / "run.prom")
    with logs.handled_by(handler := ListHandler()):
        for step in range(3):
            sink.write({"kind": "train", "step": step})
    assert len(handler.messages) == 1


def test_starts_and_restarts_of_earlier_processes_are_counted(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path, is_rank_zero=True, steps=100, quiet=True)
    for resumed in (0, 40, 40):
        logger.log_start(resumed, world_size=2, reason="test")
        if resumed:
            logger.write({"kind": "recovery", "step": resumed + 1, "seconds": 1.5})
    sink = PrometheusSink(tmp_path, steps=100, file=tmp_path / "run.prom")
    logger = MetricsLogger(tmp_path, is_rank_zero=True, steps=100, quiet=True, sinks=[sink])
    logger.log_start(40, world_size=4, reason="test")
    found = parse((tmp_path / "run.prom").read_text())
    assert (found["starts",], found["restarts",], found["recovery_seconds",], found["world_size",]) == (4, 2, 1.5, 4)


class FailingSink:
    """Fails from its second entry on, as a server that goes away."""

    def __init__(self) -> None:
        self.taken = 0

    def write(self, entry: Mapping[str, Any]) -> None:  # noqa: ARG002
        self.taken += 1
        if self.taken > 1:
            raise ConnectionError("the server is gone")

    def close(self) -> None:
        raise ConnectionError("the server is gone")


def test_a_sink_that_fails_is_logged_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = FailingSink()
    monkeypatch.setattr(metric_sinks, "WandbSink", lambda *_: failing)
    sinks = MonitoringOptions(wandb=True).open(tmp_path, RunConfig(), steps=9)
    logger = MetricsLogger(tmp_path, is_rank_zero=True, steps=9, quiet=True, sinks=sinks)
    with logs.handled_by(handler := ListHandler()):
        for step in range(5):
            logger.write({"kind": "train", "step": step})
        logger.close()
    assert failing.taken == 2
    assert len(list(read_entries(tmp_path))) == 5
    assert [message for message in handler.messages if "training continues" in message] == handler.messages[:1]


def test_a_sink_that_cannot_be_opened_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_login(*_: object) -> None:
        raise RuntimeError("no API key")

    monkeypatch.setattr(metric_sinks, "MlflowSink", no_login)
    with pytest.raises(UsageError, match="MLflow cannot be opened: no API key"):
        MonitoringOptions(mlflow=True).open(tmp_path, RunConfig(), steps=9)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_sinks, "find_spec", lambda _: None)
    options: dict[str, Any] = {name: True}
    with pytest.raises(InstallError, match=rf"freescale\[{name}\]"):
        MonitoringOptions(**options).check()


def test_every_metric_is_documented_and_the_dashboard_asks_for_known_ones() -> None:
    documented = set(re.findall(r"^\| `freescale_(\w+)", PAGE.read_text(), re.MULTILINE))
    assert documented == {metric.name for metric in METRICS}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {
        name for panel in panels for one in panel["targets"] for name in re.findall(r"freescale_(\w+)", one["expr"])
    }
    assert asked <= documented
    assert documented - asked == set()
    for metric in METRICS:
        assert f"`freescale_{metric.name}` | {', '.join(metric.labels)} |" in PAGE.read_text(), metric.name
