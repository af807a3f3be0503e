"""The contract of advantage estimators."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl_core.algorithms.outcome import outcomes_only
from agentrl_core.api import AdvantageEstimator, AdvantageInput, AdvantageOutput, AlgorithmContext
from agentrl_testing.contracts.case import PluginCase, PluginContract, needs

TOLERANCE = 1e-5
CAPABILITY_OF_FIELD = {
    "values": "values",
    "components": "components",
    "rollout_log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_probs",
    "entropies": "entropies",
    "teacher_log_probs": "teacher_log_probs",
    "baselines": "greedy_baseline",
}


def example(seed: int = 0) -> AdvantageInput:
    """Two groups of four rows of up to six tokens in two turns, tool tokens between them, and one empty response.

    Turns and outcomes are rewarded; there are two components, and everything that an estimator may declare.
    """
    generator = torch.Generator().manual_seed(seed)
    mask_BR = torch.rand(8, 6, generator=generator) < 0.7
    mask_BR[:, 0] = True
    mask_BR[:, 2] = False
    mask_BR[3] = False
    rewards_BR, turns_BR = torch.zeros(8, 6), torch.full((8, 6), -1)
    turn_rewards_BT, outcomes_B = torch.zeros(8, 2), torch.zeros(8)
    for row in range(8):
        sampled = mask_BR[row].nonzero().squeeze(-1)
        if not len(sampled):
            continue
        turns_BR[row, sampled] = (sampled > 2).long()
        outcomes_B[row] = torch.randn((), generator=generator)
        rewards_BR[row, sampled[-1]] += outcomes_B[row]
        for turn in set(turns_BR[row, sampled].tolist()):
            turn_rewards_BT[row, turn] = torch.randn((), generator=generator)
            rewards_BR[row, (turns_BR[row] == turn).nonzero()[-1]] += turn_rewards_BT[row, turn]
    groups, trajectories = np.empty(8, object), np.empty(8, object)
    groups[:] = ["a"] * 4 + ["b"] * 4
    trajectories[:] = [f"t{row}" for row in range(8)]
    log_probs = {
        name: torch.where(mask_BR, -3 * torch.rand(8, 6, generator=generator), 0.0)
        for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs", "entropies")
    }
    first = torch.randn(8, generator=generator)
    scores_B = outcomes_B + turn_rewards_BT.sum(-1)
    return AdvantageInput(
        rewards_BR, mask_BR, groups, trajectories, torch.randn(8, 6, generator=generator), outcomes=outcomes_B,
        scores=scores_B, turn_ids=turns_BR, turn_rewards=turn_rewards_BT, data_sources=groups,
        components={"first": first, "second": scores_B - first},
        baselines=torch.randn(2, generator=generator).repeat_interleave(4), **log_probs,
    )  # fmt: skip


def rows_of(batch: AdvantageInput, rows: Sequence[int]) -> AdvantageInput:
    """These rows, in this order."""
    index = list(rows)
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    components = {name: component[index] for name, component in batch.components.items()}
    chosen = {name: value[index] for name, value in values.items() if name != "components" and value is not None}
    return dataclasses.replace(batch, **chosen, components=components)


def rewarded(batch: AdvantageInput, token_rewards_BR: Tensor) -> AdvantageInput:
    """The batch with these rewards as outcomes."""
    return dataclasses.replace(batch, token_rewards=token_rewards_BR, scores=cast(Any, None))


def _outcomes_moved(batch: AdvantageInput, mask_BR: Tensor) -> AdvantageInput:
    """The batch with this part of its mask; each row's outcome stands on its new last token."""
    rewards_BR = batch.token_rewards.clone()
    for mask, change in ((batch.response_mask, -1), (mask_BR, 1)):
        for row in mask.any(-1).nonzero().squeeze(-1).tolist():
            rewards_BR[row, mask[row].nonzero()[-1]] += change * batch.outcomes[row]
    return dataclasses.replace(batch, token_rewards=rewards_BR, response_mask=mask_BR)


