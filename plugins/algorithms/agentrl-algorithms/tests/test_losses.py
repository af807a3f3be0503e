"""Each loss against its paper's equation: float64, plain loops over sampled tokens, autograd for the gradient.

A reference gets the sampled tokens of each row and returns a loss per token; ``sg`` is the stop-gradient.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl_algorithms import plugin
from agentrl_core.api import PluginSpec, PolicyLossInput
from agentrl_testing.contracts import PolicyLossCase


@dataclass
class Token:
    """A sampled token; ``log_prob`` is a scalar with a gradient, the others are numbers."""

    log_prob: Tensor
    old: float
    advantage: float
    rollout: float
    reference: float


Rows = list[list[Token]]
Reference = Callable[..., list[list[Tensor]]]


def sg(value: Tensor) -> Tensor:
    return value.detach()


def cut(difference: Tensor) -> Tensor:
    """Log-ratios count to +-20."""
    value = difference.item()
    return difference if abs(value) <= 20 else torch.tensor(math.copysign(20.0, value)).double()


def ratio(token: Token) -> Tensor:
    return torch.exp(cut(token.log_prob - token.old))


def clip(value: Tensor, low: float, high: float) -> Tensor:
    return torch.tensor(low).double() if value < low else torch.tensor(high).double() if value > high else value


def larger(first: Tensor, second: Tensor) -> Tensor:
    return first if first > second else second


def ppo_token(token: Token, low: float, high: float) -> Tensor:
    a = token.advantage
    return larger(-a * ratio(token), -a * clip(ratio(token), 1 - low, 1 + high))


def ppo(rows: Rows, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = math.inf) -> list[list[Tensor]]:
    def loss(token: Token) -> Tensor:
        plain = ppo_token(token, clip_low, clip_high)
        bound = -token.advantage * dual_clip
        return torch.tensor(bound).double() if token.advantage < 0 and plain > bound else plain

    return [[loss(token) for token in row] for row in rows]


def gspo(rows: Rows, clip_low: float = 3e-4, clip_high: float = 4e-4) -> list[list[Tensor]]:
    """The token form, equations 13 and 14."""
    losses = []
    for row in rows:
        s = torch.exp(
            cut(sum(token.log_prob - token.old for token in row) / max(len(row), 1)) if row else torch.tensor(0)
        )
        losses.append([])
        for token in row:
            s_t = sg(s) * torch.exp(token.log_prob) / sg(torch.exp(token.log_prob))
            a = token.advantage
            losses[-1].append(larger(-a * s_t, -a * clip(s_t, 1 - clip_low, 1 + clip_high)))
    return losses


def gspo_sequence(rows: Rows, clip_low: float = 3e-4, clip_high: float = 4e-4) -> list[list[Tensor]]:
    """The sequence form, equation 5: one loss for the row, here on each of its tokens."""
    losses = []
    for row in rows:
        if not row:
            losses.append([])
            continue
        s = torch.exp(cut(sum(token.log_prob - token.old for token in row) / len(row)))
        a = row[0].advantage
        losses.append([larger(-a * s, -a * clip(s, 1 - clip_low, 1 + clip_high))] * len(row))
    return losses


def cispo(rows: Rows, clip_low: float = 1.0, clip_high: float = 4.0) -> list[list[Tensor]]:
    return [[-sg(clip(ratio(t), 1 - clip_low, 1 + clip_high)) * t.advantage * t.log_prob for t in row] for row in rows]


def gmpo(rows: Rows, clip_low: float = 0.4, clip_high: float = 0.4) -> list[list[Tensor]]:
    losses = []
    for row in rows:
        a = sum(token.advantage for token in row) / max(len(row), 1)
        product = torch.tensor(0.0).double()
        for token in row:
            d = token.log_prob - token.old
            clipped = clip(d, -clip_low, clip_high)
            # min(ratio * A, clipped ratio * A), as a choice of the log-ratio; A = 0 chooses nothing.
            chosen = d if (d < clipped) == (a > 0) or d == clipped else clipped
            product = product + (chosen if a != 0 else 0.0)
        mean = torch.exp(cut(product / max(len(row), 1)))
        losses.append([-a * mean] * len(row))
    return losses


def sapo(rows: Rows, tau_positive: float = 1.0, tau_negative: float = 1.05) -> list[list[Tensor]]:
    def loss(token: Token) -> Tensor:
        tau = tau_positive if token.advantage > 0 else tau_negative
        return -token.advantage * 4 / tau / (1 + torch.exp(-tau * (ratio(token) - 1)))

    return [[loss(token) for token in row] for row in rows]


def dppo(rows: Rows, divergence: str = "tv", threshold: float | None = None, max_ratio: float = 20.0) -> Any:
    bound = threshold or {"tv": 0.15, "kl": 0.05}[divergence]

    def loss(token: Token) -> Tensor:
        pi, mu = math.exp(token.log_prob.item()), math.exp(token.rollout)
        if divergence == "tv":
            distance = abs(mu - pi)
        else:
            distance = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
        away = pi > mu if token.advantage > 0 else pi < mu
        mask = 0.0 if distance > bound and away else 1.0
        weight = min(torch.exp(cut(token.log_prob - token.rollout)).item(), max_ratio)
        return -mask * weight * token.advantage * token.log_prob

    return [[loss(token) for token in row] for row in rows]


def covariances(rows: Rows) -> dict[tuple[int, int], float]:
    tokens = [token for row in rows for token in row]
    mean_log_prob = sum(token.log_prob.item() for token in tokens) / len(tokens)
    mean_advantage = sum(token.advantage for token in tokens) / len(tokens)
    return {
        (i, t): (token.log_prob.item() - mean_log_prob) * (token.advantage - mean_advantage)
        for i, row in enumerate(rows)
        for t, token in enumerate(row)
    }


def clip_cov(rows: Rows, share: float, cov_low: float = 1.0, cov_high: float = 5.0) -> list[list[Tensor]]:
    cov = covariances(rows)
    candidates = []
    for (i, t), value in cov.items():
        token = rows[i][t]
        clipped = ppo_token(token, 0.2, 0.2) > -token.advantage * ratio(token)
        if cov_low < value < cov_high and not clipped:
            candidates.append((-value, i, t))
    count = max(int(share * len(cov)), 1)
    chosen = {(i, t) for _, i, t in sorted(candidates)[:count]}
    losses = ppo(rows)
    return [[0.0 * loss if (i, t) in chosen else loss for t, loss in enumerate(row)] for i, row in enumerate(losses)]


def kl_cov(rows: Rows, share: float, kl_coef: float = 1.0) -> list[list[Tensor]]:
    cov = covariances(rows)
    count = max(int(share * len(cov)), 1)
    chosen = sorted(cov, key=lambda key: (-cov[key], key))[:count]

    def loss(i: int, t: int, token: Token) -> Tensor:
        # D_KL(pi_old || pi) of the paper's equation, as the unbiased estimate that is never negative.
        penalty = kl_coef * (ratio(token) - 1 - (token.log_prob - token.old)) if (i, t) in chosen else 0.0
        return -token.advantage * ratio(token) + penalty

    return [[loss(i, t, token) for t, token in enumerate(row)] for i, row in enumerate(rows)]


def gpg(rows: Rows) -> list[list[Tensor]]:
    return [[-token.advantage * token.log_prob for token in row] for row in rows]


def tis_reinforce(rows: Rows, max_ratio: float = 2.0) -> list[list[Tensor]]:
    def weight(token: Token) -> float:
        return min(torch.exp(cut(token.log_prob - token.rollout)).item(), max_ratio)

    return [[-weight(token) * token.advantage * token.log_prob for token in row] for row in rows]


def dro(rows: Rows, tau: float = 1.0) -> list[list[Tensor]]:
    losses = []
    for row in rows:
        a = sum(token.advantage for token in row) / max(len(row), 1)
        log_ratio = sum(token.log_prob - token.reference for token in row)
        losses.append([(a - tau * log_ratio) ** 2 / 2] * len(row))
    return losses


def sft(rows: Rows, tokens: str = "all", weight: float = 1.0) -> list[list[Tensor]]:
    return [[-weight * t.log_prob * (tokens == "all" or t.advantage > 0) for t in row] for row in rows]


TABLE: list[tuple[PluginSpec, Reference, dict[str, Any]]] = [
    (plugin.PPO, ppo, {}),
    (plugin.PPO, ppo, {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5}),
    (plugin.GSPO, gspo, {}),
    (plugin.GSPO, gspo, {"clip_low": 0.1, "clip_high": 0.2}),
    (plugin.CISPO, cispo, {}),
    (plugin.CISPO, cispo, {"clip_low": 0.2, "clip_high": 0.1}),
    (plugin.GMPO, gmpo, {}),
    (plugin.GMPO, gmpo, {"clip_low": 0.1, "clip_high": 0.2}),
    (plugin.SAPO, sapo, {}),
    (plugin.SAPO, sapo, {"tau_positive": 0.5, "tau_negative": 3.0}),
    (plugin.DPPO, dppo, {}),
    (plugin.DPPO, dppo, {"divergence": "kl"}),
    (plugin.DPPO, dppo, {"divergence": "tv", "threshold": 0.02, "max_ratio": 1.1}),
    (plugin.CLIP_COV, clip_cov, {"share": 2e-4}),
    (plugin.CLIP_COV, clip_cov, {"share": 0.3, "cov_low": 0.01}),
    (plugin.KL_COV, kl_cov, {"share": 2e-4}),
    (plugin.KL_COV, kl_cov, {"share": 0.3, "kl_coef": 0.5}),
    (plugin.GPG_LOSS, gpg, {}),
    (plugin.TIS_REINFORCE, tis_reinforce, {}),
    (plugin.TIS_REINFORCE, tis_reinforce, {"max_ratio": 0.9}),
    (plugin.DRO, dro, {}),
    (plugin.DRO, dro, {"tau": 0.05}),
    (plugin.SFT, sft, {}),
    (plugin.SFT, sft, {"tokens": "positive", "weight": 0.5}),
]


def make_batch(mask: list[list[int]], spread: float, seed: int, per_turn: bool = False) -> PolicyLossInput:
    """Policies that differ by ``spread``; advantages of rows, or of each token."""
    generator = torch.Generator().manual_seed(seed)
    mask_bR = torch.tensor(mask).bool()
    shape = mask_bR.shape

    def around(values_bR: Tensor) -> Tensor:
        return (values_bR + spread * torch.randn(shape, generator=generator)).clamp(max=-0.01)

    old_bR = -0.1 - 2 * torch.rand(shape, generator=generator)
    advantages_bR = torch.randn(shape if per_turn else (shape[0], 1), generator=generator).expand(shape)
    batch = PolicyLossInput(
        around(old_bR), old_bR, torch.where(mask_bR, advantages_bR, 0.0), mask_bR,
        rollout_log_probs=around(old_bR), ref_log_probs=around(old_bR),
    )  # fmt: skip
    fillers = {
        name: getattr(batch, name).masked_fill(~mask_bR, math.nan) for name in ("old_log_probs", "ref_log_probs")
    }
    return replace(batch, **fillers)


def far_apart() -> PolicyLossInput:
    """An empty row, and log-ratios up to +-30 for advantages of both signs and 0."""
    batch = make_batch([[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]], 0.3, 5)
    far_bR = torch.tensor([[3.0, -3, 0, 0.5], [0] * 4, [0, -30, 0, 1], [-12.0, 0, 0, 0], [-0.5, 0, 2, -1]])
    log_probs_bR = (batch.old_log_probs + far_bR).clamp(max=-0.01)
    advantages_bR = batch.advantages.clone()
    advantages_bR[4] = 0.0
    rollout_bR = torch.where(far_bR < -10, log_probs_bR - 30, batch.rollout_log_probs)
    return replace(
        batch,
        log_probs=torch.where(batch.response_mask, log_probs_bR, -1.0),
        advantages=advantages_bR,
        rollout_log_probs=rollout_bR,
    )


BATCHES = {
    "single turn": make_batch([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], 0.2, 1),
    "multi-turn with holes": make_batch([[1, 1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 1, 0, 1]], 0.3, 2, per_turn=True),
    "single row": make_batch([[1, 1, 0, 1]], 0.2, 3),
    "single token": make_batch([[0, 1]], 0.2, 4),
    "far apart": far_apart(),
    "nothing sampled": make_batch([[0, 0], [0, 0]], 0.2, 6),
}


def expected(reference: Reference, batch: PolicyLossInput, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Losses [b, R] with 0 under mask 0, and the gradient of their sum."""
    log_probs_bR = batch.log_probs.double().requires_grad_(True)
    places = [[int(t) for t in row.nonzero()] for row in batch.response_mask]
    columns = (batch.old_log_probs, batch.advantages, batch.rollout_log_probs, batch.ref_log_probs)
    rows = [
        [Token(log_probs_bR[i, t], *(float(column[i, t]) for column in columns)) for t in row]
        for i, row in enumerate(places)
    ]
    losses_bR = torch.zeros(log_probs_bR.shape, dtype=torch.float64)
    total = (log_probs_bR * 0).sum()
    if any(places):
        for i, row in enumerate(reference(rows, **options)):
            for t, loss in zip(places[i], row, strict=True):
                losses_bR[i, t] = loss.item()
                total = total + loss
    (gradient_bR,) = torch.autograd.grad(total, log_probs_bR)
    return losses_bR, gradient_bR


