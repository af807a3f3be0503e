"""Lost connections, servers that are overloaded, and servers that are killed: nothing is lost or done twice."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tinker_support.policy import saved_at, train
from tinker_support.proxy import Proxy, every

from agentrl_backend_tinker import model as model_module
from agentrl_backend_tinker.config import TinkerEngineConfig
from agentrl_backend_tinker.engine import TinkerEngine
from agentrl_backend_tinker.paths import NAME
from agentrl_core.api import (
    Adapter,
    AdapterSlots,
    ArrayBucket,
    EngineContext,
    SamplingParams,
    TokenOutput,
    WeightUpdate,
    together,
)
from agentrl_core.api.errors import ConfigError, WorkerError

FAULTS = ["before", "after", 408, 429, 500, 503]
SLOTS = AdapterSlots(("policy",), 2, 4, ("q_proj",))


def path_in(backend: Any) -> str:
    (tensors,) = backend.weights(1 << 20)
    return bytes(tensors[NAME].numpy()).rstrip(b"\0").decode()


def update_of(path: str) -> WeightUpdate:
    from agentrl_backend_tinker.paths import SIZE, path_tensor

    data = path_tensor(path)[NAME].numpy()
    return WeightUpdate([ArrayBucket((NAME,), ((SIZE,),), ("uint8",), data)], adapter=Adapter("policy", {"r": 4}))


@pytest.fixture
def proxied() -> Iterator[Any]:
    proxies: list[Proxy] = []

    def start(port: int, fault: Any) -> Proxy:
        proxies.append(Proxy(port, fault))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.close()


@pytest.fixture
def own_server(model: str, tmp_path: Path, server_class: Any) -> Iterator[Any]:
    """One that a test kills."""
    found = server_class(model, tmp_path / "state", _free_port())
    found.start()
    yield found
    found.kill()


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture
def expected(make: Any, server: Any) -> dict[str, torch.Tensor]:
    """The weights of three steps without a fault."""
    backend = make.loaded(server.url)
    for step in range(3):
        train(backend, 1, step)
        path = path_in(backend)
    return saved_at(server, path)


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=0, rtol=0, msg=name)


def check_output(found: TokenOutput, wanted: TokenOutput) -> None:
    # In another batch the last bits of a log-prob differ.
    assert (found.token_ids, found.spans, found.finish_reason) == (wanted.token_ids, wanted.spans, wanted.finish_reason)
    assert found.log_probs == pytest.approx(wanted.log_probs, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_request_fails_once_and_trains_once(
    make: Any, server: Any, proxied: Any, expected: dict[str, torch.Tensor], fault: Any
) -> None:
    proxy = proxied(server.port, every(2, fault))
    backend = make.loaded(proxy.url)
    for step in range(3):
        train(backend, 1, step)
        path = path_in(backend)
    check_same(saved_at(server, path), expected)
    failed = {route for route, _ in proxy.faults}
    assert {"create_model", "forward_backward", "optim_step", "save_weights", "retrieve_future"} <= failed


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_request_fails_once_and_samples_the_same(
    make: Any, server: Any, proxied: Any, model: str, fault: Any
) -> None:
    backend = make.loaded(server.url)
    train(backend, 1)
    update = update_of(path_in(backend))

    async def sampled(url: str) -> Any:
        context = EngineContext(model, vocab_size=260, max_model_len=256, adapters=SLOTS)
        engine = TinkerEngine(TinkerEngineConfig(url=url), context)
        await engine.start()
        try:
            await engine.update_weights(update, 3)
            params = [SamplingParams(8, seed=seed, adapter="policy") for seed in range(4)]
            return await together(engine.generate([5, 6, 7], each, f"r{number}") for number, each in enumerate(params))
        finally:
            await engine.close()

    without = asyncio.run(sampled(server.url))
    with_faults = asyncio.run(sampled(proxied(server.port, every(2, fault)).url))
    for found, wanted in zip(with_faults, without, strict=True):
        check_output(found, wanted)


def restart(server: Any) -> None:
    server.kill()
    threading.Thread(target=server.start, kwargs={"wait": False}).start()


@pytest.mark.slow
def test_a_server_that_is_killed_loses_nothing(
    make: Any, own_server: Any, proxied: Any, expected: dict[str, torch.Tensor], model: str
) -> None:
    """Between requests, with a step that it has not got, and with one that it has made without having said so; an
    engine goes on sampling with the weights that it has."""
    killed: list[str] = []

    def fault(route: str, before: int) -> Any:
        if route == "optim_step" and before == 1 and not killed:
            killed.append("before the server had the step")
            restart(own_server)
            return "before"
        # The answer to the result of the last step, which is made.
        if (
            len(killed) == 1
            and backend.steps == 2
            and proxy.seen[-1:] == ["retrieve_future"]
            and route == "retrieve_future"
        ):
            killed.append("after the server had made the step")
            restart(own_server)
            return "before"
        return None

    proxy = proxied(own_server.port, fault)
    backend = make.loaded(proxy.url)

    async def sample(update: WeightUpdate, kill: bool) -> Any:
        context = EngineContext(model, vocab_size=260, max_model_len=256, adapters=SLOTS)
        engine = TinkerEngine(TinkerEngineConfig(url=own_server.url), context)
        await engine.start()
        try:
            await engine.update_weights(update, 1)
            if kill:
                restart(own_server)
            return await engine.generate([5, 6, 7], SamplingParams(8, seed=1, adapter="policy"), "r")
        finally:
            await engine.close()

    train(backend, 1)
    update = update_of(path_in(backend))
    first = asyncio.run(sample(update, kill=False))
    # With nothing saved since.
    train(backend, 1, 1)
    again = asyncio.run(sample(update, kill=True))
    check_output(again, first)
    train(backend, 1, 2)
    assert killed == ["before the server had the step", "after the server had made the step"]
    check_same(saved_at(own_server, path_in(backend)), expected)


@pytest.mark.slow
def test_a_server_that_lost_its_states_too_is_a_clear_error(make: Any, own_server: Any) -> None:
    backend = make.loaded(own_server.url)
    train(backend, 1)
    path_in(backend)
    own_server.kill()
    shutil.rmtree(own_server.state)
    own_server.start()
    with pytest.raises(
        WorkerError, match="has lost the model, and it could not be built again from tinker://.*--resume"
    ):
        train(backend, 1, 1)


def test_a_server_that_stays_away_is_a_clear_error(make: Any, proxied: Any, server: Any) -> None:
    proxy = proxied(server.port, lambda route, before: 503 if route == "optim_step" else None)
    backend = make.loaded(proxy.url, options={"patience": 0.3})
    with pytest.raises(WorkerError, match=r"optim_step.*status 503: a fault.*trainer.backend.config.patience"):
        train(backend, 1)


def test_an_address_without_a_server_is_refused_at_the_start(
    make: Any, proxied: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before patience has run out: later it is a server that went away."""
    monkeypatch.setattr("agentrl_backend_tinker.connection.FIRST_PATIENCE", 0.3)
    with pytest.raises(ConfigError, match=r"backend.config.url: .* opens no session .*no usable answer to create_ses"):
        make.loaded(f"http://127.0.0.1:{_free_port()}")
    for status in (401, 404, 501):
        proxy = proxied(server.port, lambda route, before, status=status: status)
        with pytest.raises(ConfigError, match=rf"opens no session .*status {status}.*an API key that it knows"):
            make.loaded(proxy.url)


