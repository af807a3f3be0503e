"""What vLLM is told, and what is said where it cannot start."""

import asyncio
import json
import os
import sys
from typing import Any

import pytest

from agentrl_core.api import EngineContext, SamplingParams
from agentrl_core.api.errors import EngineError
from agentrl_engine_vllm.config import VLLMConfig
from agentrl_engine_vllm.engine import VLLMEngine, make_engine
from agentrl_engine_vllm.launch import engine_arguments, environment, kv_cache_bytes

MODEL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}


def test_vllm_gets_what_the_context_and_the_options_say(serve, run, stand_in) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    async def main() -> None:
        async with serve(mem_fraction=0.5, engine_args={"block_size": 16}, env={"ODD": "1"}):
            assert AsyncLLM.last.calls == [("agentrl_score_whole_distribution", [])]
            assert AsyncLLM.last.version == "0"
            assert os.environ["ODD"] == "1"
            assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"

    run(main())
    arguments = AsyncLLM.last.arguments
    expected = {
        "dtype": "float32", "max_model_len": 100, "seed": 4, "tensor_parallel_size": 2, "pipeline_parallel_size": 1,
        "data_parallel_size": 1, "distributed_executor_backend": "mp", "gpu_memory_utilization": 0.5, "block_size": 16,
        "max_num_seqs": 64, "enforce_eager": True, "logprobs_mode": "processed_logprobs", "skip_tokenizer_init": False,
        "generation_config": "vllm",
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }  # fmt: skip
    assert {name: arguments[name] for name in expected} == expected
    assert arguments["weight_transfer_config"].backend == "agentrl"


def test_hosts_of_a_replica_meet_where_the_core_says() -> None:
    place = {"tensor_parallel": 4, "nodes": 2, "rendezvous": "10.0.0.1:777"}
    head = engine_arguments(VLLMConfig(), EngineContext("m", **place), MODEL)
    other = engine_arguments(VLLMConfig(), EngineContext("m", **place, node_rank=1), MODEL)
    assert {name: value for name, value in other.items() if value != head.get(name)} == {"node_rank": 1}
    expected = {"nnodes": 2, "node_rank": 0, "master_addr": "10.0.0.1", "master_port": 777}
    assert {name: head[name] for name in expected} == expected
    assert isinstance(make_engine(VLLMConfig(), EngineContext("m", **place)), VLLMEngine)
    follower = make_engine(VLLMConfig(), EngineContext("m", **place, node_rank=1))
    with pytest.raises(EngineError, match="host 1 of a vLLM replica takes no requests"):
        asyncio.run(follower.generate([1], SamplingParams(1), "r"))
    with pytest.raises(EngineError, match="workers on host 1 do not run"):
        asyncio.run(follower.health())
    asyncio.run(follower.close())


def test_data_parallelism_over_hosts_is_refused() -> None:
    with pytest.raises(EngineError, match="data_parallel=2: .* set rollout.engine.nodes=1, or data_parallel=1"):
        make_engine(VLLMConfig(), EngineContext("m", nodes=2, data_parallel=2))


def test_on_a_gpu_the_memory_is_vllms_choice() -> None:
    arguments = engine_arguments(VLLMConfig(), EngineContext("m", device="cuda"), MODEL)
    assert arguments["skip_tokenizer_init"], "there is no tokenizer in the folder"
    assert "kv_cache_memory_bytes" not in arguments and "block_size" not in arguments
    assert (arguments["enforce_eager"], arguments["enable_sleep_mode"]) == (False, True)
    assert "TORCH_COMPILE_DISABLE" not in environment(VLLMConfig(), EngineContext("m", device="cuda"))


def test_on_a_gpu_that_it_shares_vllm_takes_what_the_trainer_leaves() -> None:
    context = EngineContext("m", device="cuda", memory_share=0.4, memory_free=0.5)
    assert engine_arguments(VLLMConfig(), context, MODEL)["gpu_memory_utilization"] == 0.4
    assert engine_arguments(VLLMConfig(mem_fraction=0.2), context, MODEL)["gpu_memory_utilization"] == 0.2
    assert "gpu_memory_utilization" not in engine_arguments(VLLMConfig(), EngineContext("m", device="cuda"), MODEL)


