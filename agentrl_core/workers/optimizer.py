"""AdamW with a learning-rate schedule of known length and gradient clipping."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl_core.config.schema import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
STREAMED_BYTES = 512 << 20
"""Parameters whose moments are on the device at a time, where moments wait on the host; one may be larger."""


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

    Args:
        on_host: the moments wait in host memory. A step brings those of a few parameters at a time to the device and
            takes them back: the results have the same bits.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        grad_clip: float,
        total_steps: int,
        on_host: bool = False,
    ) -> None:
        self._named = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        self.parameters = list(self._named.values())
        """Those that are trained."""
        self._config = config
        self._grad_clip = grad_clip
        self._total_steps = total_steps
        self.steps = 0
        """Steps so far, by which the schedule goes."""
        first, second = config.betas
        # One kernel for all: by itself torch makes temporaries of the whole model, or loops over sharded parameters.
        self._is_fused = all(parameter.device.type == "cuda" for parameter in self.parameters)
        self._adamw = torch.optim.AdamW(
            self.parameters, lr=config.lr, betas=(first, second), weight_decay=config.weight_decay,
            fused=self._is_fused or None,
        )  # fmt: skip
        self._on_host = on_host
        self._buckets = list(_buckets(self.parameters)) if on_host else [self.parameters]

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self._config, self.steps, self._total_steps)

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def step(self) -> StepReport:
        """Clip, step, and forget the gradients."""
        lr = self.lr
        grad_norm = _clip(self.parameters, self._grad_clip)
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            group = self._adamw.param_groups[0]
            group["lr"] = lr
            for group["params"] in self._buckets:
                with self._moments_on_device(group["params"]):
                    self._adamw.step()
            group["params"] = self.parameters
        self.zero_grad()
        self.steps += 1
        return StepReport(grad_norm, lr, skipped)

    def moments(self) -> dict[str, Tensor]:
        """AdamW's state as ``name.exp_avg``, ``name.exp_avg_sq`` (like the parameter) and ``name.step``.

        These are the tensors themselves: who writes into them sets the state. Those that do not exist yet are made as
        AdamW's first step would make them.
        """
        state = self._adamw.state
        for parameter in self.parameters:
            if not state[parameter]:
                made = {key: torch.zeros_like(parameter, memory_format=torch.preserve_format) for key in MOMENTS}
                if self._on_host:
                    made = {key: _on_host(moment) for key, moment in made.items()}
                step = torch.tensor(0.0, device=parameter.device if self._is_fused else None)
                state[parameter] = {"step": step, **made}
        return {
            f"{name}.{key}": value for name, parameter in self._named.items() for key, value in state[parameter].items()
        }

    @property
    def bytes_to_come(self) -> int:
        """Memory of the device that moments will take and do not yet."""
        if self._on_host or self._adamw.state:
            return 0
        return sum(len(MOMENTS) * _local(parameter).nbytes for parameter in self.parameters)

    @contextmanager
    def _moments_on_device(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        if not self._on_host:
            yield
            return
        state, waiting = self._adamw.state, {}
        for parameter in parameters:
            for key in MOMENTS:
                if key in state[parameter]:
                    waiting[parameter, key] = host = state[parameter][key]
                    state[parameter][key] = host.to(parameter.device, non_blocking=True, copy=True)
        yield
        for parameter in parameters:
            for key in MOMENTS:
                if key in state[parameter]:
                    moment, host = state[parameter][key], waiting.get((parameter, key))
                    state[parameter][key] = _on_host(moment) if host is None else host.copy_(moment, non_blocking=True)
        if parameters[0].device.type == "cuda":
            # The host's copies are read by whoever saves them.
            torch.cuda.current_stream(parameters[0].device).synchronize()


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        nbytes = _local(parameter).nbytes
        if bucket and size + nbytes > STREAMED_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += nbytes
    yield bucket


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, which a GPU copies to and from without a detour."""
    own = tensor.detach()
    # Not DTensor.from_local, which would bring a shard to the device of its mesh.
    return torch.empty_like(own, device="cpu", pin_memory=own.device.type == "cuda").copy_(own)


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
