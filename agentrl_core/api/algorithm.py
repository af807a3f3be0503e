"""The interfaces of advantage estimators, policy losses and rollout corrections: pure functions over padded tensors.

Shapes: B rows, R response tokens, T turns of the longest trajectory, all padded; ``response_mask`` is 1 where the
policy sampled. Nothing under mask 0 may change a result. An estimator and a correction are called once a step, in the
trainer's process, with float32 tensors on the CPU and without gradients; a loss for every micro-batch, in each actor
worker's process and on its device, with gradients through ``log_probs`` and, where it declares them, ``entropies``.
None is a coroutine, nor called from two threads concurrently. An exception ends the run.

What costs something is computed only for plugins whose spec declares the capability of the same name (see ``KINDS``);
for all others the field is None.

    class Reinforce(PolicyLoss):
        def __call__(self, batch):
            losses_BR = -batch.advantages * batch.log_probs
            return PolicyLossOutput(losses_BR, {})
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class AdvantageInput:
    """A batch as an estimator sees it.

    A trajectory has several rows where its chat template rewrites history or where it branches. Each row of it carries
    the outcome, and each turn is sampled in one row.

    ``outcomes``, ``scores``, ``turn_ids`` and ``turn_rewards`` are always there: left out together, they are those of a
    batch in which nothing but outcomes is rewarded.

    Args:
        token_rewards: [B, R] float32; every reward where it was earned: a turn's on the last token of the turn, the
            outcome on the row's last token with mask 1, rewards of single tokens on these, zero elsewhere.
        response_mask: [B, R] bool.
        group_ids: [B] object array; rows of one prompt share a value.
        trajectory_ids: [B] object array; rows of one trajectory share a value, and have one vote in their group.
        data_sources: [B] object array; ``data_source`` of the row's prompt, "" where it has none. None in batches that
            were not made by a trainer.
        values: [B, R] float32 of the critic, or None. Capability ``values``.
        outcomes: [B] float32; what the row's trajectory earned as a whole, without its turns and single tokens.
        scores: [B] float32; everything that the row's trajectory earned.
        turn_ids: [B, R] int64; number of the trajectory's turn that sampled the token, from 0, and -1 under mask 0.
        turn_rewards: [B, T] float32; what each turn of the row's trajectory earned. 0 where there is no such turn.
        components: by name, [B] float32: the parts of the score that the reward manager names, not weighted; NaN for a
            trajectory without this part. Capability ``components``: at least one must be there.
        old_log_probs, rollout_log_probs, ref_log_probs: [B, R] float32 of the policy before this step's updates, of
            the engine, and of the reference. The second is None if the engine has none. Capabilities
            ``rollout_log_probs``, ``ref_log_probs``.
        entropies: [B, R] float32 in nats, of the distributions behind ``old_log_probs``. Capability ``entropies``.
        teacher_log_probs: [B, R] float32 of the teacher. Capability ``teacher_log_probs``.
        correction_weights: [B, R] float32; factors of the tokens' losses. None without ``algorithm.correction``.
        baselines: [B] float32; the score of a greedy answer to the row's prompt. Capability ``greedy_baseline``.
    """

    token_rewards: "torch.Tensor"
    response_mask: "torch.Tensor"
    group_ids: "np.ndarray[Any, Any]"
    trajectory_ids: "np.ndarray[Any, Any]"
    values: "torch.Tensor | None" = None
    outcomes: "torch.Tensor" = field(default=None, kw_only=True)  # type: ignore[assignment]
    scores: "torch.Tensor" = field(default=None, kw_only=True)  # type: ignore[assignment]
    turn_ids: "torch.Tensor" = field(default=None, kw_only=True)  # type: ignore[assignment]
    turn_rewards: "torch.Tensor" = field(default=None, kw_only=True)  # type: ignore[assignment]
    components: "Mapping[str, torch.Tensor]" = field(default_factory=dict, kw_only=True)
    old_log_probs: "torch.Tensor | None" = field(default=None, kw_only=True)
    rollout_log_probs: "torch.Tensor | None" = field(default=None, kw_only=True)
    ref_log_probs: "torch.Tensor | None" = field(default=None, kw_only=True)
    entropies: "torch.Tensor | None" = field(default=None, kw_only=True)
    teacher_log_probs: "torch.Tensor | None" = field(default=None, kw_only=True)
    correction_weights: "torch.Tensor | None" = field(default=None, kw_only=True)
    baselines: "torch.Tensor | None" = field(default=None, kw_only=True)
    data_sources: "np.ndarray[Any, Any] | None" = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        scores: Any = self.scores
        if scores is None:
            for name, value in _outcomes_only(self).items():
                object.__setattr__(self, name, value)


def _outcomes_only(batch: AdvantageInput) -> "dict[str, torch.Tensor]":
    """What the batch holds if all its rewards are outcomes; a turn begins where the mask rises."""
    import torch

    mask_BR = batch.response_mask.bool()
    outcomes_B = torch.where(mask_BR, batch.token_rewards, 0.0).sum(-1)
    before_BR = torch.nn.functional.pad(mask_BR, (1, 0))[:, :-1]
    turns_BR = torch.where(mask_BR, (mask_BR & ~before_BR).cumsum(-1) - 1, -1)
    rows: dict[object, list[int]] = {}
    for row, key in enumerate(zip(batch.group_ids, batch.trajectory_ids, strict=True)):
        if mask_BR[row].any():
            rows.setdefault(key, []).append(row)
    scores_B = torch.zeros_like(outcomes_B)
    for members in rows.values():
        scores_B[members] = outcomes_B[members].mean()
    turns = int(turns_BR.max()) + 1 if turns_BR.numel() else 0
    return {
        "outcomes": outcomes_B,
        "scores": scores_B,
        "turn_ids": turns_BR,
        "turn_rewards": outcomes_B.new_zeros(len(outcomes_B), turns),
    }


@dataclass(frozen=True)
class AdvantageOutput:
    """What an estimator returns.

    Args:
        advantages: [B, R] float32, zero under mask 0.
        returns: [B, R] float32, zero under mask 0; what a critic learns.
        metrics: numbers by name; ``bias`` is logged as ``advantage/bias``.
    """

    advantages: "torch.Tensor"
    returns: "torch.Tensor"
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AlgorithmContext:
    """What estimators, losses and corrections get when they are built.

    Args:
        group_size: ``rollout.n``.
    """

    group_size: int


class AdvantageEstimator(ABC):
    """Turns rewards into advantages.

    A row without sampled tokens has no vote: it must not change a mean, a baseline or a group's size. It is in the
    batch where the engine had no room to answer, and where mask 1 is nowhere.

    One that declares ``separate_groups`` is called for some groups of the step at a time, all rows of each, padded to
    the longest of these rows. It must give every group what it gives it among all others, bit for bit, and no metrics.
    """

    def __init__(self, config: Any, context: AlgorithmContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        """Advantages of a whole batch."""


@dataclass(frozen=True)
class PolicyLossInput:
    """A micro-batch, or for :meth:`PolicyLoss.prepare` a mini-batch, as a policy loss sees it.

    All tensors are [b, R] and float32 unless stated. Whole rows: a micro-batch never cuts one.

    Args:
        log_probs: carries the gradient. In ``prepare`` without gradient, and NaN unless the loss declares the
            capability ``mini_batch_log_probs``, which costs one more forward pass.
        old_log_probs: of the policy before this step's updates: the proximal policy.
        advantages: zero under mask 0.
        response_mask: bool.
        rollout_log_probs: of the engine, which sampled the tokens. Capability ``rollout_log_probs``.
        ref_log_probs: of the reference. Capability ``ref_log_probs``.
        entropies: in nats, with gradient. Capability ``entropies``; None in ``prepare``.
        policy_versions: int64; number of the weights that sampled the token, -1 under mask 0.
        turn_ids: int64; as in :class:`AdvantageInput`.
        group_ids: [b] int64; rows of one prompt share a number.
        row_ids: [b] int64; the rows' numbers in the step's batch.
        columns: what :meth:`PolicyLoss.prepare` returned for these rows.
    """

    log_probs: "torch.Tensor"
    old_log_probs: "torch.Tensor"
    advantages: "torch.Tensor"
    response_mask: "torch.Tensor"
    rollout_log_probs: "torch.Tensor | None" = field(default=None, kw_only=True)
    ref_log_probs: "torch.Tensor | None" = field(default=None, kw_only=True)
    entropies: "torch.Tensor | None" = field(default=None, kw_only=True)
    policy_versions: "torch.Tensor | None" = field(default=None, kw_only=True)
    turn_ids: "torch.Tensor | None" = field(default=None, kw_only=True)
    group_ids: "torch.Tensor | None" = field(default=None, kw_only=True)
    row_ids: "torch.Tensor | None" = field(default=None, kw_only=True)
    columns: "Mapping[str, torch.Tensor]" = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class PolicyLossOutput:
    """``losses`` [b, R] per token, not yet aggregated.

    ``metrics`` maps names to [b, R] float tensors; the core logs their mean over mask 1 under ``actor/``.
    """

    losses: "torch.Tensor"
    metrics: "dict[str, torch.Tensor]" = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedLoss:
    """What a loss found out about a whole mini-batch.

    Args:
        columns: by name, [M, R]; the micro-batches see their rows of them as ``PolicyLossInput.columns``.
        metrics: numbers; the core logs their mean over the mini-batches under ``actor/``.
    """

    columns: "Mapping[str, torch.Tensor]" = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class PolicyLoss(ABC):
    """Per-token policy loss. The core masks, aggregates, adds KL and entropy, and normalises micro-batches.

    The result must not depend on how a mini-batch is cut into micro-batches or over ranks: what needs other rows
    (quantiles, normalised weights) is computed in :meth:`prepare`.
    """

    def __init__(self, config: Any, context: AlgorithmContext) -> None:
        self.config = config
        self.context = context

    def prepare(self, batch: PolicyLossInput) -> PreparedLoss:
        """Look at a whole mini-batch [M, R] before its micro-batches; on every rank, with the same rows."""
        return PreparedLoss()

    @abstractmethod
    def __call__(self, batch: PolicyLossInput) -> PolicyLossOutput:
        """Losses of one micro-batch."""


@dataclass(frozen=True)
class CorrectionInput:
    """A batch as a rollout correction sees it; all [B, R].

    Args:
        old_log_probs: float32, of the policy before this step's updates, computed by the trainer.
        rollout_log_probs: float32, of the engine, which sampled the tokens.
        response_mask: bool.
        policy_versions: int64; number of the weights that sampled the token, -1 under mask 0.
    """

    old_log_probs: "torch.Tensor"
    rollout_log_probs: "torch.Tensor"
    response_mask: "torch.Tensor"
    policy_versions: "torch.Tensor"


@dataclass(frozen=True)
class CorrectionOutput:
    """``weights`` [B, R] float32 multiply the policy loss of each token, 0 rejects it; denominators stay as they are.

    ``metrics`` are logged under ``correction/``.
    """

    weights: "torch.Tensor"
    metrics: dict[str, float] = field(default_factory=dict)


class RolloutCorrection(ABC):
    """Corrects for the difference between the policy that sampled and the one that is updated.

    ``algorithm.correction`` chooses one; it needs an engine with the capability ``logprobs``.
    """

    def __init__(self, config: Any, context: AlgorithmContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    def __call__(self, batch: CorrectionInput) -> CorrectionOutput:
        """Weights of a whole batch."""
