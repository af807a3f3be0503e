"""LoRA adapters of the embedded engine, against PEFT: its own, and those in the actor's module."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora.layer import LoraLayer

from agentrl_core.api import Adapter, AdapterSlots, PolicySpan, SamplingParams, WeightUpdate
from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import Broadcast
from agentrl_core.engine_kit.ports import free_port
from agentrl_core.engine_kit.weight_group import WeightGroup
from agentrl_engine_hf.config import HFEngineConfig

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
SLOTS = AdapterSlots(names=("one", "two"), versions=2, rank=8, targets=TARGETS)
RANKS = {"one": 4, "two": 8}


def inject(module: Any, **fields: Any) -> Any:
    """An adapter of each name, with weights that change something."""
    torch.manual_seed(5)
    for name, rank in RANKS.items():
        config = LoraConfig(r=rank, lora_alpha=8, target_modules=list(TARGETS), **fields)
        inject_adapter_in_model(config, module, adapter_name=name)
    shake(module)
    return module


def shake(module: Any) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)


@contextmanager
def active(module: Any, name: str) -> Iterator[Any]:
    """The module with this adapter alone, or with none."""
    layers = [part for part in module.modules() if isinstance(part, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = not name
        if name:
            layer.set_adapter(name)
    yield module
    for layer in layers:
        layer._disable_adapters = False


def state(module: Any) -> list[Any]:
    """What an actor must find as it left it."""
    layers = [part for part in module.modules() if isinstance(part, LoraLayer)]
    return [
        [part.training for part in module.modules()],
        [(list(layer.active_adapters), layer.disable_adapters) for layer in layers],
        [parameter.requires_grad for parameter in module.parameters()],
        ["forward" in vars(part) for part in module.modules()],
    ]


def updates(module: Any, pack: Any, names: tuple[str, ...] = SLOTS.names) -> list[WeightUpdate]:
    """The adapters of a module as an actor sends them."""
    found = []
    for name in names:
        config = module.peft_config[name]
        tensors = get_peft_model_state_dict(module, adapter_name=name)
        named = {f"base_model.model.{key.removeprefix('base_model.model.')}": each for key, each in tensors.items()}
        fields = {"r": config.r, "lora_alpha": config.lora_alpha, "target_modules": sorted(config.target_modules)}
        found.append(replace(pack(named), adapter=Adapter(name, fields)))
    return found


def ask(engine: Any, name: str, session: str, count: int = 10, version: int | None = None) -> Any:
    return engine.generate([1, 2, 3, 4, 5], SamplingParams(count, seed=0, adapter=name, version=version), session)


@pytest.mark.parametrize("recorded", [True, False])
def test_the_modules_own_adapters_answer_in_one_batch(qwen3, serve, reference_log_probs, recorded) -> None:
    module = inject(qwen3())

    async def main() -> list[Any]:
        async with serve(module, HFEngineConfig(record_decode=recorded), adapters=SLOTS) as engine:
            for number, name in enumerate(SLOTS.names, 3):
                await engine.update_weights(WeightUpdate(shared=True, adapter=Adapter(name, _config(name))), number)
            outputs = await asyncio.gather(*(ask(engine, name, f"s{name}") for name in (*SLOTS.names, "")))
            records = await engine._call(lambda executor: set(executor.model._decoder._records))
            assert records == ({False, True} if recorded else set())
            return outputs

    for (name, version), output in zip((("one", 3), ("two", 4), ("", 0)), asyncio.run(main()), strict=True):
        assert output.spans == [PolicySpan(version, 0, 10)]
        with active(module, name):
            expected = reference_log_probs(module, [1, 2, 3, 4, 5], output.token_ids)
        assert output.log_probs == pytest.approx(expected, abs=2e-5)


def _config(name: str) -> dict[str, Any]:
    return {"r": RANKS[name], "lora_alpha": 8, "target_modules": list(TARGETS)}


def test_the_actor_finds_its_module_as_it_left_it(qwen3, serve, gate) -> None:
    module = inject(qwen3(), lora_dropout=0.5).train()
    for part in module.modules():
        if isinstance(part, LoraLayer):
            part.set_adapter("two")
    before = state(module)

    async def main() -> None:
        async with serve(module, adapters=SLOTS) as engine:
            assert state(module) == before
            await engine.update_weights(WeightUpdate(shared=True, adapter=Adapter("one", _config("one"))), 1)
            held = gate(module, 3)
            task = asyncio.create_task(ask(engine, "one", "s"))
            await held.reached()
            assert state(module) != before
            await held.command(engine.pause("keep"))
            assert state(module) == before
            module(torch.tensor([[1, 2, 3]])).logits.sum().backward()
            lora = [parameter for name, parameter in module.named_parameters() if "lora_B.two" in name]
            assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in lora)
            await engine.resume()
            await task
            assert state(module) == before

    asyncio.run(main())


def test_what_the_actor_trained_answers(qwen3, serve, reference_log_probs) -> None:
    """Its update moves nothing; a request that was held goes on with the new weights, and its spans say so."""
    module = inject(qwen3())

    async def main() -> tuple[Any, Any]:
        async with serve(module, adapters=SLOTS) as engine:
            update = WeightUpdate(shared=True, adapter=Adapter("one", _config("one")))
            await engine.update_weights(update, 1)
            task = asyncio.create_task(ask(engine, "one", "s", 200))
            await ask(engine, "one", "clock")
            await engine.pause("keep")
            shake(module)
            await engine.update_weights(update, 2)
            await engine.resume()
            with pytest.raises(ValueError, match="adapter 'one' has no version 1 .*there are: 2"):
                await ask(engine, "one", "late", version=1)
            return await task, await ask(engine, "one", "new")

    held, new = asyncio.run(main())
    assert [span.version for span in held.spans] == [1, 2] and new.spans == [PolicySpan(2, 0, 10)]
    for output, start in ((held, held.spans[-1].start), (new, 0)):
        with active(module, "one"):
            expected = reference_log_probs(module, [1, 2, 3, 4, 5], output.token_ids)
        assert output.log_probs[start:] == pytest.approx(expected[start:], abs=2e-5)


def test_an_actors_module_without_the_adapters_is_refused(qwen3, serve) -> None:
    async def main(module: Any) -> None:
        async with serve(module, adapters=SLOTS):
            pass

    with pytest.raises(EngineError, match=r"has no adapter 'one', 'two' .* it has: none"):
        asyncio.run(main(qwen3()))
    with pytest.raises(EngineError, match="q_proj: adapter 'one' is not plain LoRA .Dora"):
        asyncio.run(main(inject(qwen3(), use_dora=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_that_peft_saves_answer(qwen3, serve, reference_log_probs, pack, dtype, tmp_path) -> None:
    """Of different ranks, in one batch, with targets that the model has in some layers only."""
    base = qwen3()
    base.save_pretrained(tmp_path)
    trained = inject(qwen3())

    async def main() -> list[Any]:
        async with serve(None, model_path=str(tmp_path), adapters=SLOTS, dtype=str(dtype)[6:]) as engine:
            for number, update in enumerate(updates(trained, pack), 1):
                await engine.update_weights(update, number)
            return await asyncio.gather(*(ask(engine, name, f"s{name}") for name in (*SLOTS.names, "")))

    for name, output in zip((*SLOTS.names, ""), asyncio.run(main()), strict=True):
        with active(trained.to(dtype), name):
            expected = reference_log_probs(trained, [1, 2, 3, 4, 5], output.token_ids)
        assert output.log_probs == pytest.approx(expected, abs=2e-5 if dtype == torch.float32 else 0.1)


def test_a_layer_that_an_adapter_leaves_out_is_unchanged(qwen3, serve, reference_log_probs, pack, tmp_path) -> None:
    qwen3().save_pretrained(tmp_path)
    trained = qwen3()
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["v_proj"], layers_to_transform=[1], use_rslora=True)
    inject_adapter_in_model(config, trained, adapter_name="one")
    shake(trained)
    fields = {"r": 2, "lora_alpha": 4, "target_modules": ["v_proj"], "layers_to_transform": [1], "use_rslora": True}

    async def main() -> list[Any]:
        async with serve(None, model_path=str(tmp_path), adapters=SLOTS) as engine:
            for number, update in enumerate(updates(inject(qwen3()), pack), 1):
                await engine.update_weights(update, number)
            (update,) = updates(trained, pack, ("one",))
            await engine.update_weights(replace(update, adapter=Adapter("one", fields)), 3)
            return await asyncio.gather(ask(engine, "one", "a"), ask(engine, "two", "b"))

    output, _ = asyncio.run(main())
    expected = reference_log_probs(trained, [1, 2, 3, 4, 5], output.token_ids)
    assert output.log_probs == pytest.approx(expected, abs=2e-5)


def test_the_recorded_step_serves_adapters_and_repeats_the_module(model, serve, pack, tmp_path) -> None:
    """With them and without, of changing number: the module itself is not called to decode."""
    model.save_pretrained(tmp_path)

    async def main(record: bool) -> tuple[list[Any], int]:
        config = HFEngineConfig(record_decode=record)
        async with serve(None, config, model_path=str(tmp_path), adapters=SLOTS) as engine:
            for number, update in enumerate(updates(inject(type(model)(model.config)), pack), 1):
                await engine.update_weights(update, number)
            calls: list[int] = []
            count = lambda executor: setattr(executor.model._decoder, "forward", _counting(executor, calls))  # noqa: E731
            await engine._call(count)
            asked = ("one", "", "two", "one", "two", "one")
            outputs = await asyncio.gather(*(ask(engine, n, f"s{i}", 4 + 5 * i) for i, n in enumerate(asked)))
            return outputs, len(calls)

    recorded, none = asyncio.run(main(True))
    plain, many = asyncio.run(main(False))
    assert none == 0 and many > 20
    for left, right in zip(recorded, plain, strict=True):
        assert left.token_ids == right.token_ids
        assert left.log_probs == pytest.approx(right.log_probs, abs=1e-5)


def _counting(executor: Any, calls: list[int]) -> Any:
    forward = executor.model._decoder.forward

    def count(*inputs: Any) -> Any:
        calls.append(1)
        return forward(*inputs)

    return count


def test_one_adapter_adds_its_own_products_alone(model, serve, pack, tmp_path) -> None:
    """Rows without one compute what they computed before, and with one two products for each layer that it changes."""
    model.save_pretrained(tmp_path)
    counts: dict[str, int] = {}

    async def main() -> None:
        async with serve(None, HFEngineConfig(record_decode=False), model_path=str(tmp_path), adapters=SLOTS) as engine:
            (update,) = updates(inject(type(model)(model.config)), pack, ("one",))
            for version in (1, 2):  # a version that nobody asks for costs nothing
                await engine.update_weights(update, version)
            for name in ("", "one"):
                counts[name] = await _products_of_a_step(engine, name)

    asyncio.run(main())
    assert counts["one"] - counts[""] == 2 * len(TARGETS) * model.config.num_hidden_layers
    assert counts[""] == 7 * model.config.num_hidden_layers + 1


async def _products_of_a_step(engine: Any, name: str) -> int:
    from torch.nn.functional import linear

    seen: list[int] = []

    def counted(*arguments: Any) -> torch.Tensor:
        seen.append(1)
        return linear(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", counted)
        for count in (1, 3, 4):  # the first one computes the prompt
            seen.append(0)
            await ask(engine, name, f"{name} {count}", count)
    starts = [place for place, each in enumerate(seen) if not each]
    return (len(seen) - starts[2]) - (starts[2] - starts[1])


def test_what_is_dropped_is_freed(model, serve, pack, tmp_path) -> None:
    """With the last request that uses it, and what its sessions have cached."""
    model.save_pretrained(tmp_path)
    trained = inject(type(model)(model.config))

    async def main() -> None:
        async with serve(None, model_path=str(tmp_path), adapters=SLOTS) as engine:

            async def update(version: int) -> None:
                await engine.update_weights(updates(trained, pack, ("one",))[0], version)

            async def held() -> tuple[list[int], list[str]]:
                return await engine._call(
                    lambda executor: (
                        sorted(entry.version for entry in executor._adapters), sorted(executor._scheduler.idle)
                    )
                )  # fmt: skip

            await update(1)
            await ask(engine, "one", "turn")
            task = asyncio.create_task(ask(engine, "one", "long", 240))
            await ask(engine, "one", "clock")
            for version in (2, 3, 4):
                await update(version)
            versions, sessions = await held()
            assert versions == [1, 3, 4] and "turn" in sessions
            assert (await task).spans == [PolicySpan(1, 0, 240)]
            assert await held() == ([3, 4], [])

    asyncio.run(main())


def test_a_broken_update_reaches_no_other_request(model, serve, pack, tmp_path) -> None:
    model.save_pretrained(tmp_path)
    good = inject(type(model)(model.config))
    bad = inject(type(model)(model.config))
    for name, parameter in bad.named_parameters():
        if "lora_A.two" in name:
            parameter.data.fill_(np.nan)

    async def main() -> None:
        async with serve(None, model_path=str(tmp_path), adapters=SLOTS) as engine:
            for update in updates(good, pack):
                await engine.update_weights(update, 1)
            with pytest.raises(EngineError, match="q_proj.lora_A.weight: holds values that are not finite"):
                await engine.update_weights(updates(bad, pack)[1], 2)
            assert (await ask(engine, "two", "s")).spans == [PolicySpan(1, 0, 10)]

    asyncio.run(main())


def test_adapters_go_on_after_a_full_update(qwen3, serve, reference_log_probs, pack, tmp_path) -> None:
    qwen3().save_pretrained(tmp_path)
    other = qwen3(seed=7)
    trained = inject(qwen3(seed=7))

    async def main() -> list[Any]:
        async with serve(None, model_path=str(tmp_path), adapters=SLOTS) as engine:
            await engine.update_weights(updates(trained, pack, ("one",))[0], 1)
            await asyncio.gather(ask(engine, "one", "a"), ask(engine, "", "b"))
            await engine.update_weights(pack(other), 2)
            return await asyncio.gather(ask(engine, "one", "a"), ask(engine, "", "b"))

    for name, version, output in zip(("one", ""), (1, 2), asyncio.run(main()), strict=True):
        assert output.spans == [PolicySpan(version, 0, 10)]
        with active(trained, name):
            expected = reference_log_probs(trained, [1, 2, 3, 4, 5], output.token_ids)
        assert output.log_probs == pytest.approx(expected, abs=2e-5)


def test_a_model_without_the_targets_is_refused(model, serve, tmp_path) -> None:
    model.save_pretrained(tmp_path)

    async def main() -> None:
        async with serve(None, model_path=str(tmp_path), adapters=replace(SLOTS, targets=("qkv_proj",))):
            pass

    with pytest.raises(EngineError, match="no linear layers named qkv_proj"):
        asyncio.run(main())


def test_a_deterministic_rollout_with_adapters_repeats_its_bits(model, serve, pack, tmp_path) -> None:
    """Whatever came in between, in a new engine, and with other versions in its memory."""
    model.save_pretrained(tmp_path)
    trained = inject(type(model)(model.config))
    asked = ["one", "", "two", "one", "two", "", "one"]

    async def rollout(engine: Any, order: int) -> list[Any]:
        numbers = range(len(asked))[::order]
        for number in numbers:
            await engine.open_session(f"s{number}")

        async def turns(number: int) -> list[Any]:
            prompt = [1, 2, 3, number]
            outputs = []
            for turn in range(2):
                params = SamplingParams(4 + 3 * number, seed=number + turn, adapter=asked[number])
                outputs.append(await engine.generate(prompt, params, f"s{number}"))
                prompt = [*prompt, *outputs[-1].token_ids, 7]
            await engine.close_session(f"s{number}")
            return outputs

        tasks = {number: asyncio.create_task(turns(number)) for number in numbers}
        return [await tasks[number] for number in range(len(asked))]

    async def main(versions: int) -> list[Any]:
        async with serve(None, model_path=str(tmp_path), adapters=SLOTS, deterministic=True) as engine:
            for _ in range(versions):
                for update in updates(trained, pack):
                    await engine.update_weights(update, 5)
            return [await rollout(engine, 1), await rollout(engine, -1)]

    first, *others = [*asyncio.run(main(1)), *asyncio.run(main(3))]
    assert all(other == first for other in others)


def test_an_adapter_can_come_in_the_actors_group(model, serve, reference_log_probs, pack, tmp_path) -> None:
    model.save_pretrained(tmp_path)
    trained = inject(type(model)(model.config))

    (update,) = updates(trained, pack, ("one",))
    address = f"127.0.0.1:{free_port()}"

    def send() -> None:
        with WeightGroup(address, 0, 2, "gloo", timeout=60) as group:
            for bucket in update:
                group.broadcast(torch.from_numpy(bucket.data.copy()))

    async def main() -> Any:
        async with serve(None, model_path=str(tmp_path), adapters=SLOTS) as engine:
            sender = asyncio.create_task(asyncio.to_thread(send))
            layout = tuple(replace(bucket, data=np.empty(0, np.uint8)) for bucket in update)
            sent = WeightUpdate(broadcast=Broadcast(address, "gloo", 2, 1, layout), adapter=update.adapter)
            await engine.update_weights(sent, 1)
            await sender
            return await ask(engine, "one", "s")

    output = asyncio.run(main())
    with active(inject(type(model).from_pretrained(tmp_path)), "one") as module:
        expected = reference_log_probs(module, [1, 2, 3, 4, 5], output.token_ids)
    assert output.log_probs == pytest.approx(expected, abs=2e-5)
