"""A model's weights on their way out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl_core.api import ArrayBucket, EngineError
from agentrl_core.api.training_backend import TrainingContext
from agentrl_core.fsdp2.weights import ModelWeights
from agentrl_core.workers.outgoing import OutgoingWeights


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 3)
        self.norm = torch.nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.empty = torch.nn.Parameter(torch.empty(0))
        self.head = torch.nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_file_of_a_model_is_its_weights_after_every_update(dtype: torch.dtype) -> None:
    model = Tied().to(dtype)
    file = ModelWeights(model)
    try:
        first = file.write_file()
        for _ in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_()
            assert file.write_file() == first
            tensors = load_file(first[0])
            assert set(tensors) == {"embed.weight", "norm", "empty"}
            assert all(torch.equal(tensors[name], model.state_dict()[name]) for name in tensors)
        model.norm = torch.nn.Parameter(torch.zeros(7, dtype=dtype))
        with pytest.raises(EngineError, match=r"norm \[7\].* is not the first update's"):
            file.write_file()
    finally:
        file.close()
    assert not Path(first[0]).exists()


@pytest.fixture
def experts() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=50, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
            head_dim=8, num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
            decoder_sparse_step=1,
        )
    )  # fmt: skip


def restored(buckets: list[ArrayBucket]) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(data.copy()).view(getattr(torch, dtype)).view(shape)
        for bucket in buckets
        for name, shape, dtype, data in bucket.tensors()
    }


def sent(weights: ModelWeights, bucket_bytes: int) -> list[ArrayBucket]:
    """As engines get them."""
    backend: Any = SimpleNamespace(
        weights=weights.buckets, context=TrainingContext("actor", "tokens", True, "", "", 0, 0)
    )
    return list(OutgoingWeights(backend).buckets(bucket_bytes))


@pytest.mark.parametrize("bucket_bytes", [0, 4000, 2**20])
def test_a_mixture_of_experts_leaves_as_its_checkpoint_has_it(
    experts: Qwen3MoeForCausalLM, tmp_path: Path, bucket_bytes: int
) -> None:
    """Engines refused the fused experts: the model has no such tensor."""
    weights = ModelWeights(experts)
    for version in range(2):
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.add_(version)
        experts.save_pretrained(tmp_path)
        expected = load_file(tmp_path / "model.safetensors")
        assert "model.layers.1.mlp.experts.3.gate_proj.weight" in expected
        buckets = sent(weights, bucket_bytes)
        layout = weights.layout(bucket_bytes)
        for found in (restored(buckets), load_file(weights.write_file()[0])):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert [(each.names, each.shapes) for each in layout] == [(each.names, each.shapes) for each in buckets]
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()["model.layers.0.mlp.experts.gate_up_proj"],
        experts.state_dict()["model.layers.0.mlp.experts.gate_up_proj"],
    )
    weights.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_leave_in_the_data_type_of_the_engines(experts: Qwen3MoeForCausalLM, dtype: torch.dtype) -> None:
    """What an engine of that data type would hold: the trainer's weights, cast, but for what stays in float32."""
    type(experts)._keep_in_fp32_modules_strict, before = ["input_layernorm"], type(experts)._keep_in_fp32_modules_strict
    try:
        experts._keep_in_fp32_modules_strict = {"input_layernorm"}
        stored = restored(sent(ModelWeights(experts), 2**20))
        weights = ModelWeights(experts, dtype)
    finally:
        type(experts)._keep_in_fp32_modules_strict = before
    expected = {name: tensor if "input_layernorm" in name else tensor.to(dtype) for name, tensor in stored.items()}
    assert {tensor.dtype for tensor in expected.values()} == {torch.float32, dtype}
    for found in (restored(sent(weights, 2000)), load_file(weights.write_file()[0])):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
                   for name, tensor in expected.items())  # fmt: skip
    sizes = [bucket.nbytes for bucket in weights.layout(2**20)]
    assert sizes == [bucket.nbytes for bucket in sent(weights, 2**20)]
    weights.close()


def test_the_file_of_a_plain_model_is_cast_too() -> None:
    model = Tied()
    file = ModelWeights(model, torch.bfloat16)
    tensors = load_file(file.write_file()[0])
    file.close()
    assert {name: tensor.dtype for name, tensor in tensors.items()} == dict.fromkeys(tensors, torch.bfloat16)
    assert torch.equal(tensors["embed.weight"], model.embed.weight.to(torch.bfloat16))
