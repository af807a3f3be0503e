"""LoRA adapters in a model, by PEFT: made or read, switched off, merged, written.

A model with an adapter keeps its class and its own parameters, which are frozen; the linear layers that the adapter
changes are PEFT's, with the original as ``base_layer``. The adapter's matrices are float32, whatever the model is.
"""

import difflib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from agentrl_core.api.engine import AdapterSlots
from agentrl_core.api.errors import CheckpointError, ConfigError
from agentrl_core.api.weights import Adapter
from agentrl_core.config.schema import POLICY, AdapterConfig
from agentrl_core.engine_kit.adapters import PREFIX, UNSERVED
from agentrl_core.plugins.boundary import boundary

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_UNTRAINED = {*UNSERVED, "layers_to_transform", "megatron_config"}
"""Settings of PEFT that make an adapter another one than ``model.adapter`` describes."""
_KEEP_THE_MODEL = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
"""``init_lora_weights`` with which PEFT leaves the model's weights as they are. PiSSA and others subtract from them."""


def initial(name: str) -> str:
    """Name of the copy of what an adapter began with."""
    return f"{name}_initial"


def add_adapter(
    model: Any,
    described: Mapping[str, Any],
    path: str | None,
    seed: int,
    *,
    policy: str = POLICY,
    keep_initial: bool = False,
) -> Any:
    """Freeze a model and put an adapter into it, in place; returns it. The adapter is the one that is used.

    Args:
        model: of transformers, with its weights or on torch's meta device; it may have others already.
        described: see :func:`peft_config`.
        path: directory of the adapter that it begins with; None: a new one, which adds 0.
        seed: of a new adapter's matrices.
        policy: its name.
        keep_initial: add a frozen copy, see :func:`initial`.

    Raises:
        ConfigError: the adapter of ``path`` does not fit the model.
    """
    model.requires_grad_(False)
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    for name in (policy, initial(policy)) if keep_initial else (policy,):
        insert_adapter(model, name, described, seed)
        if path is not None and not is_empty:
            _fill(adapter_tensors(model, name), path)
    use_adapter(model, policy)
    return model


def insert_adapter(model: Any, name: str, described: Mapping[str, Any], seed: int) -> None:
    """Put one more adapter into a model; until it is trained it adds 0."""
    from peft import LoraConfig, inject_adapter_in_model

    is_empty = any(parameter.is_meta for parameter in model.parameters())
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # That it joins others, and of tied embeddings, which concerns merged adapters alone.
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        inject_adapter_in_model(LoraConfig(**described), model, adapter_name=name)
    for layer in _layers(model):
        if is_empty:
            # PEFT leaves a second adapter on the CPU.
            layer.lora_A.to("meta")
            layer.lora_B.to("meta")
        # Of bfloat16 weights most of an optimizer's steps would be lost.
        layer.lora_A.float()
        layer.lora_B.float()


def remove_adapter(model: Any, name: str) -> None:
    """Take an adapter out of a model. It must not be the active one."""
    for layer in _layers(model):
        layer.delete_adapter(name)
    del model.peft_config[name]


def peft_config(model: Any, settings: AdapterConfig) -> dict[str, Any]:
    """``adapter_config.json`` of an adapter of these settings; ``target_modules`` are the last parts of names.

    Args:
        model: without an adapter.

    Raises:
        ConfigError: no linear layer is called as ``model.adapter.targets`` says, or the adapter of
            ``model.adapter.path`` is not one that can be trained.
    """
    if settings.path is not None:
        found = read_config(settings.path)
        wanted = found["target_modules"]
        if isinstance(wanted, str) and wanted != "all-linear":
            wanted = [name for name, _ in model.named_modules() if re.fullmatch(wanted, name)] or wanted
        targets = targets_of(model, wanted, f"model.adapter.path: {CONFIG_FILE}: target_modules")
        rank, alpha, extra = found["r"], found["lora_alpha"], {"use_rslora": bool(found.get("use_rslora"))}
    else:
        targets = targets_of(model, settings.targets, "model.adapter.targets")
        rank, alpha, extra = settings.rank, settings.alpha, {}
    left_out = _seeing_layers(model, targets)
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "target_modules": targets,
        "lora_dropout": settings.dropout, "bias": "none", **extra,
        **({"exclude_modules": left_out} if left_out else {}),
    }  # fmt: skip


