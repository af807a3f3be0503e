"""A real vLLM on the CPU, tiny random models, and what transformers itself says about their outputs.

Run by ``make test-engine-vllm`` in the environment of ``make engines-cpu-vllm``.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl_core.api import EngineContext, SamplingParams, TokenOutput
from agentrl_core.testing.tiny_model import save_tiny_model
from agentrl_engine_vllm.config import VLLMConfig
from agentrl_engine_vllm.engine import VLLMEngine

VOCAB = 261
MAX_MODEL_LEN = 256
EOS = 258
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    # Peaked distributions, so that greedy sampling has no near ties.
    "initializer_range": 0.12,
}


class Models:
    """Random models, saved once each: ``models(seed, tied)`` is a folder, ``models.module(...)`` the model in it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[tuple[int, bool], Any] = {}

    def __call__(self, seed: int = 0, tied: bool = True) -> str:
        path = self._root / f"{seed}-{'tied' if tied else 'untied'}"
        if not path.exists():
            save_tiny_model(path, seed=seed, tie_word_embeddings=tied, **SHAPE)
        return str(path)

    def files(self, seed: int = 0, tied: bool = True) -> tuple[str, ...]:
        return tuple(str(path) for path in sorted(Path(self(seed, tied)).glob("*.safetensors")))

    def module(self, seed: int = 0, tied: bool = True) -> Any:
        if (seed, tied) not in self._modules:
            module = AutoModelForCausalLM.from_pretrained(self(seed, tied), dtype=torch.float32)
            self._modules[seed, tied] = module.eval()
        return self._modules[seed, tied]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines on one loop, which an engine stays on for its life."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session", params=[True, False], ids=["tied", "untied"])
def case(request: pytest.FixtureRequest, models: Models, run: Any) -> Iterator["Case"]:
    """One engine for all tests of a kind of model: a start takes a quarter of a minute."""
    context = EngineContext(models(tied=request.param), max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB)
    # Prompts that arrive together are computed in parts, as long ones are.
    engine = VLLMEngine(VLLMConfig(engine_args={"max_num_batched_tokens": 256}), context)
    run(engine.start())
    yield Case(engine, models, request.param)
    run(engine.close())


class Case:
    """An engine, and models of its kind: the output layer is tied to the embedding, or is not."""

    def __init__(self, engine: VLLMEngine, models: Models, tied: bool) -> None:
        self.engine = engine
        self.tied = tied
        self._models = models

    def files(self, seed: int) -> tuple[str, ...]:
        return self._models.files(seed, self.tied)

    def module(self, seed: int = 0) -> Any:
        return self._models.module(seed, self.tied)


def make_prompts(count: int, low: int = 1, high: int = 40, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(low, high))] for _ in range(count)]


async def generate_all(
    engine: VLLMEngine, prompts: Sequence[list[int]], params: SamplingParams, tag: str = "r"
) -> list[TokenOutput]:
    requests = (engine.generate(prompt, params, f"{tag}{i}") for i, prompt in enumerate(prompts))
    return await asyncio.gather(*requests)


@torch.no_grad()
def reference_log_probs(
    module: Any, prompt: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Of every token, under softmax(logits / temperature)."""
    logits = module(torch.tensor([[*prompt, *token_ids]])).logits[0, len(prompt) - 1 : -1].float()
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    found: list[float] = log_probs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
    return found


def worst_gap(module: Any, prompts: Any, outputs: Sequence[TokenOutput], temperature: float = 1.0) -> float:
    return max(
        abs(a - b)
        for prompt, output in zip(prompts, outputs, strict=True)
        for a, b in zip(
            output.log_probs or [], reference_log_probs(module, prompt, output.token_ids, temperature), strict=True
        )
    )
