"""What is on disk, after a kill and for how long; sessions that end, and what they leave behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from agentrl_core.api.errors import ConfigError
from agentrl_tinker.client import Client, Model, SamplerClient, datum
from agentrl_tinker.refusals import Refusal
from agentrl_tinker.store import Checkpoint, Store, owner_of

IDS = [5, 6, 7, 8, 9, 10]
DATUM = datum(IDS[:-1], IDS[1:], weights=[1.0] * 5)
Serve = Callable[..., Any]


async def learn(model: Model, steps: int = 2) -> np.ndarray:
    for _ in range(steps):
        await model.train([DATUM])
        await model.step(learning_rate=0.01)
    return (await model.forward([DATUM])).log_probs[0]


async def load_new(client: Client, path: str, optimizer: bool) -> Model:
    session = await client.session()
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": optimizer}
    found = await client.result(await client.post("load_weights", body))
    assert found["model_id"] == f"{session}:train:0"
    return Model(client, session, found["model_id"])


def test_training_continues_bit_for_bit_from_a_checkpoint_in_another_server(serve: Serve) -> None:
    async def before(server: Any) -> tuple[str, str, np.ndarray, np.ndarray]:
        model = await Model.create(server.one, server.model, await server.one.session())
        await learn(model)
        # Gradients that no step has used are not part of a checkpoint.
        await model.train([DATUM])
        path, for_sampler = await model.save("step-2"), await model.save_for_sampler("s")
        score = await (await model.sampler()).score(IDS)
        await model.load(path)
        return path, for_sampler, score, await learn(model)

    async def after(server: Any, path: str, for_sampler: str, score: np.ndarray, wanted: np.ndarray) -> None:
        resumed = await load_new(server.one, path, optimizer=True)
        np.testing.assert_array_equal(await learn(resumed), wanted)
        await resumed.load(path, optimizer=False)
        assert abs(await learn(resumed) - wanted).max() > 1e-4
        sampler = await SamplerClient.create(server.one, resumed.session_id, 0, model_path=for_sampler)
        np.testing.assert_array_equal(await sampler.score(IDS), score)
        state = await SamplerClient.create(server.one, resumed.session_id, 1, model_path=path)
        np.testing.assert_array_equal(await state.score(IDS), score)
        with pytest.raises(Refusal, match="is for samplers, without the state of training"):
            await resumed.load(for_sampler)
        smaller = await Model.create(server.one, server.model, resumed.session_id, 1, rank=4)
        with pytest.raises(Refusal, match="this model has .'rank': 4"):
            await smaller.load(path)

    found = serve(before)
    serve(lambda server: after(server, *found))


def test_a_checkpoint_is_not_replaced_by_accident(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        model = await Model.create(server.one, server.model, await server.one.session())
        path = await model.save("a")
        await learn(model)
        with pytest.raises(Refusal, match="exists already"):
            await model.save("a")
        assert await model.save("a", overwrite=True) == path
        folders = [each for each in (server.service.store.root).rglob("a-*") if each.is_dir()]
        assert len(folders) == 1
        await server.one._http.delete(
            f"/api/v1/training_runs/{model.model_id}/checkpoints/weights/a", headers={"X-API-Key": "tml-one"}
        )
        assert not folders[0].exists()
        with pytest.raises(Refusal, match="there is no checkpoint"):
            await model.load(path)

    serve(scenario)


def test_checkpoints_expire_and_half_written_ones_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, owner = Store(tmp_path), owner_of("tml-one")
    shape = {"rank": 8, "train_attn": True, "train_mlp": True, "train_unembed": True}
    named = Checkpoint("run", "weights", "a", "base", shape, "", 0, 0.0, expires=time.time() + 100)
    kept = store.save(owner, named, {"x": b"1"})
    forever = store.save(owner, Checkpoint("run", "weights", "b", "base", shape, "", 0, 0.0), {"x": b"2"})
    users = tmp_path / "models" / "mine" / "weights" / "shards"
    users.mkdir(parents=True)
    (tmp_path / "scratch").mkdir()
    half = tmp_path / owner / "run" / "weights" / "c-123"
    half.mkdir()
    scratch = store.scratch / "session"
    scratch.mkdir()
    with pytest.raises(ConfigError, match="another server uses .*. Stop it, or name another folder"):
        Store(tmp_path)
    assert half.exists() and scratch.exists()
    store.close()
    again = Store(tmp_path)
    assert [each.path for each in again.all(owner)] == [kept.path, forever.path]
    assert not half.exists() and not scratch.exists()
    # Only what a server has written is its own to delete.
    assert users.exists() and (tmp_path / "scratch").exists()
    monkeypatch.setattr(time, "time", lambda: kept.expires + 1)
    assert [each.name for each in again.all(owner)] == ["b"]
    again.close()
    assert sorted(each.name for each in half.parent.iterdir()) == sorted(["b.json", forever.folder])
    assert "tml" not in json.dumps([str(each) for each in tmp_path.rglob("*")])


def test_a_session_that_is_silent_loses_its_adapters(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Any) -> None:
        service = server.service
        model = await Model.create(server.one, server.model, await server.one.session())
        path = await model.save("a")
        sampler = await model.sampler()
        with pytest.raises(Refusal, match="trains 1 adapters already .--max-adapters."):
            await Model.create(server.one, server.model, await server.one.session())
        # A request that waits for one that never comes.
        promise = await model.send_step(seq_id=9)
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 299)
        await service.end_idle_sessions()
        await server.one.post("session_heartbeat", {"session_id": model.session_id})
        monkeypatch.setattr(time, "monotonic", lambda: now + 598)
        await service.end_idle_sessions()
        await model.forward([DATUM])
        monkeypatch.setattr(time, "monotonic", lambda: now + 800)
        # Who waits for a result is there.
        waiting = asyncio.create_task(server.one.result(promise, seconds=0))
        await asyncio.sleep(0)
        monkeypatch.setattr(time, "monotonic", lambda: now + 1000)
        await service.end_idle_sessions()
        assert model.model_id in service._models
        waiting.cancel()
        monkeypatch.setattr(time, "monotonic", lambda: now + 1200)
        await service.end_idle_sessions()
        for call in (model.forward([DATUM]), sampler.sample(IDS, max_tokens=1), server.one.result(promise)):
            with pytest.raises(Refusal, match="there is no"):
                await call
        with pytest.raises(Refusal) as found:
            await server.one.post("session_heartbeat", {"session_id": model.session_id})
        assert found.value.status == 410
        assert (len(service.results), service._models, service._samplers, service.trainer._trained) == (0, {}, {}, {})
        assert not list(service.store.scratch.iterdir())
        await load_new(server.one, path, optimizer=True)

    serve(scenario, max_adapters=1)


def test_a_session_that_is_closed_while_silent_ones_end_does_no_harm(serve: Serve, monkeypatch: Any) -> None:
    """The end of one session waits for what it runs; meanwhile another is closed, and a third is heard from."""

    async def scenario(server: Any) -> None:
        service = server.service
        models = [await Model.create(server.one, server.model, await server.one.session()) for _ in range(3)]
        _, second, third = (each.session_id for each in models)
        for session in service._sessions.values():
            session.seen -= 1000
        removal, go_on = asyncio.Event(), asyncio.Event()
        compute = service._compute

        async def slow(function: Any, *args: Any) -> Any:
            if function == service.trainer.remove:
                removal.set()
                await go_on.wait()
            return await compute(function, *args)

        monkeypatch.setattr(service, "_compute", slow)
        ending = asyncio.create_task(service.end_idle_sessions())
        await removal.wait()
        closing = asyncio.create_task(server.one.post(f"sessions/{second}/finish", {}))
        await server.one.post("session_heartbeat", {"session_id": third})
        while second in service._sessions:
            await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(ending, closing)
        assert list(service._sessions) == [third]

    serve(scenario)


def test_a_client_that_leaves_in_the_middle_of_a_step_leaves_nothing_half_done(serve: Serve) -> None:
    """Its requests are carried out as if it were there, and its session's end waits for the one that runs."""

    async def scenario(server: Any) -> None:
        session = await server.one.session()
        model = await Model.create(server.one, server.model, session)
        await model.send_train([DATUM] * 50)
        await model.send_step(learning_rate=0.01)
        leaving = asyncio.create_task(model.forward([DATUM]))
        await asyncio.sleep(0)
        leaving.cancel()
        other = await Model.create(server.two, server.model, await server.two.session())
        await learn(other)
        await server.one.post(f"sessions/{session}/finish", {"reason": {"type": "interrupted"}})
        assert list(server.service.trainer._trained) == [other.model_id]
        await learn(other)

    serve(scenario)


