"""LoRA adapters in actor and critic, against PEFT and transformers on their own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl_core.api import CheckpointError, ConfigError
from agentrl_core.config.schema import AdapterConfig, ResolvedConfig
from agentrl_core.fsdp2.adapters import adapter_tensors, add_adapter, peft_config
from agentrl_core.fsdp2.model_files import save_merged
from agentrl_core.fsdp2.models import empty_causal_lm, load_causal_lm
from agentrl_core.plugins.resolution import resolve
from agentrl_core.workers.actor import ActorWorker
from agentrl_core.workers.critic import CriticWorker

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture
def make_worker(make_config: Callable[..., Any]) -> Callable[..., Any]:
    def make(cls: type = ActorWorker, adapter: dict[str, Any] | None = None, **config: Any) -> Any:
        made = make_config(adapter=AdapterConfig(**{"rank": 4, **(adapter or {})}), **config)
        # As `bind` leaves it.
        made.__class__ = ResolvedConfig
        made.rollout.engine.resolved = resolve("engine", "hf")
        made.algorithm.advantage.resolved = resolve("advantage_estimator", "grpo")
        worker = cls(made, 100)
        worker.init_model()
        return worker

    return make


@pytest.fixture
def trained(make_batch: Callable[..., Any], rows: Any) -> Callable[[Any, int], Any]:
    """Updates an actor so many times; the batch."""

    def train(actor: ActorWorker, updates: int = 3) -> Any:
        batch = make_batch(rows)
        mask = batch.batch["response_mask"]
        batch.batch["advantages"] = torch.where(
            mask, torch.randn(mask.shape, generator=torch.Generator().manual_seed(1)), 0.0
        )
        for _ in range(updates):
            batch.batch["old_log_probs"] = log_probs(actor, batch)
            actor.update(batch)
        return batch

    return train


def log_probs(actor: ActorWorker, batch: Any) -> torch.Tensor:
    found: torch.Tensor = actor.compute_log_prob(batch).batch["old_log_probs"]
    return found


def reference_log_probs(model: Any, batch: Any) -> torch.Tensor:
    """[B, R] of a model, row by row and without padding; 0 under mask 0."""
    mask, width = batch.batch["response_mask"], batch.batch["prompts"].shape[1]
    found = torch.zeros(mask.shape)
    for row in range(len(mask)):
        seen = batch.batch["attention_mask"][row].bool()
        ids = batch.batch["input_ids"][row][seen][None]
        with torch.no_grad():
            table = model(input_ids=ids).logits.float().log_softmax(-1)[0]
        prompt = int(seen[:width].sum())
        for place in range(ids.shape[1] - prompt):
            if mask[row, place]:
                found[row, place] = table[prompt + place - 1, ids[0, prompt + place]]
    return found


def test_a_new_adapter_changes_nothing_and_alone_is_trained(make_worker: Any, model_path: str, trained: Any) -> None:
    actor = make_worker()
    base = load_file(Path(model_path) / "model.safetensors")
    batch = trained(actor, 0)
    plain = AutoModelForCausalLM.from_pretrained(model_path)
    torch.testing.assert_close(log_probs(actor, batch), reference_log_probs(plain, batch), **CLOSE)
    trained(actor)
    own = {name.replace(".base_layer.", "."): tensor for name, tensor in actor.module.state_dict().items()}
    assert all(torch.equal(own[name], tensor) for name, tensor in base.items())
    moved = [name for name, parameter in actor.module.named_parameters() if parameter.requires_grad]
    assert len(moved) == 2 * 2 * 7 and all(".lora_" in name for name in moved)
    assert (log_probs(actor, batch) - reference_log_probs(plain, batch)).abs().max() > 0.01


def test_peft_loads_what_a_checkpoint_has(make_worker: Any, model_path: str, trained: Any, tmp_path: Path) -> None:
    actor = make_worker(adapter={"alpha": 12.0, "targets": ["q_proj", "down_proj"]})
    batch = trained(actor)
    actor.save_checkpoint(str(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "training",
    }  # fmt: skip
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path), tmp_path)
    torch.testing.assert_close(log_probs(actor, batch), reference_log_probs(loaded, batch), **CLOSE)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["target_modules"]) == (4, 12.0, ["down_proj", "q_proj"])


def test_engines_without_adapters_get_them_merged(
    make_worker: Any, model_path: str, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResolvedConfig, "serves_adapters", False)
    actor = make_worker()
    batch = trained(actor)
    plain = AutoModelForCausalLM.from_pretrained(model_path)
    names = set(load_file(Path(model_path) / "model.safetensors"))
    (path,) = actor.weight_files()
    from_file = load_file(path)
    from_buckets = {
        name: torch.from_numpy(data.copy()).view(getattr(torch, dtype)).view(shape)
        for bucket in actor.weight_buckets(10_000)
        for name, shape, dtype, data in bucket.tensors()
    }
    assert names == set(from_file) == set(from_buckets)
    assert all(torch.equal(from_file[name], tensor) for name, tensor in from_buckets.items())
    plain.load_state_dict(from_file, strict=False)
    torch.testing.assert_close(log_probs(actor, batch), reference_log_probs(plain, batch), **CLOSE)
    assert actor.adapter() is None


def test_engines_with_adapters_get_nothing_else(
    make_worker: Any, trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResolvedConfig, "serves_adapters", True)
    actor = make_worker()
    trained(actor)
    actor.save_checkpoint(str(tmp_path))
    stored = load_file(tmp_path / "adapter_model.safetensors")
    (path,) = actor.weight_files()
    sent = load_file(path)
    assert sent.keys() == stored.keys() and all(torch.equal(sent[name], stored[name]) for name in sent)
    adapter = actor.adapter()
    assert adapter is not None and adapter.name == "policy" and adapter.config["r"] == 4


@pytest.mark.parametrize("starts", ["new", "stored"])
def test_the_reference_is_the_policy_before_the_run(
    make_worker: Any, model_path: str, trained: Any, tmp_path: Path, starts: str
) -> None:
    initial = AutoModelForCausalLM.from_pretrained(model_path)
    path = None
    if starts == "stored":
        path = str(tmp_path / "first")
        torch.manual_seed(3)
        initial = get_peft_model(
            initial, LoraConfig(r=3, lora_alpha=7, target_modules=["v_proj", "up_proj"], init_lora_weights=False)
        )
        initial.save_pretrained(path)
    actor = make_worker(adapter={"path": path}, algorithm={"kl_coef": 0.1})
    batch = trained(actor, 0)
    expected = reference_log_probs(initial.eval(), batch)
    torch.testing.assert_close(log_probs(actor, batch), expected, **CLOSE)
    batch.batch["ref_log_prob"] = expected
    mask = batch.batch["response_mask"]
    batch.batch["advantages"] = torch.where(mask, 1.0, 0.0)
    for _ in range(2):
        batch.batch["old_log_probs"] = log_probs(actor, batch)
        actor.update(batch)
    torch.testing.assert_close(actor.compute_ref_log_prob(batch).batch["ref_log_prob"], expected, **CLOSE)
    moved = (log_probs(actor, batch) - expected).abs().max()
    assert moved > 0.01
    # The update goes on as before: the reference has left no adapter off and no matrix frozen.
    batch.batch["old_log_probs"] = log_probs(actor, batch)
    before = log_probs(actor, batch)
    actor.update(batch)
    assert (log_probs(actor, batch) - before).abs().max() > 1e-4


def test_dropout_leaves_the_generator_that_others_draw_from(make_worker: Any, trained: Any) -> None:
    actor = make_worker(adapter={"dropout": 0.2})
    before = torch.get_rng_state()
    trained(actor, 1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_resumed_actor_goes_on_bit_for_bit(make_worker: Any, trained: Any, tmp_path: Path, dropout: float) -> None:
    adapter = {"dropout": dropout}
    through, first, second = (make_worker(adapter=adapter) for _ in range(3))
    trained(through, 4)
    trained(first, 2)
    first.save_checkpoint(str(tmp_path))
    second.load_checkpoint(str(tmp_path))
    # As what else runs in the process may.
    torch.rand(3)
    trained(second, 2)
    for name, tensor in through.module.state_dict().items():
        assert torch.equal(second.module.state_dict()[name], tensor), name


def test_a_critic_trains_its_head_and_its_own_adapter(
    make_worker: Any, make_batch: Any, rows: Any, tmp_path: Path
) -> None:
    critic, again = (make_worker(CriticWorker) for _ in range(2))
    batch = make_batch(rows)
    batch.batch["values"] = critic.compute_values(batch).batch["values"]
    batch.batch["returns"] = torch.where(batch.batch["response_mask"], 1.0, 0.0)
    for _ in range(5):
        critic.update(batch)
    values = critic.compute_values(batch).batch["values"]
    assert values.abs().max() > 0
    named = critic._backend._model.named_parameters()
    moved = {name: parameter for name, parameter in named if parameter.requires_grad}
    assert any("value_head" in name for name in moved) and any(".lora_B" in name for name in moved)
    assert any(parameter.any() for name, parameter in moved.items() if ".lora_B" in name)
    critic.save_checkpoint(str(tmp_path))
    assert {"adapter_model.safetensors", "value_head.safetensors"} <= {file.name for file in tmp_path.iterdir()}
    again.load_checkpoint(str(tmp_path))
    torch.testing.assert_close(again.compute_values(batch).batch["values"], values, atol=0, rtol=0)


def test_a_base_in_bfloat16_keeps_the_adapter_in_float32(make_worker: Any, trained: Any) -> None:
    actor = make_worker(dtype="bfloat16", compute_dtype="bfloat16")
    batch = trained(actor)
    dtypes = {".lora_" in name: parameter.dtype for name, parameter in actor.module.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    assert log_probs(actor, batch).dtype == torch.float32


def test_an_adapter_is_read_exactly_into_a_model_in_bfloat16(model_path: str, make_config: Any, tmp_path: Path) -> None:
    model = load_causal_lm(model_path, make_config(dtype="bfloat16").model, "model.path")
    described = peft_config(model, AdapterConfig(rank=2))
    tensors = adapter_tensors(add_adapter(model, described, None, 1))
    stored = {name: torch.rand(tensor.shape) for name, tensor in tensors.items()}
    save_file(stored, tmp_path / "adapter_model.safetensors")
    model = load_causal_lm(model_path, make_config(dtype="bfloat16").model, "model.path")
    found = adapter_tensors(add_adapter(model, described, str(tmp_path), 1))
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())


def test_gradients_do_not_depend_on_recomputed_activations(make_worker: Any, trained: Any) -> None:
    plain, recomputing = make_worker(), make_worker(gradient_checkpointing=True)
    trained(plain)
    trained(recomputing)
    for name, tensor in plain.module.state_dict().items():
        torch.testing.assert_close(recomputing.module.state_dict()[name], tensor, **CLOSE)


def test_a_merged_model_is_one_of_transformers(make_worker: Any, model_path: str, trained: Any, tmp_path: Path) -> None:
    actor = make_worker()
    batch = trained(actor)
    actor.save_checkpoint(str(tmp_path / "adapter"))
    save_merged(str(tmp_path / "adapter"), str(tmp_path / "whole"), model_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(log_probs(actor, batch), reference_log_probs(whole, batch), **CLOSE)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_prj"], "model.adapter.targets: Qwen3ForCausalLM has no linear layer 'q_prj'; nearest: q_proj"),
        (["lm_head"], "no linear layer 'lm_head'"),
        ([], "model.adapter.targets: expected at least one of down_proj"),
    ],
)
def test_targets_that_do_not_exist(make_worker: Any, targets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_worker(adapter={"targets": targets})


def _stored(model_path: str, path: Path, **config: Any) -> Path:
    wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(model_path), LoraConfig(r=2, **config))
    wrapped.save_pretrained(path)
    return path


def test_an_adapter_that_cannot_be_trained_is_refused(make_worker: Any, model_path: str, tmp_path: Path) -> None:
    dora = _stored(model_path, tmp_path / "dora", target_modules=["q_proj"], use_dora=True)
    with pytest.raises(ConfigError, match=r"model\.adapter\.path: .*adapter_config\.json sets use_dora"):
        make_worker(adapter={"path": str(dora)})
    other = _stored(model_path, tmp_path / "other", target_modules=["q_proj"])
    tensors = load_file(other / "adapter_model.safetensors")
    save_file(
        {name: tensor[:, :1].contiguous() for name, tensor in tensors.items()}, other / "adapter_model.safetensors"
    )
    with pytest.raises(ConfigError, match="is an adapter of another model than model.path, or .* has the shape"):
        make_worker(adapter={"path": str(other)})
    (other / "adapter_model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors cannot be read"):
        make_worker(adapter={"path": str(other)})


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj"], "use_rslora": True, "lora_alpha": 3},
        {"target_modules": r".*self_attn\.(q|v)_proj"},
        {"target_modules": ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]},
        {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    ],
    ids=["rslora", "a pattern", "whole names", "orthogonal"],
)
def test_an_adapter_of_peft_computes_as_peft_loads_it(
    make_worker: Any, model_path: str, make_batch: Any, rows: Any, tmp_path: Path, config: dict[str, Any]
) -> None:
    _stored(model_path, tmp_path, **{"init_lora_weights": False, **config})
    batch = make_batch(rows)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path), tmp_path)
    actor = make_worker(adapter={"path": str(tmp_path)})
    torch.testing.assert_close(log_probs(actor, batch), reference_log_probs(loaded, batch), **CLOSE)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"init_lora_weights": "pissa"}, "sets init_lora_weights=pissa"),
        ({"init_lora_weights": "olora"}, "sets init_lora_weights=olora"),
        ({"layers_to_transform": [1]}, "sets layers_to_transform"),
        ({"exclude_modules": r".*layers\.0\..*"}, "or of some of its layers only: it lacks .*layers.0"),
    ],
)
def test_an_adapter_whose_model_differs_is_refused(
    make_worker: Any, model_path: str, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    _stored(model_path, tmp_path, target_modules=["q_proj"], **config)
    with pytest.raises(ConfigError, match=message):
        make_worker(adapter={"path": str(tmp_path)})


def test_a_critic_gets_a_new_adapter_with_the_settings_of_a_stored_one(
    make_worker: Any, model_path: str, tmp_path: Path
) -> None:
    _stored(model_path, tmp_path, target_modules=["q_proj"], init_lora_weights=False)
    critic = make_worker(CriticWorker, adapter={"path": str(tmp_path)})
    adapter = {name: tensor for name, tensor in critic._backend._model.state_dict().items() if ".lora_" in name}
    assert len(adapter) == 4 and all(2 in tensor.shape and ".q_proj." in name for name, tensor in adapter.items())
    assert not any(tensor.any() for name, tensor in adapter.items() if ".lora_B" in name)


def test_a_checkpoint_whose_adapter_has_another_factor_is_refused(make_worker: Any, tmp_path: Path) -> None:
    make_worker(adapter={"alpha": 8.0}).save_checkpoint(str(tmp_path))
    make_worker(adapter={"alpha": 8.0}).load_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"lora_alpha: 8\.0 -> 32\.0"):
        make_worker().load_checkpoint(str(tmp_path))


def test_a_model_without_linear_layers_is_refused(make_worker: Any, tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.adapter\.targets: GPT2LMHeadModel has no linear layers"):
        make_worker(path=str(tmp_path))


def test_fused_experts_are_left_alone_where_dense_layers_have_their_names(
    make_worker: Any, trained: Any, tmp_path: Path
) -> None:
    config = Qwen3MoeConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        mlp_only_layers=[0], initializer_range=0.2, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    actor = make_worker(path=str(tmp_path / "model"))
    batch = trained(actor)
    actor.save_checkpoint(str(tmp_path / "adapter"))
    save_merged(str(tmp_path / "adapter"), str(tmp_path / "whole"), str(tmp_path / "model"))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(log_probs(actor, batch), reference_log_probs(whole, batch), atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="PEFT takes 'up_proj' of Qwen3MoeForCausalLM for its fused experts"):
        make_worker(path=str(tmp_path / "model"), adapter={"targets": ["q_proj", "up_proj"]})


def test_the_seed_decides_a_new_adapter(model_path: str, make_config: Any) -> None:
    def matrices(seed: int) -> dict[str, torch.Tensor]:
        model = load_causal_lm(model_path, make_config().model, "model.path")
        torch.rand(seed + 1)
        add_adapter(model, peft_config(model, AdapterConfig(rank=2)), None, seed)
        return {name: tensor for name, tensor in model.state_dict().items() if ".lora_A" in name}

    first, same, other = matrices(1), matrices(1), matrices(2)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_no_adapter_of_a_model_without_weights_has_some(
    model_path: str, make_config: Callable[..., Any], tmp_path: Path
) -> None:
    """A rank other than the first and ``agentrl plan`` hold no weights: a file of them is not for their memory."""
    _stored(model_path, tmp_path, init_lora_weights=False)
    model = empty_causal_lm(model_path, make_config().model)
    described = peft_config(model, AdapterConfig(path=str(tmp_path)))
    for policy in ("one", "two"):
        add_adapter(model, described, str(tmp_path), 0, policy=policy, keep_initial=True)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Layers as wide as a block of weights in 4 bits."""
    path = str(tmp_path_factory.mktemp("wide"))
    config = Qwen3Config(
        vocab_size=40, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True,
        initializer_range=0.1, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize(("bits", "share"), [("4bit", 0.65), ("8bit", 0.75)])
def test_a_quantized_base_is_trained_through_its_adapter(
    make_worker: Any,
    wide_model: str,
    trained: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bits: str,
    share: float,
) -> None:
    monkeypatch.setattr(ResolvedConfig, "serves_adapters", True)
    actor, whole = make_worker(path=wide_model, quantize=bits, algorithm={"kl_coef": 0.1}), make_worker(path=wide_model)
    batch = trained(actor, 0)
    linear = [name for name, _ in actor.module.named_parameters() if "base_layer" in name]
    sizes = [sum(dict(each.module.named_parameters())[name].nbytes for name in linear) for each in (actor, whole)]
    assert sizes[0] < share * sizes[1] and not any(actor.module.get_parameter(name).requires_grad for name in linear)
    before = log_probs(actor, batch)
    assert 1e-4 < (before - log_probs(whole, batch)).abs().max() < 3
    reference = actor.compute_ref_log_prob(batch).batch["ref_log_prob"]
    torch.testing.assert_close(reference, before, **CLOSE)
    mask = batch.batch["response_mask"]
    batch.batch["ref_log_prob"], batch.batch["advantages"] = reference, torch.where(mask, 1.0, 0.0)
    batch.batch["old_log_probs"] = before
    for _ in range(3):
        actor.update(batch)
    after = log_probs(actor, batch)
    assert after[mask].mean() > before[mask].mean() + 0.01
    torch.testing.assert_close(actor.compute_ref_log_prob(batch).batch["ref_log_prob"], reference, **CLOSE)
    actor.save_checkpoint(str(tmp_path))
    again = make_worker(path=wide_model, quantize=bits)
    again.load_checkpoint(str(tmp_path))
    torch.testing.assert_close(log_probs(again, batch), after, **CLOSE)
