import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl_core.api.engine import EngineContext, MultiModal, PolicySpan, SamplingParams
from agentrl_core.api.errors import EngineError
from agentrl_engine_hf.config import HFEngineConfig
from agentrl_engine_hf.engine import HFEngine
from agentrl_engine_hf.model import Model

LONG = SamplingParams(max_tokens=200, seed=5)


def test_abort_returns_what_was_sampled(qwen3, serve, gate, reference_log_probs) -> None:
    module, prompt = qwen3(), [1, 2, 3]

    async def main():
        async with serve(module) as engine:
            # Forward 1 is the prefill, 2..6 sample one token each.
            held = gate(module, 6)
            task = asyncio.create_task(engine.generate(prompt, LONG, "r"))
            aborted = await held.command(engine.abort("r"))
            return aborted, await task, await engine.abort("r"), await engine.abort("unknown")

    aborted, output, again, unknown = asyncio.run(main())
    assert aborted == output
    assert (output.finish_reason, len(output.token_ids)) == ("abort", 5)
    assert output.log_probs == pytest.approx(reference_log_probs(module, prompt, output.token_ids), abs=2e-5)
    assert (again, unknown) == (None, None)


def test_abort_of_a_waiting_request_returns_nothing_sampled(qwen3, serve, gate) -> None:
    module = qwen3()

    async def main():
        async with serve(module, HFEngineConfig(max_num_seqs=1)) as engine:
            held = gate(module, 3)
            first = asyncio.create_task(engine.generate([1, 2], SamplingParams(8, seed=0), "first"))
            await held.reached()
            second = asyncio.create_task(engine.generate([1, 2], LONG, "second"))
            await asyncio.sleep(0)
            await held.command(engine.abort("second"))
            return await first, await second

    first, second = asyncio.run(main())
    assert len(first.token_ids) == 8
    assert (second.token_ids, second.finish_reason) == ([], "abort")


def test_an_output_says_how_long_it_waited_for_a_row(qwen3, serve, gate) -> None:
    module = qwen3()

    async def main():
        async with serve(module, HFEngineConfig(max_num_seqs=1)) as engine:
            held = gate(module, 3)
            first = asyncio.create_task(engine.generate([1, 2], SamplingParams(8, seed=0), "first"))
            await held.reached()
            start = time.perf_counter()
            second = asyncio.create_task(engine.generate([1, 2], SamplingParams(4, seed=0), "second"))
            held.open()
            outputs = await first, await second
            return outputs, time.perf_counter() - start

    (first, second), waited = asyncio.run(main())
    assert 0 <= first.queued and 0 < second.queued < waited


def test_a_cancelled_request_frees_its_row(qwen3, serve, gate) -> None:
    module = qwen3()

    async def main():
        async with serve(module, HFEngineConfig(max_num_seqs=1)) as engine:
            held = gate(module, 4)
            task = asyncio.create_task(engine.generate([1, 2], LONG, "r"))
            await held.reached()
            task.cancel()
            held.open()
            with pytest.raises(asyncio.CancelledError):
                await task
            engine.metrics()
            output = await engine.generate([1, 2], SamplingParams(4, seed=0), "r")
            return output, engine.metrics()

    output, metrics = asyncio.run(main())
    assert len(output.token_ids) == 4
    assert metrics["steps"] < 10


def test_pause_keep_with_an_update_goes_on_with_the_new_weights(
    qwen3, serve, prompts, gate, pack, generate_all, reference_log_probs
) -> None:
    old, new = qwen3(seed=0), qwen3(seed=1)
    module = qwen3(seed=0)
    starts = prompts(32, 5, 5)
    params = [SamplingParams(max_tokens=20 + i % 7, seed=i) for i in range(32)]

    async def main():
        async with serve(module) as engine:
            held = gate(module, 9)
            task = asyncio.create_task(generate_all(engine, starts, params))
            await held.command(engine.pause("keep"))
            assert not task.done()
            await engine.update_weights(pack(new), 7)
            await engine.resume()
            return await task

    for prompt, param, output in zip(starts, params, asyncio.run(main()), strict=True):
        assert len(output.token_ids) == param.max_tokens
        assert output.spans == [PolicySpan(0, 0, 8), PolicySpan(7, 8, param.max_tokens)]
        head = reference_log_probs(old, prompt, output.token_ids)[:8]
        tail = reference_log_probs(new, prompt, output.token_ids)[8:]
        assert output.log_probs == pytest.approx(head + tail, abs=2e-5)


