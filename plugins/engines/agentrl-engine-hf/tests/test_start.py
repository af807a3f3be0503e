import asyncio

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl_core.api.engine import SamplingParams
from agentrl_core.api.errors import EngineError
from agentrl_core.api.plugin import KINDS
from agentrl_engine_hf.plugin import PLUGIN

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


async def start(serve, module=None, **context):
    async with serve(module, **context) as engine:
        return await engine.generate([1, 2, 3], SamplingParams(4, seed=0), "r")


def test_sliding_window_models_are_refused_by_name(serve) -> None:
    module = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=64)).eval()
    with pytest.raises(EngineError, match="'mistral'.*sliding_attention.*window: 64, max_model_len: 256"):
        asyncio.run(start(serve, module))


def test_a_window_that_no_sequence_can_leave_is_served(serve, reference_log_probs) -> None:
    module = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=256)).eval()
    output = asyncio.run(start(serve, module))
    assert output.log_probs == pytest.approx(reference_log_probs(module, [1, 2, 3], output.token_ids), abs=2e-5)


def test_hybrid_models_are_refused_by_name(serve) -> None:
    config = Qwen3Config(
        **SMALL, use_sliding_window=True, sliding_window=16, layer_types=["full_attention", "sliding_attention"]
    )
    with pytest.raises(EngineError, match="'qwen3'.*sliding_attention"):
        asyncio.run(start(serve, Qwen3ForCausalLM(config).eval()))


def test_recurrent_models_are_refused_by_name(serve) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    module = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, state_size=4)).eval()
    with pytest.raises(EngineError, match="'mamba'"):
        asyncio.run(start(serve, module))


def test_other_attention_implementations_are_refused(serve) -> None:
    module = Qwen3ForCausalLM(Qwen3Config(**SMALL)).eval()
    module.set_attn_implementation("flex_attention")
    with pytest.raises(EngineError, match="attn_implementation='flex_attention'.*sdpa, eager"):
        asyncio.run(start(serve, module))


def test_eager_attention_is_served(serve, reference_log_probs) -> None:
    module = Qwen3ForCausalLM(Qwen3Config(**SMALL)).eval()
    module.set_attn_implementation("eager")
    output = asyncio.run(start(serve, module))
    assert output.log_probs == pytest.approx(reference_log_probs(module, [1, 2, 3], output.token_ids), abs=2e-5)


def test_a_missing_model_path_is_named(serve, tmp_path) -> None:
    with pytest.raises(EngineError, match="model.path: .*nowhere is not a directory"):
        asyncio.run(start(serve, model_path=str(tmp_path / "nowhere")))


def test_the_plugin_declares_what_its_kind_knows() -> None:
    assert set(KINDS["engine"].capabilities) >= PLUGIN.capabilities
    assert PLUGIN.factory == "agentrl_engine_hf.engine:HFEngine"


def test_attention_of_cudnn_is_off_where_the_engine_computes(serve) -> None:
    """A setting of the process: on CUDA torch would try cuDNN first, which takes a second for each new shape."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    asyncio.run(start(serve, Qwen3ForCausalLM(Qwen3Config(**SMALL)).eval()))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
