"""Meshes that cannot be, and models that cannot be split: refused before weights are read, with what to do."""

from pathlib import Path

import pytest
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
)

from agentrl_core.api.errors import ConfigError
from agentrl_core.fsdp2.backend import Fsdp2
from agentrl_core.fsdp2.config import Fsdp2Config
from agentrl_core.fsdp2.mesh import Mesh
from agentrl_core.fsdp2.models import empty_causal_lm
from agentrl_core.fsdp2.tensor_parallel import check_model
from tests.fsdp2.ranks import Case, Row, model_config, train_on


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ({"tensor_parallel": 3}, 4, r"make groups of 3 processes, and the run has 4, which is no multiple of 3"),
        ({"tensor_parallel": 2, "sequence_parallel": 2, "replicas": 2}, 4, r"make groups of 8 processes, and .* has 4"),
        ({"tensor_parallel": 2}, 1, r"the run has 1, .*cluster.processes_per_node"),
        ({"expert_parallel": 3}, 8, r"expert_parallel: 3 does not divide the 8 .*; nearest that do: 2, 4"),
        ({"expert_parallel": 4, "replicas": 4}, 8, r"expert_parallel: 4 does not divide the 2 .*; nearest that do: 2$"),
        ({"expert_parallel": 2, "tensor_parallel": 4}, 8, r"2 is no multiple of tensor_parallel=4; set it to 4"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_divide_the_processes(options: dict[str, int], ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=r"- trainer\.backend\.config") as raised:
        Mesh.of(Fsdp2Config(**options), "cpu", 0, ranks)
    assert raised.match(message)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("dense", {"tensor_parallel": 3}, r"3 does not divide num_attention_heads = 8 of Qwen3.*; nearest .*: 2, 4"),
        ("dense", {"tensor_parallel": 8}, r"8 does not divide num_key_value_heads = 4 .*; nearest that do: 4$"),
        ("dense", {"sequence_parallel": 8}, r"sequence_parallel: 8 does not divide num_key_value_heads = 4"),
        ("dense", {"sequence_parallel": 4, "tensor_parallel": 2},
         r"4 does not divide num_key_value_heads / tensor_parallel \(2\) = 2 of .*; nearest that do: 2$"),
        ("experts", {"expert_parallel": 3}, r"3 does not divide number of experts = 4 of Qwen3Moe.*: 2, 4"),
        ("dense", {"expert_parallel": 2}, r"no plan for sending tokens to the experts of Qwen3ForCausalLM"),
    ],
)  # fmt: skip
def test_options_that_do_not_divide_the_model(
    paths: dict[str, str], model: str, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"- trainer\.backend\.config") as raised:
        check_model(empty_causal_lm(paths[model], model_config(paths[model])), Fsdp2Config(**options), "model.path")
    assert raised.match(message)


def test_models_without_a_plan(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    # Its experts are a plan of another kind: every rank masks the router.
    llama = Llama4TextConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, intermediate_size=16, intermediate_size_mlp=16,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    Llama4ForCausalLM(llama).save_pretrained(tmp_path / "llama4")
    for name, option, found in (
        ("gpt2", "tensor_parallel", "no plan for splitting the layers of GPT2LMHeadModel"),
        ("llama4", "expert_parallel", "no plan for sending tokens to the experts of Llama4ForCausalLM"),
    ):
        path = str(tmp_path / name)
        model = empty_causal_lm(path, model_config(path, attn_implementation="eager"))
        with pytest.raises(ConfigError, match=rf"config\.{option}: transformers has {found} \(model\.path\)"):
            check_model(model, Fsdp2Config(**{option: 2}), "model.path")


def test_adapters_are_not_split() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel: 2 with model\.adapter, .*set it to 1, or model\.adapter"):
        Fsdp2.check(Fsdp2Config(tensor_parallel=2), None, True, 2, "model.path")


def test_rows_of_a_model_with_windows_are_not_spread(rows: list[Row], tmp_path: Path) -> None:
    config = Gemma3TextConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, sliding_window=4, max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"sequence_parallel: the tokens of a row of Gemma3.* its masks have windows"):
        train_on(2, Case(str(tmp_path), rows, {"sequence_parallel": 2}))
