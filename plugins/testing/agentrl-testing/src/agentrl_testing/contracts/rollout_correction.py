"""The contract of rollout corrections."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from agentrl_core.api import AlgorithmContext, CorrectionInput, CorrectionOutput, RolloutCorrection
from agentrl_testing.contracts.case import PluginCase, PluginContract, is_number

TOLERANCE = 1e-5


def example(seed: int = 0) -> CorrectionInput:
    """Five rows of up to eight tokens with tool tokens in the middle, one of them empty; versions 3 and 4 sampled."""
    generator = torch.Generator().manual_seed(seed)
    mask_BR = torch.rand(5, 8, generator=generator) < 0.8
    mask_BR[:, 0] = True
    mask_BR[:, 3] = False
    mask_BR[2] = False
    rollout_BR = -torch.rand(5, 8, generator=generator) * 3
    old_BR = rollout_BR + 0.5 * torch.randn(5, 8, generator=generator)
    versions_BR = torch.where(mask_BR, torch.where(torch.arange(8) < 3, 3, 4), -1)
    return CorrectionInput(old_BR, rollout_BR, mask_BR, versions_BR)


def rows_of(batch: CorrectionInput, rows: Sequence[int]) -> CorrectionInput:
    """These rows, in this order."""
    return CorrectionInput(*(getattr(batch, field.name)[list(rows)] for field in fields(batch)))


@dataclass(kw_only=True)
class RolloutCorrectionCase(PluginCase):
    """A rollout correction under test.

    Args:
        known: batches with the weights [B, R] that they must get under mask 1, from the paper or by hand.
    """

    known: Sequence[tuple[CorrectionInput, Tensor]] = ()

    def correct(self, batch: CorrectionInput) -> CorrectionOutput:
        """What a correction, built as the trainer builds it, returns."""
        correction: RolloutCorrection = self.build(AlgorithmContext(4))
        return correction(batch)

    def weights(self, batch: CorrectionInput) -> Tensor:
        """[B, R]: what multiplies the losses; 0 under mask 0."""
        return torch.where(batch.response_mask, self.correct(batch).weights, 0.0)


def same(first: Tensor, second: Tensor) -> bool:
    """Equal within rounding."""
    return torch.allclose(first, second, atol=TOLERANCE, rtol=TOLERANCE)


class RolloutCorrectionContract(PluginContract):
    """What every rollout correction must do."""

    kind = "rollout_correction"

    def test_output_has_the_shape_of_the_batch(self, plugin: RolloutCorrectionCase) -> None:
        """[B, R] float32 without a gradient, finite and not negative; the metrics are finite numbers."""
        batch = example()
        output = plugin.correct(batch)
        weights_BR = output.weights
        assert weights_BR.shape == batch.response_mask.shape, f"weights have the shape {list(weights_BR.shape)}"
        assert weights_BR.dtype == torch.float32, f"weights are {weights_BR.dtype}, not float32"
        assert not weights_BR.requires_grad, "weights carry a gradient"
        assert weights_BR.isfinite().all(), "weights hold NaN or infinite values, maybe under mask 0"
        assert (weights_BR >= 0).all(), "weights are negative"
        wrong = {name: value for name, value in output.metrics.items() if not is_number(value)}
        assert not wrong, f"metrics are not finite numbers: {wrong}"

    def test_equal_policies_have_weight_one(self, plugin: RolloutCorrectionCase) -> None:
        """There is nothing to correct where the policy that sampled is the one that is updated."""
        batch = example()
        equal = replace(batch, old_log_probs=batch.rollout_log_probs.clone())
        assert same(plugin.weights(equal), batch.response_mask.float()), "log-probs are equal but a weight is not 1"

    def test_extreme_differences_are_finite(self, plugin: RolloutCorrectionCase) -> None:
        """One token that differs much, or all of them, or one row alone, or no sampled token at all."""
        batch = example()
        batches = [rows_of(batch, [0]), rows_of(batch, [2])]
        for far in (200.0, -200.0):
            one_BR = batch.old_log_probs.clone()
            one_BR[0, 0] += far
            batches += [replace(batch, old_log_probs=old) for old in (one_BR, batch.old_log_probs + far)]
        for number, each in enumerate(batches):
            output = plugin.correct(each)
            assert output.weights.isfinite().all(), f"weights of extreme batch {number} hold NaN or infinite values"
            wrong = {name: value for name, value in output.metrics.items() if not is_number(value)}
            assert not wrong, f"metrics of extreme batch {number} are not finite numbers: {wrong}"

    def test_what_is_masked_has_no_influence(self, plugin: RolloutCorrectionCase) -> None:
        """Fillers under mask 0 change no weight and no metric."""
        batch = example()
        hidden = ~batch.response_mask
        clean = plugin.correct(batch)
        for filler in (-100.0, float("nan")):
            filled = replace(
                batch,
                old_log_probs=batch.old_log_probs.masked_fill(hidden, -0.5),
                rollout_log_probs=batch.rollout_log_probs.masked_fill(hidden, filler),
            )
            dirty = plugin.correct(filled)
            assert same(plugin.weights(filled), plugin.weights(batch)), "what stands under mask 0 changes weights"
            assert dirty.metrics == clean.metrics, "what stands under mask 0 changes metrics"
            assert dirty.weights.isfinite().all(), "fillers under mask 0 give NaN or infinite weights"

    def test_rows_may_come_in_any_order(self, plugin: RolloutCorrectionCase) -> None:
        """The order of a batch is that in which trajectories ended."""
        batch, order = example(), [3, 0, 4, 2, 1]
        assert same(plugin.weights(rows_of(batch, order)), plugin.weights(batch)[order]), (
            "weights depend on the order of the rows"
        )

    def test_an_empty_response_disturbs_nobody(self, plugin: RolloutCorrectionCase) -> None:
        """Without it the others get the same weights."""
        batch, others = example(), [0, 1, 3, 4]
        assert same(plugin.weights(rows_of(batch, others)), plugin.weights(batch)[others]), (
            "a row without sampled tokens changes the weights of others"
        )

    def test_batch_is_left_alone(self, plugin: RolloutCorrectionCase) -> None:
        """The update uses the same tensors."""
        batch, untouched = example(), example()
        plugin.correct(batch)
        for field in fields(batch):
            same_values = torch.equal(getattr(batch, field.name), getattr(untouched, field.name))
            assert same_values, f"{field.name} was changed in place"

    def test_known_values(self, plugin: RolloutCorrectionCase) -> None:
        """What the author worked out by hand."""
        for number, (batch, expected) in enumerate(plugin.known):
            weights_BR, wanted_BR = plugin.weights(batch), torch.where(batch.response_mask, expected, 0.0)
            assert same(weights_BR, wanted_BR), f"known batch {number}: {weights_BR.tolist()} != {wanted_BR.tolist()}"