def test_the_running_batch_is_larger_on_a_gpu() -> None:
    sizes = {device: engine_arguments(VLLMConfig(), EngineContext("m", device=device), MODEL)["max_num_seqs"]
             for device in ("cpu", "cuda")}  # fmt: skip
    assert sizes == {"cpu": 64, "cuda": 256}
    assert engine_arguments(VLLMConfig(max_num_seqs=5), EngineContext("m", device="cuda"), MODEL)["max_num_seqs"] == 5


def test_on_a_cpu_the_cache_holds_full_contexts_of_all_requests() -> None:
    context = EngineContext("m", max_model_len=100)
    per_token = 2 * 2 * 2 * 32 * 4
    assert kv_cache_bytes(VLLMConfig(max_num_seqs=8), context, MODEL) >= 8 * 100 * per_token
    assert kv_cache_bytes(VLLMConfig(max_num_seqs=8), context, {"text_config": MODEL}) >= 8 * 100 * per_token
    assert kv_cache_bytes(VLLMConfig(), context, {}) == 1 << 30
    assert engine_arguments(VLLMConfig(kv_cache_gib=2), context, MODEL)["kv_cache_memory_bytes"] == 2 << 30


def test_an_interpreter_without_vllm_is_named(model_path, run, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=f"{sys.executable} has no package vllm; .*pip install"):
        run(VLLMEngine(VLLMConfig(), EngineContext(model_path)).start())


def test_bad_models_are_named(make_engine, run, tmp_path) -> None:
    with pytest.raises(EngineError, match="model.path: .*config.json cannot be read"):
        run(make_engine(str(tmp_path)).start())
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    with pytest.raises(EngineError, match="holds no .*safetensors"):
        run(make_engine(str(tmp_path)).start())


def test_a_start_that_fails_leaves_nothing(make_engine, run, stand_in) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    async def refuse(self: AsyncLLM, name: str, args: tuple[list[int], ...]) -> None:
        raise RuntimeError("samples elsewhere")

    AsyncLLM.collective_rpc = refuse
    engine = make_engine()
    with pytest.raises(RuntimeError, match="samples elsewhere"):
        run(engine.start())
    assert AsyncLLM.last.calls == [("shutdown",)]
    with pytest.raises(EngineError, match="does not run"):
        run(engine.health())


def test_an_engine_that_was_not_started_says_so(make_engine) -> None:
    async def main() -> None:
        engine = make_engine()
        with pytest.raises(EngineError, match=r"call start\(\) first"):
            await engine.health()
        await engine.close()
        await engine.close()

    asyncio.run(main())


def test_experts_of_tokens_are_asked_for_on_gpus() -> None:
    context = EngineContext("m", device="cuda", routed_experts=True)
    assert engine_arguments(VLLMConfig(), context, MODEL)["enable_return_routed_experts"]
    plain = EngineContext("m", device="cuda")
    assert "enable_return_routed_experts" not in engine_arguments(VLLMConfig(), plain, MODEL)


@pytest.mark.parametrize(
    ("config", "context", "problem"),
    [
        (VLLMConfig(), {"device": "cpu"}, "device=cpu"),
        (VLLMConfig(), {"device": "cuda", "pipeline_parallel": 2}, "pipeline_parallel=2"),
        (VLLMConfig(prefix_caching=False), {"device": "cuda"}, "prefix_caching=false"),
    ],
)
def test_where_vllm_has_no_experts_of_tokens_it_does_not_start(
    config: VLLMConfig, context: dict[str, Any], problem: str
) -> None:
    with pytest.raises(EngineError, match=f"does not return the experts of tokens with {problem}"):
        engine_arguments(config, EngineContext("m", routed_experts=True, **context), MODEL)