def test_an_update_that_keeps_the_cache_of_what_runs_gives_it_to_nobody_else(
    qwen3, serve, prompts, gate, pack, generate_all, reference_log_probs
) -> None:
    """Tokens after the update are the new model's on keys and values of the old one; no later request reads those."""
    old, new, module = qwen3(seed=0), qwen3(seed=1), qwen3(seed=0)
    starts = prompts(4, 5, 5)

    async def main():
        async with serve(module) as engine:
            held = gate(module, 9)
            task = asyncio.create_task(generate_all(engine, starts, SamplingParams(20, seed=1)))
            await held.command(engine.update_weights(replace(pack(new), running="continue"), 7))
            outputs = await task
            engine.metrics()
            # The next turn of each session, and the same prompts in other sessions.
            turns = [[*start, *output.token_ids, 3] for start, output in zip(starts, outputs, strict=True)]
            later = await generate_all(engine, turns, SamplingParams(5, seed=2))
            later += await generate_all(engine, starts, SamplingParams(5, seed=2), tag="other")
            return outputs, turns + starts, later, engine.metrics()

    outputs, later_prompts, later, metrics = asyncio.run(main())
    for prompt, output in zip(starts, outputs, strict=True):
        assert output.spans == [PolicySpan(0, 0, 8), PolicySpan(7, 8, 20)]
        assert output.log_probs[:8] == pytest.approx(reference_log_probs(old, prompt, output.token_ids)[:8], abs=2e-5)
        assert output.log_probs[8:] == pytest.approx(tail_on_old_cache(old, new, prompt, output.token_ids, 8), abs=2e-5)
    assert metrics["cached_tokens"] == 0
    for prompt, output in zip(later_prompts, later, strict=True):
        assert output.log_probs == pytest.approx(reference_log_probs(new, prompt, output.token_ids), abs=2e-5)


@torch.no_grad()
def tail_on_old_cache(old: Any, new: Any, prompt: list[int], token_ids: list[int], start: int) -> list[float]:
    """Log-probs of the tokens from ``start`` on; the old model has computed the cache of all before the last one."""
    cache = old(torch.tensor([[*prompt, *token_ids[: start - 1]]]), use_cache=True).past_key_values
    logits = new(torch.tensor([token_ids[start - 1 :]]), past_key_values=cache).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids[start:])[:, None])[:, 0].tolist()


def test_pause_abort_ends_what_runs_and_holds_what_comes(qwen3, serve, gate) -> None:
    module = qwen3()

    async def main():
        async with serve(module) as engine:
            held = gate(module, 4)
            running = asyncio.create_task(engine.generate([1, 2], LONG, "r"))
            await held.command(engine.pause("abort"))
            first = await running
            engine.metrics()
            second = asyncio.create_task(engine.generate([3, 4], SamplingParams(4, seed=0), "s"))
            await engine.health()
            paused_steps = engine.metrics()["steps"]
            await engine.resume()
            return first, paused_steps, await second

    first, paused_steps, second = asyncio.run(main())
    assert (first.finish_reason, len(first.token_ids)) == ("abort", 3)
    assert paused_steps == 0
    assert len(second.token_ids) == 4


def test_pause_drain_waits_for_what_runs_and_holds_what_comes(qwen3, serve, gate) -> None:
    module = qwen3()

    async def main():
        async with serve(module) as engine:
            held = gate(module, 3)
            running = asyncio.create_task(engine.generate([1, 2], SamplingParams(12, seed=0), "r"))
            await held.reached()
            pause = asyncio.create_task(engine.pause("drain"))
            await asyncio.sleep(0)
            late = asyncio.create_task(engine.generate([3, 4], SamplingParams(4, seed=0), "late"))
            await asyncio.sleep(0)
            held.open()
            await pause
            state = running.done() or len((await running).token_ids) == 12, late.done()
            await engine.resume()
            return state, await running, await late

    state, running, late = asyncio.run(main())
    assert state == (True, False)
    assert (len(running.token_ids), running.finish_reason, len(late.token_ids)) == (12, "length", 4)


