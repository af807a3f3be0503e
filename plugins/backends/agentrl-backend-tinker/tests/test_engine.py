"""The engine against the contract of engines, and what its adapters' versions do."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tinker_support.policy import micro_batch, train

from agentrl_backend_tinker.config import TinkerBackendConfig, TinkerEngineConfig
from agentrl_backend_tinker.engine import TinkerEngine
from agentrl_backend_tinker.paths import NAME, path_of, path_tensor
from agentrl_backend_tinker.plugin import BACKEND, ENGINE
from agentrl_core.api import (
    Adapter,
    AdapterSlots,
    ArrayBucket,
    EngineContext,
    PolicySpan,
    SamplingParams,
    Wanted,
    WeightUpdate,
    together,
)
from agentrl_core.api.errors import EngineError
from agentrl_testing.contracts import EngineCase, EngineContract
from agentrl_testing.contracts.training_backend import TrainingBackendCase, TrainingBackendContract

PROMPT = [5, 6, 7, 8]
SLOTS = AdapterSlots(("first", "second"), 2, 4, ("q_proj",))


@pytest.fixture(scope="module")
def servers(server_class: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Servers of the models of contracts."""
    import socket

    started: dict[str, Any] = {}

    def of(model: str) -> str:
        if model not in started:
            with socket.create_server(("127.0.0.1", 0)) as found:
                port = found.getsockname()[1]
            options = ("--max-model-len", "64") if "backend" in model else ("--max-model-len", "512")
            started[model] = server_class(model, tmp_path_factory.mktemp("state"), port, options)
            started[model].start()
        return str(started[model].url)

    yield of
    for each in started.values():
        each.kill()


class ServedCase(EngineCase):
    """With a server of the contract's model."""

    servers: Any = None

    def build(self, context: Any) -> Any:
        return TinkerEngine(TinkerEngineConfig(url=ServedCase.servers(context.model_path)), context)


class TestTinkerEngine(EngineContract):
    """Without updates, which are paths of weights that the contract does not have: they are tested below."""

    @pytest.fixture
    def plugin(self, servers: Any) -> EngineCase:
        ServedCase.servers = servers
        plain = ENGINE.capabilities - {"weight_update", "live_update", "adapters"}
        return ServedCase(replace(ENGINE, capabilities=plain))


