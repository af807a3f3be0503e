from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from agentrl_engine_hf.plugin import PLUGIN
from agentrl_testing.contracts import EngineCase, EngineContract


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TestEmbeddedEngine(EngineContract):
    @pytest.fixture
    def plugin(self) -> EngineCase:
        return EngineCase(PLUGIN)


class TestEmbeddedEngineUntied(EngineContract):
    @pytest.fixture
    def plugin(self) -> EngineCase:
        # Adapters leave the output layer alone: one engine for them is enough.
        plain = replace(PLUGIN, capabilities=PLUGIN.capabilities - {"adapters"})
        return EngineCase(plain, tie_word_embeddings=False)
