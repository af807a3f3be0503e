"""Samplers: which weights they have, what they return, and that they run at the same time."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_core.api.engine import AdapterSlots
from agentrl_tinker.adapters import Shape
from agentrl_tinker.client import Model, SamplerClient, datum
from agentrl_tinker.refusals import Refusal
from agentrl_tinker.sampler import Slots, Weights

IDS = [5, 6, 7, 8, 9, 10]
DATUM = datum(IDS[:-1], IDS[1:], weights=[1.0] * 5)
Serve = Callable[..., Any]


async def new_model(client: Any, model: str, **options: Any) -> Model:
    return await Model.create(client, model, await client.session(), **options)


async def learn(model: Model, steps: int = 2, rate: float = 0.02) -> np.ndarray:
    for _ in range(steps):
        await model.train([DATUM])
        await model.step(learning_rate=rate)
    return (await model.forward([DATUM])).log_probs[0]


def test_a_snapshot_keeps_its_weights_and_one_in_flight_takes_new_ones(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        model = await new_model(server.one, server.model)
        first = await learn(model)
        snapshot, inflight = await model.sampler(), await model.sampler("inflight")
        second = await learn(model)
        later = await model.sampler("inflight")
        for sampler, wanted in ((snapshot, first), (inflight, second), (later, second), (snapshot, first)):
            np.testing.assert_allclose((await sampler.score(IDS))[1:], wanted, atol=1e-5)
        assert abs(first - second).max() > 0.1

    serve(scenario)


def test_log_probs_of_samples_are_those_of_the_trainer(serve: Serve) -> None:
    """Of two adapters and the base, all at the same time."""

    async def scenario(server: Any) -> None:
        session = await server.one.session()
        samplers = [await SamplerClient.create(server.one, session, 0, base_model=server.model)]
        for number in range(2):
            model = await Model.create(server.one, server.model, session, number, seed=number, rank=4 + number)
            model.samplers += 10 * number
            await learn(model, rate=0.05)
            samplers.append(await model.sampler())
        found = await asyncio.gather(
            *(each.sample(IDS, count=3, max_tokens=6, stop=[]) for each in samplers for _ in range(3))
        )
        for sampler, sampled in zip([each for each in samplers for _ in range(3)], found, strict=True):
            for tokens, log_probs, stopped in zip(sampled.tokens, sampled.log_probs, sampled.stopped, strict=True):
                assert len(tokens) == 6 and not stopped
                np.testing.assert_allclose((await sampler.score(IDS + tokens))[len(IDS) :], log_probs, atol=1e-4)

    serve(scenario)


def test_parameters_of_sampling(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        base = await SamplerClient.create(server.one, await server.one.session(), 0, base_model=server.model)
        greedy = await base.sample(IDS, count=2, max_tokens=5, temperature=0.0, stop=[])
        assert greedy.tokens[0] == greedy.tokens[1]
        assert (await base.sample(IDS, max_tokens=5, top_k=1, stop=[])).tokens[0] == greedy.tokens[0]
        seeded = [await base.sample(IDS, count=2, max_tokens=8, seed=7, stop=[]) for _ in range(2)]
        assert seeded[0].tokens == seeded[1].tokens
        assert seeded[0].tokens[0] != seeded[0].tokens[1]
        third = greedy.tokens[0][2]
        stopped = await base.sample(IDS, max_tokens=5, temperature=0.0, stop=[third])
        assert stopped.tokens[0] == greedy.tokens[0][: greedy.tokens[0].index(third) + 1]
        assert stopped.stopped == [True]
        long = await base.sample(IDS, stop=[])
        assert len(long.tokens[0]) == 256 - len(IDS)

    serve(scenario)


def test_a_stop_text_ends_a_sample_wherever_tokens_begin(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Any) -> None:
        base = await SamplerClient.create(server.one, await server.one.session(), 0, base_model=server.model)
        tokens = (await base.sample(IDS, max_tokens=6, seed=7, stop=[])).tokens[0]
        monkeypatch.setattr(server.service, "_decode", lambda ids: "".join(f"<{token}>" for token in ids))
        for stop in ([f"{tokens[1]}><{tokens[2]}"], f"{tokens[1]}><{tokens[2]}"):
            found = await base.sample(IDS, max_tokens=6, seed=7, stop=stop)
            assert (found.tokens[0], found.stopped) == (tokens[:3], [True])
            assert len(found.log_probs[0]) == 3

    serve(scenario)


def test_scores_of_a_prompt(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        base = await SamplerClient.create(server.one, await server.one.session(), 0, base_model=server.model)
        whole = await base.score(IDS)
        assert np.isnan(whole[0]) and np.isfinite(whole[1:]).all()
        tail = (
            await base.sample(IDS, extra={"prompt_logprobs": True, "prompt_logprobs_last_n": 2}, max_tokens=1)
        ).prompt
        assert np.isnan(tail[:-2]).all()
        np.testing.assert_array_equal(tail[-2:], whole[-2:])

    serve(scenario)


def test_a_sampler_of_a_lost_file_says_so_and_others_go_on(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        model = await new_model(server.one, server.model)
        lost, kept = await model.sampler(), await model.sampler()
        shutil.rmtree(server.service._samplers[lost.sampler_id].weights().folder)
        with pytest.raises(Refusal, match="No such file|adapter_model.safetensors"):
            await lost.sample(IDS, max_tokens=1)
        await kept.sample(IDS, max_tokens=1)

    serve(scenario)


def test_a_cancelled_sample_ends_and_its_place_is_free(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        base = await SamplerClient.create(server.one, await server.one.session(), 0, base_model=server.model)
        promise = await base.send(IDS, max_tokens=200, stop=[])
        await server.one.post("cancel_future", {"request_id": promise["request_id"]})
        with pytest.raises(Refusal, match="cancelled"):
            await server.one.result(promise)
        assert server.service._sampling == {}
        await base.sample(IDS, max_tokens=1)

    serve(scenario)


def weights_in(tmp_path: Path, name: str) -> Weights:
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 4}')
    return Weights(folder, Shape(4))


class AnyEngine:
    async def update_weights(self, update: Any, version: int) -> None:
        await asyncio.sleep(0)


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def test_weights_that_are_always_in_use_give_their_slot_to_those_that_wait(tmp_path: Path) -> None:
    async def main() -> None:
        slots = Slots(AnyEngine(), AdapterSlots(("s0",), 1, 8, ("q_proj",)))  # type: ignore[arg-type]
        begun: list[str] = []
        gates = [asyncio.Event() for _ in range(4)]

        async def request(name: str, number: int) -> None:
            async with slots.using(weights_in(tmp_path, name)):
                begun.append(f"{name}{number}")
                await gates[number].wait()

        tasks = []
        for number, name in enumerate("aaba"):
            tasks.append(asyncio.create_task(request(name, number)))
            await settle()
        # The last one came when others waited for the slot of its weights.
        assert begun == ["a0", "a1"]
        for gate in gates:
            gate.set()
        await asyncio.gather(*tasks)
        assert begun == ["a0", "a1", "b2", "a3"]

    asyncio.run(main())


def test_a_request_that_is_cancelled_twice_frees_its_slot(tmp_path: Path) -> None:
    async def main() -> None:
        engine, loaded = AnyEngine(), asyncio.Event()
        slots = Slots(engine, AdapterSlots(("s0", "s1"), 1, 8, ("q_proj",)))  # type: ignore[arg-type]

        async def request(name: str, ends: asyncio.Event) -> None:
            async with slots.using(weights_in(tmp_path, name)):
                await ends.wait()

        held, ended = asyncio.Event(), asyncio.Event()
        ended.set()
        cancelled = asyncio.create_task(request("a", held))
        await settle()

        async def slow(*_: Any) -> None:
            await loaded.wait()

        engine.update_weights = slow  # type: ignore[method-assign]
        other = asyncio.create_task(request("b", ended))
        for _ in range(2):
            await settle()
            cancelled.cancel()
        await settle()
        loaded.set()
        await asyncio.wait([cancelled, other])
        both = [asyncio.create_task(request(name, held)) for name in "cd"]
        await settle()
        assert {folder.name for folder in slots._running} == {"c", "d"}
        held.set()
        await asyncio.gather(*both)

    asyncio.run(main())


def test_an_engine_with_slots_gets_weights_into_the_one_that_was_idle_longest(tmp_path: Path) -> None:
    """Weights that are used stay, and who finds no slot waits."""

    class Engine:
        async def update_weights(self, update: Any, version: int) -> None:
            loads.append((update.adapter.name, Path(update.files[0]).parent.name, version))
            assert update.adapter.config == {"r": 4}

    loads: list[tuple[str, str, int]] = []

    async def main() -> None:
        slots = Slots(Engine(), AdapterSlots(("s0", "s1"), 1, 8, ("q_proj",)))  # type: ignore[arg-type]
        gates = {name: asyncio.Event() for name in "abc"}
        order = []

        async def request(name: str) -> None:
            async with slots.using(weights_in(tmp_path, name)) as fields:
                order.append((name, fields["adapter"], fields["version"]))
                await gates[name].wait()

        tasks = [asyncio.create_task(request(name)) for name in "abac"]
        await asyncio.sleep(0.01)
        assert [name for name, _, _ in order] == ["a", "b", "a"]
        gates["a"].set()
        await asyncio.wait(tasks[::2] + [tasks[3]], timeout=0.05)
        assert order[-1] == ("c", "s1", 3)
        gates["c"].set()
        await asyncio.wait([tasks[3]])
        await request("c")
        gates["b"].set()
        await asyncio.gather(*tasks)
        await request("a")
        async with slots.using(None) as fields:
            assert fields == {}

    asyncio.run(main())
    assert [each[:2] for each in loads] == [("s1", "a"), ("s0", "b"), ("s1", "c"), ("s0", "a")]
    assert [each[2] for each in loads] == [1, 2, 3, 4]
