import math
import os
import pickle
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoModelForCausalLM

from agentrl_core.algorithms.aggregation import Aggregation
from agentrl_core.api import CheckpointError, ConfigError, ProtocolError, WorkerError
from agentrl_core.config.schema import OptimizerConfig
from agentrl_core.controller.worker import WorkerContext, worker_context
from agentrl_core.workers.actor import OPTIONAL_COLUMNS, ActorWorker, update_columns
from agentrl_core.workers.micro_batching import narrowed


@pytest.fixture
def make_actor(make_config):
    def make(steps: int = 100, **config) -> ActorWorker:
        actor = ActorWorker(make_config(**config), total_optimizer_steps=steps)
        actor.init_model()
        return actor

    return make


@pytest.fixture
def trainable(make_batch, rows):
    """A batch with the actor's own log-probs and with advantages, as the trainer hands it over."""

    def make(actor: ActorWorker, filler: float = 0.0, **columns):
        batch = make_batch(rows)
        mask = batch.batch["response_mask"]
        generator = torch.Generator().manual_seed(1)
        advantages = torch.randn(mask.shape, generator=generator)
        noise = 0.3 * torch.randn(mask.shape, generator=generator)
        old = actor.compute_log_prob(batch).batch["old_log_probs"] + noise
        columns = {"old_log_probs": old, "advantages": advantages, **columns}
        for name, column in columns.items():
            batch.batch[name] = torch.where(mask, column, filler)
        return batch

    return make


def weights(actor: ActorWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.module.state_dict().items()}


