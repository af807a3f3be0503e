"""LoRA adapters (arXiv 2106.09685) on one frozen module, by PEFT."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, LoraModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn

from agentrl_core.workers.adapters import WEIGHTS_FILE, adapter_tensors
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
        self._tuner: LoraModel | None = None
        self._names: list[str] = []

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

    def config(self, shape: Shape) -> LoraConfig:
        return LoraConfig(r=shape.rank, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=self.targets(shape))

    def add(self, name: str, shape: Shape, seed: int | None = None) -> None:
        """A new adapter, which computes what the base does until it is trained."""
        config = self.config(shape)
        with torch.random.fork_rng(), warnings.catch_warnings():
            # Of tied embeddings, which concerns merged adapters alone.
            warnings.simplefilter("ignore")
            if seed is None:
                torch.seed()
            else:
                torch.manual_seed(seed)
            if self._tuner is None:
                self._tuner = LoraModel(self.module, {name: config}, name)
            else:
                self._tuner.peft_config[name] = config
                self._tuner.inject_adapter(self.module, name)
        self._names.append(name)
        self.activate(None)

    def remove(self, name: str) -> None:
        if self._tuner is not None and name in self._names:
            self._names.remove(name)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._tuner.delete_adapter(name)
            self.activate(None)

    def activate(self, name: str | None, training: bool = False) -> None:
        """Compute with this adapter from now on; with ``training`` its parameters get gradients."""
        for layer in self.module.modules():
            if isinstance(layer, LoraLayer):
                layer.set_adapter([] if name is None else [name], inference_mode=not training)

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


def config_text(config: LoraConfig) -> str:
    """The content of ``adapter_config.json``."""
    given: dict[str, Any] = config.to_dict()  # type: ignore[no-untyped-call]
    fields = {key: sorted(value) if isinstance(value, set) else value for key, value in given.items()}
    return json.dumps(fields, indent=2, sort_keys=True)


def read_adapter(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(folder / WEIGHTS_FILE)
    return tensors
