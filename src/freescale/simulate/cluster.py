"""Clusters: devices and links, as small TOML files in which every figure has a source.

An uncertain figure has a range. `Cluster.draw` draws one cluster from the ranges; many draws give a band.
"""

import importlib.resources
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from freescale.errors import ConfigError, reason, suggest

FIGURES = {
    "ranks_per_host": "ranks per host",
    "hosts_per_leaf": "hosts per leaf switch; the spine connects the leaves",
    "flops": "peak FLOP/s of a rank",
    "efficiency": "share of `flops` that training reaches",
    "memory": "memory bandwidth of a rank, bytes per second",
    "near": "bandwidth of a rank inside its host, bytes per second",
    "far": "bandwidth of a host to other hosts, bytes per second",
    "one_way": "1 if transfers between two ranks are half-duplex, as with gloo; 0 if full-duplex",
    "ring": "share of the bandwidth that an all-reduce reaches",
    "in_flight": "bytes of deferred chunks in flight per rank when an urgent transfer begins",
    "oversubscription": "bandwidth of the hosts of a leaf over its uplink",
    "latency": "seconds before the first byte of a transfer",
    "message": "seconds of a transfer per peer, independent of its size",
    "contention": "relative slowdown of compute while SMs move bytes",
    "sm_free": "share of the bandwidth that SM-free transports reach",
    "host": "host overhead per step, seconds",
    "jitter": "relative standard deviation of a rank's compute time",
    "slow_share": "share of slow ranks",
    "slow_by": "relative slowdown of slow ranks",
    "stall_share": "share of steps in which a rank waits for data",
    "stall": "mean seconds of such a wait",
}

_LIMITS = {
    **dict.fromkeys(("ranks_per_host", "hosts_per_leaf", "flops", "memory", "near", "far"), (1.0, 1e18)),
    **dict.fromkeys(("efficiency", "ring", "sm_free"), (1e-3, 100.0)),
    "in_flight": (0.0, 1e18),
    "jitter": (0.0, 1.0),
}
"""Limits of figures; 0 to 100 for all others. Beyond them the simulated clock loses precision."""


@dataclass(frozen=True)
class Figure:
    """A number, its range and its source."""

    value: float
    low: float
    high: float
    source: str


@dataclass(frozen=True)
class Cluster:
    """Hosts of one kind. `device`: its product name; all devices but `cpu` run asynchronously to their host."""

    name: str
    device: str
    figures: Mapping[str, Figure]

    def __getattr__(self, name: str) -> float:
        """Return the value of a figure."""
        if name not in FIGURES:
            raise AttributeError(name)
        return self.figures[name].value

    @property
    def asynchronous(self) -> bool:
        """Whether compute runs asynchronously to the host."""
        return self.device != "cpu"

    def draw(self, rng: np.random.Generator) -> "Cluster":
        """Draw a cluster from the ranges of the figures."""
        return self.with_values({name: rng.uniform(figure.low, figure.high) for name, figure in self.figures.items()})

    def with_values(self, values: Mapping[str, float]) -> "Cluster":
        """Return a cluster with other values."""
        new = {name: replace(self.figures[name], value=value) for name, value in values.items()}
        return replace(self, figures={**self.figures, **new})


def names() -> list[str]:
    """Return the names of the clusters in the package."""
    return sorted(
        file.name.removesuffix(".toml") for file in _package_folder().iterdir() if file.name.endswith(".toml")
    )


def load(source: str) -> Cluster:
    """Load a cluster by name, or from a TOML file."""
    if source in names():
        file = _package_folder() / f"{source}.toml"
    elif source.endswith(".toml") and Path(source).is_file():
        file = Path(source)
    else:
        remedy = f"{suggest(source, names())}; or give the path of a .toml file"
        raise ConfigError(f"no cluster is called '{source}'", remedy=remedy)
    try:
        return _parse(tomllib.loads(file.read_text(encoding="utf-8")), source)
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        what = f"the cluster is not TOML: {reason(error)}"
        raise ConfigError(what, where=source, remedy="see docs/simulate.md") from error


def _parse(content: dict[str, Any], where: str) -> Cluster:
    table = figures if isinstance(figures := content.get("figures"), dict) else {}
    invalid = [name for name in table if name not in FIGURES] or [name for name in FIGURES if name not in table]
    if invalid or not all(isinstance(content.get(key), str) for key in ("name", "device")):
        remedy = (
            suggest(invalid[0], FIGURES) if invalid and invalid[0] in table else "give name, device and every figure"
        )
        what = f"a figure is unknown or missing: {', '.join(invalid) or 'name, device'}"
        raise ConfigError(what, where=where, remedy=remedy)
    return Cluster(
        content["name"], content["device"], {name: _parse_figure(name, figure, where) for name, figure in table.items()}
    )


def _parse_figure(name: str, table: Any, where: str) -> Figure:
    if not isinstance(table, dict) or not table.get("source") or "value" not in table:
        form = f'{name} = {{ value = 1.0, source = "..." }}, with low and high where it is not known'
        raise ConfigError(f"figure '{name}' has no value or no source", where=where, remedy=f"write {form}")
    try:
        value, low, high = (float(table.get(key, table["value"])) for key in ("value", "low", "high"))
    except (TypeError, ValueError, OverflowError):
        value = low = high = math.nan
    minimum, maximum = _LIMITS.get(name, (0.0, 100.0))
    if not minimum <= low <= value <= high <= maximum:
        remedy = f"give numbers with {minimum:g} <= low <= value <= high <= {maximum:g}"
        raise ConfigError(f"figure '{name}' cannot be used: {table}", where=where, remedy=remedy)
    return Figure(value, low, high, str(table["source"]))


def _package_folder() -> Any:
    return importlib.resources.files("freescale.simulate") / "clusters"
