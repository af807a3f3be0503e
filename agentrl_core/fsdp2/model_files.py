"""A model as Hugging Face files: what `agentrl export` copies and transformers loads."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
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
from agentrl_core.api.weights import ArrayBucket
from agentrl_core.config.schema import POLICY, AdapterConfig, ModelConfig
from agentrl_core.engine_kit.media import has_processor
from agentrl_core.fsdp2.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapted_layers,
    adapter_tensors,
    add_adapter,
    fill_adapter,
    merged,
    peft_config,
)
from agentrl_core.fsdp2.models import load_causal_lm
from agentrl_core.fsdp2.weights import ModelWeights, Tensors, in_checkpoint_form
from agentrl_core.plugins.boundary import boundary

FILE_BYTES = 4 << 30
"""Of one safetensors file; a model that is larger gets several and an index."""
_INDEX = "model.safetensors.index.json"
_PROCESSOR = "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.*"
_PICKLED = "pytorch_model*.bin", "pytorch_model.bin.index.json"


def save_model(
    model: Any,
    path: str,
    tensors: Mapping[str, Tensor] | None = None,
    file_bytes: int | None = None,
    frozen: Mapping[str, Tensor] | None = None,
) -> None:
    """Config and safetensors in Hugging Face layout, in the weights' own dtype.

    Where the model is sharded all ranks must call this; rank 0 writes one file after the other, and holds one at most.

    Args:
        tensors: its weights, in place of those that the model has now.
        file_bytes: of a file; None: :data:`FILE_BYTES`.
        frozen: weights that get separate files. If ``tensors`` lack them these files exist elsewhere, and only the
            index names them.
    """
    own, frozen = model.state_dict(keep_vars=True) if tensors is None else tensors, frozen or {}
    trained = {name: tensor for name, tensor in own.items() if name not in frozen}
    once = {name: tensor for name, tensor in own.items() if name in frozen}
    parts = {
        "model": ModelWeights(model, tensors=lambda: trained),
        **({"frozen": ModelWeights(model, tensors=lambda: once or frozen)} if frozen else {}),
    }
    is_first = not any(weights.is_sharded for weights in parts.values()) or dist.get_rank() == 0
    if is_first:
        _save_config(model, path)
    file_bytes = file_bytes or FILE_BYTES
    layouts = {kind: _files_of(kind, weights, file_bytes) for kind, weights in parts.items()}
    for kind, weights in parts.items():
        if kind == "model" or once:
            _save_files(path, layouts[kind], weights.buckets(file_bytes), is_first)
    if is_first:
        _save_index(path, {name: bucket for layout in layouts.values() for name, bucket in layout.items()})


def frozen_files(model: Any, frozen: Mapping[str, Tensor]) -> list[str]:
    """The files of :func:`save_model` with frozen weights only."""
    return list(_files_of("frozen", ModelWeights(model, tensors=lambda: frozen), FILE_BYTES))


def _save_config(model: Any, path: str) -> None:
    Path(path).mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(path)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(path)


def _files_of(kind: str, weights: ModelWeights, file_bytes: int) -> dict[str, ArrayBucket]:
    """What each file has, without the data."""
    layout = weights.layout(file_bytes)
    return {
        f"{kind}-{number:05d}-of-{len(layout):05d}.safetensors": bucket for number, bucket in enumerate(layout, 1)
    }  # fmt: skip


def _save_files(path: str, names: Iterable[str], buckets: Iterator[Tensors], is_first: bool) -> None:
    for name in names:
        # In one expression: a variable would hold a file's tensors while the next one's are gathered.
        _save_tensors(Path(path) / name, next(buckets), is_first)


def _save_tensors(file: Path, tensors: Tensors, is_first: bool) -> None:
    if is_first:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def _save_index(path: str, files: Mapping[str, ArrayBucket]) -> None:
    """Say which file has which tensor; a single file needs no index, and another name."""
    if len(files) == 1:
        (Path(path) / next(iter(files))).rename(Path(path) / "model.safetensors")
        return
    weights = {tensor: name for name, bucket in files.items() for tensor in bucket.names}
    index = {"metadata": {"total_size": sum(bucket.nbytes for bucket in files.values())}, "weight_map": weights}
    (Path(path) / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


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

    The model is never in memory: its files are mapped, and tensors are changed one file of the result at a time.

    Args:
        adapter: directory of the adapter.
        base: directory of the model that it belongs to.

    Raises:
        ConfigError: the adapter does not fit the model, or one of them cannot be read.
    """
    stored = AutoConfig.from_pretrained(base, local_files_only=True).dtype or torch.float32
    model_config = ModelConfig(base, dtype=cast(Any, str(stored).removeprefix("torch.")))
    model = load_causal_lm(base, model_config, "the base", torch.device("meta"))
    add_adapter(model, peft_config(model, AdapterConfig(path=adapter)), None, seed=0)
    fill_adapter(model, adapter)
    tensors = _mapped(Path(base))
    layers = {_stored_name(model, name, tensors): layer for name, layer in adapted_layers(model).items()}
    weights = ModelWeights(nn.Module(), tensors=lambda: tensors)
    files = _files_of("model", weights, FILE_BYTES)
    _save_config(model, path)
    _save_files(path, files, (_with_adapter(bucket, layers) for bucket in weights.buckets(FILE_BYTES)), True)
    _save_index(path, files)
    copy_processor(base, path)


def _with_adapter(tensors: Tensors, layers: Mapping[str, Any]) -> Tensors:
    # Clones of the others: what is mapped may share memory, which safetensors refuses to write twice.
    return {
        name: merged(tensor, layers[name]).to(tensor.dtype) if name in layers else tensor.clone()
        for name, tensor in tensors.items()
    }


def _stored_name(model: Any, name: str, stored: Mapping[str, Tensor]) -> str:
    """What a model's files call the weight of a layer with an adapter."""
    weight = model.get_submodule(name.removesuffix(".weight")).weight
    for found, tensor in in_checkpoint_form(model, {name: weight.detach()}).items():
        if found in stored and stored[found].shape == tensor.shape == weight.shape:
            return found
    raise ConfigError(
        f"the files of the model have no tensor that is the weight of {name.removesuffix('.weight')} alone; merge the "
        "adapter with peft.PeftModel.merge_and_unload"
    )


def _mapped(model: Path) -> Tensors:
    """A model's tensors as its files have them. They are read from the disk when they are used."""
    # As transformers chooses them: the directory may have others.
    choices = ("model.safetensors", _INDEX, "pytorch_model.bin", _PICKLED[1])
    found = next(model / name for name in choices if (model / name).is_file())
    files = set(json.loads(found.read_bytes())["weight_map"].values()) if found.suffix == ".json" else {found.name}
    tensors: Tensors = {}
    for file in (model / name for name in sorted(files)):
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}
        else:
            tensors |= torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    return tensors


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
