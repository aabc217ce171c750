"""What a run is: its schema, how it is read and written, and the named recipes. Imports nothing heavy."""

from freescale.config.compare import Difference, differences
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
