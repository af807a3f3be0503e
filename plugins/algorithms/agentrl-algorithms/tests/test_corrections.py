"""Each rollout correction and its metrics against the formulas: float64, plain loops over sampled tokens."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from agentrl_algorithms import plugin
from agentrl_algorithms.config import DivergenceConfig
from agentrl_algorithms.rejection import DivergenceRejection
from agentrl_core.api import AlgorithmContext, ConfigError, CorrectionInput, PluginSpec
from agentrl_testing.contracts import RolloutCorrectionCase

Rows = list[list[tuple[float, float]]]
"""Log-probabilities (pi_old, mu) of the sampled tokens of each row."""
Weights = list[list[float]]


def exp(value: float) -> float:
    """Exponents count to +-20."""
    return math.exp(min(max(value, -20.0), 20.0))


def token_ratios(rows: Rows) -> Weights:
    return [[exp(old - rollout) for old, rollout in row] for row in rows]


def row_ratios(rows: Rows) -> Weights:
    return [[exp(sum(old - rollout for old, rollout in row))] * len(row) for row in rows]


def each(rows: Weights, function: Callable[[float], float]) -> Weights:
    return [[function(weight) for weight in row] for row in rows]


def over_mean_of_tokens(weights: Weights) -> Weights:
    flat = [weight for row in weights for weight in row]
    mean = sum(flat) / len(flat)
    return each(weights, lambda weight: weight / mean if mean else weight)


def over_mean_of_rows(weights: Weights) -> Weights:
    firsts = [row[0] for row in weights if row]
    mean = sum(firsts) / len(firsts)
    return each(weights, lambda weight: weight / mean if mean else weight)


def token_tis(rows: Rows, max_weight: float = 2.0, normalize: bool = False) -> Weights:
    weights = each(token_ratios(rows), lambda ratio: min(ratio, max_weight))
    return over_mean_of_tokens(weights) if normalize else weights


def sequence_tis(rows: Rows, max_weight: float = 2.0, normalize: bool = False) -> Weights:
    weights = each(row_ratios(rows), lambda ratio: min(ratio, max_weight))
    return over_mean_of_rows(weights) if normalize else weights


def token_mis(rows: Rows, max_weight: float = 2.0, normalize: bool = False) -> Weights:
    weights = each(token_ratios(rows), lambda ratio: ratio if ratio <= max_weight else 0.0)
    return over_mean_of_tokens(weights) if normalize else weights


def sequence_mis(rows: Rows, max_weight: float = 2.0, normalize: bool = False) -> Weights:
    weights = each(row_ratios(rows), lambda ratio: ratio if ratio <= max_weight else 0.0)
    return over_mean_of_rows(weights) if normalize else weights


def icepop(rows: Rows, low: float = 0.5, high: float = 5.0, normalize: bool = False) -> Weights:
    weights = each(token_ratios(rows), lambda ratio: ratio if low <= ratio <= high else 0.0)
    return over_mean_of_tokens(weights) if normalize else weights


def sequence_icepop(rows: Rows, low: float = 0.5, high: float = 5.0, normalize: bool = False) -> Weights:
    weights = each(row_ratios(rows), lambda ratio: ratio if low <= ratio <= high else 0.0)
    return over_mean_of_rows(weights) if normalize else weights


def divergence_rejection(
    rows: Rows, limits: dict[str, list[float]], weights: str = "none", max_weight: float = 2.0
) -> Weights:
    """Token by token, from the definitions."""

    def estimate(kind: str, old: float, rollout: float) -> float:
        log = min(max(old - rollout, -20.0), 20.0)
        return {"k1": log, "k2": log * log / 2, "k3": math.exp(log) - 1 - log}[kind]

    kinds = {"none": each(token_ratios(rows), lambda _: 1.0), "token": token_tis(rows, max_weight),
             "sequence": sequence_tis(rows, max_weight)}  # fmt: skip
    made = kinds[weights]
    for name, bounds in limits.items():
        level, kind = name.rsplit("_", 1)
        low, high = (math.log(bounds[0]), math.log(bounds[1])) if kind == "k1" else (-math.inf, bounds[0])
        for number, row in enumerate(rows):
            values = [estimate(kind, old, rollout) for old, rollout in row]
            if values and level != "token":
                one = {"seq_sum": sum(values), "seq_mean": sum(values) / len(values), "seq_max": max(values)}[level]
                values = [one] * len(values)
            made[number] = [weight if low <= d <= high else 0.0 for weight, d in zip(made[number], values, strict=True)]
    return made


def geometric_rejection(
    rows: Rows, low: float = 0.999, high: float = 1.001, max_weight: float | None = None
) -> Weights:
    means = [exp(sum(old - rollout for old, rollout in row) / len(row)) if row else 1.0 for row in rows]
    weights = token_tis(rows, max_weight) if max_weight else each(token_ratios(rows), lambda ratio: 1.0)
    return [[weight * (low <= mean <= high) for weight in row] for mean, row in zip(means, weights, strict=True)]


def percentile_rejection(rows: Rows, keep: float = 0.99) -> Weights:
    differences = sorted(abs(old - rollout) for row in rows for old, rollout in row)
    bound = next(value for count, value in enumerate(differences, 1) if count >= keep * len(differences))
    return [[float(abs(old - rollout) <= bound) for old, rollout in row] for row in rows]


TABLE: list[tuple[PluginSpec, Callable[..., Weights], dict[str, Any]]] = [
    (plugin.TOKEN_TIS, token_tis, {}),
    (plugin.TOKEN_TIS, token_tis, {"max_weight": 1.1, "normalize": True}),
    (plugin.SEQUENCE_TIS, sequence_tis, {}),
    (plugin.SEQUENCE_TIS, sequence_tis, {"max_weight": 5.0, "normalize": True}),
    (plugin.TOKEN_MIS, token_mis, {}),
    (plugin.TOKEN_MIS, token_mis, {"max_weight": 1.1, "normalize": True}),
    (plugin.SEQUENCE_MIS, sequence_mis, {}),
    (plugin.SEQUENCE_MIS, sequence_mis, {"max_weight": 5.0, "normalize": True}),
    (plugin.ICEPOP, icepop, {}),
    (plugin.ICEPOP, icepop, {"low": 0.9, "high": 1.2, "normalize": True}),
    (plugin.SEQUENCE_ICEPOP, sequence_icepop, {}),
    (plugin.SEQUENCE_ICEPOP, sequence_icepop, {"low": 0.8, "high": 1.2, "normalize": True}),
    *(
        (plugin.DIVERGENCE_REJECTION, divergence_rejection, {"limits": {name: bounds}})
        for name, bounds in {
            "token_k1": [0.9, 1.2],
            "seq_sum_k1": [0.7, 1.5],
            "seq_mean_k1": [0.95, 1.02],
            "token_k2": [0.01],
            "seq_sum_k2": [0.05],
            "seq_mean_k2": [0.02],
            "seq_max_k2": [0.03],
            "token_k3": [0.01],
            "seq_sum_k3": [0.05],
            "seq_mean_k3": [0.02],
            "seq_max_k3": [0.03],
        }.items()
    ),
    (
        plugin.DIVERGENCE_REJECTION,
        divergence_rejection,
        {"limits": {"token_k1": [0.8, 1.2], "seq_max_k3": [0.08], "seq_mean_k2": [0.05]}},
    ),
    (
        plugin.DIVERGENCE_REJECTION,
        divergence_rejection,
        {"limits": {"seq_mean_k3": [0.05]}, "weights": "token", "max_weight": 1.1},
    ),
    (
        plugin.DIVERGENCE_REJECTION,
        divergence_rejection,
        {"limits": {"token_k2": [0.02]}, "weights": "sequence", "max_weight": 1.1},
    ),
    (plugin.GEOMETRIC_REJECTION, geometric_rejection, {}),
    (plugin.GEOMETRIC_REJECTION, geometric_rejection, {"low": 0.9, "high": 1.05}),
    (plugin.GEOMETRIC_REJECTION, geometric_rejection, {"low": 0.8, "high": 1.2, "max_weight": 1.1}),
    (plugin.PERCENTILE_REJECTION, percentile_rejection, {}),
    (plugin.PERCENTILE_REJECTION, percentile_rejection, {"keep": 0.6}),
]


def make_batch(mask: list[list[int]], spread: float, seed: int) -> CorrectionInput:
    generator = torch.Generator().manual_seed(seed)
    mask_BR = torch.tensor(mask).bool()
    rollout_BR = -3 * torch.rand(mask_BR.shape, generator=generator)
    old_BR = rollout_BR + spread * torch.randn(mask_BR.shape, generator=generator)
    rollout_BR = rollout_BR.masked_fill(~mask_BR, math.nan)
    return CorrectionInput(old_BR, rollout_BR, mask_BR, torch.where(mask_BR, 0, -1))


def far_apart() -> CorrectionInput:
    batch = make_batch([[1, 1, 1], [0, 0, 0], [1, 0, 1], [0, 1, 0]], 0.1, 4)
    batch.old_log_probs[0, 1] += 40
    batch.old_log_probs[2, 0] -= 40
    return batch


BATCHES = {
    "single turn": make_batch([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], 0.1, 1),
    "multi-turn with holes": make_batch([[1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1], [1, 0, 1, 1, 1, 1]], 0.3, 2),
    "single row": make_batch([[1, 1, 0, 1]], 0.2, 3),
    "single token": make_batch([[0, 1]], 0.2, 5),
    "far apart": far_apart(),
}


def rows_of(batch: CorrectionInput) -> Rows:
    tokens = zip(batch.old_log_probs, batch.rollout_log_probs, batch.response_mask, strict=True)
    return [list(zip(old[mask].tolist(), rollout[mask].tolist(), strict=True)) for old, rollout, mask in tokens]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def expected_metrics(rows: Rows, weights: Weights) -> dict[str, float]:
    rows, weights = [row for row in rows if row], [row for row in weights if row]
    differences = [old - rollout for row in rows for old, rollout in row]
    flat = [weight for row in weights for weight in row]
    squares = mean([weight**2 for weight in flat])
    return {
        "kl": mean([-difference for difference in differences]),
        "k3_kl": mean([exp(difference) - 1 - difference for difference in differences]),
        "chi2_token": mean([exp(2 * difference) for difference in differences]) - 1,
        "chi2_seq": mean([exp(2 * sum(old - rollout for old, rollout in row)) for row in rows]) - 1,
        "rollout_ppl": mean([exp(-mean([rollout for _, rollout in row])) for row in rows]),
        "training_ppl": mean([exp(-mean([old for old, _ in row])) for row in rows]),
        "weight_mean": mean(flat),
        "ess": mean(flat) ** 2 / squares if squares else 0.0,
        "rejected_share": mean([float(weight == 0) for weight in flat]),
    }


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    ("spec", "reference", "options"),
    TABLE,
    ids=["-".join([spec.name, *map(str, options.values())]) for spec, _, options in TABLE],
)
def test_weights_and_metrics_are_those_of_the_formulas(
    spec: PluginSpec, reference: Callable[..., Weights], options: dict[str, Any], batch: CorrectionInput
) -> None:
    rows = rows_of(batch)
    weights = reference(rows, **options)
    output = RolloutCorrectionCase(spec, config=spec.config(**options)).correct(batch)
    expected_BR = torch.zeros(batch.response_mask.shape)
    expected_BR[batch.response_mask] = torch.tensor([weight for row in weights for weight in row])
    torch.testing.assert_close(output.weights, expected_BR, rtol=1e-5, atol=1e-5)
    assert output.metrics == pytest.approx(expected_metrics(rows, weights), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "limits: name at least one of token_k1"),
        ({"seq_max_k1": [0.5, 2.0]}, "limits.seq_max_k1: unknown; allowed: token_k1, seq_sum_k1"),
        ({"token_k1": [2.0]}, r"limits.token_k1: found \[2.0\]; write \[smallest ratio, largest ratio\]"),
        ({"token_k1": [2.0, 0.5]}, "limits.token_k1: found"),
        ({"seq_sum_k3": [0.1, 0.2]}, "limits.seq_sum_k3: found .* write the largest divergence"),
        ({"token_k2": [-1.0]}, "limits.token_k2: found"),
    ],
)
def test_limits_that_mean_nothing_are_refused(limits: dict[str, list[float]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DivergenceRejection(DivergenceConfig(limits), AlgorithmContext(group_size=2))
