"""Options of the training backend ``fsdp2``."""

from dataclasses import dataclass

from agentrl_core.api import option


@dataclass
class Fsdp2Config:
    tensor_parallel: int = option(
        1,
        ge=1,
        help="processes that share every layer: each computes the same tokens with a part of the heads, of the MLP and "
        "of the vocabulary. It must divide the heads",
    )
    expert_parallel: int = option(
        1,
        ge=1,
        help="processes that share the experts: each holds some of them and gets the tokens that chose these. A "
        "multiple of tensor_parallel that divides the experts",
    )
    sequence_parallel: int = option(
        1,
        ge=1,
        help="processes that share every row: each computes a part of its tokens, and in attention of the heads. For "
        "rows that are too long for one device",
    )
    replicas: int = option(
        1,
        ge=1,
        help="copies of the sharded model: weights are gathered within a copy, gradients are added up over all copies. "
        "The number of nodes keeps gathering within a node",
    )
