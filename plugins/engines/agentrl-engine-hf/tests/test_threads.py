"""CPU threads of a decode step."""

import asyncio
import threading

import pytest
import torch

from agentrl_core.api import SamplingParams
from agentrl_engine_hf import threads
from agentrl_engine_hf.config import HFEngineConfig
from agentrl_engine_hf.model import Model
from agentrl_engine_hf.threads import cpu_threads, threads_for


def test_small_models_decode_with_one_thread_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Linear(10, 10)
    assert threads_for(module, 0) == 1
    assert threads_for(module, 3) == 3
    assert threads_for(module.to("meta"), 0) == 0, "nothing is changed where something else than a CPU computes"
    monkeypatch.setattr(threads, "SMALL", 110)
    assert threads_for(torch.nn.Linear(10, 10), 0) == 0


def test_other_threads_keep_theirs() -> None:
    torch.set_num_threads(2)
    found = []

    def other() -> None:
        torch.set_num_threads(2)
        with cpu_threads(1):
            found.append(torch.get_num_threads())
            with pytest.raises(ZeroDivisionError), cpu_threads(3):
                found.append(torch.get_num_threads())
                1 / 0  # noqa: B018
            with cpu_threads(0):
                found.append(torch.get_num_threads())
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [1, 3, 1, 2]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("wanted", "expected"), [(0, 1), (2, 2)])
def test_a_step_is_decoded_with_them(qwen3, serve, monkeypatch, wanted: int, expected: int) -> None:
    torch.set_num_threads(3)
    seen = {"decode": set(), "prefill": set()}
    for name in seen:
        original = getattr(Model, name)

        def watched(self, *args, _name=name, _original=original):
            seen[_name].add(torch.get_num_threads())
            return _original(self, *args)

        monkeypatch.setattr(Model, name, watched)

    async def main() -> None:
        async with serve(qwen3(), HFEngineConfig(decode_threads=wanted)) as engine:
            await engine.generate([1, 2, 3], SamplingParams(3), "r")

    asyncio.run(main())
    assert seen == {"decode": {expected}, "prefill": {3}}
