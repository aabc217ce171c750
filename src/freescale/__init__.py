"""FreeScale: distributed training of sequence recommendation models without bubbles.

Public names are imported on first use, so `import freescale` is fast and does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freescale import balance as balance
    from freescale import errors as errors
    from freescale import models as models
    from freescale.balance.cost import Cost as Cost
    from freescale.bubbles.step_profiler import StepProfiler as StepProfiler
    from freescale.config.schema import BalanceConfig as BalanceConfig
    from freescale.config.schema import DataConfig as DataConfig
    from freescale.config.schema import FeatureConfig as FeatureConfig
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
    from freescale.integrations.torchrec import PrioritizedEmbeddingSharder as PrioritizedEmbeddingSharder
    from freescale.integrations.torchrec import PrioritizedPipeline as PrioritizedPipeline
    from freescale.integrations.torchrec import TransportEmbeddingSharder as TransportEmbeddingSharder
    from freescale.integrations.zero_collision import ZeroCollisionTable as ZeroCollisionTable

_NAMES_BY_MODULE = {
    "balance.cost": ["Cost"],
    "integrations.ddp": ["BalancedLoader"],
    "bubbles.step_profiler": ["StepProfiler"],
    "config.schema": [
        f"{part}Config"
        for part in ("Balance", "Data", "Feature", "Model", "Run", "Tables", "Task", "Train", "Transport")
    ],
    "data.batch": ["Batch", "Events"],
    "data.loader": ["Loader"],
    "integrations.torchrec": ["PrioritizedEmbeddingSharder", "PrioritizedPipeline", "TransportEmbeddingSharder"],
    "integrations.zero_collision": ["ZeroCollisionTable"],
}
_MODULE_OF = {name: f"freescale.{module}" for module, names in _NAMES_BY_MODULE.items() for name in names}
_MODULES = ("balance", "errors", "models")
__all__ = sorted([*_MODULE_OF, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"freescale.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'freescale' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
