"""What the algorithm computes between rollout and update: corrections, KL in the reward, advantages.

Shapes: B rows, R response tokens.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl_core.algorithms.kl import kl_estimate
from agentrl_core.algorithms.outcome import advantage_input, outcomes_only
from agentrl_core.api import AdvantageOutput, AlgorithmContext, ConfigError, CorrectionInput
from agentrl_core.api.agent_loop import Status
from agentrl_core.config import ResolvedConfig
from agentrl_core.plugins.boundary import hang_reported
from agentrl_core.protocol import DataProto
from agentrl_core.protocol.ragged import RaggedColumn, converted, like, on_values, ragged
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.workers.actor import CORRECTION, reads_advantages

logger = logging.getLogger(__name__)
KL_HORIZON = 10_000
"""Trajectories over which an adaptive coefficient may move by its own size, times the clipped error."""
MOST_KL_ERROR = 0.2
PART = 256
"""Rows that an estimator with separate groups gets at once, if groups are no larger."""
TOKEN_COLUMNS = ("prompts", "responses", "input_ids", "attention_mask", "position_ids")
"""What no estimator sees."""


class Algorithm:
    """Estimator and correction of a run, and the coefficients that it adapts.

    Args:
        config: of the run.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self._settings = config.algorithm
        context = AlgorithmContext(group_size=config.rollout.n)
        self._estimator: Any = self._settings.advantage.build(context)
        correction = self._settings.correction
        self._correction: Any = None if correction is None else correction.build(context)
        with hang_reported(f"policy loss {self._settings.loss.name!r}"):
            self.loss_reads_advantages = reads_advantages(self._settings.loss.build(context))
        self.kl_coef = self._settings.kl_coef
        self._entropy: float | None = None

    @property
    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"kl_coef": self.kl_coef} | ({} if self._entropy is None else {"entropy": self._entropy})

    @state.setter
    def state(self, state: dict[str, float]) -> None:
        self.kl_coef = state.get("kl_coef", self.kl_coef)
        self._entropy = state.get("entropy")

    @property
    def entropy_coef(self) -> float:
        """Weight of the entropy bonus in the next update: 0 while the last entropy was above its target."""
        target = self._settings.entropy_target
        pauses = target is not None and self._entropy is not None and self._entropy > target
        return 0.0 if pauses else self._settings.entropy_coef

    def note(self, metrics: dict[str, float]) -> None:
        """Remember the entropy that an update measured."""
        self._entropy = metrics.get("actor/entropy", self._entropy)

    def correct(self, batch: DataProto) -> dict[str, float]:
        """Add the weight of each token's loss to the batch; returns metrics."""
        if self._correction is None:
            return {}
        if "rollout_log_probs" not in batch.batch.keys():
            raise ConfigError(
                "algorithm.correction needs the engine's log-probs, and some trajectories of this step have none: "
                "an agent loop made rows without response_logprobs"
            )
        # Columns of its own, as of an estimator.
        columns = batch[:].batch
        seen = CorrectionInput(
            columns["old_log_probs"],
            columns["rollout_log_probs"],
            converted(columns["response_mask"], torch.bool),
            converted(columns["policy_versions"], torch.int64),
        )
        with hang_reported("the rollout correction"):
            output = self._correction(seen)
        batch.batch[CORRECTION] = like(batch.batch["response_mask"], output.weights)
        return {f"correction/{name}": value for name, value in output.metrics.items()}

    def penalise(self, batch: DataProto) -> dict[str, float]:
        """Subtract the KL penalty from the rewards, if ``algorithm.kl_placement`` is ``reward``; returns metrics.

        reward_t -= kl_coef * (log pi_old - log pi_ref), and the score of a trajectory by the sum over its tokens.
        ``kl_target`` moves the coefficient by the proportional controller of "Fine-Tuning Language Models from Human
        Preferences", arXiv 1909.08593, section 2.2.
        """
        settings = self._settings
        if settings.kl_placement != "reward" or not settings.kl_coef:
            return {}
        mask_BR, old_BR, ref_BR = (batch.batch[name] for name in ("response_mask", "old_log_probs", "ref_log_prob"))

        def kl_of(mask: Tensor, old: Tensor, ref: Tensor) -> Tensor:
            return torch.where(mask.bool(), kl_estimate(old, ref, "k1"), 0.0)

        kl_BR = on_values(kl_of, mask_BR, old_BR, ref_BR)
        penalty_BR = on_values(lambda kl: self.kl_coef * kl, kl_BR)
        batch.batch["rm_scores"] = on_values(torch.sub, batch.batch["rm_scores"], penalty_BR)
        batch.batch["scores"] = batch.batch["scores"] - _of_trajectories(batch, penalty_BR.sum(-1))
        mean = float(kl_BR.sum() / mask_BR.sum().clamp(min=1))
        metrics = {"reward/kl": mean, "reward/kl_coef": self.kl_coef}
        if settings.kl_target is not None:
            error = min(max(mean / settings.kl_target - 1, -MOST_KL_ERROR), MOST_KL_ERROR)
            self.kl_coef *= 1 + error * len(set(batch.non_tensor_batch["trajectory_id"])) / KL_HORIZON
        return metrics

    def estimate(self, batch: DataProto) -> dict[str, float]:
        """Add ``advantages`` and ``returns`` [B, R] to the batch; returns metrics."""
        mask_BR = batch.batch["response_mask"]
        if (mask := ragged(mask_BR)) is not None and self._settings.advantage.has("separate_groups"):
            columns, metrics = self._by_groups(batch, mask), dict[str, float]()
        else:
            output = self._estimated(batch)
            columns = {"advantages": like(mask_BR, output.advantages), "returns": like(mask_BR, output.returns)}
            metrics = {f"advantage/{name}": value for name, value in output.metrics.items()}
        for name, column_BR in columns.items():
            batch.batch[name] = column_BR
        return metrics

    def _by_groups(self, batch: DataProto, mask: RaggedColumn) -> dict[str, Tensor]:
        """``advantages`` and ``returns`` of an estimator that gets some groups at a time."""
        seen = batch.select([name for name in batch.batch.keys() if name not in TOKEN_COLUMNS])
        found: dict[str, Any] = {}
        slices = mask.rows.slices
        for rows in whole_groups(batch.non_tensor_batch["uid"], mask.rows.lengths_B):
            part, width = seen.select_idxs(rows), int(mask.rows.lengths_B[rows].max())
            for name, column_bR in part.batch.items():
                if (column := ragged(column_bR)) is not None:
                    part.batch[name] = column.part(0, width)
            output = self._estimated(part)
            for name in ("advantages", "returns"):
                column_bR = getattr(output, name).numpy()
                values = found.setdefault(name, np.zeros(mask.rows.size, dtype=column_bR.dtype))
                for row, of_row_R in zip(rows.tolist(), column_bR, strict=True):
                    place = slices[row]
                    values[place] = of_row_R[: place.stop - place.start]
        return {name: mask.like(values) for name, values in found.items()}

    def _estimated(self, batch: DataProto) -> AdvantageOutput:
        advantage = self._settings.advantage
        # Columns of its own: one that it looks at through a view would stay padded.
        seen = advantage_input(batch[:])
        if advantage.has("components") and not seen.components:
            raise ConfigError(
                f"advantage estimator '{advantage.name}' needs the parts of the score, and the reward manager names "
                "none: reward.manager must return RewardResult.components, as 'naive' does for each function"
            )
        if advantage.plugin.spec.api_version < 2:
            seen = outcomes_only(seen)
        with hang_reported(f"advantage estimator {advantage.name!r}"):
            output: AdvantageOutput = self._estimator(seen)
        return output


