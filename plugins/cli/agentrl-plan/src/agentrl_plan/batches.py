"""Rows for a simulation: the largest micro-batches that a configuration allows.

Shapes: B rows, P prompt and R response tokens.
"""

from dataclasses import dataclass

import torch

from agentrl_core.config import ResolvedConfig
from agentrl_core.protocol import DataProto
from agentrl_core.workers.micro_batching import MOST_SHARING

MICRO_BATCHES = 2
"""For each rank: the second one finds the gradients of the first."""


@dataclass(frozen=True)
class Shape:
    """A micro-batch.

    Args:
        rows: their number.
        prompt: tokens of each prompt.
        response: tokens of each response, all sampled.
        shared: the rows have one prompt.
    """

    rows: int
    prompt: int
    response: int
    shared: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * (self.prompt + self.response)


def full_micro_batch(config: ResolvedConfig, max_tokens: int) -> Shape:
    """As many tokens as fit, as many of them sampled as possible: what takes the most memory."""
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    if longest >= max_tokens:
        return Shape(1, config.data.max_prompt_length, config.rollout.max_response_length)
    rows = -(-max_tokens // longest)
    length = max(max_tokens // rows, 2)
    response = min(config.rollout.max_response_length, length - 1)
    return Shape(rows, length - response, response)


def samples_of_a_prompt(config: ResolvedConfig, max_tokens: int) -> Shape | None:
    """Samples of one prompt at their full length; None where a micro-batch has room for one."""
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    rows = min(config.rollout.n, (max_tokens - prompt) // response, MOST_SHARING * max_tokens // (prompt + response))
    return Shape(rows, prompt, response, shared=True) if rows > 1 else None


def batch_of(shape: Shape, ranks: int) -> DataProto:
    """A batch with :data:`MICRO_BATCHES` micro-batches of this shape for each rank."""
    count = shape.rows * MICRO_BATCHES * ranks
    length = shape.prompt + shape.response
    responses_B1 = torch.arange(count)[:, None]
    prompts_B1 = responses_B1 // (shape.rows if shape.shared else 1)
    ids_BL = torch.ones(count, length, dtype=torch.long)
    # They differ in as many digits as their number has; the models' vocabularies have more than seven tokens.
    for digit in range(12):
        ids_BL[:, : shape.prompt][:, digit : digit + 1] = 1 + prompts_B1 // 6**digit % 6
        ids_BL[:, shape.prompt :][:, digit : digit + 1] = 1 + responses_B1 // 6**digit % 6
    ones_BR = torch.ones(count, shape.response)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids_BL,
            "attention_mask": torch.ones_like(ids_BL),
            "position_ids": torch.arange(length).repeat(count, 1),
            "prompts": ids_BL[:, : shape.prompt],
            "responses": ids_BL[:, shape.prompt :],
            "response_mask": ones_BR.long(),
            "rollout_log_probs": -ones_BR,
            "old_log_probs": -ones_BR,
            "ref_log_prob": -ones_BR,
            "advantages": ones_BR,
            "values": ones_BR,
            "returns": ones_BR,
            "correction_weights": ones_BR,
        },
        meta_info={"temperature": 1.0, "seed": 0, "calculate_entropy": True},
    )
