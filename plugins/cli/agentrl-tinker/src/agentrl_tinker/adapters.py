"""LoRA adapters (arXiv 2106.09685) on one frozen module, by PEFT."""

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agentrl_core.fsdp2.adapters import adapter_tensors, insert_adapter, remove_adapter, use_adapter
from agentrl_tinker.refusals import Refusal

ALPHA = 32
"""Whatever the rank is: with it the learning rate that suits an adapter hardly depends on the rank."""


@dataclass(frozen=True)
class Shape:
    """What the API says of an adapter."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Adapters:
    """Named adapters of a module, one of them active, or none."""

    def __init__(self, module: Any) -> None:
        self.module = module.requires_grad_(False)
        self._head = next(
            (name for name, part in module.named_modules() if part is module.get_output_embeddings()), "lm_head"
        )
        self._linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        self.has_experts = any(".experts." in name for name, _ in module.named_parameters())

    def targets(self, shape: Shape) -> list[str]:
        """Names of the modules that an adapter of this shape changes.

        Raises:
            Refusal: there are none, or the model's experts are not linear modules.
        """
        if shape.train_mlp and self.has_experts:
            raise Refusal(
                "lora_config.train_mlp: this model's experts are not linear modules, to which this server could add "
                "adapters. Set train_mlp=False"
            )
        wanted = {True: shape.train_attn, False: shape.train_mlp}
        found = [name for name in self._linear if name != self._head and wanted["attn" in name or "attention" in name]]
        found += [self._head] * shape.train_unembed
        if not found:
            raise Refusal("lora_config: nothing to train. Set one of train_attn, train_mlp and train_unembed")
        return found

    def config(self, shape: Shape) -> dict[str, Any]:
        """The content of ``adapter_config.json``."""
        return {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": shape.rank, "lora_alpha": ALPHA, "lora_dropout": 0.0,
            "bias": "none", "target_modules": self.targets(shape),
        }  # fmt: skip

    def add(self, name: str, shape: Shape, seed: int | None = None) -> None:
        """A new adapter, which computes what the base does until it is trained."""
        insert_adapter(self.module, name, self.config(shape), secrets.randbits(63) if seed is None else seed)
        self.activate(None)

    def remove(self, name: str) -> None:
        self.activate(None)
        remove_adapter(self.module, name)

    def activate(self, name: str | None, training: bool = False) -> None:
        """Compute with this adapter from now on; with ``training`` its parameters get gradients."""
        use_adapter(self.module, name, training)

    def parameters(self, name: str) -> dict[str, Tensor]:
        """By the names of PEFT's files."""
        return adapter_tensors(self.module, name)

    @torch.no_grad()
    def load(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Take over an adapter's tensors.

        Raises:
            Refusal: they are those of another shape or model.
        """
        parameters = self.parameters(name)
        shapes = {key: tuple(value.shape) for key, value in parameters.items()}
        if shapes != {key: tuple(value.shape) for key, value in tensors.items()}:
            raise Refusal("these weights are an adapter of another rank, of other modules or of another model")
        for key, parameter in parameters.items():
            parameter.copy_(tensors[key])
