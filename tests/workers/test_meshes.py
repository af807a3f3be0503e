"""Workers on a mesh of processes of Ray do what one process does: rows, results and metrics of each part count once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_core.controller import ClassWithInitArgs, LocalRuntime
from agentrl_core.controller.runtime import Runtime
from agentrl_core.fsdp2.config import Fsdp2Config

pytestmark = pytest.mark.ray


def roles(config: Any) -> dict[str, ClassWithInitArgs]:
    from agentrl_core.workers.actor import ActorWorker
    from agentrl_core.workers.critic import CriticWorker

    return {
        "actor": ClassWithInitArgs(ActorWorker, config, 100),
        "critic": ClassWithInitArgs(CriticWorker, config, 100),
    }


def roles_of_stages(config: Any) -> dict[str, ClassWithInitArgs]:
    """The same, where only the last of two ranks knows what the model says, as in a pipeline."""
    import torch.distributed as dist

    from agentrl_core.api.training_backend import DataShare, Outputs
    from agentrl_core.fsdp2.backend import Fsdp2
    from agentrl_core.workers.actor import ActorWorker
    from agentrl_core.workers.critic import CriticWorker

    class Stages(Fsdp2):
        def _make_mesh(self) -> None:
            return None

        @property
        def share(self) -> DataShare:
            return DataShare(0, 1, counts=self.context.rank == 1)

        def forward(self, micros: Any, wanted: Any) -> Any:
            for outputs in super().forward(micros, wanted):
                yield outputs if self.share.counts else Outputs()

        def forward_backward(self, micros: Any, wanted: Any, loss: Any) -> None:
            if self.share.counts:
                super().forward_backward(micros, wanted, loss)

        def optimizer_step(self, lr: float, max_norm: float) -> float:
            for parameter in self._optimizer.parameters:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.broadcast(parameter.grad, 1)
            return super().optimizer_step(lr, max_norm)

    class Actor(ActorWorker):
        def _build(self, context: Any) -> Any:
            return Stages(self.config.trainer.backend.config, context)

    class Critic(CriticWorker):
        def _build(self, context: Any) -> Any:
            return Stages(self.config.trainer.backend.config, context)

    return {"actor": ClassWithInitArgs(Actor, config, 100), "critic": ClassWithInitArgs(Critic, config, 100)}


@pytest.mark.parametrize(
    ("roles_of", "ranks", "options"),
    [(roles, 4, {"tensor_parallel": 2}), (roles_of_stages, 2, {})],
    ids=["tensor parallel", "stages"],
)
def test_a_mesh_of_workers_is_one_worker(
    make_config: Callable[..., Any], ray_runtime: Runtime, make_batch: Callable[..., Any], rows: list[Any],
    roles_of: Callable[[Any], dict[str, ClassWithInitArgs]], ranks: int, options: dict[str, int],
) -> None:  # fmt: skip
    update = {"mini_batches": 2, "epochs": 2, "micro_batch_tokens": 40, "grad_clip": 0.5}
    found = []
    with LocalRuntime() as local:
        for runtime, size, own, made in ((local, 1, {}, roles), (ray_runtime, ranks, options, roles_of)):
            config = make_config(algorithm={"entropy_coef": 0.01}, actor=update, critic=update)
            config.trainer.backend.config = Fsdp2Config(**own)
            groups = runtime.colocated_worker_groups(made(config), processes_per_node=size)
            for group in groups.values():
                group.init_model()
            found.append([step(groups, make_batch(chosen)) for chosen in (rows, rows[:3], rows[:1])])
            for group in groups.values():
                group.close()
    for (metrics, columns, weights), (its_metrics, its_columns, its_weights) in zip(*found, strict=True):
        assert its_metrics == pytest.approx(metrics, abs=1e-5, rel=1e-4)
        for name, column in columns.items():
            torch.testing.assert_close(its_columns[name], column, atol=1e-5, rtol=0)
        for name, tensor in weights.items():
            np.testing.assert_allclose(its_weights[name], tensor, atol=1e-5, rtol=0, err_msg=name)


def step(groups: Any, batch: Any) -> tuple[dict[str, float], dict[str, torch.Tensor], dict[str, Any]]:
    batch.union(groups["actor"].compute_log_prob(batch))
    batch.union(groups["critic"].compute_values(batch))
    mask = batch.batch["response_mask"]
    generator = torch.Generator().manual_seed(7)
    columns = {name: batch.batch[name].clone() for name in ("old_log_probs", "values")}
    batch.batch["advantages"] = torch.randn(mask.shape, generator=generator) * mask
    batch.batch["returns"] = torch.randn(mask.shape, generator=generator) * mask
    metrics = groups["critic"].update(batch)[0] | groups["actor"].update(batch)[0]
    weights = {
        name: data.view(np.float32).reshape(shape).copy()
        for bucket in groups["actor"].weight_buckets(10_000)
        for name, shape, _, data in bucket.tensors()
    }
    return metrics, columns, weights