def _linear_layers(model: Any) -> set[str]:
    """Names of the linear layers of the language model, but for that of the output."""
    head, own = getattr(model, "get_output_embeddings", lambda: None)(), _language_modules(model)
    return {name for name, module in own.items() if isinstance(module, nn.Linear) and module is not head}


def _language_modules(model: Any) -> dict[str, nn.Module]:
    """The modules of a model but for those that make features of images, by name."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    own = {id(module) for module in decoder.modules()}
    return {name: module for name, module in model.named_modules() if id(module) in own}


def _seeing_layers(model: Any, targets: list[str]) -> list[str]:
    """Names of modules outside of the language model that are called like its targets, and get no adapter."""
    own = _language_modules(model)
    return [name for name, _ in model.named_modules() if name.rpartition(".")[2] in targets and name not in own]


def adapter_slots(adapters: Sequence[Adapter], versions: int) -> AdapterSlots:
    """What an engine must be able to hold: so many versions of each of these adapters."""
    targets = {target: None for adapter in adapters for target in adapter.config["target_modules"]}
    return AdapterSlots(
        tuple(adapter.name for adapter in adapters),
        versions,
        max(adapter.config["r"] for adapter in adapters),
        tuple(targets),
    )


def targets_of(model: Any, targets: list[str] | str, key: str) -> list[str]:
    """The last parts of the names of the linear layers that are meant; ``all-linear``: all of the language model but
    the output's.

    Raises:
        ConfigError: one of them is the name of no linear layer; with the nearest names.
    """
    all_names = {name.rpartition(".")[2] for name in _linear_layers(model)}
    names = sorted(all_names - _names_of_experts(model, all_names))
    if not names:
        raise ConfigError(
            f"{key}: {type(model).__name__} has no linear layers (torch.nn.Linear) that an adapter can change; train "
            "all weights with model.adapter=null"
        )
    if targets == "all-linear":
        return names
    wanted = [targets] if isinstance(targets, str) else targets
    for target in wanted:
        # Of names of whole layers, as in files of PEFT, the last part counts.
        if target.rpartition(".")[2] not in names:
            if target.rpartition(".")[2] in all_names:
                raise ConfigError(
                    f"{key}: PEFT takes {target!r} of {type(model).__name__} for its fused experts, which agentrl does "
                    f"not adapt. Allowed are {', '.join(names)}, or all-linear for all of them"
                )
            near = difflib.get_close_matches(target, names, n=2, cutoff=0.4) or names
            raise ConfigError(
                f"{key}: {type(model).__name__} has no linear layer {target!r}; nearest: {', '.join(near)}. Allowed "
                f"are {', '.join(names)}, or all-linear for all of them"
            )
    if not wanted:
        raise ConfigError(f"{key}: expected at least one of {', '.join(names)}, or all-linear; found none")
    return sorted({target.rpartition(".")[2] for target in wanted})


def _names_of_experts(model: Any, names: set[str]) -> set[str]:
    """Names that PEFT takes for fused experts of a mixture-of-experts model, though linear layers have them too."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=sorted(names))
    convert_peft_config_for_transformers(config, model, None)
    return names - set(config.target_modules or ())


def check_same(described: Mapping[str, Any], path: str) -> None:
    """Refuse a checkpoint whose adapter is added to the model with another factor.

    Raises:
        CheckpointError: naming what differs.
    """
    stored = read_config(path)
    changed = [
        f"{key}: {before} -> {now}"
        for key in ("lora_alpha", "use_rslora")
        if (before := float(stored.get(key) or 0)) != (now := float(described.get(key) or 0))
    ]
    if changed:
        raise CheckpointError(
            f"{path} has another adapter than model.adapter and model.adapter.path describe:\n  "
            + "\n  ".join(changed) + "\nSet the old values again, or start a new run with trainer.resume=never"
        )  # fmt: skip


def read_config(path: str) -> dict[str, Any]:
    """``adapter_config.json`` of an adapter's directory.

    Raises:
        ConfigError: it is missing, or no plain LoRA adapter.
    """
    file = Path(path) / CONFIG_FILE
    with boundary(ConfigError, f"model.adapter.path: {file} cannot be read:"):
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if found.get("peft_type") != "LORA":
        raise ConfigError(f"model.adapter.path: {file} is an adapter of type {found.get('peft_type')}; allowed is LORA")
    used = [name for name in sorted(_UNTRAINED) if found.get(name)]
    if found.get("bias", "none") != "none":
        used.append("bias")
    if found.get("init_lora_weights") not in _KEEP_THE_MODEL:
        used.append(f"init_lora_weights={found['init_lora_weights']}")
    if used:
        raise ConfigError(
            f"model.adapter.path: {file} sets {', '.join(used)}, which agentrl does not train and engines do not "
            "serve; use an adapter without, or merge it into its model and train that"
        )
    return found


