"""AdamW with gradient clipping, over parameters that may be shards, and moments that may wait on the host."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl_core.config.schema import OptimizerConfig
from agentrl_core.fsdp2.mesh import local_part

MOMENTS = ("exp_avg", "exp_avg_sq")
STREAMED_BYTES = 512 << 20
"""Parameters whose moments are on the device at a time, where moments wait on the host; one may be larger."""


class AdamW:
    """AdamW (arXiv 1711.05101) over named parameters, whole or sharded; every step is clipped.

    Args:
        on_host: the moments wait in host memory. A step brings those of a few parameters at a time to the device and
            takes them back: the results have the same bits.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        on_host: bool = False,
    ) -> None:
        self._named = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        self.parameters = list(self._named.values())
        """Those that are trained."""
        first, second = config.betas
        # One kernel for all: by itself torch makes temporaries of the whole model, or loops over sharded parameters.
        self._is_fused = all(parameter.device.type == "cuda" for parameter in self.parameters)
        self._adamw = torch.optim.AdamW(
            self.parameters, lr=config.lr, betas=(first, second), weight_decay=config.weight_decay,
            fused=self._is_fused or None,
        )  # fmt: skip
        self._on_host = on_host
        # One kernel takes shards of one mesh.
        by_mesh = [list(own) for _, own in groupby(sorted(self.parameters, key=_mesh_of), _mesh_of)]
        self._buckets = [each for own in by_mesh for each in _buckets(own)] if on_host else by_mesh

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def step(self, lr: float, max_norm: float) -> float:
        """Clip, step, and forget the gradients; their norm before clipping. If that is not finite, weights and moments
        stay as they are."""
        grad_norm = _clip(self.parameters, max_norm)
        if math.isfinite(grad_norm):
            group = self._adamw.param_groups[0]
            group["lr"] = lr
            for group["params"] in self._buckets:
                with self._moments_on_device(group["params"]):
                    self._adamw.step()
            group["params"] = self.parameters
        self.zero_grad()
        return grad_norm

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
        return sum(len(MOMENTS) * local_part(parameter).nbytes for parameter in self.parameters)

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
        nbytes = local_part(parameter).nbytes
        if bucket and size + nbytes > STREAMED_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += nbytes
    yield bucket


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, which a GPU copies to and from without a detour."""
    own = tensor.detach()
    # Not DTensor.from_local, which would bring a shard to the device of its mesh.
    return torch.empty_like(own, device="cpu", pin_memory=own.device.type == "cuda").copy_(own)


def _mesh_of(parameter: nn.Parameter) -> str:
    return f"{parameter.device_mesh} {parameter.placements}" if isinstance(parameter, DTensor) else ""


def _clip(parameters: list[nn.Parameter], limit: float) -> float:
    """Scale the gradients so that their norm, over all parameters and ranks, is at most ``limit``; the norm before.

    Gradients may be on different meshes: what several ranks have counts once.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0.0
    local = [local_part(gradient).detach() for gradient in gradients]
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(local)])
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        copies = norms.new_tensor([_copies(gradient) for gradient in gradients])
        squares = (norms.square() / copies).sum()
        dist.all_reduce(squares)
        norm = squares.sqrt()
    else:
        norm = norms.square().sum().sqrt()
    norm = norm.float()
    # As torch's clip_grad_norm_ does it.
    torch._foreach_mul_(local, (limit / (norm + 1e-6)).clamp(max=1.0))
    return float(norm)


def _copies(gradient: Tensor) -> int:
    """How many ranks have the same part of it."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size()
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return dist.get_world_size() // math.prod(size for size, placed in sizes if not placed.is_replicate())
