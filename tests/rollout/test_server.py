"""One engine behind its server."""

import asyncio

import pytest

from agentrl_core.api import EngineContext, EngineError, LoraAdapter, SamplingParams, WeightUpdate
from agentrl_core.config.schema import EngineSlot
from agentrl_core.rollout.server import EngineServer

ENGINE = """
from agentrl_core.api import EngineError, InferenceEngine, PolicySpan, TokenOutput

class Foreign(Exception):
    pass

class Engine(InferenceEngine):
    def __init__(self, config, context):
        self.failing = {}
        self.updates = []

    async def _may_fail(self, what):
        if what in self.failing:
            raise self.failing[what]

    async def start(self):
        await self._may_fail("start")

    async def health(self):
        await self._may_fail("health")

    async def generate(self, prompt_ids, params, request_id, multi_modal=None):
        await self._may_fail("generate")
        return TokenOutput([1], None, "stop", [PolicySpan(0, 0, 1)])

    async def update_weights(self, update, version):
        await self._may_fail("update_weights")
        self.updates.append(version)

    async def close(self):
        await self._may_fail("close")
"""


@pytest.fixture
def server(make_slot) -> EngineServer:
    return EngineServer(make_slot(EngineSlot, ENGINE, "Engine").ref, None, EngineContext("model", replica=2))


CALLS = {
    "start": lambda server: server.start(),
    "health": lambda server: server.start(),
    "generate": lambda server: server.generate([1], SamplingParams(1), "a"),
    "update_weights": lambda server: server.update_weights(WeightUpdate(), 3),
    "close": lambda server: server.close(),
}


@pytest.mark.parametrize("what", CALLS)
def test_foreign_exceptions_become_engine_errors_that_name_the_engine(server: EngineServer, what: str) -> None:
    class Foreign(Exception):
        """Its class does not exist where the error is read."""

    server._engine.failing[what] = Foreign("CUDA is ill")
    with pytest.raises(EngineError) as caught:
        asyncio.run(CALLS[what](server))
    text = str(caught.value)
    assert "Engine" in text and "replica 2" in text and f"{what} failed: Foreign: CUDA is ill" in text
    assert "Traceback" in text and caught.value.__cause__ is None and caught.value.__suppress_context__


def test_engine_errors_pass_unchanged(server: EngineServer) -> None:
    error = server._engine.failing["generate"] = EngineError("no room")
    with pytest.raises(EngineError) as caught:
        asyncio.run(CALLS["generate"](server))
    assert caught.value is error


def test_an_adapter_never_reaches_an_engine_that_takes_none(make_slot) -> None:
    update = WeightUpdate(adapter=LoraAdapter(8, 16, ("q_proj",)))
    for declared, refuses in ((set(), True), ({"lora"}, False)):
        source = ENGINE.replace(
            "(InferenceEngine):", f"(InferenceEngine):\n    capabilities = frozenset({declared!r})\n"
        )
        server = EngineServer(make_slot(EngineSlot, source, "Engine").ref, None, EngineContext("model", replica=2))
        asyncio.run(server.update_weights(WeightUpdate(), 1))
        if refuses:
            with pytest.raises(
                EngineError, match="replica 2: weights 3 are a LoRA adapter's.*lacks the capability 'lora'"
            ):
                asyncio.run(server.update_weights(update, 3))
        else:
            asyncio.run(server.update_weights(update, 3))
        assert server._engine.updates == ([1] if refuses else [1, 3])


def test_what_the_engine_says_comes_through(server: EngineServer) -> None:
    asyncio.run(server.start())
    assert asyncio.run(CALLS["generate"](server)).token_ids == [1]
    told = server.metrics()
    assert (told["requests"], told["tokens"], told["running_max"], told["queue_max"]) == (1, 1, 1, 0)
    assert server.metrics() == {}
