import pytest
import torch

from agentrl_core.api import ConfigError
from agentrl_core.workers.actor import ActorWorker
from agentrl_core.workers.reference import ReferenceWorker


def test_is_the_initial_policy_and_stays_it(make_config, make_batch, rows):
    config = make_config()
    actor, reference = ActorWorker(config, 10), ReferenceWorker(config)
    actor.init_model()
    reference.init_model()
    batch = make_batch(rows)
    first = actor.compute_log_prob(batch).batch["old_log_probs"]
    assert torch.equal(reference.compute_ref_log_prob(batch).batch["ref_log_prob"], first)
    batch.batch["old_log_probs"], batch.batch["advantages"] = first, batch.batch["response_mask"].float()
    actor.update(batch)
    assert torch.equal(reference.compute_ref_log_prob(batch).batch["ref_log_prob"], first)


def test_missing_reference_path_names_its_key(make_config, tmp_path):
    config = make_config()
    config.reference.path = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="reference.path: .*nowhere"):
        ReferenceWorker(config).init_model()
