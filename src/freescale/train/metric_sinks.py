"""Where metrics go beside `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow, and Prometheus (`prometheus`).

On rank 0 a sink receives the entries of `metrics.jsonl` as they are written. After every interval of the step profiler
it receives one of the kind "time": the milliseconds of a step by cause. An error of a sink is logged and ends the sink,
never the training.
"""

import contextlib
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from freescale.config import RunConfig
from freescale.errors import FreeScaleError, InstallError, UsageError, reason
from freescale.log import warning_once
from freescale.train.metrics_logger import MetricsSink
from freescale.train.prometheus import PrometheusSink, parse_address

_NO_VALUES = ("kind", "step", "time")


@dataclass(frozen=True, kw_only=True)
class MonitoringOptions:
    """Which sinks a training has: the options of the command."""

    tensorboard: bool = False
    wandb: bool = False
    mlflow: bool = False
    metrics_address: str = ""
    """[HOST:]PORT of an HTTP server for Prometheus; without a host, the loopback address."""
    metrics_file: Path | None = None
    """A file for the textfile collector of Prometheus' node exporter."""

    def check(self) -> None:
        """Refuse sinks whose package is missing, and an address that is none."""
        if self.metrics_address:
            parse_address(self.metrics_address)
        for name in ("tensorboard", "wandb", "mlflow"):
            if getattr(self, name) and find_spec(name) is None:
                what = f"--{name} needs a package that is missing"
                raise InstallError(what, remedy=f"pip install 'freescale[{name}]'")

    def open(self, folder: Path, config: RunConfig, *, steps: int) -> "list[MetricsSink]":
        """Open the sinks of a run."""
        sinks: list[MetricsSink] = []
        if self.tensorboard:
            sinks.append(TensorBoardSink(folder))
        if self.wandb:
            sinks.append(_opened("Weights & Biases", lambda: WandbSink(folder, config)))
        if self.mlflow:
            sinks.append(_opened("MLflow", lambda: MlflowSink(folder, config)))
        if self.metrics_address or self.metrics_file is not None:
            sinks.append(PrometheusSink(folder, steps=steps, address=self.metrics_address, file=self.metrics_file))
        return [_SafeSink(sink) for sink in sinks]


def scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of an entry under `KIND/NAME`."""
    numbers = {name: value for name, value in entry.items() if isinstance(value, (int, float))}
    finite = {name: value for name, value in numbers.items() if name not in _NO_VALUES and math.isfinite(value)}
    return {f"{entry['kind']}/{name}": float(value) for name, value in finite.items()}


class TensorBoardSink:
    """Files for TensorBoard in the run's folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(folder / "tensorboard")

    def write(self, entry: Mapping[str, Any]) -> None:
        """Add the scalars of an entry."""
        for name, value in scalars(entry).items():
            self._board.add_scalar(name, value, entry["step"])

    def close(self) -> None:
        """Write what is pending."""
        self._board.close()


class WandbSink:
    """A run of Weights & Biases per start of the training, grouped by the run's folder.

    W&B's environment variables decide all else: WANDB_MODE=offline writes files for `wandb sync`.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        wandb: Any = importlib.import_module("wandb")  # as all sinks, an optional extra
        name = folder.resolve().name
        self._run = wandb.init(
            project="freescale", group=name, name=name, dir=folder, config=asdict(config), reinit="create_new"
        )
        self._run.define_metric("*", step_metric="step")  # W&B's own steps cannot go back, as a rewind does

    def write(self, entry: Mapping[str, Any]) -> None:
        """Log the scalars of an entry."""
        if values := scalars(entry):
            self._run.log({**values, "step": entry["step"]})

    def close(self) -> None:
        """Send what is pending."""
        self._run.finish()


class MlflowSink:
    """A run of MLflow per start of the training. MLFLOW_TRACKING_URI says where: a server, or a local store."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._finished = False
        self._client = mlflow.MlflowClient()
        experiment = mlflow.set_experiment("freescale")
        self._id = self._client.create_run(experiment.experiment_id, run_name=folder.resolve().name).info.run_id
        for name, value in _flat(asdict(config)).items():
            self._client.log_param(self._id, name, str(value)[:500], synchronous=False)

    def write(self, entry: Mapping[str, Any]) -> None:
        """Log the scalars of an entry, in the background."""
        for name, value in scalars(entry).items():
            self._client.log_metric(
                self._id, name.replace("@", "_at_"), value, int(entry["time"] * 1000), entry["step"], synchronous=False
            )
        if entry["kind"] == "end":
            self._finished = bool(entry["finished"])

    def close(self) -> None:
        """Send what is pending and end the run."""
        importlib.import_module("mlflow").flush_async_logging()
        self._client.set_terminated(self._id, "FINISHED" if self._finished else "KILLED")


class _SafeSink:
    """A sink whose errors are logged once, and end it."""

    def __init__(self, sink: MetricsSink) -> None:
        self._sink: MetricsSink | None = sink

    def write(self, entry: Mapping[str, Any]) -> None:
        """Pass an entry on."""
        self._attempt(lambda sink: sink.write(entry))

    def close(self) -> None:
        """Close the sink."""
        self._attempt(lambda sink: sink.close())

    def _attempt(self, use: Callable[[MetricsSink], None]) -> None:
        if (sink := self._sink) is None:
            return
        try:
            use(sink)
        except Exception as error:  # of other people's packages and servers
            self._sink = None
            warning_once(f"{type(sink).__name__} gets no more metrics: {reason(error)}; training continues")
            with contextlib.suppress(Exception):
                sink.close()


def _opened(name: str, create: Callable[[], MetricsSink]) -> MetricsSink:
    try:
        return create()
    except Exception as error:
        if isinstance(error, FreeScaleError):
            raise
        what = f"{name} cannot be opened: {reason(error)}"
        raise UsageError(what, remedy="check its environment variables, or choose its offline mode") from error


def _flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in node.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
