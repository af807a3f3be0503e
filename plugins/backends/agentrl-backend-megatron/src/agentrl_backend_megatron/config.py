"""Options of the Megatron training backend."""

from dataclasses import dataclass
from typing import Any, Literal

from agentrl_core.api.config import option


@dataclass
class MegatronConfig:
    """``trainer.backend.config`` where ``trainer.backend.name`` is ``megatron``."""

    tensor_parallel: int = option(1, ge=1, unit="ranks", help="number of ranks that each layer is split across")
    pipeline_parallel: int = option(1, ge=1, unit="ranks", help="number of ranks that the layers are spread over")
    expert_parallel: int = option(
        1, ge=1, unit="ranks", help="number of ranks that the experts of a layer are spread over; each expert is whole"
    )
    context_parallel: int = option(
        1,
        ge=1,
        unit="ranks",
        help="number of ranks that the tokens of each row are split over; needs the layers of Transformer Engine",
    )
    sequence_parallel: bool = option(
        True, help="split what tensor parallelism leaves whole, such as norms, over the tokens; nothing without it"
    )
    implementation: Literal["auto", "transformer_engine", "local"] = option(
        "auto",
        help="layers of Transformer Engine, or Megatron-Core's own in plain torch, for CPUs and tests; auto: "
        "transformer_engine where it is installed",
    )
    reduce_gradients_in_float32: bool = option(True, help="add up gradients over ranks in float32")
    transformer_config: dict[str, Any] = option(
        default_factory=dict,
        help="more arguments of megatron.core.transformer.TransformerConfig, e.g. {recompute_granularity: selective}",
    )
