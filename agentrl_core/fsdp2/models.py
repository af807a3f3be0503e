"""Loading Hugging Face models from a directory, with errors that name the config key."""

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
)
from transformers.utils import logging as transformers_logging

from agentrl_core.api.errors import ConfigError
from agentrl_core.config.schema import ModelConfig
from agentrl_core.engine_kit.media import has_processor
from agentrl_core.plugins.boundary import boundary, described
from agentrl_core.workers.devices import compute_dtype

logger = logging.getLogger(__name__)

NOT_IN_SDPA = ("attn_logit_softcapping", "alibi")
"""Settings of models that transformers ignores, or gets wrong, with torch's scaled_dot_product_attention."""


def load_causal_lm(path: str, config: ModelConfig, key: str, device: torch.device | None = None) -> Any:
    """The causal language model of a directory, one that is shown images where the directory has a processor of these,
    on the CPU, in eval mode and without dropout.

    Args:
        path: directory with config and weights.
        config: dtype, attention and the rest.
        key: the config key that ``path`` comes from, for messages.
        device: on which the weights are quantized and stay, if ``model.quantize`` says so; None: they are not. On
            torch's meta device no weights are read, but how the model's files name them.

    Raises ConfigError where the path does not exist, is no model, or lacks weights.
    """
    return _load(AutoModelForCausalLM, path, config, key, device)


def load_backbone(path: str, config: ModelConfig, key: str, device: torch.device | None = None) -> Any:
    """The same model without its language-model head.

    Raises ConfigError also where transformers has none.
    """
    model = _load(AutoModel, path, config, key, device)
    if model.get_output_embeddings() is not None:
        raise ConfigError(
            f"{key}: transformers has no {type(model).__name__} without its language-model head, which a critic needs; "
            "use a model of another family as critic.path, or an algorithm without a critic"
        )
    return model


def empty_causal_lm(path: str, config: ModelConfig) -> Any:
    """The same model as of :func:`load_causal_lm` without weights, on torch's meta device."""
    return _empty(AutoModelForCausalLM, path, config)


def empty_backbone(path: str, config: ModelConfig) -> Any:
    """The same model as of :func:`load_backbone` without weights, on torch's meta device."""
    return _empty(AutoModel, path, config)


def _empty(auto_class: Any, path: str, config: ModelConfig) -> Any:
    model_config = _model_config(path, config)
    with torch.device("meta"):
        return (
            _seeing(auto_class, path, model_config)
            .from_config(
                model_config,
                dtype=getattr(torch, config.dtype),
                attn_implementation=attention_for(model_config, config),
                trust_remote_code=config.trust_remote_code,
            )
            .eval()
        )


def check_architecture(path: str, config: ModelConfig) -> Any:
    """The model of :func:`empty_causal_lm`, or the reason why transformers cannot build it from its config.json.

    Raises:
        ConfigError: with what transformers says.
    """
    message = f"transformers cannot build a model from {Path(path) / 'config.json'}:"
    with boundary(ConfigError, message, describe=_with_key), quiet_progress():
        model = empty_causal_lm(path, config)
        layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 1)
        if layers < 1:
            raise ValueError(f"num_hidden_layers: expected 1 or more, found {layers}")
        return model


def _with_key(failure: Exception) -> str:
    named = [f"model.{key}" for key in ("trust_remote_code", "attn_implementation") if f"{key}=" in str(failure)]
    return "\n".join([described(failure), *(f"In agentrl this argument is the key {key}" for key in named)])


def _model_config(path: str, config: ModelConfig) -> Any:
    if not Path(path).is_dir():
        # transformers would take the path for the name of a repository, and complain about its form.
        raise ConfigError(
            f"{path!r} is not a directory on node {socket.gethostname()}. Every node of the cluster needs the model at "
            "this path"
        )
    model_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code, local_files_only=True)
    # Dropout would make the ratio compare two random functions instead of two policies.
    _switch_off_dropout(model_config)
    return model_config


