"""The interfaces of advantage estimators and policy losses: pure functions over padded tensors.

Shapes: B rows, R response tokens, both padded; ``response_mask`` is 1 where the policy sampled. Nothing under mask 0
may change a result. An estimator is called once a step, in the trainer's process, with float32 tensors on the CPU and
without gradients; a loss for every micro batch, in each actor worker's process and on its device, with gradients
through ``log_probs`` only. Neither is a coroutine, nor called from two threads concurrently. An exception ends the
run.

    class Reinforce(PolicyLoss):
        def __call__(self, batch):
            losses_BR = -batch.advantages * batch.log_probs
            return PolicyLossOutput(losses_BR, {})
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class AdvantageInput:
    """A batch as an estimator sees it.

    Args:
        token_rewards: [B, R] float32; the outcome reward on the last token with mask 1, zero elsewhere.
        response_mask: [B, R] bool.
        group_ids: [B] object array; rows of one prompt share a value.
        trajectory_ids: [B] object array; rows of one trajectory share a value, and have one vote in their group.
        values: [B, R] float32 of the critic, or None.
    """

    token_rewards: "torch.Tensor"
    response_mask: "torch.Tensor"
    group_ids: "np.ndarray[Any, Any]"
    trajectory_ids: "np.ndarray[Any, Any]"
    values: "torch.Tensor | None" = None


@dataclass(frozen=True)
class AdvantageOutput:
    """``advantages`` and ``returns``, both [B, R] float32 and zero under mask 0; ``metrics`` are logged."""

    advantages: "torch.Tensor"
    returns: "torch.Tensor"
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AlgorithmContext:
    """What estimators and losses get when they are built.

    Args:
        group_size: ``rollout.n``.
    """

    group_size: int


class AdvantageEstimator(ABC):
    """Turns rewards into advantages."""

    def __init__(self, config: Any, context: AlgorithmContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        """Advantages of a whole batch."""


@dataclass(frozen=True)
class PolicyLossInput:
    """A micro-batch as a policy loss sees it; all [b, R], float32 but for the bool mask.

    ``log_probs`` carries the gradient; ``old_log_probs`` are those of the policy before this step's updates.
    """

    log_probs: "torch.Tensor"
    old_log_probs: "torch.Tensor"
    advantages: "torch.Tensor"
    response_mask: "torch.Tensor"


@dataclass(frozen=True)
class PolicyLossOutput:
    """``losses`` [b, R] per token, not yet aggregated.

    ``metrics`` maps names to [b, R] float tensors; the core logs their mean over mask 1 under ``actor/``.
    """

    losses: "torch.Tensor"
    metrics: "dict[str, torch.Tensor]" = field(default_factory=dict)


class PolicyLoss(ABC):
    """Per-token policy loss. The core masks, aggregates, adds KL and entropy, and normalises micro-batches."""

    def __init__(self, config: Any, context: AlgorithmContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    def __call__(self, batch: PolicyLossInput) -> PolicyLossOutput:
        """Losses of one micro-batch."""
