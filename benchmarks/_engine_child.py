"""vLLM or SGLang as their own users run them, in their own interpreter; benchmarks/engines.py starts it.

    python _engine_child.py vllm|sglang MODEL SOCKET

For every ``{"prompts": [...], "max_tokens": [...]}`` that comes over the socket it samples all of them at once and
answers ``{"seconds": ..., "tokens": ...}``; null ends it.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Client
from typing import Any

MAX_MODEL_LEN = 512
MAX_REQUESTS = 64
Sample = Callable[[list[int], int, str], Awaitable[int]]


async def start_vllm(model: str) -> Sample:
    """AsyncLLM as vLLM's server makes it, with the settings that a small CPU wants."""
    defaults = {
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    os.environ.update({name: value for name, value in defaults.items() if name not in os.environ})
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=model, dtype="float32", enforce_eager=True, max_model_len=MAX_MODEL_LEN, block_size=32,
        kv_cache_memory_bytes=256 << 20, max_num_seqs=MAX_REQUESTS, enable_prefix_caching=True,
        skip_tokenizer_init=True, logprobs_mode="processed_logprobs",
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(arguments)

    async def sample(prompt: list[int], max_tokens: int, request_id: str) -> int:
        params = SamplingParams(
            temperature=1.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        tokens = 0
        async for output in engine.generate({"prompt_token_ids": prompt}, params, request_id):
            tokens = len(output.outputs[0].token_ids)
        return tokens

    return sample


async def start_sglang(model: str) -> Sample:
    """SGLang's Engine on a CPU."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import sglang

    engine = sglang.Engine(
        model_path=model, device="cpu", dtype="float32", max_total_tokens=MAX_REQUESTS * MAX_MODEL_LEN,
        max_running_requests=MAX_REQUESTS, context_length=MAX_MODEL_LEN, skip_tokenizer_init=True, log_level="error",
        # Otherwise it spins on a core while the other one is measured.
        sleep_on_idle=True,
    )  # fmt: skip

    async def sample(prompt: list[int], max_tokens: int, request_id: str) -> int:
        params = {"temperature": 1.0, "max_new_tokens": max_tokens, "ignore_eos": True}
        reply = await engine.async_generate(input_ids=prompt, sampling_params=params, return_logprob=True)
        return len(reply["output_ids"])

    return sample


async def serve(name: str, model: str, address: str) -> None:
    """Answer until told to stop."""
    sample = await {"vllm": start_vllm, "sglang": start_sglang}[name](model)
    with Client(address, "AF_UNIX") as connection:
        connection.send_bytes(b"ready")
        number = 0
        while work := json.loads(await asyncio.to_thread(connection.recv_bytes)):
            number += 1
            start = time.perf_counter()
            counts = await asyncio.gather(
                *(
                    sample(prompt, tokens, f"{number}-{index}")
                    for index, (prompt, tokens) in enumerate(zip(work["prompts"], work["max_tokens"], strict=True))
                )
            )
            answer: dict[str, Any] = {"seconds": time.perf_counter() - start, "tokens": sum(counts)}
            connection.send_bytes(json.dumps(answer).encode())
    # The engines' own shut-down can wait for processes that are gone; nothing here needs it.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:4]))