def _load(auto_class: Any, path: str, config: ModelConfig, key: str, device: torch.device | None) -> Any:
    if not Path(path).is_dir():
        raise ConfigError(
            f"{key}: {path!r} is not a directory on node {socket.gethostname()}. Every node of the cluster needs one "
            f"with config.json and weights at this path (`hf download NAME --local-dir {path}` fetches a model from "
            "the Hugging Face hub)"
        )
    try:
        model_config = _model_config(path, config)
        with quiet_progress():
            model, info = _seeing(auto_class, path, model_config).from_pretrained(
                path,
                config=model_config,
                dtype=getattr(torch, config.dtype),
                attn_implementation=attention_for(model_config, config),
                trust_remote_code=config.trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                **_load_arguments(config, device),
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{key}: transformers cannot load a model from {path!r}: {error}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ConfigError(
            f"{key}: the weights in {path!r} lack {len(missing)} tensors of {type(model).__name__}, "
            f"{missing[0]!r} for one; they would be random"
        )
    return model.eval()


def sees_images(model_config: Any) -> bool:
    """Whether transformers has a model that is shown images for this config."""
    return type(model_config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or (
        "AutoModelForImageTextToText" in (getattr(model_config, "auto_map", None) or {})
    )


def _seeing(auto_class: Any, path: str, model_config: Any) -> Any:
    """The class for a model with its head, where that is shown images; others as they are."""
    is_text = type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING and not has_processor(path)
    sees = auto_class is AutoModelForCausalLM and sees_images(model_config) and not is_text
    return AutoModelForImageTextToText if sees else auto_class


def vision_parameters(model: Any) -> dict[str, nn.Parameter]:
    """All that makes features of images, tower and projector, by name: what is no part of the language model."""
    language = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    own = {id(parameter) for part in language if part is not None for parameter in part.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in own}


def freeze(model: Any, parts: Sequence[str]) -> Any:
    """Leave parts of a model untrained, as ``model.freeze`` says; returns it.

    Raises:
        ConfigError: it has no such part.
    """
    if "vision" in parts:
        found = vision_parameters(model)
        if not found:
            raise ConfigError(
                f"model.freeze: {type(model).__name__} has no vision tower that could be frozen; leave vision out"
            )
        for parameter in found.values():
            parameter.requires_grad_(False)
    return model


def _load_arguments(config: ModelConfig, device: torch.device | None) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for ``model.quantize``, and for a model without weights."""
    if device is not None and device.type == "meta":
        return {"device_map": {"": device}}
    if config.quantize is None or device is None:
        return {}
    # Multiplication in 8 bits says in every layer that it casts.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    four_bits = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": getattr(torch, compute_dtype(config, device)),
    }
    settings = BitsAndBytesConfig(**(four_bits if config.quantize == "4bit" else {"load_in_8bit": True}))
    return {"quantization_config": settings, "device_map": {"": device}}


def attention_for(model_config: Any, config: ModelConfig) -> str:
    """``model.attn_implementation``, or ``eager`` where transformers would compute another model with ``sdpa``."""
    text = model_config.get_text_config(decoder=True)
    feature = next((name for name in NOT_IN_SDPA if getattr(text, name, None)), None)
    if config.attn_implementation != "sdpa" or feature is None:
        return config.attn_implementation
    logger.warning(
        "model.attn_implementation: sdpa computes %s without its %s; eager attention is used instead (slower; set "
        "model.attn_implementation=eager to silence this)",
        type(model_config).__name__, feature,
    )  # fmt: skip
    return "eager"


def check_lengths(model_config: Any, longest: int, key: str) -> None:
    """Refuse a model that, with rows of up to ``longest`` tokens, computes a row by what it shares a batch with.

    Raises:
        ConfigError: it would count the padding as positions, or one long row would change the others.
    """
    text, name = model_config.get_text_config(decoder=True), type(model_config).__name__
    shorten = "lower data.max_prompt_length and rollout.max_response_length"
    if getattr(text, "attn_temperature_tuning", False) and longest >= text.floor_scale:
        raise ConfigError(
            f"{key}: attn_temperature_tuning of {name} depends on the position in the padded row from token "
            f"{int(text.floor_scale)} on, and rows have up to {longest} tokens; {shorten}, or train another model"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    for factors in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        trained = int(
            factors.get("original_max_position_embeddings") or getattr(text, "max_position_embeddings", None) or longest
        )
        if "dynamic" in str(factors.get("rope_type")) and longest > trained:
            raise ConfigError(
                f"{key}: dynamic RoPE scaling of {name} computes every row of a batch with other frequencies once one "
                f"of them has more than {trained} tokens, and rows have up to {longest} tokens; {shorten}, or "
                "choose another rope_type in config.json, such as yarn or linear"
            )
        # Engines differ too: some take the long factors from the first token on, some when a row gets so long.
        if factors.get("rope_type") == "longrope" and factors["short_factor"] != factors["long_factor"]:
            reaches = int(factors["original_max_position_embeddings"])
            if longest > reaches:
                raise ConfigError(
                    f"{key}: longrope of {name} computes every row of a batch with other factors once one of them has "
                    f"more than {reaches} tokens, and rows have up to {longest} tokens; {shorten}, or use one set of "
                    "factors at all lengths: copy long_factor to short_factor in config.json"
                )


def _switch_off_dropout(model_config: Any) -> None:
    for part in (model_config, *(value for value in vars(model_config).values() if hasattr(value, "model_type"))):
        for name, value in vars(part).items():
            if name.endswith(("dropout", "pdrop", "layerdrop")) and isinstance(value, float):
                setattr(part, name, 0.0)


def vocabulary_of(model: Any) -> int:
    """The number of tokens that a model knows."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def experts_of(text_config: Any) -> int:
    """The number of experts of a layer of a model with this config; 0: it has none."""
    return first_of(text_config, ("num_experts", "num_local_experts", "n_routed_experts"))


def first_of(config: Any, keys: Sequence[str]) -> int:
    """The value of the first of these keys that a model's config has; 0: it has none."""
    return next((int(count) for key in keys if (count := getattr(config, key, None))), 0)


def enable_gradient_checkpointing(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@contextmanager
def training_mode(module: nn.Module, seed: int = 0) -> Iterator[None]:
    """Training mode, which gradient checkpointing needs, and dropout by ``seed`` inside; eval mode afterwards."""
    # Plugins of the local runtime draw from the same generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module.train()
        try:
            yield
        finally:
            module.eval()


@contextmanager
def quiet_progress() -> Iterator[None]:
    """No progress bars of transformers inside: they would tear the live view apart at every checkpoint."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
