"""The learning rate of each optimizer step of a run, whose length is known."""

import math

from agentrl_core.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step number ``step``, from 0.

    It rises linearly over ``warmup_steps`` steps, the last of which has the peak, then stays (constant) or falls
    (linear, cosine) to ``min_lr_ratio`` of the peak, which a step number ``total_steps`` and any later one would have.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min((step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1), 1.0)
    remaining = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)