class BackendCase(TrainingBackendCase):
    def made(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self.config = TinkerBackendConfig(url=ServedCase.servers(path))
        return super().made(path, *args, **kwargs)


class TestTinkerBackend(TrainingBackendContract):
    """What of it is about backends that train adapters alone; test_backend.py has the rest."""

    @pytest.fixture
    def plugin(self, servers: Any) -> TrainingBackendCase:
        ServedCase.servers = servers
        return BackendCase(BACKEND)


def update_of(backend: Any, name: str = "first") -> WeightUpdate:
    (tensors,) = backend.weights(1 << 20)
    bucket = ArrayBucket((NAME,), (tuple(tensors[NAME].shape),), ("uint8",), tensors[NAME].numpy())
    return WeightUpdate([bucket], adapter=Adapter(name, backend.adapter_config))


def with_engine(url: str, model: str, work: Any) -> Any:
    async def main() -> Any:
        context = EngineContext(model, vocab_size=260, max_model_len=256, adapters=SLOTS)
        engine = TinkerEngine(TinkerEngineConfig(url=url), context)
        await engine.start()
        try:
            async with asyncio.timeout(120):
                return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def expected(backend: Any, output: Any) -> list[float]:
    """What the backend says of an answer."""
    micro = micro_batch([(PROMPT, output.token_ids, [1] * len(output.token_ids))])
    with torch.no_grad():
        (found,) = backend.forward([micro], Wanted())
    return found.log_probs[0].tolist()


def test_versions_of_adapters_answer_side_by_side(make: Any, server: Any, model: str) -> None:
    """Each with its own log-probs; a request that runs keeps its version, and an old one is gone."""
    backends = [make.loaded(server.url) for _ in range(3)]
    for number, backend in enumerate(backends):
        train(backend, number)
    long = SamplingParams(200, seed=1, adapter="first", stop_token_ids=())

    async def work(engine: TinkerEngine) -> Any:
        with pytest.raises(ValueError, match="has no version yet"):
            await engine.generate(PROMPT, SamplingParams(4, adapter="first"), "early")
        await engine.update_weights(update_of(backends[0]), 1)
        running = asyncio.ensure_future(engine.generate(PROMPT, long, "long"))
        await asyncio.sleep(0)
        await engine.update_weights(update_of(backends[1]), 2)
        await engine.update_weights(update_of(backends[2]), 3)
        await engine.update_weights(update_of(backends[0], "second"), 7)
        with pytest.raises(ValueError, match="no version 1 .*there are: 2, 3"):
            await engine.generate(PROMPT, replace(long, version=1), "late")
        asked = [("first", 2), ("first", 3), ("second", 7), ("first", None)]
        params = [SamplingParams(8, seed=1, adapter=name, version=version) for name, version in asked]
        others = await together(engine.generate(PROMPT, each, f"r{number}") for number, each in enumerate(params))
        return [await running, *others]

    outputs = with_engine(server.url, model, work)
    assert [output.spans[0].version for output in outputs] == [1, 2, 3, 7, 3]
    for output, backend in zip(outputs, [backends[number] for number in (0, 1, 2, 0, 2)], strict=True):
        assert output.log_probs == pytest.approx(expected(backend, output), abs=1e-5)
        assert output.spans == [PolicySpan(output.spans[0].version, 0, len(output.token_ids))]
    gaps = [abs(a - b) for a, b in zip(outputs[3].log_probs, expected(backends[2], outputs[3]), strict=True)]
    assert max(gaps) > 1e-3, "the versions do not differ"


def test_an_aborted_or_cancelled_request_ends(server: Any, model: str) -> None:
    async def work(engine: TinkerEngine) -> None:
        params = SamplingParams(250, seed=1)
        task = asyncio.ensure_future(engine.generate(PROMPT, params, "one"))
        await asyncio.sleep(0)
        assert await engine.abort("two") is None
        assert (await engine.abort("one")).finish_reason == "abort"
        assert (await task).finish_reason == "abort" and (await task).token_ids == []
        task = asyncio.ensure_future(engine.generate(PROMPT, params, "three"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len((await engine.generate(PROMPT, SamplingParams(4), "four")).token_ids) == 4

    with_engine(server.url, model, work)


def test_metrics_count_since_the_last_call_and_since_the_start(server: Any, model: str) -> None:
    async def work(engine: TinkerEngine) -> None:
        engine.metrics()
        for total in (4, 8):
            await engine.generate(PROMPT, SamplingParams(4), "r")
            found = engine.metrics()
            assert (found["prompt_tokens"], found["sampled_tokens"]) == (4, 4)
            assert (found["total_prompt_tokens"], found["total_sampled_tokens"]) == (total, total)
            assert found["requests"] >= 2
        assert engine.metrics()["requests"] == 0

    with_engine(server.url, model, work)


def test_other_weights_are_refused(server: Any, model: str) -> None:
    """Those of other backends, those that the server does not have, and adapters that are not served."""
    tensor = torch.zeros(4, 4)
    other = ArrayBucket(("lora_A.weight",), ((4, 4),), ("float32",), tensor.view(torch.uint8).numpy())
    gone = path_tensor("tinker://nobody/sampler_weights/x")[NAME].numpy()
    bucket = ArrayBucket((NAME,), (gone.shape,), ("uint8",), gone)

    async def work(engine: TinkerEngine) -> None:
        for update, message in (
            (WeightUpdate([other]), "trainer.backend.name=tinker"),
            (WeightUpdate([bucket], adapter=Adapter("third", {})), "'third'.*first, second"),
            (WeightUpdate([bucket], adapter=Adapter("first", {})), "does not have the weights tinker://nobody"),
        ):
            with pytest.raises(EngineError, match=message):
                await engine.update_weights(update, 1)
        assert len((await engine.generate(PROMPT, SamplingParams(4), "r")).token_ids) == 4

    with_engine(server.url, model, work)


def test_a_path_travels_as_bytes() -> None:
    data = path_tensor("tinker://run/sampler_weights/ä")[NAME].numpy()
    assert path_of(WeightUpdate([ArrayBucket((NAME,), (data.shape,), ("uint8",), data)])).endswith("/ä")
