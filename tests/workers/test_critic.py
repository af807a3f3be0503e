import pytest
import torch

from agentrl_core.algorithms.value import explained_variance
from agentrl_core.api import CheckpointError, ConfigError
from agentrl_core.workers.critic import CriticWorker
from agentrl_core.workers.micro_batching import columns_of, micro_batches


@pytest.fixture
def make_critic(make_config):
    def make(**config) -> CriticWorker:
        critic = CriticWorker(make_config(**config), total_optimizer_steps=100)
        critic.init_model()
        return critic

    return make


@pytest.fixture
def batch(make_batch, rows):
    """Returns that a value function can learn: they depend on the row."""
    made = make_batch(rows)
    mask = made.batch["response_mask"]
    returns = torch.linspace(-1, 1, len(made))[:, None] * mask
    made.batch["returns"], made.batch["values"] = returns, torch.zeros_like(returns)
    return made


def train(critic: CriticWorker, batch, steps: int) -> list[dict[str, float]]:
    metrics = []
    for step in range(steps):
        batch.meta_info["seed"] = step
        batch.batch["values"] = critic.compute_values(batch).batch["values"]
        found = [batch.batch[name] for name in ("values", "returns", "response_mask")]
        metrics.append(critic.update(batch) | {"critic/explained_variance": explained_variance(*found)})
    return metrics


def test_a_new_critic_says_zero(make_critic, batch):
    assert not make_critic().compute_values(batch).batch["values"].any()


def test_updates_explain_the_returns(make_critic, batch):
    critic = make_critic(critic={"mini_batches": 2, "micro_batch_tokens": 60})
    metrics = train(critic, batch, 15)
    assert metrics[-1]["critic/loss"] < 0.5 * metrics[0]["critic/loss"]
    assert metrics[0]["critic/explained_variance"] == pytest.approx(0, abs=1e-6)
    assert metrics[-1]["critic/explained_variance"] > 0.5
    assert metrics[-1].keys() == {
        "critic/loss", "critic/explained_variance", "critic/grad_norm", "critic/lr", "critic/value_mean",
        "critic/skipped_steps", "critic/clip_fraction",
    }  # fmt: skip


def test_a_value_is_read_before_its_token_is_sampled(make_critic, batch):
    critic = make_critic()
    train(critic, batch, 3)
    batch.batch["response_mask"] = batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :].bool()
    before = critic.compute_values(batch).batch["values"]
    width_p, place = batch.batch["prompts"].shape[1], 2
    for name, column in (("responses", place), ("input_ids", width_p + place)):
        batch.batch[name][:, column] = (batch.batch[name][:, column] + 1) % 40
    after = critic.compute_values(batch).batch["values"]
    torch.testing.assert_close(before[:, : place + 1], after[:, : place + 1])
    assert not torch.equal(before[:, place + 1 :], after[:, place + 1 :])


def test_values_do_not_depend_on_micro_batches(make_critic, batch, tmp_path):
    critic = make_critic(critic={"micro_batch_tokens": 1})
    train(critic, batch, 2)
    critic.save_checkpoint(str(tmp_path))
    whole = make_critic(critic={"micro_batch_tokens": 10_000, "path": str(tmp_path)})
    torch.testing.assert_close(
        critic.compute_values(batch).batch["values"], whole.compute_values(batch).batch["values"], atol=1e-5, rtol=0
    )


def test_a_masked_value_of_100_changes_nothing_in_the_critics_update(make_critic, batch):
    results = []
    mask = batch.batch["response_mask"]
    for filler in (0.0, 100.0, float("nan")):
        for name in ("values", "returns"):
            batch.batch[name] = torch.where(mask, batch.batch[name], filler)
        results.append(make_critic().update(batch))
    assert results[0] == results[1] == results[2]


def test_a_checkpoint_continues_bit_for_bit(make_critic, batch, tmp_path):
    original = make_critic()
    train(original, batch, 2)
    original.save_checkpoint(str(tmp_path / "critic"))
    resumed = make_critic()
    resumed.load_checkpoint(str(tmp_path / "critic"))
    assert train(original, batch, 2) == train(resumed, batch, 2)


@pytest.mark.parametrize("file", ["training/.metadata", "training/__0_0.distcp"])
@pytest.mark.parametrize("damage", ["corrupt", "missing"])
def test_a_corrupt_checkpoint_is_named(make_critic, tmp_path, file, damage):
    critic = make_critic()
    critic.save_checkpoint(str(tmp_path))
    if damage == "missing":
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        critic.load_checkpoint(str(tmp_path))


def test_missing_critic_path_names_its_key(make_config, tmp_path):
    with pytest.raises(ConfigError, match="critic.path: .*nowhere"):
        CriticWorker(make_config(critic={"path": str(tmp_path / "nowhere")}), 1).init_model()


def test_gradients_are_finite(make_critic, batch):
    critic = make_critic(gradient_checkpointing=True)
    train(critic, batch, 1)
    (micro,) = micro_batches(columns_of(batch, ("values", "returns"), "test"), 10_000)
    critic._backend._model(micro)[0].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in critic._backend._model.parameters() if p.grad is not None)