def gradients_of_one_update(actor: ActorWorker, batch, monkeypatch) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradients that the optimizer is given, and the update's metrics."""
    seen = {}

    def record(self, closure=None):
        seen.update({name: p.grad.clone() for name, p in actor.module.named_parameters() if p.grad is not None})

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", record)
        metrics = actor.update(batch)
    return seen, metrics


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_micro_batches_give_the_gradient_of_the_full_batch(make_actor, trainable, monkeypatch, aggregation):
    results = []
    for tokens in (1, 40, 10_000):
        actor = make_actor(
            algorithm={"aggregation": aggregation, "kl_coef": 0.1, "entropy_coef": 0.01},
            actor={"micro_batch_tokens": tokens, "grad_clip": 1e9},
        )
        mask_shape = trainable(actor).batch["response_mask"].shape
        batch = trainable(actor, ref_log_prob=torch.full(mask_shape, -3.0))
        results.append(gradients_of_one_update(actor, batch, monkeypatch))
    (single, single_metrics), (packed, packed_metrics), (full, full_metrics) = results
    assert full and full_metrics["actor/grad_norm"] > 0
    for name, gradient in full.items():
        # Float32 rounds relative to the summands, and a sum over tokens has far larger ones than a mean.
        scale = float(gradient.abs().max())
        torch.testing.assert_close(single[name], gradient, atol=5e-6 * scale, rtol=1e-5)
        torch.testing.assert_close(packed[name], gradient, atol=5e-6 * scale, rtol=1e-5)
    assert single_metrics == pytest.approx(full_metrics, rel=1e-4, abs=1e-6)
    assert packed_metrics == pytest.approx(full_metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("filler", [-1e4, math.nan, math.inf])
def test_what_stands_under_mask_zero_changes_no_metric_and_no_weight(make_actor, trainable, filler):
    results = []
    for fill in (0.0, filler):
        actor = make_actor(algorithm={"kl_coef": 0.1, "entropy_coef": 0.01})
        shape = trainable(actor).batch["response_mask"].shape
        metrics = actor.update(trainable(actor, filler=fill, ref_log_prob=torch.full(shape, -3.0)))
        results.append((metrics, weights(actor)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(tensor, results[1][1][name]) for name, tensor in results[0][1].items())


def test_rows_without_a_sampled_token_change_nothing(make_actor, trainable):
    whole, fewer = make_actor(), make_actor()
    batch = trainable(whole)
    kept = [row for row in range(len(batch)) if batch.batch["response_mask"][row].any()]
    assert len(kept) < len(batch)
    metrics_whole, metrics_fewer = whole.update(batch), fewer.update(batch.select_idxs(kept))
    assert metrics_whole == pytest.approx(metrics_fewer, rel=1e-4, abs=1e-6)


def test_the_denominator_is_that_of_the_mini_batch(make_actor, trainable):
    still = {"optimizer": OptimizerConfig(lr=1e-12)}
    actor = make_actor(actor={"mini_batches": 100, **still})
    batch = trainable(actor)
    sampled = batch.batch["response_mask"].any(-1).nonzero().squeeze(-1).tolist()
    each = [make_actor(actor=still).update(batch.select_idxs([row])) for row in sampled]
    metrics = actor.update(batch)
    assert len(sampled) > 2
    for name in ("actor/loss", "actor/grad_norm"):
        assert metrics[name] == pytest.approx(np.mean([one[name] for one in each]), rel=1e-4, abs=1e-7)


def test_all_zero_mask_is_finite_and_makes_no_step(make_actor, trainable):
    actor = make_actor()
    batch = trainable(actor)
    batch.batch["response_mask"] = torch.zeros_like(batch.batch["response_mask"])
    before = weights(actor)
    metrics = actor.update(batch)
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(actor).items())


def test_updates_make_rewarded_tokens_more_likely(make_actor, make_batch, rows):
    actor = make_actor(actor={"epochs": 2, "mini_batches": 2, "micro_batch_tokens": 60})
    batch = make_batch(rows)
    mask = batch.batch["response_mask"]
    batch.batch["advantages"] = mask.float()
    first = None
    for step in range(5):
        batch.meta_info["seed"] = step
        batch.batch["old_log_probs"] = actor.compute_log_prob(batch).batch["old_log_probs"]
        first = batch.batch["old_log_probs"] if first is None else first
        metrics = actor.update(batch)
    last = actor.compute_log_prob(batch).batch["old_log_probs"]
    assert float(last[mask].mean()) > float(first[mask].mean()) + 0.1
    assert {"actor/loss", "actor/pg_loss", "actor/entropy", "actor/clip_fraction", "actor/ppo_kl", "actor/grad_norm",
            "actor/lr", "actor/skipped_steps"} <= metrics.keys()  # fmt: skip
    assert "actor/kl" not in metrics


def test_kl_term_pulls_towards_the_reference_and_is_logged(make_actor, trainable):
    actor = make_actor(algorithm={"kl_coef": 1.0, "kl_estimator": "k2"})
    batch = trainable(actor)
    mask = batch.batch["response_mask"]
    reference = torch.where(mask, batch.batch["old_log_probs"] + 0.5, 0.0)
    batch.batch["advantages"] = torch.zeros_like(reference)
    batch.batch["ref_log_prob"] = reference
    metrics = actor.update(batch)
    assert metrics["actor/loss"] == pytest.approx(metrics["actor/kl"], rel=1e-5)
    assert actor.update(batch)["actor/kl"] < metrics["actor/kl"]


def test_entropy_bonus_raises_the_entropy(make_actor, trainable):
    actor = make_actor(algorithm={"entropy_coef": 1.0})
    batch = trainable(actor)
    batch.batch["advantages"] = torch.zeros_like(batch.batch["advantages"])
    first = actor.update(batch)
    assert first["actor/loss"] == pytest.approx(-first["actor/entropy"], rel=1e-5)
    assert actor.update(batch)["actor/entropy"] > first["actor/entropy"]


def test_compute_log_prob_returns_entropies_only_where_asked_for(make_actor, make_batch, rows):
    actor, batch = make_actor(), make_batch(rows)
    assert set(actor.compute_log_prob(batch).batch.keys()) == {"old_log_probs"}
    batch.meta_info["calculate_entropy"] = True
    assert set(actor.compute_log_prob(batch).batch.keys()) == {"old_log_probs", "entropys"}


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_order_of_rows_follows_from_the_seed_alone(make_actor, trainable, gradient_checkpointing):
    def run(seed: int) -> dict[str, float]:
        actor = make_actor(actor={"mini_batches": 3}, gradient_checkpointing=gradient_checkpointing)
        batch = trainable(actor)
        batch.meta_info["seed"] = seed
        torch.manual_seed(seed + 17)
        return actor.update(batch)

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_a_checkpoint_continues_bit_for_bit(make_actor, trainable, tmp_path):
    settings = {"actor": {"mini_batches": 2}}
    original = make_actor(**settings)
    batch = trainable(original)
    original.update(batch)
    original.save_checkpoint(str(tmp_path / "actor"))
    resumed = make_actor(**settings)
    module = resumed.module
    resumed.load_checkpoint(str(tmp_path / "actor"))
    assert resumed.module is module
    for _ in range(2):
        assert original.update(batch) == resumed.update(batch)
    after = weights(resumed)
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights(original).items())


