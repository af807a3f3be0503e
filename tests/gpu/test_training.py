"""Training on a CUDA device, in bfloat16, with both runtimes: `pytest tests/gpu` on a machine with one GPU.

With ``AGENTRL_GPU_REHEARSAL=1`` the tests run on the CPU, also in bfloat16: that shows that they can run, and nothing
of CUDA.
"""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl_core.config import load_config
from agentrl_core.protocol import DataProto
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.workers.actor import ActorWorker
from agentrl_core.workers.critic import CriticWorker

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_REHEARSAL = DEVICE == "cpu" and os.environ.get("AGENTRL_GPU_REHEARSAL") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu" and not IS_REHEARSAL, reason="torch sees no CUDA device here"),
]
ON_GPU: dict[str, Any] = {
    "cluster.device": DEVICE,
    "model.dtype": "bfloat16",
    "data.batch_size": 4,
    "rollout.n": 8,
    "rollout.max_response_length": 6,
    "actor.optimizer.lr": 1e-2,
    "trainer.steps": 2 if IS_REHEARSAL else 10,
}
PPO: dict[str, Any] = {"algorithm.advantage": "gae", "critic.optimizer.lr": 1e-3, "algorithm.kl_coef": 0.01}
OFFLOAD: dict[str, Any] = {
    f"{role}.{key}": True for role in ("actor", "critic") for key in ("offload_parameters", "offload_optimizer")
}


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)])
@pytest.mark.parametrize("changes", [{}, PPO], ids=["grpo", "ppo"])
def test_bfloat16_trains_and_the_engine_agrees_with_the_actor(
    fit: Callable[..., RunDir], runtime: str, changes: dict[str, Any]
) -> None:
    steps = fit({**ON_GPU, **changes, "cluster.runtime": runtime}).read_metrics()
    assert [step["step"] for step in steps] == list(range(1, ON_GPU["trainer.steps"] + 1))
    for step in steps:
        assert math.isfinite(step["actor/loss"]) and step["actor/skipped_steps"] == 0
        # bfloat16 has 8 bits of precision: the two compute the same in another order.
        assert step["rollout/logprob_gap_mean"] < 0.05
        assert IS_REHEARSAL or step["actor/peak_memory_gib"] > 0
    assert any(step["actor/grad_norm"] > 0 for step in steps)


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same operations on the same numbers give the same bits: CUDA's kernels add in one order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("in_order")
def test_what_waits_on_the_host_changes_no_result(tiny_run: Callable[..., Path]) -> None:
    """Workers in this process and one batch: an engine in between would sample other tokens for a bit that differs.

    Both compute the same float32 operations, and attention is the eager one, because the backward pass of the others
    adds in any order. AdamW may run over other groups of tensors: ten roundings of 2**-24 in each of three steps,
    relative to a step, and up to a hundred times that in the gradients of the next one. What is lost on the way is
    more: with moments that begin again at zero the distance is a fifth of all that has moved.
    """
    exact = {"model.dtype": "float32", "model.compute_dtype": "float32", "model.attn_implementation": "eager"}
    # Of the runtime in which workers may offload.
    changes = {**ON_GPU, **PPO, **exact, "cluster.runtime": "ray"}
    moved = []
    for offload in ({}, OFFLOAD):
        config = load_config(tiny_run({**changes, **offload}))
        for worker in (ActorWorker(config, 100), CriticWorker(config, 100)):
            worker.init_model()
            before = _weights(worker)
            batch = _batch()
            if isinstance(worker, ActorWorker):
                batch.union(worker.compute_log_prob(batch))
            for _ in range(3):
                worker.update(batch)
            moved.append(_weights(worker) - before)
            worker.close()
    for stays, moves in zip(moved[:2], moved[2:], strict=True):
        assert stays.norm() > 0
        assert (stays - moves).norm() <= 3 * 10 * 100 * 2**-24 * stays.norm()


def _weights(worker: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().cpu().flatten() for parameter in worker._backend._model.parameters()])


def _batch() -> DataProto:
    """Eight rows with a prompt of 8 and a response of 4 to 16 tokens."""
    generator = torch.Generator().manual_seed(0)
    mask_BR = torch.arange(16) < torch.randint(4, 17, (8, 1), generator=generator)
    ids_BL = torch.randint(1, 200, (8, 24), generator=generator)
    attention_BL = torch.cat([torch.ones(8, 8), mask_BR], 1).long()
    values_BR = torch.randn(8, 16, generator=generator) * mask_BR
    tensors = {
        "input_ids": ids_BL,
        "attention_mask": attention_BL,
        "position_ids": (attention_BL.cumsum(-1) - 1).clamp(min=0),
        "responses": ids_BL[:, 8:],
        "response_mask": mask_BR,
        "advantages": values_BR,
        "returns": values_BR.flip(0) * mask_BR,
        "values": torch.zeros(8, 16),
        "ref_log_prob": -2.0 * mask_BR,
    }
    return DataProto.from_dict(tensors=tensors, meta_info={"temperature": 1.0, "seed": 0})


@pytest.mark.ray
def test_a_run_whose_models_wait_on_the_host_begins_as_one_whose_models_stay(fit: Callable[..., RunDir]) -> None:
    changes = {**ON_GPU, **PPO, "model.dtype": "float32", "cluster.runtime": "ray", "rollout.deterministic": True}
    changes |= {"trainer.steps": 3}
    stays = fit({**changes, "trainer.name": "stays", "trainer.steps": 1}).read_metrics()
    moves = fit({**changes, **OFFLOAD, "reference.offload_parameters": True, "trainer.name": "moves"}).read_metrics()
    assert len(moves) == 3 and all(math.isfinite(step["actor/loss"] + step["critic/loss"]) for step in moves)
    # Before the first update both have the same weights, whose forward passes add in one order. What is compared are
    # means of numbers of size 1, which bfloat16 rounds to 8 bits.
    for key in ("actor/loss", "critic/loss", "actor/entropy"):
        assert moves[0][key] == pytest.approx(stays[0][key], rel=2**-8, abs=2**-8)


def test_a_checkpoint_of_the_gpu_goes_on(fit: Callable[..., RunDir]) -> None:
    fit({**ON_GPU, "trainer.steps": 2})
    steps = fit({**ON_GPU, "trainer.steps": 3, "trainer.resume": "auto"}).read_metrics()
    assert [step["step"] for step in steps] == [1, 2, 3]


@pytest.mark.ray
@pytest.mark.skipif(
    torch.cuda.device_count() < 2 and not IS_REHEARSAL,
    reason=f"needs 2 CUDA devices, found {torch.cuda.device_count()}",
)
def test_two_gpus_train_on_what_one_does(fit: Callable[..., RunDir]) -> None:
    changes = {**ON_GPU, "model.dtype": "float32", "model.compute_dtype": "float32", "rollout.deterministic": True}
    changes |= {"cluster.runtime": "ray", "trainer.steps": 2}
    one = fit({**changes, "trainer.name": "one"}).read_metrics()[0]
    two = fit({**changes, "trainer.name": "two", "cluster.processes_per_node": 2}).read_metrics()[0]
    for key in ("actor/loss", "actor/grad_norm", "actor/entropy"):
        assert two[key] == pytest.approx(one[key], rel=1e-2, abs=1e-4)
