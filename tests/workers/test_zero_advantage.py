"""Rows without an advantage, against a reference in float64 that shares no code with the package."""

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl_core.api.algorithm import PolicyLoss, PolicyLossInput, PolicyLossOutput
from agentrl_core.workers.actor import ActorWorker, vanishes_without_advantage

SILENT_ROWS = [1, 3, 6, 7]
CLIP, MAX_LENGTH = 0.2, 16


@pytest.fixture
def make_actor(make_config):
    def make(**config: Any) -> ActorWorker:
        actor = ActorWorker(make_config(**config), total_optimizer_steps=100)
        actor.init_model()
        return actor

    return make


@pytest.fixture
def batch(make_batch, rows):
    """Half of the rows have no advantage; old log-probs are far enough off that some ratios are clipped."""
    made = make_batch(rows)
    mask = made.batch["response_mask"]
    generator = torch.Generator().manual_seed(3)
    made.batch["advantages"] = torch.randn(len(rows), 1, generator=generator).expand(mask.shape) * mask
    made.batch["advantages"][SILENT_ROWS] = 0.0
    made.batch["old_log_probs"] = (torch.randn(mask.shape, generator=generator) - 3) * mask
    made.batch["ref_log_prob"] = (torch.randn(mask.shape, generator=generator) - 3) * mask
    return made


def share_with_advantage(batch: Any) -> float:
    sampled = batch.batch["response_mask"].any(-1)
    return float((batch.batch["advantages"] != 0).any(-1).sum() / sampled.sum())


def reference(path: str, batch: Any, rows: list, aggregation: str, kl_coef: float, entropy_coef: float) -> dict:
    """Metrics of one optimizer step over the whole batch, row by row and unpadded, in float64."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
    policies, kls, entropies, ratios, clipped = [], [], [], [], []
    for number, (prompt, response, sampled) in enumerate(rows):
        chosen = [place for place, is_sampled in enumerate(sampled) if is_sampled]
        if not chosen:
            continue
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        table = logits.log_softmax(-1)
        log_probs = table[chosen, torch.tensor(response)[chosen]]
        old, ref, advantage = (
            batch.batch[name][number, chosen].double() for name in ("old_log_probs", "ref_log_prob", "advantages")
        )
        ratio = torch.exp(log_probs - old)
        policies.append(-torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP)))
        kls.append((torch.exp(ref - log_probs) - 1 - (ref - log_probs)).clamp(max=10))
        entropies.append(-(table.exp() * table).sum(-1)[chosen])
        ratios.append(ratio.detach())
        clipped.append((advantage * ratio > advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).double())

    def total(values: list) -> torch.Tensor:
        if aggregation == "token-mean":
            return torch.cat(values).mean()
        sums = [row.mean() if aggregation == "seq-mean-token-mean" else row.sum() for row in values]
        return torch.stack(sums).mean() / (MAX_LENGTH if aggregation == "seq-mean-token-sum-norm" else 1)

    loss = total(policies) + kl_coef * total(kls) - entropy_coef * total(entropies)
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    means = {"entropy": entropies, "ratio": ratios, "clip_fraction": clipped, **({"kl": kls} if kl_coef else {})}
    return {
        "actor/loss": loss.item(),
        "actor/pg_loss": total(policies).item(),
        "actor/grad_norm": norm,
        **{f"actor/{name}": torch.cat(values).mean().item() for name, values in means.items()},
    }


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize(("kl_coef", "entropy_coef"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.05)])
@pytest.mark.parametrize("drop", [True, False])
def test_loss_gradient_norm_and_metrics_count_every_row(
    make_actor, batch, rows, model_path, aggregation, kl_coef, entropy_coef, drop
):
    algorithm = {"aggregation": aggregation, "kl_coef": kl_coef, "entropy_coef": entropy_coef}
    actor = make_actor(algorithm={**algorithm, "drop_zero_advantage": drop}, actor={"micro_batch_tokens": 40})
    metrics = actor.update(batch)
    expected = reference(model_path, batch, rows, aggregation, kl_coef, entropy_coef)
    assert expected["actor/clip_fraction"] > 0
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=2e-4)
    share = 1.0 if not drop or kl_coef or entropy_coef else share_with_advantage(batch)
    assert metrics["actor/trained_rows_share"] == pytest.approx(share)


def test_dropping_changes_no_weight_over_several_steps(make_actor, batch):
    """Mini-batches of one row: in some of them nothing has a gradient, yet AdamW's moments move the weights."""
    results = []
    for drop in (True, False):
        actor = make_actor(algorithm={"drop_zero_advantage": drop}, actor={"mini_batches": 8, "epochs": 2})
        metrics = actor.update(batch)
        results.append((metrics, {name: tensor.clone() for name, tensor in actor.module.state_dict().items()}))
    (dropped, dropped_weights), (whole, whole_weights) = results
    assert dropped.pop("actor/trained_rows_share") == pytest.approx(share_with_advantage(batch))
    assert whole.pop("actor/trained_rows_share") == 1.0
    assert dropped == pytest.approx(whole, rel=1e-3, abs=1e-6)
    for name, tensor in dropped_weights.items():
        torch.testing.assert_close(tensor, whole_weights[name], atol=2e-5, rtol=1e-4)


def test_a_batch_without_any_advantage_is_measured_and_moves_nothing(make_actor, batch):
    actor = make_actor()
    before = {name: tensor.clone() for name, tensor in actor.module.state_dict().items()}
    actor.update(batch)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in actor.module.state_dict().items())
    before = {name: tensor.clone() for name, tensor in actor.module.state_dict().items()}
    batch.batch["advantages"] = torch.zeros_like(batch.batch["advantages"])
    metrics = actor.update(batch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in actor.module.state_dict().items())
    assert metrics["actor/trained_rows_share"] == 0.0 and metrics["actor/entropy"] > 0
    assert "actor/loss" not in metrics


class WithPenalty(PolicyLoss):
    """Has a term that does not depend on the advantage."""

    def __call__(self, batch: PolicyLossInput) -> PolicyLossOutput:
        ratio = (batch.log_probs - batch.old_log_probs).exp()
        return PolicyLossOutput(-batch.advantages * ratio + 0.1 * (ratio - 1).square())


class WithoutPenalty(PolicyLoss):
    def __call__(self, batch: PolicyLossInput) -> PolicyLossOutput:
        return PolicyLossOutput(-batch.advantages * batch.log_probs)


def test_a_loss_that_moves_rows_without_an_advantage_keeps_them():
    assert not vanishes_without_advantage(WithPenalty(None, None))
    assert vanishes_without_advantage(WithoutPenalty(None, None))
