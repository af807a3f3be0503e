import dataclasses

import numpy as np
import torch

from agentrl_algorithms.gae import GAE
from agentrl_algorithms.plugin import GAE as GAE_SPEC
from agentrl_core.api import (
    AdvantageEstimator,
    AdvantageInput,
    AdvantageOutput,
    CorrectionOutput,
    PolicyLoss,
    PolicyLossOutput,
    RolloutCorrection,
)
from agentrl_testing.contracts import (
    AdvantageEstimatorCase,
    AdvantageEstimatorContract,
    PolicyLossCase,
    PolicyLossContract,
    RolloutCorrectionCase,
    RolloutCorrectionContract,
)
from agentrl_testing.contracts.advantage_estimator import example


def spread(batch, scores_B):
    advantages = torch.where(batch.response_mask, scores_B[:, None], 0.0).float()
    return AdvantageOutput(advantages, advantages)


def scores(batch):
    return torch.where(batch.response_mask, batch.token_rewards, 0.0).sum(-1)


class Plain(AdvantageEstimator):
    """The score itself; right but for what a subclass breaks."""

    def __call__(self, batch):
        return spread(batch, scores(batch))


class Doubles(Plain):
    def __call__(self, batch):
        output = super().__call__(batch)
        return AdvantageOutput(output.advantages.double(), output.returns)


class Unmasked(Plain):
    def __call__(self, batch):
        values = scores(batch)[:, None].expand_as(batch.token_rewards).contiguous()
        return AdvantageOutput(values, values)


class ReadsMasked(Plain):
    def __call__(self, batch):
        return spread(batch, batch.token_rewards.sum(-1))


class Cumulative(Plain):
    def __call__(self, batch):
        return spread(batch, scores(batch).cumsum(0))


class CountsEmpty(Plain):
    def __call__(self, batch):
        return spread(batch, scores(batch) - scores(batch).mean())


class InPlace(Plain):
    def __call__(self, batch):
        batch.token_rewards.mul_(0.5)
        return super().__call__(batch)


class Divides(Plain):
    def __call__(self, batch):
        values = scores(batch)
        return spread(batch, (values - values.mean()) / values.std())


class WholeBatch(Plain):
    """Compares all prompts with each other."""

    def __call__(self, batch):
        values, usable = scores(batch), batch.response_mask.any(-1)
        return spread(batch, values - values[usable].mean())


class Measures(Plain):
    """Returns metrics, of which parts of a step have no common value."""

    def __call__(self, batch):
        return dataclasses.replace(super().__call__(batch), metrics={"mean": 0.5})


class RowsVote(Plain):
    def __call__(self, batch):
        values, usable = scores(batch), batch.response_mask.any(-1)
        baseline = torch.zeros_like(values)
        for group in set(batch.group_ids):
            rows = torch.as_tensor(batch.group_ids == group) & usable
            baseline[torch.as_tensor(batch.group_ids == group)] = values[rows].mean()
        return spread(batch, values - baseline)


class NeedsValues(Plain):
    def __call__(self, batch):
        return spread(batch, scores(batch) - batch.values.mean(-1))


def test_every_check_catches_a_broken_estimator(spec, catches) -> None:
    def case(cls, *capabilities, **fields):
        return AdvantageEstimatorCase(spec("advantage_estimator", cls, *capabilities), **fields)

    batch = example()
    wrong = [(batch, torch.full(batch.token_rewards.shape, 7.0))]
    catches(
        AdvantageEstimatorContract,
        {
            "test_output_has_the_shape_of_the_batch": [case(Doubles), case(Unmasked)],
            "test_separate_groups_need_nothing_of_each_other": [
                case(WholeBatch, "separate_groups"),
                case(Measures, "separate_groups"),
            ],
            "test_what_is_masked_has_no_influence": [case(ReadsMasked)],
            "test_rows_may_come_in_any_order": [case(Cumulative)],
            "test_an_empty_response_disturbs_nobody": [case(CountsEmpty)],
            "test_batch_is_left_alone": [case(InPlace)],
            "test_known_values": [case(Plain, known=wrong)],
            "test_all_rewards_equal_is_finite": [case(Divides)],
            "test_groups_are_apart": [case(WholeBatch, "groups")],
            "test_a_trajectory_has_one_vote": [case(RowsVote, "groups")],
            "test_values_are_used": [case(Plain, "values")],
            "test_without_values_it_does_not_ask_for_them": [case(NeedsValues)],
        },
    )


def test_a_right_estimator_with_masked_values_of_one_hundred_passes() -> None:
    assert GAE_SPEC.factory.endswith(GAE.__name__)
    AdvantageEstimatorContract().test_what_is_masked_has_no_influence(AdvantageEstimatorCase(GAE_SPEC))


class Reinforce(PolicyLoss):
    def __call__(self, batch):
        return PolicyLossOutput(-batch.advantages * batch.log_probs)


class Aggregated(Reinforce):
    def __call__(self, batch):
        return PolicyLossOutput(super().__call__(batch).losses.mean())


class Explodes(Reinforce):
    def __call__(self, batch):
        ratio = (8 * (batch.log_probs - batch.old_log_probs)).exp()
        return PolicyLossOutput(-batch.advantages * ratio)


class Detached(Reinforce):
    def __call__(self, batch):
        return PolicyLossOutput(-batch.advantages * batch.log_probs.detach() + 0.0 * batch.log_probs.sum().detach())