def stored_adapter(path: str, policy: str = POLICY) -> Adapter:
    """A policy's adapter from a directory, as engines take it; :data:`WEIGHTS_FILE` there has its tensors."""
    found = read_config(path)
    targets = sorted({target.rpartition(".")[2] for target in found["target_modules"]})
    return Adapter(policy, {**found, "target_modules": targets})


def fill_adapter(model: nn.Module, path: str) -> None:
    """Read an adapter into a model without weights, which stays without the others."""
    for layer in _layers(model):
        layer.lora_A.to_empty(device="cpu")
        layer.lora_B.to_empty(device="cpu")
    _fill(adapter_tensors(model), path)


def _fill(own: Mapping[str, Tensor], path: str) -> None:
    """Take over the tensors of an adapter's directory."""
    file = Path(path) / WEIGHTS_FILE
    with boundary(ConfigError, f"model.adapter.path: {file} cannot be read:"):
        stored = load_file(file)
    problems = [f"it lacks {key}" for key in own.keys() - stored.keys()]
    problems += [f"the model has no place for {key}" for key in stored.keys() - own.keys()]
    problems += [
        f"{key} has the shape {list(stored[key].shape)}, the model needs {list(own[key].shape)}"
        for key in own.keys() & stored.keys()
        if own[key].shape != stored[key].shape
    ]
    if problems:
        raise ConfigError(
            f"model.adapter.path: {file} is an adapter of another model than model.path, or of some of its layers "
            f"only: {min(problems)} (and {len(problems) - 1} more)"
        )
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(stored[key])


def _layers(model: nn.Module) -> Iterator[Any]:
    from peft.tuners.lora import LoraLayer

    return (module for module in model.modules() if isinstance(module, LoraLayer))


def has_adapter(model: nn.Module) -> bool:
    """Whether a model has one."""
    return any(hasattr(module, "lora_A") for module in model.modules())


def use_adapter(model: nn.Module, name: str | None, trains: bool = True) -> None:
    """Compute with this adapter, or with none; it has gradients where it ``trains``, and no other one has."""
    for layer in _layers(model):
        layer.set_adapter([] if name is None else [name], inference_mode=not trains)


@contextmanager
def reference_policy(model: nn.Module, policy: str) -> Iterator[None]:
    """Compute as a policy did before the run: with the adapter that it began with, or none."""
    layers = list(_layers(model))
    keeps_initial = any(initial(policy) in layer.lora_A for layer in layers)
    if keeps_initial:
        use_adapter(model, initial(policy), trains=False)
    else:
        for layer in layers:
            layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        use_adapter(model, policy)


def adapter_tensors(
    model: nn.Module, name: str = POLICY, tensors: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """An adapter's matrices, A [rank, in] and B [out, rank], by the names that PEFT gives them in files.

    Args:
        tensors: of the model by name, in place of those that it has now.
    """
    own = model.state_dict(keep_vars=True) if tensors is None else tensors
    part = f".{name}.weight"
    return {
        PREFIX + key.removesuffix(part) + ".weight": tensor
        for key, tensor in own.items()
        if key.endswith(part) and ".lora_" in key
    }


def base_name(name: str) -> str | None:
    """What a tensor of a model with adapters is called in the model without; None for one of an adapter."""
    return None if ".lora_" in name else name.replace(".base_layer.", ".")


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that the adapter changes, by the names that their weights have in the model without one."""
    return {f"{name}.weight": module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def merged(weight: Tensor, layer: Any) -> Tensor:
    """``weight + scale * B A`` of a layer's adapter, in float32. Of a sharded layer all ranks must call this."""
    a, b = (getattr(layer, f"lora_{side}")[POLICY].weight.detach().float() for side in "AB")
    if isinstance(a, DTensor):
        a = a.redistribute(placements=[Replicate()] * a.device_mesh.ndim)
    added: Tensor = float(layer.scaling[POLICY]) * (b @ a)
    return weight.float() + added