def test_sleep_and_wake_up_keep_the_request(qwen3, tmp_path, serve, prompts) -> None:
    qwen3().save_pretrained(tmp_path)

    async def main():
        async with serve(model_path=str(tmp_path)) as engine:
            before = await engine.generate([1, 2, 3], SamplingParams(8, seed=0), "a")
            await engine.sleep(2)
            task = asyncio.create_task(engine.generate([1, 2, 3], SamplingParams(8, seed=0), "a"))
            await engine.health()
            await engine.wake_up(["weights"])
            await engine.health()
            asleep = not task.done()
            await engine.wake_up()
            return before, asleep, await task, engine.metrics()

    before, asleep, after, metrics = asyncio.run(main())
    assert asleep
    assert after.token_ids == before.token_ids
    assert metrics["cached_tokens"] == 0


@pytest.mark.parametrize(("level", "steps"), [(1, ["give back"]), (2, ["move to cpu", "give back"])])
def test_sleep_gives_back_what_has_become_free(qwen3, tmp_path, serve, monkeypatch, level, steps) -> None:
    qwen3().save_pretrained(tmp_path)
    found = []
    monkeypatch.setattr(Model, "move", lambda self, device: found.append(f"move to {device}"))
    monkeypatch.setattr(Model, "give_memory_back", lambda self: found.append("give back"))

    async def main():
        async with serve(model_path=str(tmp_path)) as engine:
            await engine.sleep(level)

    asyncio.run(main())
    assert found == steps


@pytest.mark.parametrize(("device", "calls"), [("cuda", 1), ("cpu", 0)])
def test_memory_is_given_back_on_cuda(monkeypatch, device, calls) -> None:
    called = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append(True))
    Model.give_memory_back(SimpleNamespace(device=torch.device(device)))
    assert len(called) == calls


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(4), "prompt is empty"),
        ([1] * 256, SamplingParams(4), "256 tokens.*max_model_len 256"),
        ([1, 200], SamplingParams(4), r"token id 200 is outside the vocabulary 0\.\.199"),
        ([-1, 5], SamplingParams(4), "token id -1"),
        ([1], SamplingParams(0), "max_tokens is 0"),
        ([1], SamplingParams(4, temperature=-1.0), "temperature is -1.0"),
        ([1], SamplingParams(4, top_p=0.0), "top_p is 0.0"),
    ],
)
def test_a_bad_request_is_refused_and_harms_nobody(model, serve, prompt, params, message) -> None:
    async def main():
        async with serve(model) as engine:
            good = asyncio.create_task(engine.generate([1, 2], SamplingParams(20, seed=0), "good"))
            with pytest.raises(ValueError, match=message):
                await engine.generate(prompt, params, "bad")
            return await good

    assert len(asyncio.run(main()).token_ids) == 20


def test_images_are_refused(model, serve) -> None:
    async def main():
        async with serve(model) as engine:
            with pytest.raises(ValueError, match="the prompt has 1 images; this engine takes text alone"):
                await engine.generate([1], SamplingParams(1), "r", MultiModal(("name",), [1]))

    asyncio.run(main())


def test_a_session_has_one_request_at_a_time(qwen3, serve, gate) -> None:
    module = qwen3()

    async def main():
        async with serve(module) as engine:
            held = gate(module, 2)
            first = asyncio.create_task(engine.generate([1, 2], SamplingParams(5, seed=0), "r"))
            with pytest.raises(ValueError, match="'r' is running already"):
                await held.command(engine.generate([1, 2], SamplingParams(5, seed=0), "r"))
            return await first

    assert len(asyncio.run(main()).token_ids) == 5


