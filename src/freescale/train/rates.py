"""How learning rates rise and fall. Pure."""

import math

from freescale.config import TrainConfig


def share(step: int, steps: int, config: TrainConfig) -> float:
    """Share of the full learning rate at a step (counted from 0) of a run of so many steps."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "none":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    left = 1.0 - done if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.final_lr + (1.0 - config.final_lr) * left