class Algorithms:
    """The algorithm of each policy that is trained.

    Args:
        config: of the run.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self.by_policy = {name: Algorithm(own) for name, own in config.trained.items()}
        self.loss_reads_advantages = any(each.loss_reads_advantages for each in self.by_policy.values())
        self._prefixes = {name: f"{name}/" if config.policies else "" for name in self.by_policy}

    @property
    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        pairs = ((self._prefixes[name], each.state) for name, each in self.by_policy.items())
        return {prefix + key: value for prefix, state in pairs for key, value in state.items()}

    @state.setter
    def state(self, state: dict[str, float]) -> None:
        for name, each in self.by_policy.items():
            prefix = self._prefixes[name]
            each.state = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}


def whole_groups(uids: Iterable[object], lengths_B: Any) -> list[Any]:
    """The rows of all groups, in parts of about :data:`PART` rows, none of which cuts a group.

    Groups with rows of similar length come together, and rows of a part are in their order.
    """
    groups: dict[object, list[int]] = defaultdict(list)
    for row, uid in enumerate(uids):
        groups[uid].append(row)
    parts: list[list[int]] = []
    for rows in sorted(groups.values(), key=lambda rows: int(lengths_B[rows].max())):
        if not parts or len(parts[-1]) + len(rows) > PART:
            parts.append([])
        parts[-1] += rows
    return [np.sort(part) for part in parts]


def _of_trajectories(batch: DataProto, values_B: Tensor) -> Tensor:
    """The sum [B] over all rows of each row's trajectory."""
    numbers: dict[object, int] = {}
    ids = [numbers.setdefault(each, len(numbers)) for each in batch.non_tensor_batch["trajectory_id"]]
    index_B = torch.tensor(ids)
    return values_B.new_zeros(len(numbers)).index_add_(0, index_B, values_B)[index_B]


def add_baselines(results: Sequence[TrajectoryResult], greedy: Sequence[TrajectoryResult]) -> None:
    """Give each trajectory the score of the greedy answer to its prompt; where that has none, its group's mean."""
    baselines = {result.row["uid"]: result.reward.score for result in greedy if result.reward is not None}
    groups: dict[str, list[float]] = defaultdict(list)
    for result in results:
        if result.status is Status.TRAINED and result.reward is not None:
            groups[result.row["uid"]].append(result.reward.score)
    missing = groups.keys() - baselines.keys()
    if missing:
        logger.warning("%d of %d greedy answers have no score: the mean of the samples takes its place",
                       len(missing), len(groups))  # fmt: skip
    for result in results:
        group = groups[result.row["uid"]]
        result.baseline = baselines.get(result.row["uid"], sum(group) / max(len(group), 1))
