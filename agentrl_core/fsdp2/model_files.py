"""A model as Hugging Face files: what `agentrl export` copies and transformers loads."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from zipfile import is_zipfile

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig

from agentrl_core.api.errors import ConfigError
from agentrl_core.config.schema import POLICY, AdapterConfig, ModelConfig
from agentrl_core.engine_kit.media import has_processor
from agentrl_core.fsdp2.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_tensors,
    add_adapter,
    peft_config,
)
from agentrl_core.fsdp2.models import load_causal_lm
from agentrl_core.fsdp2.weights import ModelWeights
from agentrl_core.plugins.boundary import boundary

FILE_BYTES = 4 << 30
"""Of one safetensors file; a model that is larger gets several and an index."""
_INDEX = "model.safetensors.index.json"
_PROCESSOR = "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.*"
_PICKLED = "pytorch_model*.bin", "pytorch_model.bin.index.json"


def save_model(
    model: Any, path: str, tensors: Mapping[str, Tensor] | None = None, file_bytes: int = FILE_BYTES
) -> None:
    """Config and safetensors in Hugging Face layout, in the weights' own dtype.

    Where the model is sharded all ranks must call this; rank 0 writes one file after the other.

    Args:
        tensors: its weights, in place of those that the model has now.
    """
    folder, weights = Path(path), ModelWeights(model, tensors=None if tensors is None else lambda: tensors)
    is_first = not weights.is_sharded or dist.get_rank() == 0
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
        model.config.save_pretrained(path)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(path)
    count, total = len(weights.layout(file_bytes)), 0
    files: dict[str, str] = {}
    for number, bucket in enumerate(weights.buckets(file_bytes), 1):
        if is_first:
            file = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            whole = {name: tensor.contiguous() for name, tensor in bucket.items()}
            save_file(whole, folder / file, metadata={"format": "pt"})
            files.update(dict.fromkeys(whole, file))
            total += sum(tensor.nbytes for tensor in whole.values())
    if is_first and count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def save_adapter(
    model: Any, path: str, described: Mapping[str, Any], tensors: Mapping[str, Tensor], base: str, policy: str = POLICY
) -> None:
    """A policy's adapter as PEFT reads it. Where the model is sharded all ranks must call this.

    Args:
        described: see :func:`agentrl_core.fsdp2.adapters.peft_config`.
        tensors: the model's weights by name.
        base: directory of the model that the adapter belongs to.
    """
    weights = ModelWeights(nn.Module(), tensors=lambda: adapter_tensors(model, policy, tensors))
    whole: dict[str, Tensor] = {}
    for bucket in weights.buckets(FILE_BYTES):
        whole |= {name: tensor.contiguous() for name, tensor in bucket.items()}
    if weights.is_sharded and dist.get_rank() != 0:
        return
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = {**described, "base_model_name_or_path": base, "inference_mode": True}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(whole, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def save_merged(adapter: str, path: str, base: str) -> None:
    """Write a model with an adapter's weights in its own, in the data type that it is stored in; without tokenizer.

    Args:
        adapter: directory of the adapter.
        base: directory of the model that it belongs to.

    Raises:
        ConfigError: the adapter does not fit the model, or one of them cannot be read.
    """
    stored = AutoConfig.from_pretrained(base, local_files_only=True).dtype or torch.float32
    model = load_causal_lm(base, ModelConfig(base, dtype=cast(Any, str(stored).removeprefix("torch."))), "the base")
    save_model(add_adapter(model, peft_config(model, AdapterConfig(path=adapter)), adapter, seed=0), path)
    copy_processor(base, path)


def copy_processor(model: str, path: str) -> None:
    """Copy the files of a model's processor of images, if it has one; its tokenizer is another matter."""
    if has_processor(model):
        for pattern in _PROCESSOR:
            for file in Path(model).glob(pattern):
                shutil.copy(file, Path(path) / file.name)


def check_saved(folder: Path) -> None:
    """As :func:`check_weights`, for what a checkpoint has of a model: its weights or its adapter."""
    if not (folder / CONFIG_FILE).is_file():
        check_weights(folder)
        return
    with boundary(ConfigError, f"{WEIGHTS_FILE} cannot be read:"):
        _check_safetensors(folder / WEIGHTS_FILE)


def check_weights(model: Path) -> None:
    """Reject a model whose config or weights are missing or cut, and pickled weights that would run code.

    Raises:
        ConfigError: naming the file.
    """
    if not (model / "config.json").is_file():
        raise ConfigError("found no config.json; copy the model again")
    # Where a model has both, transformers loads the safetensors.
    for pattern, index, check in (("*.safetensors", _INDEX, _check_safetensors), (*_PICKLED, _check_pickle)):
        files = {file.name for file in model.glob(pattern)}
        if (model / index).is_file():
            with boundary(ConfigError, f"{index} cannot be read, copy it again:"):
                files |= set(json.loads((model / index).read_bytes())["weight_map"].values())
        for name in sorted(files):
            if not (model / name).is_file():
                raise ConfigError(f"{name}, which {index} names, is missing; copy it again")
            with boundary(ConfigError, f"{name} cannot be read, copy it again:"):
                check(model / name)
        if files:
            return
    raise ConfigError("found no *.safetensors; copy the model again")


def _check_safetensors(file: Path) -> None:
    with safe_open(file, "pt") as weights:
        weights.keys()


def _check_pickle(file: Path) -> None:
    # As transformers loads it: only what tensors need, so that no code runs.
    torch.load(file, map_location="meta", weights_only=True, mmap=is_zipfile(file))
