"""Metrics of a run for Prometheus: its text exposition format, an HTTP server and a file.

`RunGauges` turns entries into values, `exposition` writes them, and `PrometheusSink` serves the text. The text is made
when an entry comes, so all values of a scrape are of one moment, and a scrape costs training nothing but the sending.
"""

import contextlib
import http.server
import math
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from freescale.bubbles.events import CAUSES, COMPUTE, TRAFFIC
from freescale.errors import UsageError, reason
from freescale.log import info_once, warning_once
from freescale.train.metrics_logger import read_entries

_LOOPBACK = "127.0.0.1"
_CLIENT_SECONDS = 2.0
"""How long the server waits for a client, which others wait for meanwhile."""


class Metric(NamedTuple):
    """A metric: its name without the prefix, its labels beside `run`, and what it is."""

    name: str
    labels: tuple[str, ...]
    help: str
    entry: tuple[str, ...] = ()
    """The values of a train entry that it shows, by the value of its label if it has one."""


METRICS = (
    Metric("step", (), "Steps done."),
    Metric("steps", (), "Steps of the whole run."),
    Metric("world_size", (), "Ranks."),
    Metric("starts", (), "How often training began or continued, over the whole run."),
    Metric("restarts", (), "How often ranks were restarted after a loss, over the whole run."),
    Metric("recovery_seconds", (), "Time that the last restart took."),
    Metric("faults", (), "Steps with a loss or gradient that was not finite, since training began or continued."),
    Metric("finished", (), "1 after training has done all steps."),
    Metric("entry_time_seconds", (), "When these metrics were written, in seconds since 1970."),
    Metric("loss", (), "Mean over the last steps.", ("loss",)),
    Metric("grad_norm", ("of",), "Norm of the dense gradient.", ("grad_norm", "grad_norm_max")),
    Metric("learning_rate", ("part",), "Learning rate.", ("lr", "tables_lr")),
    Metric("samples_per_second", (), "Samples of all ranks.", ("samples/s",)),
    Metric("tokens_per_second", (), "Tokens of all ranks.", ("tokens/s",)),
    Metric("step_seconds", (), "Time of a step.", ("seconds",)),
    Metric("imbalance", ("when",), "Cost of the slowest rank over the mean.", ("imbalance_before", "imbalance_after")),
    Metric("moved_tokens_ratio", (), "Share of tokens that balancing moves.", ("moved_tokens",)),
    Metric("unique_ids_ratio", (), "Share of ids that are distinct in a batch.", ("unique_ids",)),
    Metric("colliding_ids_ratio", (), "Share of prefetched ids that two batches share.", ("colliding_ids",)),
    Metric("busiest_owner_ratio", (), "Rows that the busiest rank serves, over the mean.", ("busiest_owner",)),
    Metric("table_load_ratio", ("table",), "Share of slots in use, of tables with dynamic ids."),
    Metric("table_ids", ("table", "change"), "Changes of dynamic ids since the entry before."),
    Metric("cause_seconds", ("cause", "class"), "Time of a step by cause, mean of all ranks."),
    Metric("exposed_traffic_seconds", (), "Time of a step in which ranks wait for traffic and compute nothing."),
    Metric("hidden_traffic_seconds", ("kind",), "Traffic that overlaps with compute, per step."),
    Metric("overlap_ratio", (), "Share of the time of traffic that overlaps with compute."),
    Metric("quality", ("data", "metric"), "Metrics of evaluation: of held-out events, or of the next partition."),
)
"""All metrics. Each has the prefix `freescale_` and the label `run`, the name of the run's folder."""
_LABEL_VALUES = {
    "grad_norm": "mean",
    "grad_norm_max": "max",
    "lr": "dense",
    "tables_lr": "tables",
    "imbalance_before": "before",
    "imbalance_after": "after",
}
_CLASSES = dict.fromkeys(COMPUTE, "compute") | dict.fromkeys(TRAFFIC, "traffic")
_QUALITY = {"evaluate": "held_out", "validate": "partition"}

Key = tuple[str, tuple[str, ...]]


