"""One engine behind its server."""

import asyncio
import os
import re
import socket
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import Adapter, EngineContext, EngineError, SamplingParams, WeightUpdate
from agentrl_core.config.schema import EngineSlot
from agentrl_core.serving.server import EngineServer

ENGINE = """
from agentrl_core.api import EngineError, InferenceEngine, PolicySpan, TokenOutput

class Foreign(Exception):
    pass

class Engine(InferenceEngine):
    def __init__(self, config, context):
        self.failing = config
        self.context = context
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
def make_server(make_slot) -> Callable[..., EngineServer]:
    def make(failing: dict[str, Exception] | None = None, source: str = ENGINE, **place: Any) -> EngineServer:
        slot = make_slot(EngineSlot, source, "Engine", config=failing or {})
        return EngineServer(slot, EngineContext("model", replica=2, **place))

    return make


async def started(server: EngineServer) -> EngineServer:
    await server.start()
    return server


CALLS = {
    "start": lambda server: server.start(),
    "health": lambda server: server.start(),
    "generate": lambda server: server.generate([1], SamplingParams(1), "a"),
    "update_weights": lambda server: server.update_weights(WeightUpdate(), 3),
    "close": lambda server: server.close(),
}


async def call(server: EngineServer, what: str) -> Any:
    if what not in ("start", "health"):
        await server.start()
    return await CALLS[what](server)


@pytest.mark.parametrize("what", CALLS)
def test_foreign_exceptions_become_engine_errors_that_name_the_engine(make_server, what: str) -> None:
    class Foreign(Exception):
        """Its class does not exist where the error is read."""

    with pytest.raises(EngineError) as caught:
        asyncio.run(call(make_server({what: Foreign("CUDA is ill")}), what))
    text = str(caught.value)
    assert "Engine" in text and "replica 2" in text and f"{what} failed: Foreign: CUDA is ill" in text
    assert "Traceback" in text and caught.value.__cause__ is None and caught.value.__suppress_context__


def test_engine_errors_pass_unchanged(make_server) -> None:
    error = EngineError("no room")
    with pytest.raises(EngineError) as caught:
        asyncio.run(call(make_server({"generate": error}), "generate"))
    assert caught.value is error


def test_only_a_server_that_was_started_serves(make_server) -> None:
    server = make_server()
    with pytest.raises(EngineError, match="replica 2 has not been started"):
        asyncio.run(server.health())
    asyncio.run(server.close())


def test_hosts_of_a_replica_are_told_where_they_meet(make_server) -> None:
    head, other = make_server(nodes=2), make_server(nodes=2, node_rank=1)
    place = head.rendezvous()
    address, port = place.split(":")
    assert ip_address(address) and 1024 <= int(port) < 65536
    for server, rank in ((head, 0), (other, 1)):
        asyncio.run(server.start(place))
        context = server._engine.context
        assert (context.nodes, context.node_rank, context.rendezvous) == (2, rank, place)
    with pytest.raises(EngineError, match="replica 2, host 1 of 2: health failed"):
        asyncio.run(make_server({"health": RuntimeError("ill")}, nodes=2, node_rank=1).start(place))


def test_an_engine_sees_the_devices_of_its_assignment(make_slot, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    slot = make_slot(EngineSlot, ENGINE, "Engine")
    EngineServer(slot, EngineContext("model"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    EngineServer(slot, EngineContext("model"), devices=("2", "3"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_what_the_engine_says_comes_through(make_server) -> None:
    server = asyncio.run(started(make_server()))
    assert asyncio.run(CALLS["generate"](server)).token_ids == [1]
    told = server.metrics()
    assert (told["requests"], told["generated_tokens"], told["running_max"], told["queue_max"]) == (1, 1, 1, 0)
    assert server.metrics() == {}


def test_a_model_that_this_node_lacks_is_named_with_the_node(make_slot: Any, tmp_path: Path) -> None:
    server = EngineServer(make_slot.registered(EngineSlot, "scripted"), EngineContext(str(tmp_path / "model")))
    text = f"{tmp_path / 'model'} does not exist on node {socket.gethostname()}"
    try:
        with pytest.raises(EngineError, match=re.escape(text)):
            asyncio.run(server.start())
    finally:
        asyncio.run(server.close())


UPDATED = """
import asyncio
from agentrl_core.api import InferenceEngine, PolicySpan, TokenOutput

class Engine(InferenceEngine):
    # Requests end when they are told to, or aborted; what happens is written down.
    capabilities = frozenset({"pause", "weight_update", "live_update"})

    def __init__(self, config, context):
        self.version, self.running, self.calls, self.paused = 0, {}, [], False

    async def generate(self, prompt_ids, params, request_id, multi_modal=None):
        assert not self.paused, "asked while an update ends what runs"
        first = self.version
        end = self.running[request_id] = asyncio.get_running_loop().create_future()
        reason = await end
        spans = [PolicySpan(first, 0, 1), *([] if self.version == first else [PolicySpan(self.version, 1, 2)])]
        return TokenOutput([1, 2][: spans[-1].end], None, reason, spans)

    def end(self, reason):
        while self.running:
            self.running.popitem()[1].set_result(reason)

    async def pause(self, mode):
        self.calls.append(f"pause {mode}")
        self.paused = True
        self.end("abort")
        # A request that came now would be lost.
        await asyncio.sleep(0.01)

    async def resume(self):
        self.calls.append("resume")
        self.paused = False

    async def update_weights(self, update, version):
        self.calls.append(f"update {version} {update.running} over {len(self.running)}")
        self.version = version
