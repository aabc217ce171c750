"""The encoders by name."""

from torch import nn

from freescale.config import ModelConfig
from freescale.models.hstu import HSTU
from freescale.models.sasrec import SASRec


def encoder(config: ModelConfig, *, longest: int) -> nn.Module:
    """Build the encoder of a config for samples of up to `longest` places."""
    return {"hstu": HSTU, "sasrec": SASRec}[config.kind](config, longest=longest)