@pytest.mark.slow
def test_another_server_goes_on_where_a_killed_one_saved_its_state(model: str, tmp_path: Path, serve: Serve) -> None:
    script = (
        "import socket, sys; from agentrl_core.cli.main import main; s = socket.create_server(('127.0.0.1', 0));"
        " port = s.getsockname()[1]; s.close(); print(port, flush=True);"
        f" sys.argv = ['agentrl', 'tinker', 'serve', '--model', {model!r}, '--state', {str(tmp_path / 'state')!r},"
        " '--port', str(port), '--device', 'cpu']; main()"
    )

    async def before(url: str, kill: Callable[[], None]) -> tuple[str, np.ndarray]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            for _ in range(1200):
                with suppress(httpx.TransportError):
                    assert (await http.get("/api/v1/healthz")).json() == {"status": "ok"}
                    break
                await asyncio.sleep(0.1)
            client = Client(http, "tml-one")
            model_ = await Model.create(client, model, await client.session())
            await learn(model_)
            path = await model_.save("a")
            wanted = await learn(model_)
            await model_.send_train([DATUM] * 100)
            kill()
            return path, wanted

    async def after(server: Any, path: str, wanted: np.ndarray) -> None:
        np.testing.assert_array_equal(await learn(await load_new(server.one, path, True)), wanted)

    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        found = asyncio.run(before(url, lambda: os.kill(process.pid, signal.SIGKILL)))
    finally:
        process.kill()
        process.wait()
    serve(lambda server: after(server, *found))


def test_the_files_of_an_external_checkpoint_can_be_downloaded_for_a_while(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PEFT reads them, without a key, by those who know the address."""

    async def scenario(server: Any) -> None:
        model = await Model.create(server.one, server.model, await server.one.session())
        await learn(model)
        found = await model._ordered("save_weights_external", path="files")
        run, _, name = found["path"].removeprefix("tinker://").split("/")
        address = f"training_runs/{run}/checkpoints/external_weights/{name}/external_weights_urls"
        with pytest.raises(Refusal, match="no checkpoint"):
            await server.two.get(address)
        urls = (await server.one.get(address))["urls"]
        assert sorted(urls) == ["adapter_config.json", "adapter_model.safetensors"]
        contents = {file: (await server.http.get(url)).content for file, url in urls.items()}
        assert json.loads(contents["adapter_config.json"])["r"] == 8
        assert len(contents["adapter_model.safetensors"]) < found["size_bytes"]
        url = urls["adapter_config.json"]
        for wrong in (url.replace("adapter_config", "optimizer"), url.replace("downloads/", "downloads/x")):
            assert (await server.http.get(wrong)).status_code == 404
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 3601)
        assert (await server.http.get(url)).status_code == 404

    serve(scenario)