"""


@pytest.mark.parametrize(
    ("mode", "calls", "versions"),
    [
        ("recompute", ["update 7 recompute over 2"], [0, 7]),
        ("continue", ["update 7 continue over 2"], [0, 7]),
        ("restart", ["pause abort", "update 7 recompute over 0", "resume"], [7]),
    ],
)
def test_requests_that_run_meet_new_weights_as_the_mode_says(make_server, mode, calls, versions) -> None:
    async def main() -> None:
        server = await started(make_server(source=UPDATED))
        engine = server._engine
        before = [asyncio.create_task(server.generate([1], SamplingParams(2), name)) for name in "ab"]
        while len(engine.running) < 2:
            await asyncio.sleep(0)
        update = asyncio.create_task(server.update_weights(WeightUpdate(), 7, mode))
        # One that comes in the middle of it.
        await asyncio.sleep(0)
        before.append(asyncio.create_task(server.generate([1], SamplingParams(2), "c")))
        await update
        while len(engine.running) < 3:
            await asyncio.sleep(0)
        engine.end("length")
        outputs = await asyncio.gather(*before)
        assert engine.calls == calls
        assert [[span.version for span in each.spans] for each in outputs[:2]] == [versions] * 2
        assert {each.finish_reason for each in outputs} == {"length"}
        assert server.metrics()["pause_seconds"] > 0
        await server.update_weights(WeightUpdate(), 8, mode)
        assert engine.calls[-1] == "update 8 " + ("continue over 0" if mode == "continue" else "recompute over 0")
        assert server.metrics() == {}, "an update that no request meets pauses nobody"

    asyncio.run(main())


def test_a_request_that_is_aborted_without_an_update_does_not_begin_again(make_server) -> None:
    async def main() -> None:
        server = await started(make_server(source=UPDATED))
        await server.update_weights(WeightUpdate(), 7, "restart")
        request = asyncio.create_task(server.generate([1], SamplingParams(2), "a"))
        while not server._engine.running:
            await asyncio.sleep(0)
        server._engine.end("abort")
        assert (await request).finish_reason == "abort"

    asyncio.run(main())


ADAPTED = """
import asyncio

from agentrl_core.api import InferenceEngine, PolicySpan, TokenOutput

class Engine(InferenceEngine):
    \"\"\"Serves versions of an adapter side by side; a request has as many tokens as it is given turns.\"\"\"

    def __init__(self, config, context):
        self.newest, self.running, self.asked = 0, {}, []

    async def generate(self, prompt_ids, params, request_id, multi_modal=None):
        version = self.newest if params.version is None else params.version
        self.asked.append((list(prompt_ids), params.max_tokens, version))
        ids, ended = [], asyncio.Event()
        self.running[request_id] = ended
        while len(ids) < params.max_tokens and not ended.is_set():
            ids.append(100 + version)
            await asyncio.sleep(0)
            if len(ids) == 2 and self.newest == 0:
                await ended.wait()
        reason = "length" if len(ids) == params.max_tokens else "abort"
        return TokenOutput(ids, [0.0] * len(ids), reason, [PolicySpan(version, 0, len(ids))])

    async def update_weights(self, update, version):
        assert update.adapter.name == "policy"
        self.newest = version

    async def pause(self, mode):
        for ended in self.running.values():
            ended.set()
        await asyncio.sleep(0)

    async def resume(self):
        pass
"""


@pytest.mark.parametrize(
    ("on_running", "ids", "spans", "asked"),
    [
        ("recompute", [100, 100, 101, 101], [(0, 0, 2), (1, 2, 4)], ([7, 100, 100], 2, 1)),
        ("restart", [101, 101, 101, 101], [(1, 0, 4)], ([7], 4, 1)),
    ],
)
def test_a_request_that_runs_while_an_adapter_changes(make_server, on_running, ids, spans, asked) -> None:
    async def main() -> None:
        server = await started(make_server(source=ADAPTED))
        request = asyncio.ensure_future(server.generate([7], SamplingParams(4), "a"))
        await asyncio.sleep(0.01)
        await server.update_weights(WeightUpdate(adapter=Adapter("policy", {})), 1, on_running)
        output = await request
        assert output.token_ids == ids and output.finish_reason == "length"
        assert [(span.version, span.start, span.end) for span in output.spans] == spans
        assert server._engine.asked[-1] == asked

    asyncio.run(main())


def test_with_finish_a_request_keeps_its_adapter(make_server) -> None:
    async def main() -> None:
        server = await started(make_server(source=ADAPTED))
        request = asyncio.ensure_future(server.generate([7], SamplingParams(4), "a"))
        await asyncio.sleep(0.01)
        await server.update_weights(WeightUpdate(adapter=Adapter("policy", {})), 1, "finish")
        assert not request.done()
        server._engine.running["a"].set()
        output = await request
        assert output.token_ids == [100, 100] and output.spans[0].version == 0

    asyncio.run(main())
