"""The contract of policy losses."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl_core.api import AlgorithmContext, PolicyLoss, PolicyLossInput, PolicyLossOutput
from agentrl_testing.contracts.case import PluginCase, PluginContract

TOLERANCE = 1e-5


FIELDS = ("rollout_log_probs", "ref_log_probs", "entropies")
"""Of the input; each is there for a loss with the capability of this name."""


def example(seed: int = 0) -> PolicyLossInput:
    """Four rows of up to six tokens; the policy has moved a little since the rollout."""
    generator = torch.Generator().manual_seed(seed)
    mask_br = torch.rand(4, 6, generator=generator) < 0.7
    mask_br[:, 0] = True
    old_br = -torch.rand(4, 6, generator=generator) * 3
    new_br = old_br + 0.05 * torch.randn(4, 6, generator=generator)
    advantages_br = torch.randn(4, 1, generator=generator).expand(4, 6).clone()
    rollout_br = old_br + 0.05 * torch.randn(4, 6, generator=generator)
    return PolicyLossInput(
        new_br, old_br, torch.where(mask_br, advantages_br, 0.0), mask_br, rollout_log_probs=rollout_br,
        ref_log_probs=old_br + 0.1, entropies=torch.rand(4, 6, generator=generator),
        policy_versions=torch.where(mask_br, 3, -1), turn_ids=torch.where(mask_br, torch.arange(6) // 3, -1),
        group_ids=torch.tensor([0, 0, 1, 1]), row_ids=torch.arange(4),
    )  # fmt: skip


def rows_of(batch: PolicyLossInput, rows: Sequence[int]) -> PolicyLossInput:
    """These rows, in this order."""
    index = list(rows)
    values = {item.name: getattr(batch, item.name) for item in fields(batch) if item.name != "columns"}
    chosen = {name: value[index] for name, value in values.items() if value is not None}
    columns = {name: column[index] for name, column in batch.columns.items()}
    return replace(batch, **chosen, columns=columns)


def masked_losses(output: PolicyLossOutput, batch: PolicyLossInput) -> Tensor:
    """What the core aggregates."""
    return torch.where(batch.response_mask, output.losses, 0.0)


@dataclass(kw_only=True)
class PolicyLossCase(PluginCase):
    """A policy loss under test.

    Args:
        follows_advantages: False for a loss that is no policy gradient, such as supervised learning.
        known: micro-batches with the losses [b, r] that they must get under mask 1, from the paper or by hand.
    """

    follows_advantages: bool = True
    known: Sequence[tuple[PolicyLossInput, Tensor]] = ()

    def make(self) -> PolicyLoss:
        """A loss as the actor builds it."""
        loss: PolicyLoss = self.build(AlgorithmContext(4))
        return loss

    def seen(self, batch: PolicyLossInput) -> PolicyLossInput:
        """A mini-batch with what the loss declares to need and nothing else, prepared by the loss."""
        missing: dict[str, Any] = {name: None for name in FIELDS if not self.has(name)}
        batch = replace(batch, **missing)
        log_probs_br = batch.log_probs.detach()
        if not self.has("mini_batch_log_probs"):
            log_probs_br = torch.full_like(log_probs_br, torch.nan)
        prepared = self.make().prepare(replace(batch, log_probs=log_probs_br, entropies=None))
        return replace(batch, columns=prepared.columns)

    def losses(self, batch: PolicyLossInput) -> PolicyLossOutput:
        """Losses of a mini-batch that is one micro-batch."""
        return self.make()(self.seen(batch))

    def gradient(self, batch: PolicyLossInput, cuts: Sequence[Sequence[int]] = ()) -> Tensor:
        """[b, r] of the sum of the losses under mask 1 with respect to ``log_probs``.

        ``cuts`` are the rows of each micro-batch; empty: all in one.
        """
        batch = self.seen(batch)
        log_probs_br = batch.log_probs.clone().requires_grad_(True)
        batch = replace(batch, log_probs=log_probs_br)
        micros = [rows_of(batch, rows) for rows in cuts] if cuts else [batch]
        total = torch.stack([masked_losses(self.make()(micro), micro).sum() for micro in micros]).sum()
        (gradient_br,) = torch.autograd.grad(total, log_probs_br, allow_unused=True)
        assert gradient_br is not None, "the losses do not depend on log_probs: nothing would be learned"
        return gradient_br


class PolicyLossContract(PluginContract):
    """What every policy loss must do."""

    kind = "policy_loss"

    def test_losses_are_per_token(self, plugin: PolicyLossCase) -> None:
        """[b, r], finite under mask 1, with metrics of the same shape."""
        batch = example()
        output = plugin.losses(batch)
        assert isinstance(output, PolicyLossOutput), f"the loss returned a {type(output).__name__}"
        shape = batch.log_probs.shape
        assert output.losses.shape == shape, f"losses have the shape {list(output.losses.shape)}, not {list(shape)}"
        assert masked_losses(output, batch).isfinite().all(), "losses hold NaN or infinite values"
        wrong = {name: list(metric.shape) for name, metric in output.metrics.items() if metric.shape != shape}
        assert not wrong, f"metrics are not [b, r]: {wrong}"

    def test_gradient_is_finite(self, plugin: PolicyLossCase) -> None:
        """Also where the policy has moved far."""
        assert plugin.gradient(example()).isfinite().all(), "the gradient holds NaN or infinite values"
        batch = example()
        for far in (20.0, -20.0):
            gradient_br = plugin.gradient(replace(batch, log_probs=batch.old_log_probs + far))
            assert gradient_br.isfinite().all(), f"the gradient is not finite where log_probs moved by {far:+g}"

    def test_what_is_masked_has_no_influence(self, plugin: PolicyLossCase) -> None:
        """Fillers under mask 0 change no loss and get no gradient."""
        batch = example()
        hidden = ~batch.response_mask
        fillers = {"log_probs": -7.0, "old_log_probs": -0.5, "advantages": 100.0, "rollout_log_probs": -9.0,
                   "ref_log_probs": -0.1, "entropies": 50.0}  # fmt: skip
        filled = replace(
            batch, **{name: getattr(batch, name).masked_fill(hidden, value) for name, value in fillers.items()}
        )
        before, after = (masked_losses(plugin.losses(each), each) for each in (batch, filled))
        assert torch.allclose(before, after, atol=TOLERANCE), "what stands under mask 0 changes losses under mask 1"
        assert not plugin.gradient(filled)[hidden].any(), "tokens under mask 0 get a gradient"

    def test_rows_may_come_in_any_order(self, plugin: PolicyLossCase) -> None:
        """A row's losses do not depend on where in the micro-batch it stands."""
        batch, order = example(), [2, 0, 3, 1]
        moved = rows_of(batch, order)
        expected = masked_losses(plugin.losses(batch), batch)[order]
        assert torch.allclose(masked_losses(plugin.losses(moved), moved), expected, atol=TOLERANCE), (
            "losses depend on the order of the rows"
        )

    @pytest.mark.parametrize("cuts", [[[0, 1], [2, 3]], [[3], [1], [0], [2]], [[2, 0, 1], [3]]])
    def test_micro_batches_add_up(self, plugin: PolicyLossCase, cuts: list[list[int]]) -> None:
        """The gradient of a mini-batch does not depend on how it is cut into micro-batches or over ranks."""
        whole_br, cut_br = plugin.gradient(example()), plugin.gradient(example(), cuts)
        assert torch.allclose(whole_br, cut_br, atol=TOLERANCE), (
            f"the gradient is another one in micro-batches of the rows {cuts}: what needs other rows belongs into "
            "prepare(), which sees the whole mini-batch"
        )

    def test_good_tokens_become_likelier(self, plugin: PolicyLossCase) -> None:
        """On the rollout's own policy, the step raises what had a positive advantage and lowers the rest."""
        if not plugin.follows_advantages:
            pytest.skip("the case says that the loss does not follow the advantages")
        batch = example()
        on_policy = replace(batch, log_probs=batch.old_log_probs.clone())
        gradient_br = plugin.gradient(on_policy)
        chosen = batch.response_mask & (batch.advantages != 0)
        product = gradient_br[chosen] * batch.advantages[chosen]
        assert (product <= TOLERANCE).all() and (product < 0).any(), (
            "at log_probs == old_log_probs the gradient does not point against the advantage: is the sign right?"
        )

    def test_batch_is_left_alone(self, plugin: PolicyLossCase) -> None:
        """The other terms of the loss use the same tensors."""
        batch, untouched = example(), example()
        plugin.losses(batch)
        for name in ("log_probs", "old_log_probs", "advantages", "response_mask"):
            assert torch.equal(getattr(batch, name), getattr(untouched, name)), f"{name} was changed in place"

    def test_known_values(self, plugin: PolicyLossCase) -> None:
        """What the author worked out by hand."""
        for number, (batch, expected) in enumerate(plugin.known):
            losses_br = masked_losses(plugin.losses(batch), batch)
            wanted = torch.where(batch.response_mask, expected, 0.0)
            assert torch.allclose(losses_br, wanted, atol=TOLERANCE), (
                f"known micro-batch {number}: {losses_br.tolist()} != {wanted.tolist()}"
            )
