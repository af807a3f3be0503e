"""Training on a CUDA device, in bfloat16, with both runtimes: `pytest tests/gpu` on a machine with one GPU."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from agentrl_core.runs.run_dir import RunDir

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
ON_GPU: dict[str, Any] = {
    "cluster.device": "cuda",
    "model.dtype": "bfloat16",
    "data.batch_size": 4,
    "rollout.n": 8,
    "rollout.max_response_length": 6,
    "actor.optimizer.lr": 1e-2,
    "trainer.steps": 10,
}
PPO: dict[str, Any] = {"algorithm.advantage": "gae", "critic.optimizer.lr": 1e-3, "algorithm.kl_coef": 0.01}


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)])
@pytest.mark.parametrize("changes", [{}, PPO], ids=["grpo", "ppo"])
def test_bfloat16_trains_and_the_engine_agrees_with_the_actor(
    fit: Callable[..., RunDir], runtime: str, changes: dict[str, Any]
) -> None:
    steps = fit({**ON_GPU, **changes, "cluster.runtime": runtime}).read_metrics()
    assert [step["step"] for step in steps] == list(range(1, 11))
    for step in steps:
        assert math.isfinite(step["actor/loss"]) and step["actor/skipped_steps"] == 0
        # bfloat16 has 8 bits of precision: the two compute the same in another order.
        assert step["rollout/logprob_gap_mean"] < 0.05
        assert step["actor/peak_memory_gib"] > 0
    assert any(step["actor/grad_norm"] > 0 for step in steps)


@pytest.mark.ray
def test_what_waits_on_the_host_changes_no_result(fit: Callable[..., RunDir]) -> None:
    changes = {**ON_GPU, **PPO, "model.dtype": "float32", "cluster.runtime": "ray", "rollout.deterministic": True}
    offload = {
        f"{role}.{key}": True for role in ("actor", "critic") for key in ("offload_parameters", "offload_optimizer")
    }
    stays = fit({**changes, "trainer.name": "stays", "trainer.steps": 3}).read_metrics()
    moves = fit(
        {**changes, **offload, "reference.offload_parameters": True, "trainer.name": "moves", "trainer.steps": 3}
    ).read_metrics()
    for first, second in zip(stays, moves, strict=True):
        assert second["actor/loss"] == pytest.approx(first["actor/loss"], abs=1e-4)
        assert second["critic/loss"] == pytest.approx(first["critic/loss"], abs=1e-4)


def test_a_checkpoint_of_the_gpu_goes_on(fit: Callable[..., RunDir]) -> None:
    fit({**ON_GPU, "trainer.steps": 2})
    steps = fit({**ON_GPU, "trainer.steps": 3, "trainer.resume": "auto"}).read_metrics()
    assert [step["step"] for step in steps] == [1, 2, 3]


@pytest.mark.ray
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 CUDA devices, found {torch.cuda.device_count()}")
def test_two_gpus_train_on_what_one_does(fit: Callable[..., RunDir]) -> None:
    changes = {**ON_GPU, "model.dtype": "float32", "model.compute_dtype": "float32", "rollout.deterministic": True}
    changes |= {"cluster.runtime": "ray", "trainer.steps": 2}
    one = fit({**changes, "trainer.name": "one"}).read_metrics()[0]
    two = fit({**changes, "trainer.name": "two", "cluster.processes_per_node": 2}).read_metrics()[0]
    for key in ("actor/loss", "actor/grad_norm", "actor/entropy"):
        assert two[key] == pytest.approx(one[key], rel=1e-2, abs=1e-4)
