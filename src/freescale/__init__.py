"""FreeScale: distributed training of sequence recommendation models without bubbles.

Public names load when they are first used, so that `import freescale` is quick and imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freescale import balance as balance
    from freescale.balance.cost import Cost as Cost
    from freescale.bubbles.step_profiler import StepProfiler as StepProfiler
    from freescale.config.schema import BalanceConfig as BalanceConfig
    from freescale.config.schema import DataConfig as DataConfig
    from freescale.config.schema import ModelConfig as ModelConfig
    from freescale.config.schema import RunConfig as RunConfig
    from freescale.config.schema import TablesConfig as TablesConfig
    from freescale.config.schema import TaskConfig as TaskConfig
    from freescale.config.schema import TrainConfig as TrainConfig
    from freescale.config.schema import TransportConfig as TransportConfig
    from freescale.data.batch import Batch as Batch
    from freescale.data.batch import Events as Events
    from freescale.data.loader import Loader as Loader
    from freescale.integrations.ddp import BalancedLoader as BalancedLoader
    from freescale.integrations.pipeline import Pipeline as Pipeline
    from freescale.integrations.torchrec import PrioritizedEmbeddingSharder as PrioritizedEmbeddingSharder
    from freescale.integrations.torchrec import TransportEmbeddingSharder as TransportEmbeddingSharder

_ROOMS = {
    "balance.cost": ["Cost"],
    "integrations.ddp": ["BalancedLoader"],
    "bubbles.step_profiler": ["StepProfiler"],
    "config.schema": [
        f"{part}Config" for part in ("Balance", "Data", "Model", "Run", "Tables", "Task", "Train", "Transport")
    ],
    "data.batch": ["Batch", "Events"],
    "data.loader": ["Loader"],
    "integrations.pipeline": ["Pipeline"],
    "integrations.torchrec": ["PrioritizedEmbeddingSharder", "TransportEmbeddingSharder"],
}
_HOMES = {name: f"freescale.{room}" for room, names in _ROOMS.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "balance":
        return importlib.import_module("freescale.balance")
    if name not in _HOMES:
        raise AttributeError(f"module 'freescale' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
