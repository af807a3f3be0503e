"""The roles as the trainer uses them: through a worker group."""

from typing import cast

import pytest
import torch

from agentrl_core.controller import ClassWithInitArgs, LocalWorkerGroup
from agentrl_core.workers.actor import ActorWorker
from agentrl_core.workers.critic import CriticWorker
from agentrl_core.workers.protocols import Actor, Critic, Reference
from agentrl_core.workers.reference import ReferenceWorker


def test_one_step_through_groups(make_config, make_batch, rows, tmp_path):
    config = make_config(algorithm={"kl_coef": 0.1})
    actor = cast(Actor, LocalWorkerGroup(ClassWithInitArgs(ActorWorker, config, 10)))
    critic = cast(Critic, LocalWorkerGroup(ClassWithInitArgs(CriticWorker, config, 10)))
    reference = cast(Reference, LocalWorkerGroup(ClassWithInitArgs(ReferenceWorker, config)))
    for group in (actor, critic, reference):
        group.init_model()

    batch = make_batch(rows)
    for result in (
        actor.compute_log_prob(batch),
        reference.compute_ref_log_prob(batch),
        critic.compute_values(batch),
    ):
        batch = batch.union(result)
    mask = batch.batch["response_mask"]
    assert torch.equal(batch.batch["old_log_probs"], batch.batch["ref_log_prob"])
    batch.batch["advantages"] = batch.batch["returns"] = mask.float()

    (critic_metrics,) = critic.update(batch)
    (actor_metrics,) = actor.update(batch)
    assert critic_metrics["critic/loss"] == pytest.approx(0.5)
    assert actor_metrics["actor/pg_loss"] == pytest.approx(-1, abs=1e-5)
    assert actor_metrics["actor/kl"] == pytest.approx(0, abs=1e-5)
    assert sum(bucket.nbytes for bucket in actor.weight_buckets(2**20)) > 0
    for group, name in ((actor, "actor"), (critic, "critic")):
        group.save_checkpoint(str(tmp_path / name))
        group.load_checkpoint(str(tmp_path / name))


@pytest.mark.parametrize(
    ("role", "worker"), [(Actor, ActorWorker), (Critic, CriticWorker), (Reference, ReferenceWorker)]
)
def test_workers_register_every_method_of_their_role(role, worker, make_config):
    arguments = () if worker is ReferenceWorker else (10,)
    group = LocalWorkerGroup(ClassWithInitArgs(worker, make_config(), *arguments))
    methods = [name for name in vars(role) if not name.startswith("_")]
    assert methods and all(callable(getattr(group, name)) for name in methods)