@pytest.mark.parametrize("forward", [1, 2])
def test_an_exception_in_a_step_fails_its_requests_and_the_engine_survives(qwen3, serve, forward) -> None:
    module = qwen3()
    calls = 0

    def explode(*_):
        nonlocal calls
        calls += 1
        if calls == forward:
            raise RuntimeError("out of luck")

    async def main():
        async with serve(module) as engine:
            hook = module.register_forward_hook(explode)
            with pytest.raises(RuntimeError, match="out of luck"):
                await engine.generate([1, 2, 3], SamplingParams(5, seed=0), "r")
            hook.remove()
            await engine.health()
            return await engine.generate([1, 2, 3], SamplingParams(5, seed=0), "r")

    assert len(asyncio.run(main()).token_ids) == 5


def test_nan_logits_fail_the_request_and_leave_nothing_behind(qwen3, serve, pack, reference_log_probs) -> None:
    module, good = qwen3(seed=0), qwen3(seed=0)
    bad = {name: torch.full_like(parameter, float("nan")) for name, parameter in good.named_parameters()}

    async def main():
        async with serve(module) as engine:
            await engine.update_weights(pack(bad), 1)
            with pytest.raises(EngineError, match="not finite for 1 of 1 running requests .weights version 1"):
                await engine.generate([1, 2, 3], SamplingParams(5, seed=0), "r")
            await engine.update_weights(pack(good), 2)
            return await engine.generate([1, 2, 3], SamplingParams(5, seed=0), "r")

    output = asyncio.run(main())
    assert output.log_probs == pytest.approx(reference_log_probs(good, [1, 2, 3], output.token_ids), abs=2e-5)


def test_a_dead_thread_fails_its_requests_and_health(model, serve) -> None:
    class Death(BaseException):
        pass

    async def main():
        async with serve(model) as engine:

            def die(*_):
                raise Death("the end")

            hook = model.register_forward_hook(die)
            try:
                with pytest.raises(Death):
                    await engine.generate([1, 2], SamplingParams(5), "r")
            finally:
                hook.remove()
            with pytest.raises(EngineError, match="has stopped"):
                await engine.health()
            with pytest.raises(EngineError, match="has stopped"):
                await engine.generate([1, 2], SamplingParams(5), "r")

    asyncio.run(main())


def test_close_fails_what_runs_and_may_be_called_twice(qwen3, serve, gate) -> None:
    module = qwen3()

    async def main():
        async with serve(module) as engine:
            held = gate(module, 3)
            task = asyncio.create_task(engine.generate([1, 2], LONG, "r"))
            await held.command(engine.close())
            with pytest.raises(EngineError, match="closed"):
                await task
            await engine.close()
            with pytest.raises(EngineError, match="has stopped"):
                await engine.health()

    asyncio.run(main())


def test_requests_come_from_one_event_loop_after_another(model) -> None:
    engine = HFEngine(HFEngineConfig(), EngineContext(model_path="", max_model_len=256, shared_module=model))
    asyncio.run(engine.start())
    outputs = []
    for _ in range(2):
        outputs.append(asyncio.run(engine.generate([1, 2, 3], SamplingParams(6, seed=0), "r")))

    async def abandoned():
        task = asyncio.create_task(engine.generate([1, 2, 3], LONG, "abandoned"))
        await asyncio.sleep(0)
        return task.get_name()

    asyncio.run(abandoned())
    outputs.append(asyncio.run(engine.generate([1, 2, 3], SamplingParams(6, seed=0), "abandoned")))
    asyncio.run(engine.close())
    assert len({tuple(output.token_ids) for output in outputs}) == 1


def test_an_exception_outside_the_forward_fails_what_runs_and_the_engine_survives(qwen3, serve, monkeypatch) -> None:
    def no_memory(*_, **__):
        raise MemoryError("no memory for the cache")

    async def main():
        async with serve(qwen3()) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(torch, "zeros", no_memory)
                with pytest.raises(MemoryError, match="no memory for the cache"):
                    await engine.generate([1, 2, 3], SamplingParams(5, seed=0), "r")
            return await engine.generate([1, 2, 3], SamplingParams(5, seed=0), "r")

    assert len(asyncio.run(main()).token_ids) == 5
