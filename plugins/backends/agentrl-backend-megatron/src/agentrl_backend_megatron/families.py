"""What Megatron-Core must know of a model of the Hugging Face hub, and which ones it computes as transformers does."""

from dataclasses import dataclass
from typing import Any

from agentrl_core.api.errors import ConfigError

QKV_BIAS = frozenset({"qwen2"})
QK_NORM = frozenset({"qwen3", "qwen3_moe"})
EXPERTS = frozenset({"qwen3_moe"})
FAMILIES = QKV_BIAS | QK_NORM | {"llama", "mistral"}
"""Values of ``model_type``."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The only parameters of this scaling that Megatron-Core knows."""


@dataclass(frozen=True)
class Family:
    """A model as its config.json describes it.

    Args:
        layers, hidden, inner, heads, groups, head_size, vocabulary: sizes; ``groups`` of queries share keys and values.
        inner_expert: size of one expert's inner layer.
        experts, chosen: experts of a layer, and those that a token goes to; 0 of a dense model.
        renormalizes: weights of the chosen experts add up to 1.
        dense_layers: without experts.
        rope_scaling: factor of Llama 3's scaling; None: there is none.
    """

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    groups: int
    head_size: int
    vocabulary: int
    epsilon: float
    rope_base: float
    rope_scaling: float | None
    is_tied: bool
    qkv_bias: bool
    qk_norm: bool
    inner_expert: int = 0
    experts: int = 0
    chosen: int = 0
    renormalizes: bool = True
    dense_layers: frozenset[int] = frozenset()

    @classmethod
    def of(cls, config: Any, key: str) -> "Family":
        """Args:
            config: of transformers.
            key: the config key that the model comes from.

        Raises:
            ConfigError: Megatron-Core would compute another model.
        """
        if config.model_type not in FAMILIES:
            raise ConfigError(
                f"{key}: the training backend megatron has no names for models of the type {config.model_type!r}; it "
                f"knows {', '.join(sorted(FAMILIES))}. Train this one with trainer.backend.name=fsdp2"
            )
        rope = dict(getattr(config, "rope_parameters", None) or {})
        for problem in _problems(config, rope):
            raise ConfigError(
                f"{key}: the training backend megatron cannot compute {config.model_type} {problem}; train this model "
                "with trainer.backend.name=fsdp2"
            )
        has_experts = config.model_type in EXPERTS
        return cls(
            config.model_type, config.num_hidden_layers, config.hidden_size, config.intermediate_size,
            config.num_attention_heads, config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            config.vocab_size, config.rms_norm_eps, float(rope.get("rope_theta", 10000.0)),
            float(rope["factor"]) if rope.get("rope_type") == "llama3" else None, bool(config.tie_word_embeddings),
            config.model_type in QKV_BIAS, config.model_type in QK_NORM,
            **({
                "inner_expert": config.moe_intermediate_size, "experts": config.num_experts,
                "chosen": config.num_experts_per_tok, "renormalizes": bool(config.norm_topk_prob),
                "dense_layers": frozenset(
                    layer for layer in range(config.num_hidden_layers)
                    if layer in config.mlp_only_layers or (layer + 1) % config.decoder_sparse_step
                ),
            } if has_experts else {}),
        )  # fmt: skip


def _problems(config: Any, rope: dict[str, Any]) -> Any:
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        for name, known in _LLAMA3.items():
            if rope.get(name) != known:
                yield f"with rope_parameters.{name}={rope.get(name)} (Megatron-Core computes {known:g})"
    elif kind != "default":
        yield f"with rope_type={kind!r}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield "with a partial rotary embedding"
    if config.hidden_act != "silu":
        yield f"with hidden_act={config.hidden_act!r}"
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            yield f"with {name}"
    windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if windows or (getattr(config, "sliding_window", None) and not hasattr(config, "layer_types")):
        yield f"with {', '.join(sorted(windows)) or 'a sliding window'}"