@dataclass(kw_only=True)
class AdvantageEstimatorCase(PluginCase):
    """An advantage estimator under test.

    Args:
        group_size: ``rollout.n``.
        known: batches with the advantages [B, R] that they must get, from the paper or by hand.
    """

    group_size: int = 4
    known: Sequence[tuple[AdvantageInput, Tensor]] = ()

    def make(self) -> AdvantageEstimator:
        """An estimator as the trainer builds it."""
        estimator: AdvantageEstimator = self.build(AlgorithmContext(self.group_size))
        return estimator

    def estimate(self, batch: AdvantageInput) -> AdvantageOutput:
        """Advantages of a batch, with what the plugin declares to need and nothing else."""
        needed: dict[str, Any] = {
            field: None for field, capability in CAPABILITY_OF_FIELD.items() if not self.has(capability)
        }
        if "components" in needed:
            needed["components"] = {}
        batch = dataclasses.replace(batch, **needed)
        return self.make()(outcomes_only(batch) if self.spec.api_version < 2 else batch)


def same(first: Tensor, second: Tensor) -> bool:
    """Equal within rounding."""
    return torch.allclose(first, second, atol=TOLERANCE, rtol=TOLERANCE)


class AdvantageEstimatorContract(PluginContract):
    """What every advantage estimator must do."""

    kind = "advantage_estimator"

    def test_output_has_the_shape_of_the_batch(self, plugin: AdvantageEstimatorCase) -> None:
        """[B, R] float32, finite, zero under mask 0."""
        batch = example()
        output = plugin.estimate(batch)
        for name in ("advantages", "returns"):
            values = getattr(output, name)
            assert values.shape == batch.response_mask.shape, f"{name} has the shape {list(values.shape)}"
            assert values.dtype == torch.float32, f"{name} is {values.dtype}, not float32"
            assert values.isfinite().all(), f"{name} holds NaN or infinite values"
            assert not values[~batch.response_mask].any(), f"{name} is not zero under mask 0"
            assert not values.requires_grad, f"{name} carries a gradient"

    def test_separate_groups_need_nothing_of_each_other(self, plugin: AdvantageEstimatorCase) -> None:
        """With ``separate_groups`` a group alone gives the same bit for bit, and no metrics."""
        needs(plugin, "separate_groups")
        batch = example()
        whole = plugin.estimate(batch)
        assert not whole.metrics, f"with separate_groups there are no metrics, this one has {sorted(whole.metrics)}"
        for rows in (slice(0, 4), slice(4, 8)):
            alone = plugin.estimate(rows_of(batch, range(8)[rows]))
            for name in ("advantages", "returns"):
                found, expected = getattr(alone, name), getattr(whole, name)[rows]
                assert torch.equal(found, expected), f"{name} of a group depend on the other groups of the step"

    def test_what_is_masked_has_no_influence(self, plugin: AdvantageEstimatorCase) -> None:
        """A reward or a value of 100 under mask 0 changes nothing."""
        batch = example()
        hidden = ~batch.response_mask
        per_token = ("token_rewards", "values", "rollout_log_probs", "ref_log_probs", "entropies", "teacher_log_probs")
        filled = {name: getattr(batch, name).masked_fill(hidden, 100.0) for name in (*per_token, "old_log_probs")}
        changed = dataclasses.replace(batch, **filled)
        before, after = plugin.estimate(batch), plugin.estimate(changed)
        assert same(before.advantages, after.advantages), "what stands under mask 0 changes the advantages"
        assert same(before.returns, after.returns), "what stands under mask 0 changes the returns"

    def test_rows_may_come_in_any_order(self, plugin: AdvantageEstimatorCase) -> None:
        """The order of a batch is that in which trajectories ended."""
        batch, order = example(), [5, 2, 7, 0, 3, 6, 1, 4]
        advantages = plugin.estimate(batch).advantages[order]
        assert same(plugin.estimate(rows_of(batch, order)).advantages, advantages), "advantages depend on the row order"

    def test_an_empty_response_disturbs_nobody(self, plugin: AdvantageEstimatorCase) -> None:
        """Without it the others get the same advantages."""
        batch = example()
        advantages = plugin.estimate(batch).advantages
        assert not advantages[3].any(), "a row without sampled tokens has an advantage"
        others = [0, 1, 2, 4, 5, 6, 7]
        without = plugin.estimate(rows_of(batch, others)).advantages
        assert same(without, advantages[others]), "a row without sampled tokens changes the advantages of others"

    def test_batch_is_left_alone(self, plugin: AdvantageEstimatorCase) -> None:
        """Metrics and records are made of it afterwards."""
        batch, untouched = example(), example()
        plugin.estimate(batch)
        assert torch.equal(batch.token_rewards, untouched.token_rewards), "token_rewards were changed"
        assert torch.equal(batch.response_mask, untouched.response_mask), "response_mask was changed"

    def test_known_values(self, plugin: AdvantageEstimatorCase) -> None:
        """What the author worked out by hand."""
        for number, (batch, expected) in enumerate(plugin.known):
            advantages = plugin.estimate(batch).advantages
            assert same(advantages, expected), f"known batch {number}: {advantages.tolist()} != {expected.tolist()}"

    def test_all_rewards_equal_is_finite(self, plugin: AdvantageEstimatorCase) -> None:
        """A group without variance, and a batch of one row."""
        batch = example()
        equal = rewarded(batch, torch.where(batch.token_rewards != 0, 1.0, 0.0))
        assert plugin.estimate(equal).advantages.isfinite().all(), "equal rewards give NaN or infinite advantages"
        single = plugin.estimate(rows_of(batch, [0])).advantages
        assert single.isfinite().all(), "one row alone gives NaN or infinite advantages"

    def test_groups_are_apart(self, plugin: AdvantageEstimatorCase) -> None:
        """The rewards of one prompt's samples change nothing for another prompt's but the scale of the whole batch."""
        needs(plugin, "groups")
        batch = example()
        rewards = batch.token_rewards.clone()
        rewards[4:] *= 10
        before = plugin.estimate(rewarded(batch, batch.token_rewards)).advantages[:4]
        after = plugin.estimate(rewarded(batch, rewards)).advantages[:4]
        scale = before.norm() / after.norm().clamp(min=1e-30)
        assert same(before, after * scale), "the rewards of another group change the advantages"

    def test_a_trajectory_has_one_vote(self, plugin: AdvantageEstimatorCase) -> None:
        """A trajectory that is cut into a row per turn gets the advantages that it gets as one row."""
        needs(plugin, "groups")
        batch = example()
        whole = plugin.estimate(batch).advantages
        rows = [0, 0, 0, *range(1, 8)]
        mask = batch.response_mask[rows].clone()
        for row, turns in enumerate(({0}, {1}, set())):
            mask[row] &= torch.tensor([turn in turns for turn in batch.turn_ids[0].tolist()])
        turn_ids = torch.where(mask, batch.turn_ids[rows], -1)
        cut = plugin.estimate(dataclasses.replace(_outcomes_moved(rows_of(batch, rows), mask), turn_ids=turn_ids))
        assert same(cut.advantages[3:], whole[1:]), "a trajectory of several rows has more than one vote in its group"
        assert same(cut.advantages[:3].sum(0), whole[0]), "a trajectory gets other advantages if it has several rows"

    def test_values_are_used(self, plugin: AdvantageEstimatorCase) -> None:
        """Who asks for a critic must not ignore it."""
        needs(plugin, "values")
        batch = example()
        assert batch.values is not None, "the example has values"
        shifted = dataclasses.replace(batch, values=batch.values * 2 + 1)
        changed = not same(plugin.estimate(batch).advantages, plugin.estimate(shifted).advantages)
        assert changed, "the capability 'values' is declared, but values have no influence"

    def test_without_values_it_does_not_ask_for_them(self, plugin: AdvantageEstimatorCase) -> None:
        """Without the capability there is no critic."""
        if plugin.has("values"):
            pytest.skip("the plugin declares the capability 'values'")
        plugin.estimate(dataclasses.replace(example(), values=None))