def ids() -> Iterator[str]:
    for spec, _, options in TABLE:
        yield "-".join([spec.name, *map(str, options.values())])


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("spec", "reference", "options"), TABLE, ids=list(ids()))
def test_losses_and_gradients_are_those_of_the_paper(
    spec: PluginSpec, reference: Reference, options: dict[str, Any], batch: PolicyLossInput
) -> None:
    case = PolicyLossCase(spec, config=spec.config(**options))
    losses_bR, gradient_bR = expected(reference, batch, options)
    found_bR = torch.where(batch.response_mask, case.losses(batch).losses, 0.0)
    torch.testing.assert_close(found_bR.double(), losses_bR, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(case.gradient(batch).double(), gradient_bR, rtol=1e-5, atol=1e-5)


def test_both_forms_of_gspo_agree_where_a_row_has_one_advantage() -> None:
    batch = BATCHES["single turn"]
    case = PolicyLossCase(plugin.GSPO)
    losses_bR, gradient_bR = expected(gspo_sequence, batch, {})
    torch.testing.assert_close(case.gradient(batch).double(), gradient_bR, rtol=1e-5, atol=1e-5)
    found_bR = torch.where(batch.response_mask, case.losses(batch).losses, 0.0)
    torch.testing.assert_close(found_bR.double(), losses_bR, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", [plugin.DPPO, plugin.TIS_REINFORCE, plugin.DRO], ids=lambda spec: spec.name)
def test_a_missing_source_is_named(spec: PluginSpec) -> None:
    batch = replace(BATCHES["single row"], rollout_log_probs=None, ref_log_probs=None)
    with pytest.raises(ValueError, match=f"{spec.name} needs (rollout|ref)_log_probs"):
        PolicyLossCase(spec).make()(batch)