@pytest.mark.slow
def test_a_server_that_asks_to_wait_is_waited_for(make: Any, proxied: Any, server: Any, expected: Any) -> None:
    """429 for several tries in a row, of every route."""
    proxy = proxied(server.port, lambda route, before: 429 if before % 4 != 3 else None)
    backend = make.loaded(proxy.url)
    for step in range(3):
        train(backend, 1, step)
        path = path_in(backend)
    assert {fault for _, fault in proxy.faults} == {429}
    check_same(saved_at(server, path), expected)


@pytest.mark.slow
def test_requests_that_wait_are_reported_in_one_line(
    make: Any, proxied: Any, server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Thousands of trajectories may wait for a server that restarts."""
    proxy = proxied(server.port, lambda route, before: 503 if route == "get_info" else None)
    connection = make.loaded(proxy.url, options={"patience": 4.0})._connection
    monkeypatch.setattr("agentrl_backend_tinker.connection.REPORTED", 0.5)

    async def ask() -> None:
        found = await asyncio.gather(*(connection.get("get_info") for _ in range(20)), return_exceptions=True)
        assert {type(each).__name__ for each in found} == {"UnreachableError"}

    make.backends[-1]._run(ask())
    lines = [record.message for record in caplog.records if "has not answered" in record.message]
    assert 1 <= len(lines) <= 10 and all("get_info" in line and "503" in line for line in lines)


def test_a_state_is_loaded_into_a_new_model_where_the_server_wants_that(
    make: Any, proxied: Any, server: Any, tmp_path: Path
) -> None:
    one = make.loaded(server.url)
    train(one, 1)
    one.snapshot()(str(tmp_path))
    proxy = proxied(server.port, lambda route, before: 400 if route == "load_weights" and before == 0 else None)
    other = make.loaded(proxy.url)
    other.restore(str(tmp_path))
    assert ("load_weights", 400) in proxy.faults and proxy.seen.count("create_model") == 2
    for backend in (one, other):
        train(backend, 1, 1)
    check_same(saved_at(server, path_in(other)), saved_at(server, path_in(one)))


@pytest.mark.parametrize(("metrics", "shown"), [({}, "is missing"), ({"loss:sum": 3.0}, "is 3")])
def test_a_server_with_another_loss_is_refused_at_the_start(
    make: Any, server: Any, monkeypatch: pytest.MonkeyPatch, metrics: dict[str, float], shown: str
) -> None:
    """One that divides by the weights, as SkyRL's does: gradients that are sums would be trained wrongly."""
    real = model_module.passed
    monkeypatch.setattr(model_module, "passed", lambda content: replace(real(content), metrics=metrics))
    with pytest.raises(ConfigError, match=rf"url: {server.url} cannot be used: .*loss:sum {shown}.*tinker check"):
        make.loaded(server.url)
