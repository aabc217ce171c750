"""Run configuration: schema, TOML loading and saving, comparison, and named recipes. Imports no heavy package."""

from freescale.config.compare import ConfigDifference, differences
from freescale.config.features import FeatureConfig
from freescale.config.load import load, load_run, override, parse, resolve, save, to_toml
from freescale.config.recipes import RECIPES
from freescale.config.schema import (
    BalanceConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    TablesConfig,
    TaskConfig,
    TrainConfig,
    TransportConfig,
)
