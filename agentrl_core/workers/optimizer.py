"""AdamW with a learning-rate schedule of known length and gradient clipping."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from agentrl_core.config.schema import OptimizerConfig


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did.

    Args:
        grad_norm: before clipping; may be inf or NaN where the step was skipped.
        lr: learning rate of this step.
        skipped: the gradient was not finite, and the weights are as before.
    """

    grad_norm: float
    lr: float
    skipped: bool


class ScheduledAdamW:
    """AdamW (arXiv 1711.05101) over ``parameters``; every step is clipped and scheduled.

    A step whose gradient is not finite changes neither weights nor moments, but counts in the schedule, whose length
    was fixed beforehand.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], config: OptimizerConfig, grad_clip: float, total_steps: int
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._config = config
        self._grad_clip = grad_clip
        self._total_steps = total_steps
        self._steps = 0
        first, second = config.betas
        self._adamw = torch.optim.AdamW(
            self._parameters, lr=config.lr, betas=(first, second), eps=config.eps, weight_decay=config.weight_decay
        )

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self._config, self._steps, self._total_steps)

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def step(self) -> StepReport:
        """Clip, step, and forget the gradients."""
        lr = self.lr
        grad_norm = float(nn.utils.clip_grad_norm_(self._parameters, self._grad_clip))
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self.zero_grad()
        self._steps += 1
        return StepReport(grad_norm, lr, skipped)

    def state_dict(self) -> dict[str, Any]:
        return {"adamw": self._adamw.state_dict(), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adamw.load_state_dict(state["adamw"])
        self._steps = state["steps"]


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
