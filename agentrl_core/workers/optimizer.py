"""AdamW with a learning-rate schedule of known length and gradient clipping."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
    """AdamW (arXiv 1711.05101) over named parameters, whole or sharded; every step is clipped and scheduled.

    A step whose gradient is not finite changes neither weights nor moments, but counts in the schedule, whose length
    was fixed beforehand.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        grad_clip: float,
        total_steps: int,
    ) -> None:
        self._named = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        self._parameters = list(self._named.values())
        self._config = config
        self._grad_clip = grad_clip
        self._total_steps = total_steps
        self.steps = 0
        """Steps so far, by which the schedule goes."""
        first, second = config.betas
        self._adamw = torch.optim.AdamW(
            self._parameters, lr=config.lr, betas=(first, second), weight_decay=config.weight_decay
        )

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self._config, self.steps, self._total_steps)

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def step(self) -> StepReport:
        """Clip, step, and forget the gradients."""
        lr = self.lr
        grad_norm = _clip(self._parameters, self._grad_clip)
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self.zero_grad()
        self.steps += 1
        return StepReport(grad_norm, lr, skipped)

    def moments(self) -> dict[str, Tensor]:
        """AdamW's state as ``name.exp_avg``, ``name.exp_avg_sq`` (like the parameter) and ``name.step``.

        These are the tensors themselves: who writes into them sets the state. Those that do not exist yet are made as
        AdamW's first step would make them.
        """
        state = self._adamw.state
        for parameter in self._parameters:
            if not state[parameter]:
                state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }
        return {
            f"{name}.{key}": value for name, parameter in self._named.items() for key, value in state[parameter].items()
        }

    def move_moments(self, device: torch.device) -> None:
        """Bring the moments to a device."""
        for state in self._adamw.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                if key in state:
                    state[key] = state[key].to(device, non_blocking=True)


def _clip(parameters: list[nn.Parameter], limit: float) -> float:
    """Scale the gradients so that their norm, over all parameters and ranks, is at most ``limit``; the norm before."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return float(norm)


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
