"""Families of transformers: padded and packed rows against each row alone in the plain model, or a refusal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from agentrl_core.api.errors import AgentRLError
from agentrl_core.workers.actor import ActorWorker

VOCAB = 40
TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "max_position_embeddings": 128,
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 64, "d_model": 32, "ffn_dim": 64,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "word_embed_proj_dim": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "state_size": 8, "time_step_rank": 4, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_n_groups": 1, "mamba_expand": 2, "expand": 2, "is_decoder": True,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
}
PACKED = {
    "apertus", "arcee", "cohere", "ernie4_5", "gemma", "glm", "glm4", "gpt2", "granite", "granitemoe", "helium",
    "hunyuan_v1_dense", "llama", "mixtral", "olmo", "olmo2", "olmoe", "opt",
    "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
}  # fmt: skip
PADDED = {
    "bamba", "cohere2", "deepseek_v3", "exaone4", "falcon_mamba", "gemma2", "gemma3_text", "lfm2", "mamba", "mamba2",
    "minimax", "mistral", "nemotron", "olmo3", "qwen2_moe", "stablelm",
}  # fmt: skip
REFUSED = {"bart", "recurrent_gemma", "roberta", "rwkv"}
EAGER = {"mamba", "mamba2", "falcon_mamba", "rwkv"}
ROWS = [([3, 4, 5, 6, 7, 8], [9, 10, 11], [1, 1, 1]), ([3, 4, 5, 6, 7, 8], [12, 13, 14, 15, 16], [1, 0, 0, 1, 1]),
        ([20, 21, 22], [23, 24], [1, 1])]  # fmt: skip


@pytest.fixture
def make_actor(make_config: Callable[..., Any], tmp_path: Path) -> Callable[[str], ActorWorker]:
    def make(family: str) -> ActorWorker:
        config_class = CONFIG_MAPPING[family]
        known = config_class()
        fields = {name: value for name, value in TINY.items() if hasattr(known, name)}
        fields |= MORE.get(family, {})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_class(**fields))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(tmp_path)
        attention = "eager" if family in EAGER else "sdpa"
        actor = ActorWorker(make_config(path=str(tmp_path), attn_implementation=attention), 1)
        actor.config.data.max_prompt_length = 16
        actor.init_model()
        return actor

    return make


@pytest.mark.parametrize("family", sorted(PACKED | PADDED))
def test_log_probs_are_those_of_each_row_alone(make_actor: Any, make_batch: Any, tmp_path: Path, family: str) -> None:
    actor = make_actor(family)
    assert actor._backend._packing.is_possible is (family in PACKED)
    ours = actor.compute_log_prob(make_batch(ROWS)).batch["old_log_probs"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    for number, (prompt, response, mask) in enumerate(ROWS):
        with torch.no_grad():
            logits = plain(torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(response).unsqueeze(-1)).squeeze(-1)
        sampled = torch.tensor(mask).bool()
        torch.testing.assert_close(ours[number, : len(response)][sampled], expected[sampled], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_a_model_that_reads_padding_is_refused(make_actor: Any, family: str) -> None:
    with pytest.raises(AgentRLError, match="model.path: .* computes something else for a row that has padding"):
        make_actor(family)
