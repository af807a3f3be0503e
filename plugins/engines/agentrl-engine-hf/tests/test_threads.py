"""CPU threads of the engine."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from agentrl_core.api import SamplingParams
from agentrl_engine_hf import threads
from agentrl_engine_hf.config import HFEngineConfig
from agentrl_engine_hf.model import Model
from agentrl_engine_hf.threads import use_cpu_threads


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def threads_used(module: torch.nn.Module, wanted: int) -> int:
    """In a new thread, which begins with those of the process."""

    def use() -> int:
        use_cpu_threads(module, wanted)
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(use).result()


def test_small_models_are_computed_by_one_thread_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Linear(10, 10)
    assert threads_used(module, 0) == 1
    assert threads_used(module, 2) == 2
    assert threads_used(module.to("meta"), 2) == 3, "nothing is changed where no CPU computes"
    monkeypatch.setattr(threads, "SMALL", 110)
    assert threads_used(torch.nn.Linear(10, 10), 0) == 3
    assert torch.get_num_threads() == 3, "other threads keep theirs"
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 3, "so do those that begin later"


@pytest.mark.parametrize(("wanted", "expected"), [(0, 1), (2, 2)])
def test_the_engine_computes_with_them_from_its_first_operation_on(
    qwen3, serve, monkeypatch, wanted: int, expected: int
) -> None:
    seen = {"new_cache": set(), "decode": set(), "prefill": set()}
    for name in seen:
        original = getattr(Model, name)

        def watched(self, *args, _name=name, _original=original):
            seen[_name].add(torch.get_num_threads())
            return _original(self, *args)

        monkeypatch.setattr(Model, name, watched)

    async def main() -> None:
        async with serve(qwen3(), HFEngineConfig(cpu_threads=wanted)) as engine:
            await engine.generate([1, 2, 3], SamplingParams(3), "r")

    asyncio.run(main())
    assert seen == dict.fromkeys(seen, {expected})
    assert torch.get_num_threads() == 3
