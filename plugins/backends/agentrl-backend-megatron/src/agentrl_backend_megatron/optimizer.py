"""AdamW of Megatron-Core's distributed optimizer: each data-parallel rank has a part of the moments."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from agentrl_backend_megatron.exchange import Piece
from agentrl_backend_megatron.model import HiddenStates

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Args:
    model: this rank's part.
    settings: ``optimizer`` of the role.
    in_float32: how gradients are added up over ranks.
    """

    def __init__(self, model: HiddenStates, settings: Any, in_float32: bool) -> None:
        dtype = model.config.params_dtype
        self.model = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=in_float32, use_distributed_optimizer=True),
            model,
        )
        first, second = settings.betas
        self._megatron = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=settings.lr, min_lr=0.0, weight_decay=settings.weight_decay, adam_beta1=first,
                adam_beta2=second, adam_eps=1e-8, clip_grad=0.0, use_distributed_optimizer=True,
                bf16=dtype == torch.bfloat16, params_dtype=dtype,
            ),
            [self.model],
            # All parameters decay, as with AdamW of torch: by itself Megatron-Core leaves out biases and norms.
            config_overrides={},
            use_gloo_process_groups=False,
        )  # fmt: skip
        self.updates = 0
        """Steps that have changed something."""

    @property
    def _parts(self) -> list[Any]:
        """One for experts and one for the rest, where both have parameters here."""
        found = getattr(self._megatron, "chained_optimizers", [self._megatron])
        return [each for each in found if not getattr(each, "is_stub_optimizer", False)]

    def zero_grad(self) -> None:
        self.model.zero_grad_buffer()
        self._megatron.zero_grad()

    def step(self, lr: float, max_norm: float) -> float:
        """See :meth:`agentrl_core.api.training_backend.TrainingBackend.optimizer_step`."""
        finalize_model_grads([self.model], None)
        self._megatron.prepare_grads()
        norm = float(self._megatron.get_grad_norm())
        if math.isfinite(norm):
            for part in self._parts:
                if parameters := part.get_parameters():
                    clip_grad_by_total_norm_fp32(parameters, max_norm, norm)
            for group in self._megatron.param_groups:
                group["lr"] = lr
            self._megatron.step_with_ready_grads()
            self.updates += 1
        self.zero_grad()
        return norm

    # State --------------------------------------------------------------------------------------------------------

    def piece_of(self, parameter: Tensor, rank: int, index: int) -> Piece | None:
        """What this rank has of the state of a parameter; None: nothing."""
        for part in self._parts:
            if parameter in part.model_param_gbuf_map:
                found = part._get_model_param_range_map(parameter)["param"]
                return Piece(rank, index, found.start, found.end) if found.end > found.start else None
        return None

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The tensors ``param``, ``exp_avg`` and ``exp_avg_sq`` of this rank's piece, flat: who writes into them sets
        the state. Moments that do not exist yet are made, of 0."""
        for part in self._parts:
            if parameter in part.model_param_group_index_map:
                group, place = part.model_param_group_index_map[parameter]
                main = part.optimizer.param_groups[group]["params"][place]
                state = part.optimizer.state[main]
                for name in MOMENTS:
                    if name not in state:
                        state[name] = torch.zeros_like(main)
                        state.setdefault("step", torch.tensor(float(self.updates)))
                return {"param": main.detach(), **{name: state[name] for name in MOMENTS}}
        return {}

    def set_updates(self, updates: int) -> None:
        """As if so many steps had been made: Adam's correction of its bias depends on it."""
        self.updates = updates
        for part in self._parts:
            for group in part.optimizer.param_groups:
                if "step" in group:
                    group["step"] = updates
            for state in part.optimizer.state.values():
                if "step" in state:
                    state["step"] = torch.full_like(torch.as_tensor(state["step"]), updates)

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters of this rank by Megatron-Core's names."""
        yield from self.model.module.named_parameters()