class Centred(Reinforce):
    """Takes the mean over everything, masked or not."""

    def __call__(self, batch):
        return PolicyLossOutput(-(batch.advantages - batch.advantages.mean()) * batch.log_probs)


class SumsUp(Reinforce):
    def __call__(self, batch):
        return PolicyLossOutput((-batch.advantages * batch.log_probs).cumsum(0))


class NormalisesByMicroBatch(Reinforce):
    def __call__(self, batch):
        mask = batch.response_mask
        scale = (batch.advantages * mask).abs().sum() / mask.sum()
        return PolicyLossOutput(-batch.advantages / scale * batch.log_probs)


class WrongSign(Reinforce):
    def __call__(self, batch):
        return PolicyLossOutput(batch.advantages * batch.log_probs)


class WritesAdvantages(Reinforce):
    def __call__(self, batch):
        batch.advantages.neg_()
        return super().__call__(batch)


def test_every_check_catches_a_broken_loss(spec, catches) -> None:
    from agentrl_testing.contracts.policy_loss import example as micro_batch

    def case(cls, **fields):
        return PolicyLossCase(spec("policy_loss", cls), **fields)

    batch = micro_batch()
    catches(
        PolicyLossContract,
        {
            "test_losses_are_per_token": [case(Aggregated)],
            "test_gradient_is_finite": [case(Explodes), case(Detached)],
            "test_what_is_masked_has_no_influence": [case(Centred)],
            "test_rows_may_come_in_any_order": [case(SumsUp)],
            "test_micro_batches_add_up": [case(NormalisesByMicroBatch), case(SumsUp)],
            "test_good_tokens_become_likelier": [case(WrongSign)],
            "test_batch_is_left_alone": [case(WritesAdvantages)],
            "test_known_values": [case(Reinforce, known=[(batch, torch.full_like(batch.log_probs, 7.0))])],
        },
    )


def test_the_example_has_an_empty_row_and_tool_tokens_in_the_middle() -> None:
    batch: AdvantageInput = example()
    assert not batch.response_mask[3].any() and isinstance(batch.group_ids, np.ndarray)


class TotalOfTokens(Plain):
    """Written for version 1, where the score stood on the last token."""

    def __call__(self, batch):
        last = [row[mask][-1:].sum() for row, mask in zip(batch.token_rewards, batch.response_mask, strict=True)]
        return spread(batch, torch.stack(last))


def test_an_estimator_of_version_1_gets_the_whole_score_on_the_last_token(spec) -> None:
    batch = example()
    case = AdvantageEstimatorCase(spec("advantage_estimator", TotalOfTokens, api_version=1))
    expected = torch.where(batch.response_mask, batch.scores[:, None], 0.0)
    torch.testing.assert_close(case.estimate(batch).advantages, expected)


class Ratios(RolloutCorrection):
    """min(pi_old / pi_rollout, 2); right but for what a subclass breaks."""

    def __call__(self, batch):
        difference = torch.where(batch.response_mask, batch.old_log_probs - batch.rollout_log_probs, 0.0)
        return CorrectionOutput(difference.exp().clamp(max=2.0), {"mean": 1.0})


class HalfWeights(Ratios):
    def __call__(self, batch):
        return CorrectionOutput(super().__call__(batch).weights / 2)


class NotANumber(Ratios):
    def __call__(self, batch):
        return CorrectionOutput(super().__call__(batch).weights, {"mean": float("nan")})


class Unbounded(Ratios):
    def __call__(self, batch):
        difference = torch.where(batch.response_mask, batch.old_log_probs - batch.rollout_log_probs, 0.0)
        return CorrectionOutput(difference.exp())


class KeepsFillers(Ratios):
    def __call__(self, batch):
        return CorrectionOutput((batch.old_log_probs - batch.rollout_log_probs).exp().clamp(max=2.0))


class RunningMean(Ratios):
    def __call__(self, batch):
        return CorrectionOutput(super().__call__(batch).weights.cumsum(0))


class CountsEmptyRows(Ratios):
    def __call__(self, batch):
        weights = super().__call__(batch).weights
        return CorrectionOutput(weights / weights.mean())


class WritesRolloutLogProbs(Ratios):
    def __call__(self, batch):
        batch.rollout_log_probs.add_(1.0)
        return super().__call__(batch)


def test_every_check_catches_a_broken_correction(spec, catches) -> None:
    from agentrl_testing.contracts.rollout_correction import example as step

    def case(cls, **fields):
        return RolloutCorrectionCase(spec("rollout_correction", cls), **fields)

    catches(
        RolloutCorrectionContract,
        {
            "test_output_has_the_shape_of_the_batch": [case(NotANumber)],
            "test_equal_policies_have_weight_one": [case(HalfWeights)],
            "test_extreme_differences_are_finite": [case(Unbounded)],
            "test_what_is_masked_has_no_influence": [case(KeepsFillers)],
            "test_rows_may_come_in_any_order": [case(RunningMean)],
            "test_an_empty_response_disturbs_nobody": [case(CountsEmptyRows)],
            "test_batch_is_left_alone": [case(WritesRolloutLogProbs)],
            "test_known_values": [case(Ratios, known=[(step(), torch.full((5, 8), 7.0))])],
        },
    )


def test_a_right_correction_passes(spec) -> None:
    contract, case = RolloutCorrectionContract(), RolloutCorrectionCase(spec("rollout_correction", Ratios))
    for check in (name for name in dir(contract) if name.startswith("test_")):
        getattr(contract, check)(case)
