"""Tiny random models, engines around them, and what transformers itself says about their outputs."""

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl_core.api import ArrayBucket, EngineContext, SamplingParams, TokenOutput, WeightUpdate
from agentrl_engine_hf.config import HFEngineConfig
from agentrl_engine_hf.engine import HFEngine

VOCAB = 200


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices on two threads wait for each other more than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _shape(overrides: dict[str, Any]) -> dict[str, Any]:
    # A wide initialisation makes peaked distributions, so that greedy sampling has no near ties.
    return {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.12,
        "tie_word_embeddings": True,
    } | overrides


def _qwen3(seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**_shape(overrides))).eval()


def _llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**_shape(overrides))).eval()


@pytest.fixture(scope="session")
def qwen3() -> Callable[..., Qwen3ForCausalLM]:
    return _qwen3


@pytest.fixture(scope="session")
def llama() -> Callable[..., LlamaForCausalLM]:
    return _llama


@pytest.fixture(scope="session")
def model() -> Qwen3ForCausalLM:
    """One model for the tests that do not change it."""
    return _qwen3()


@contextlib.asynccontextmanager
async def _serve(module: Any = None, config: HFEngineConfig | None = None, **context: Any) -> AsyncIterator[HFEngine]:
    context = {"model_path": "", "max_model_len": 256, "shared_module": module} | context
    engine = HFEngine(config or HFEngineConfig(), EngineContext(**context))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture(scope="session")
def serve() -> Callable[..., contextlib.AbstractAsyncContextManager[HFEngine]]:
    return _serve


@pytest.fixture(scope="session")
def prompts() -> Callable[..., list[list[int]]]:
    def make(count: int, low: int = 1, high: int = 40, seed: int = 0) -> list[list[int]]:
        rng = random.Random(seed)
        return [[rng.randrange(VOCAB) for _ in range(rng.randint(low, high))] for _ in range(count)]

    return make


@pytest.fixture(scope="session")
def generate_all() -> Callable[..., Any]:
    async def generate_all(
        engine: HFEngine, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams], tag: str = ""
    ) -> list[TokenOutput]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        return await asyncio.gather(
            *(
                engine.generate(prompt, param, f"{tag}{i:04d}")
                for i, (prompt, param) in enumerate(zip(prompts, each, strict=True))
            )
        )

    return generate_all


@pytest.fixture(scope="session")
def reference_log_probs() -> Callable[..., list[float]]:
    @torch.no_grad()
    def reference(module: Any, prompt: list[int], token_ids: list[int], temperature: float = 1.0) -> list[float]:
        logits = module(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1].float()
        log_probs = torch.log_softmax(logits / temperature, dim=-1)
        return log_probs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()

    return reference


@pytest.fixture(scope="session")
def pack() -> Callable[..., WeightUpdate]:
    """The weights of a module (or a state dict) as two buckets of bytes."""

    def make(source: Any, dtype: torch.dtype = torch.float32) -> WeightUpdate:
        tensors = source if isinstance(source, dict) else dict(source.named_parameters())
        items = [(name, tensor.detach().to(dtype).contiguous()) for name, tensor in tensors.items()]
        buckets = []
        for part in (items[::2], items[1::2]):
            data = [
                np.frombuffer(tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), np.uint8) for _, tensor in part
            ]
            buckets.append(
                ArrayBucket(
                    names=tuple(name for name, _ in part),
                    shapes=tuple(tuple(tensor.shape) for _, tensor in part),
                    dtypes=(str(dtype).removeprefix("torch."),) * len(part),
                    data=np.concatenate(data) if data else np.zeros(0, np.uint8),
                )
            )
        return WeightUpdate(buckets)

    return make


class Gate:
    """Holds the engine's thread in the middle of a step: in the module's ``number``-th forward from now."""

    def __init__(self, module: Any, number: int) -> None:
        self._left = number
        self._loop = asyncio.get_running_loop()
        self._reached = asyncio.Event()
        self._open = threading.Event()
        self._hook = module.register_forward_hook(self._pass)

    def _pass(self, *_: object) -> None:
        self._left -= 1
        if self._left == 0:
            self._loop.call_soon_threadsafe(self._reached.set)
            self._open.wait(60)

    async def reached(self) -> None:
        await asyncio.wait_for(self._reached.wait(), 60)

    def open(self) -> None:
        self._hook.remove()
        self._open.set()

    async def command(self, awaitable: Any) -> Any:
        """Post a command while the thread is held, let the thread go, return the command's result."""
        await self.reached()
        task = asyncio.ensure_future(awaitable)
        # The task's first step is what posts the command.
        await asyncio.sleep(0)
        self.open()
        return await task


@pytest.fixture(scope="session")
def gate() -> Callable[[Any, int], Gate]:
    return Gate
