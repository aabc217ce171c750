"""Machines and the links between them, as small TOML files in which every figure says where it comes from.

A figure that nobody published is a range; `drawn` picks one cluster from it, and many of them give a band.
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
    "ranks_per_host": "ranks of one host",
    "hosts_per_leaf": "hosts below one switch; between those, the spine",
    "flops": "products and additions per second that a rank could do",
    "efficiency": "share of them that training reaches",
    "memory": "bytes per second that rows are read and written with",
    "near": "bytes per second that a rank sends inside its host",
    "far": "bytes per second that a host sends to others",
    "one_way": "1 where a transfer between two ranks goes one way at a time, as gloo's does; 0 where both",
    "ring": "share of a link's rate that adding up over all ranks reaches",
    "in_flight": "bytes of deferred pieces that a rank has under way when something urgent begins",
    "oversubscription": "what hosts below a switch could send, over what leaves it",
    "latency": "seconds until a transfer moves",
    "message": "seconds that a transfer takes per peer, whatever it sends",
    "contention": "share by which compute is slower while a device's own cores move bytes",
    "sm_free": "share of a link's rate that ways reach which spare those cores",
    "host": "seconds that the host holds a step up",
    "jitter": "deviation of a rank's compute time, as a share of it",
    "slow_share": "share of the ranks that are slow",
    "slow_by": "by how much, as a share of their compute time",
    "stall_share": "share of the steps in which a rank waits for data",
    "stall": "seconds that it waits then",
}

_BETWEEN = {
    **dict.fromkeys(("ranks_per_host", "hosts_per_leaf", "flops", "memory", "near", "far"), (1.0, 1e18)),
    **dict.fromkeys(("efficiency", "ring", "sm_free"), (1e-3, 100.0)),
    "in_flight": (0.0, 1e18),
    "jitter": (0.0, 1.0),
}
"""What a figure may be; other shares, factors and seconds from 0 to 100. Beyond, a clock loses its digits."""


@dataclass(frozen=True)
class Figure:
    """A number, and between which ones it may be."""

    value: float
    low: float
    high: float
    source: str


@dataclass(frozen=True)
class Cluster:
    """Hosts of one kind. `device`: as its maker calls it; one that is not a CPU computes beside its host."""

    name: str
    device: str
    figures: Mapping[str, Figure]

    def __getattr__(self, name: str) -> float:
        """A figure."""
        if name not in FIGURES:
            raise AttributeError(name)
        return self.figures[name].value

    @property
    def asynchronous(self) -> bool:
        """Whether compute goes on beside the host."""
        return self.device != "cpu"

    def drawn(self, rng: np.random.Generator) -> "Cluster":
        """One of the clusters that it may be."""
        return self.changed({name: rng.uniform(one.low, one.high) for name, one in self.figures.items()})

    def changed(self, values: Mapping[str, float]) -> "Cluster":
        """With other figures."""
        new = {name: replace(self.figures[name], value=value) for name, value in values.items()}
        return replace(self, figures={**self.figures, **new})


def names() -> list[str]:
    """Clusters that come with the package."""
    return sorted(file.name.removesuffix(".toml") for file in _shipped().iterdir() if file.name.endswith(".toml"))


def load(source: str) -> Cluster:
    """A cluster by its name, or from one's own TOML file."""
    if source in names():
        file = _shipped() / f"{source}.toml"
    elif source.endswith(".toml") and Path(source).is_file():
        file = Path(source)
    else:
        remedy = f"{suggest(source, names())}; or give the path of a .toml file"
        raise ConfigError(f"no cluster is called '{source}'", remedy=remedy)
    try:
        return _parsed(tomllib.loads(file.read_text(encoding="utf-8")), source)
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        what = f"the cluster is not TOML: {reason(error)}"
        raise ConfigError(what, where=source, remedy="see docs/simulate.md") from error


def _parsed(facts: dict[str, Any], where: str) -> Cluster:
    given = figures if isinstance(figures := facts.get("figures"), dict) else {}
    wrong = [name for name in given if name not in FIGURES] or [name for name in FIGURES if name not in given]
    if wrong or not all(isinstance(facts.get(key), str) for key in ("name", "device")):
        remedy = suggest(wrong[0], FIGURES) if wrong and wrong[0] in given else "give name, device and every figure"
        what = f"a figure is unknown or missing: {', '.join(wrong) or 'name, device'}"
        raise ConfigError(what, where=where, remedy=remedy)
    return Cluster(facts["name"], facts["device"], {name: _figure(name, one, where) for name, one in given.items()})


def _figure(name: str, given: Any, where: str) -> Figure:
    if not isinstance(given, dict) or not given.get("source") or "value" not in given:
        form = f'{name} = {{ value = 1.0, source = "..." }}, with low and high where it is not known'
        raise ConfigError(f"figure '{name}' has no value or no source", where=where, remedy=f"write {form}")
    try:
        value, low, high = (float(given.get(key, given["value"])) for key in ("value", "low", "high"))
    except (TypeError, ValueError, OverflowError):
        value = low = high = math.nan
    least, most = _BETWEEN.get(name, (0.0, 100.0))
    if not least <= low <= value <= high <= most:
        remedy = f"give numbers with {least:g} <= low <= value <= high <= {most:g}"
        raise ConfigError(f"figure '{name}' cannot be used: {given}", where=where, remedy=remedy)
    return Figure(value, low, high, str(given["source"]))


def _shipped() -> Any:
    return importlib.resources.files("freescale.simulate") / "clusters"