@pytest.mark.parametrize("file", ["training/.metadata", "training/__0_0.distcp"])
@pytest.mark.parametrize("damage", ["corrupt", "missing"])
def test_a_corrupt_checkpoint_is_named(make_actor, tmp_path, file, damage):
    actor = make_actor()
    path = tmp_path / "actor"
    actor.save_checkpoint(str(path))
    if damage == "missing":
        (path / file).unlink()
    else:
        (path / file).write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=str(path)):
        actor.load_checkpoint(str(path))


def test_a_checkpoint_is_loaded_by_transformers(make_actor, trainable, tmp_path):
    actor = make_actor()
    actor.update(trainable(actor))
    actor.save_checkpoint(str(tmp_path / "out"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in weights(actor).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [1, 5000, 2**30])
def test_weight_buckets_hold_every_weight_once(make_actor, dtype, bucket_bytes):
    actor = make_actor(dtype=dtype)
    buckets = actor.weight_buckets(bucket_bytes)
    received = {}
    for bucket in buckets:
        assert bucket.nbytes <= bucket_bytes or len(bucket.names) == 1
        offset = 0
        for name, shape, kind in zip(bucket.names, bucket.shapes, bucket.dtypes, strict=True):
            assert name not in received
            torch_dtype = getattr(torch, kind)
            size = int(np.prod(shape)) * torch_dtype.itemsize
            raw = torch.from_numpy(bucket.data[offset : offset + size].copy())
            received[name] = raw.view(torch_dtype).view(shape)
            offset += size
        assert offset == bucket.nbytes
    expected = weights(actor)
    assert expected.keys() - received.keys() == {"lm_head.weight"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in received.items())


def test_a_loss_that_is_not_finite_names_the_micro_batch_and_changes_nothing(make_actor, trainable):
    actor = make_actor(actor={"micro_batch_tokens": 1})
    batch = trainable(actor)
    batch.batch["advantages"][0, 0] = math.nan
    before = weights(actor)
    with pytest.raises(
        WorkerError, match=r"actor's loss is not finite \(loss nan.*micro-batch of 1 rows .*\(rows 0 of"
    ):
        actor.update(batch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(actor).items())


def test_missing_model_directory_is_a_config_error(make_config, tmp_path):
    actor = ActorWorker(make_config(path=str(tmp_path / "nowhere")), 1)
    with pytest.raises(ConfigError, match="model.path: .*nowhere' is not a directory on node .*hf download"):
        actor.init_model()


def test_directory_without_a_model_is_a_config_error(make_config, tmp_path):
    with pytest.raises(ConfigError, match="model.path: transformers cannot load a model"):
        ActorWorker(make_config(path=str(tmp_path)), 1).init_model()


def test_missing_weights_are_not_filled_with_random_numbers(make_config, model_path, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    state = model.state_dict()
    del state["model.norm.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match="lack 1 tensors of Qwen3ForCausalLM, 'model.norm.weight'"):
        ActorWorker(make_config(path=str(tmp_path)), 1).init_model()


def test_dropout_of_the_model_is_switched_off(make_config, model_path, tmp_path, make_batch, rows):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path)
    actor = ActorWorker(make_config(path=str(tmp_path)), 1)
    actor.init_model()
    batch = make_batch(rows)
    plain = actor.compute_log_prob(batch).batch["old_log_probs"]
    actor.module.train()
    assert torch.equal(actor.compute_log_prob(batch).batch["old_log_probs"], plain)


def test_missing_facts_are_named(make_actor, trainable):
    actor = make_actor(algorithm={"kl_coef": 0.1})
    batch = trainable(actor)
    with pytest.raises(ProtocolError, match="ref_log_prob"):
        actor.update(batch)
    del batch.meta_info["temperature"]
    with pytest.raises(ProtocolError, match="temperature"):
        actor.update(batch)


def test_several_ranks_in_one_process_are_refused(make_config):
    with worker_context(WorkerContext(rank=1, world_size=2)):
        actor = ActorWorker(make_config(), 1)
    with pytest.raises(WorkerError, match="2 ranks in one process.*cluster.runtime=ray"):
        actor.init_model()


def test_an_unresolved_policy_loss_is_a_config_error(make_config):
    config = make_config()
    config.algorithm.loss.resolved = None
    with pytest.raises(ConfigError, match="load_config"):
        ActorWorker(config, 1).init_model()


def test_200_small_steps_move_float32_weights_that_compute_in_bfloat16(make_config, trainable):
    """A learning rate of 1e-6 is below half of a bfloat16 weight's last digit: pure bfloat16 stays where it is."""
    moved = {}
    for name, model in {
        "master weights": {"dtype": "float32", "compute_dtype": "bfloat16"},
        "pure bfloat16": {"dtype": "bfloat16"},
    }.items():
        config = make_config(actor={"optimizer": OptimizerConfig(lr=1e-6)}, **model)
        actor = ActorWorker(config, total_optimizer_steps=200)
        actor.init_model()
        batch, before = trainable(actor), weights(actor)
        for step in range(200):
            batch.meta_info["seed"] = step
            actor.update(batch)
        after = weights(actor)
        changed = sum(int((after[key] != tensor).sum()) for key, tensor in before.items())
        moved[name] = changed / sum(tensor.numel() for tensor in before.values())
        largest = max(float((after[key] - tensor).abs().max()) for key, tensor in before.items())
        if name == "master weights":
            assert 5e-5 < largest < 4e-4
    assert moved["master weights"] > 0.95
    assert moved["pure bfloat16"] < 0.2


def test_one_process_computes_in_bfloat16_and_keeps_float32(make_actor, make_batch, rows):
    single, mixed = make_actor(), make_actor(compute_dtype="bfloat16")
    batch = make_batch(rows)
    plain, rounded = (actor.compute_log_prob(batch).batch["old_log_probs"] for actor in (single, mixed))
    assert 1e-4 < float((plain - rounded).abs().max()) < 0.3
    assert {parameter.dtype for parameter in mixed.module.parameters()} == {torch.float32}
    assert mixed.module(torch.tensor([[3, 4]])).logits.dtype == torch.bfloat16


class Malicious:
    """Its pickle runs a command where it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.file}",)


def test_a_checkpoint_cannot_run_code_where_it_is_resumed(make_actor, tmp_path):
    actor = make_actor()
    actor.save_checkpoint(str(tmp_path / "actor"))
    (tmp_path / "actor" / "training" / ".metadata").write_bytes(pickle.dumps(Malicious(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"contains posix.system, which no checkpoint of torch does"):
        actor.load_checkpoint(str(tmp_path / "actor"))
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_in_torchs_checkpoint_code_is_a_checkpoint_error(make_actor, tmp_path, monkeypatch):
    """What torch raises there is a BaseException."""

    def full(*args, **kwargs):
        raise CheckpointException("write", {0: (OSError(28, "No space left on device"), None)})

    monkeypatch.setattr("agentrl_core.fsdp2.checkpoints.save", full)
    with pytest.raises(CheckpointError, match="training: .*No space left on device"):
        make_actor().save_checkpoint(str(tmp_path / "actor"))


def test_attention_of_cudnn_is_off_where_a_worker_computes(make_config):
    """A setting of the process: on CUDA torch would try cuDNN first, with NaN gradients and a second a shape."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    ActorWorker(make_config(), 1)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_an_update_of_what_the_trainer_sends_is_the_same_in_half_the_bytes(make_actor, trainable):
    """Columns that it does not read stay on the driver, and the others travel as small as they are."""
    whole = trainable(make_actor())
    whole.batch["rm_scores"] = torch.randn(whole.batch["response_mask"].shape)
    whole.non_tensor_batch["messages"] = np.array(["long " * 100] * len(whole), dtype=object)
    sent = narrowed(whole, (*update_columns(make_actor().config), *OPTIONAL_COLUMNS))

    def size(batch) -> int:
        return sum(batch.batch[name].nbytes for name in batch.batch.keys())

    assert size(sent) < 0.5 * size(whole) and not sent.non_tensor_batch.keys() - {"uid"}
    results = []
    for batch in (whole, sent):
        actor = make_actor()
        results.append((actor.update(batch), weights(actor)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(tensor, results[1][1][name]) for name, tensor in results[0][1].items())