class RunGauges:
    """The values of all metrics, after the entries so far."""

    def __init__(self, *, steps: int) -> None:
        self.values: dict[Key, float] = dict.fromkeys(
            [("starts", ()), ("restarts", ()), ("faults", ()), ("finished", ())], 0.0
        )
        self.values["steps", ()] = float(steps)

    def update(self, entry: Mapping[str, Any]) -> None:
        """Take an entry of `metrics.jsonl`, or one of the kind "time": the mean times of an interval of steps."""
        kind = entry["kind"]
        if kind == "time":
            self._update_times(entry)
            return
        self.values["step", ()] = float(entry["step"])
        self.values["entry_time_seconds", ()] = float(entry.get("time", 0.0))
        if kind == "train":
            self._update_train(entry)
        elif kind in _QUALITY:
            found = {name: value for name, value in entry.items() if isinstance(value, float) and name != "time"}
            self.values |= {("quality", (_QUALITY[kind], name)): value for name, value in found.items()}
        elif kind == "end":
            self.values["finished", ()] = float(bool(entry["finished"]))
        else:
            self._count(kind, entry)

    def _count(self, kind: str, entry: Mapping[str, Any]) -> None:
        counter = {"start": "starts", "recovery": "restarts", "fault": "faults"}.get(kind)
        if counter is not None:
            self.values[counter, ()] += 1.0
        if kind == "start":
            self.values["world_size", ()] = float(entry["world_size"])
        if kind == "recovery":
            self.values["recovery_seconds", ()] = float(entry["seconds"])

    def _update_train(self, entry: Mapping[str, Any]) -> None:
        for metric in METRICS:
            for name in metric.entry:
                labels = (_LABEL_VALUES[name],) if metric.labels else ()
                self.values.pop((metric.name, labels), None)  # an entry without a value leaves no old one
                if name in entry:
                    self.values[metric.name, labels] = float(entry[name])
        for name, value in entry.items():
            ids, _, rest = name.partition("/")
            table, _, what = rest.rpartition("/")
            if ids == "ids":
                key = ("table_load_ratio", (table,)) if what == "load" else ("table_ids", (table, what))
                self.values[key] = float(value)

    def _update_times(self, entry: Mapping[str, Any]) -> None:
        for cause in CAUSES:
            group = _CLASSES.get(cause, cause)
            self.values["cause_seconds", (cause, group)] = entry[cause] / 1e3
        self.values["exposed_traffic_seconds", ()] = sum(entry[kind] for kind in TRAFFIC) / 1e3
        for kind in TRAFFIC:
            self.values["hidden_traffic_seconds", (kind,)] = entry[f"hidden {kind}"] / 1e3
        if entry["in flight"] > 0:
            self.values["overlap_ratio", ()] = entry["overlapped"] / entry["in flight"]


def exposition(values: Mapping[Key, float], *, run: str) -> str:
    """Return values in the text format of Prometheus, version 0.0.4."""
    lines = []
    for metric in METRICS:
        found = {labels: value for (name, labels), value in values.items() if name == metric.name}
        if not found:
            continue
        full = f"freescale_{metric.name}"
        lines += [f"# HELP {full} {metric.help}", f"# TYPE {full} gauge"]
        for labels, value in found.items():
            pairs = zip(("run", *metric.labels), (run, *labels), strict=True)
            text = ",".join(f'{name}="{_escaped(label)}"' for name, label in pairs)
            lines.append(f"{full}{{{text}}} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of [HOST:]PORT. Without a host it is the loopback address, never all interfaces."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        what = f"--metrics-address {text} has no port"
        raise UsageError(what, remedy="give [HOST:]PORT, such as 9464 or 10.0.0.1:9464; 0.0.0.0 is all interfaces")
    return host.strip("[]") or _LOOPBACK, int(port)


class PrometheusSink:
    """Serves the metrics over HTTP, writes them to a file, or both."""

    def __init__(self, folder: Path, *, steps: int, address: str = "", file: Path | None = None) -> None:
        self._run, self._file, self._gauges = folder.resolve().name, file, RunGauges(steps=steps)
        for entry in read_entries(folder):  # earlier starts of the run
            if entry["kind"] in ("start", "recovery"):
                self._gauges.update(entry)
        self._server = None if not address else MetricsServer(parse_address(address))
        if self._server is not None:
            info_once(f"metrics for Prometheus: {self._server.url}")

    def write(self, entry: Mapping[str, Any]) -> None:
        """Take an entry, and publish all values."""
        self._gauges.update(entry)
        text = exposition(self._gauges.values, run=self._run)
        if self._server is not None:
            self._server.text = text.encode()
        if self._file is not None:
            _replace(self._file, text)

    def close(self) -> None:
        """End the server. The file stays, with the last values."""
        if self._server is not None:
            self._server.close()


class MetricsServer:
    """An HTTP server with one page, in a thread."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.text = b""
        outer = self

        class _Handler(http.server.BaseHTTPRequestHandler):
            timeout = _CLIENT_SECONDS

            def do_GET(self) -> None:
                known = self.path.partition("?")[0] == "/metrics"
                body = outer.text if known else b"see /metrics\n"
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it so
                """Write nothing to the console for a scrape."""

        class _Server(http.server.HTTPServer):
            address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Ignore clients that go away."""

        try:
            self._server = _Server(address, _Handler)
        except OSError as error:
            what = f"the metrics cannot be served at {address[0]}:{address[1]}: {reason(error)}"
            raise UsageError(
                what, remedy="choose another --metrics-address: an address of this host, a free port"
            ) from error
        self.url = f"http://{address[0]}:{address[1]}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="freescale-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _replace(path: Path, text: str) -> None:
    """Write a file so that the node exporter reads the old or the new text, and nothing between."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")  # it reads *.prom only
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        warning_once(f"{path} was not written: {reason(error)}; later entries retry")
        with contextlib.suppress(OSError):
            partial.unlink()
