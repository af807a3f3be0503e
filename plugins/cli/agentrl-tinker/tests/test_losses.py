"""Losses against references in float64, written from Tinker's documentation: values, and gradients by the tokens."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_tinker.client import Model, datum
from agentrl_tinker.losses import LOSSES, loss_named
from agentrl_tinker.refusals import Refusal

Arrays = dict[str, np.ndarray]
Reference = Callable[[np.ndarray, Arrays, dict[str, float]], tuple[np.ndarray, np.ndarray]]


def cross_entropy(lp: np.ndarray, x: Arrays, s: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    return -lp * x["weights"], -x["weights"]


def importance_sampling(lp: np.ndarray, x: Arrays, s: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    loss = -np.exp(lp - x["logprobs"]) * x["advantages"]
    return loss, loss


def ppo(
    lp: np.ndarray, x: Arrays, s: dict[str, float], log_ratio: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    ratio = np.exp(lp - x["logprobs"] if log_ratio is None else log_ratio)
    objectives = np.stack([ratio, np.clip(ratio, s["clip_low_threshold"], s["clip_high_threshold"])]) * x["advantages"]
    # Where the clipped one is strictly smaller, nothing depends on the model any more.
    return -objectives.min(0), np.where(objectives[1] < objectives[0], 0.0, -objectives[0])


def cispo(lp: np.ndarray, x: Arrays, s: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    ratio = np.clip(np.exp(lp - x["logprobs"]), s["clip_low_threshold"], s["clip_high_threshold"])
    return -ratio * lp * x["advantages"], -ratio * x["advantages"]


def dro(lp: np.ndarray, x: Arrays, s: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    gap = lp - x["logprobs"]
    return -(lp * x["advantages"] - 0.5 * s["beta"] * gap**2), -(x["advantages"] - s["beta"] * gap)


def gspo(lp: np.ndarray, x: Arrays, s: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    counted = x["sequence_ratio_mask"] == 1
    return ppo(lp, x, s, np.full_like(lp, (lp - x["logprobs"])[counted].mean()))


CASES: list[tuple[str, Reference, dict[str, float]]] = [
    ("cross_entropy", cross_entropy, {}),
    ("importance_sampling", importance_sampling, {}),
    ("ppo", ppo, {}),
    ("ppo", ppo, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
    ("cispo", cispo, {}),
    ("cispo", cispo, {"clip_low_threshold": 0.0, "clip_high_threshold": 3.0}),
    ("dro", dro, {"beta": 0.3}),
    ("gspo", gspo, {"clip_low_threshold": 0.97, "clip_high_threshold": 1.01}),
    ("gspo", gspo, {"clip_low_threshold": 0.2, "clip_high_threshold": 5.0}),
]
DEFAULTS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def inputs_for(name: str, log_probs: np.ndarray, seed: int) -> Arrays:
    """Ratios between about 0.4 and 2.5 on both sides of every threshold, advantages of both signs."""
    random = np.random.default_rng(seed)
    made = {
        "weights": random.normal(size=len(log_probs)),
        "logprobs": log_probs + random.uniform(-0.9, 0.9, len(log_probs)),
        "advantages": random.normal(size=len(log_probs)),
        "sequence_ratio_mask": np.array([0.0] + [1.0] * (len(log_probs) - 1)),
    }
    return {key: made[key].astype(np.float32) for key in LOSSES[name].inputs}


@pytest.mark.parametrize(("name", "reference", "settings"), CASES)
def test_values_and_gradients_by_tokens(name: str, reference: Reference, settings: dict[str, float]) -> None:
    log_probs = np.random.default_rng(1).uniform(-4, -0.1, 40).astype(np.float32)
    inputs = inputs_for(name, log_probs, 2)
    loss, values = loss_named(name, settings)
    variable = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    found = loss.of(variable, {key: torch.tensor(value, dtype=torch.float64) for key, value in inputs.items()}, values)
    found.backward()
    wide = {key: value.astype(np.float64) for key, value in inputs.items()}
    wanted, gradient = reference(log_probs.astype(np.float64), wide, DEFAULTS | settings)
    assert float(found.detach()) == pytest.approx(wanted.sum(), rel=1e-12)
    np.testing.assert_allclose(variable.grad, gradient, rtol=1e-9, atol=1e-12)


def test_the_server_sums_over_tokens_and_datums(serve: Callable[..., Any]) -> None:
    rows = [([1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7]), ([9, 8, 7], [8, 7, 6]), ([40] * 20, [41] * 20)]

    async def scenario(server: Any) -> None:
        trained = await Model.create(server.one, server.model, await server.one.session())
        blank = [datum(ids, targets, weights=[0.0] * len(ids)) for ids, targets in rows]
        log_probs = (await trained.forward(blank)).log_probs
        assert [len(each) for each in log_probs] == [6, 3, 20]
        for name, reference, settings in CASES:
            inputs = [inputs_for(name, each, seed) for seed, each in enumerate(log_probs)]
            data = [datum(*row, **x) for row, x in zip(rows, inputs, strict=True)]
            found = await trained.train(data, name, **settings)
            wanted = sum(
                reference(lp.astype(np.float64), {k: v.astype(np.float64) for k, v in x.items()}, DEFAULTS | settings)[
                    0
                ].sum()
                for lp, x in zip(log_probs, inputs, strict=True)
            )
            assert found.loss == pytest.approx(wanted, rel=1e-5, abs=1e-5), name
            for left, right in zip(found.log_probs, log_probs, strict=True):
                # The same rows in the same batches.
                np.testing.assert_array_equal(left, right)

    serve(scenario)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mse", {}, "this server has no loss 'mse', it has cross_entropy, importance_sampling, ppo, cispo, dro, gspo"),
        ("stable_reinforce", {}, "its objective is not published"),
        ("custom", {}, "forward_backward_custom computes them in the client"),
        ("ppo", {"clip_ratio": 0.2}, "ppo has no setting clip_ratio; it has clip_low_threshold, clip_high_threshold"),
        ("cross_entropy", {"beta": 1.0}, "cross_entropy has no setting beta; it has none"),
        ("dro", {}, "dro needs beta"),
        ("gspo", {"clip_low_threshold": 0.9}, "gspo needs clip_high_threshold"),
        ("ppo", {"clip_high_threshold": 0.2}, "are ratios, such as 0.8 and 1.2"),
    ],
)
def test_what_a_loss_does_not_have_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal, match=message.replace("(", "\\(")):
        loss_named(name, settings)
