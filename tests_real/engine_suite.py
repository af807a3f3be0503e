"""What every engine with an environment of its own must do on real weights, judged by transformers.

Stricter than the engine contract, and the same for all: each engine subclasses the suites in its ``tests_real`` and
supplies the fixtures ``case`` (a :class:`Case`) and ``run`` (runs a coroutine on the engine's loop).
"""

import asyncio
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl_core.api import (
    ArrayBucket,
    EngineContext,
    EngineError,
    InferenceEngine,
    PolicySpan,
    SamplingParams,
    TokenOutput,
    WeightUpdate,
)
from agentrl_core.api.weights import Broadcast
from agentrl_core.engine_kit.memory_files import MEMORY, mapped_memory
from agentrl_core.engine_kit.ports import free_port, host_address
from agentrl_core.engine_kit.processes import family
from agentrl_core.engine_kit.weight_group import WeightGroup
from agentrl_testing.tiny_model import save_tiny_model

VOCAB = 261
EOS = 258
MAX_MODEL_LEN = 256
TOLERANCE = 2e-5
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    # Peaked distributions, so that greedy sampling has no near ties.
    "initializer_range": 0.12,
}
LONG = list(range(80))
"""A prompt of several blocks of any KV cache, so that a stale prefix would be found there."""


class Models:
    """Random models of one kind, saved and loaded once each: the output layer shares the embedding, or does not."""

    def __init__(self, root: Path, tied: bool) -> None:
        self.tied = tied
        self._root = root / ("tied" if tied else "untied")
        self._modules: dict[int, Any] = {}

    def folder(self, seed: int = 0) -> str:
        path = self._root / str(seed)
        if not path.exists():
            save_tiny_model(path, seed=seed, tie_word_embeddings=self.tied, **SHAPE)
        return str(path)

    def context(self) -> EngineContext:
        return EngineContext(self.folder(), max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB)

    def files(self, seed: int = 0) -> WeightUpdate:
        return WeightUpdate(files=tuple(str(path) for path in sorted(Path(self.folder(seed)).glob("*.safetensors"))))

    def tensors(self, seed: int = 0) -> list[tuple[str, tuple[int, ...], str, "np.ndarray[Any, Any]"]]:
        (bucket,) = self.files(seed)
        return list(bucket.tensors())

    def buckets(self, seed: int = 0) -> WeightUpdate:
        """Dealt out in turns: the shards of a layer that an engine fuses come in different ones."""
        tensors = self.tensors(seed)
        return WeightUpdate([bucket_of(tensors[part::3]) for part in range(3)])

    def module(self, seed: int = 0) -> Any:
        if seed not in self._modules:
            self._modules[seed] = AutoModelForCausalLM.from_pretrained(self.folder(seed), dtype=torch.float32).eval()
        return self._modules[seed]


@dataclass
class Case:
    """A started engine, and models of its kind."""

    engine: InferenceEngine
    models: Models

    def gap(
        self, prompts: Sequence[list[int]], outputs: Sequence[TokenOutput], temperature: float = 1.0, seed: int = 0
    ) -> float:
        """Largest difference between the engine's log-probs and those of transformers."""
        return largest_gap(self.models.module(seed), prompts, outputs, temperature)


Make = Callable[[EngineContext], InferenceEngine]
"""An engine for a context; can be pickled."""


@contextmanager
def started(run: Any, make: Make, models: Models, **shape: int) -> Iterator[Case]:
    """An engine of a replica of that shape (``tensor_parallel=2, nodes=2``); its other hosts are processes here."""
    context = replace(models.context(), **shape)
    if context.nodes > 1:
        address = host_address()
        context = replace(context, rendezvous=f"{address}:{free_port(host=address)}")
    engine = make(context)
    spawn = multiprocessing.get_context("spawn")
    others = []
    for rank in range(1, context.nodes):
        here, there = spawn.Pipe()
        process = spawn.Process(target=_follow, args=(make, replace(context, node_rank=rank), there))
        process.start()
        others.append((process, here))
    memory: set[str] = set()
    try:
        before = shared_memory()
        run(engine.start())
        memory = shared_memory() - before
        for _, connection in others:
            assert connection.poll(60) and connection.recv() == "healthy"
        yield Case(Broadcasting(engine, context) if others else engine, models)
        for _, connection in others:
            connection.send("how are you?")
            assert connection.poll(60) and connection.recv() == "healthy"
    finally:
        run(engine.close())
        for process, connection in others:
            connection.close()
            process.join(30)
            process.kill()
    left = [name for name in memory if (MEMORY / name).exists()]
    assert not left, f"the engine has ended, and its shared memory is still there: {left}"


def shared_memory() -> set[str]:
    """Names of that which this process and its descendants have mapped."""
    return {name for pid in family(os.getpid()) for name in mapped_memory(pid)}


class Broadcasting:
    """An engine of several hosts, to which updates are sent as the actor does: files do not reach all of them."""

    def __init__(self, engine: Any, context: EngineContext) -> None:
        self._engine = engine
        self._size = 1 + context.tensor_parallel * context.pipeline_parallel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def update_weights(self, update: WeightUpdate, version: int) -> None:
        buckets = list(update)
        host = host_address()
        # A new group each time: between two updates a test may have the engine join another one.
        address = f"{host}:{free_port(host=host)}"
        layout = tuple(replace(bucket, data=np.empty(0, np.uint8)) for bucket in buckets)
        broadcast = Broadcast(address, "gloo", self._size, 1, layout)
        receiving = asyncio.create_task(self._engine.update_weights(WeightUpdate(broadcast=broadcast), version))
        sending = asyncio.create_task(asyncio.to_thread(self._send, address, buckets))
        await asyncio.wait([receiving, sending], return_when=asyncio.FIRST_COMPLETED)
        if receiving.done() and receiving.exception() is not None:
            # The engine rejected the update before it joined, so the sender waits for nobody.
            raise receiving.exception() or AssertionError
        await sending
        await receiving

    def _send(self, address: str, buckets: list[ArrayBucket]) -> None:
        with WeightGroup(address, 0, self._size, timeout=60) as group:
            for bucket in buckets:
                group.broadcast(torch.from_numpy(bucket.data.copy()))


def _follow(make: Make, context: EngineContext, connection: Any) -> None:
    async def main() -> None:
        engine = make(context)
        await engine.start()
        try:
            with suppress(EOFError):
                while True:
                    await engine.health()
                    connection.send("healthy")
                    await asyncio.to_thread(connection.recv)
        finally:
            await engine.close()

    asyncio.run(main())


def bucket_of(tensors: Sequence[tuple[str, tuple[int, ...], str, "np.ndarray[Any, Any]"]]) -> ArrayBucket:
    names, shapes, dtypes, data = zip(*tensors, strict=True)
    return ArrayBucket(names, shapes, dtypes, np.concatenate(data))


def make_prompts(count: int, low: int = 1, high: int = 40, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(low, high))] for _ in range(count)]


async def generate_all(
    engine: InferenceEngine, prompts: Sequence[list[int]], params: SamplingParams
) -> list[TokenOutput]:
    return await asyncio.gather(*(engine.generate(prompt, params, f"r{i}") for i, prompt in enumerate(prompts)))


@torch.no_grad()
def log_probs(module: Any, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Of every id, under softmax(logits / temperature)."""
    logits = module(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
    found: list[float] = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
    return found


def largest_gap(
    module: Any, prompts: Sequence[list[int]], outputs: Sequence[TokenOutput], temperature: float = 1.0
) -> float:
    """Largest difference between an engine's log-probs and those of a module."""
    return max(
        abs(ours - theirs)
        for prompt, output in zip(prompts, outputs, strict=True)
        for ours, theirs in zip(
            output.log_probs or [], log_probs(module, prompt, output.token_ids, temperature), strict=True
        )
    )


class Suite:
    """``block``: tokens of a block of the engine's KV cache, which it finds in whole ones."""

    block = 1

    @pytest.fixture
    def engine(self, case: Case, run: Any) -> InferenceEngine:
        """Every test begins with the weights of seed 0 as version 0."""
        run(case.engine.update_weights(case.models.files(), 0))
        return case.engine

    def cacheable(self, tokens: int) -> int:
        """Tokens that must be found. The last two need not: the last id was never fed, and one is always computed."""
        return (tokens - 2) // self.block * self.block


def check_sampling_and_updates(case: Case, run: Any) -> None:
    """What matters most, for replicas of other shapes."""
    prompts = make_prompts(16)

    async def main() -> list[list[TokenOutput]]:
        outputs = []
        for version in range(3):
            if version:
                # One after the other by file and by buckets.
                form = case.models.files if version == 1 else case.models.buckets
                await case.engine.update_weights(form(version), version)
            outputs.append(await generate_all(case.engine, prompts, SamplingParams(16)))
            outputs.append(await generate_all(case.engine, prompts, SamplingParams(16, temperature=0.0)))
        await case.engine.health()
        return outputs

    for number, outputs in enumerate(run(main())):
        assert case.gap(prompts, outputs, seed=number // 2) <= TOLERANCE
        assert {span.version for output in outputs for span in output.spans} == {number // 2}


class GenerationSuite(Suite):
    """Sampling."""

    @pytest.mark.parametrize(
        "sampling",
        [
            {"temperature": 1.0},
            {"temperature": 0.7},
            {"temperature": 0.7, "top_p": 0.8},
            {"temperature": 1.3, "top_k": 20},
        ],
        ids=str,
    )
    def test_log_probs_are_those_of_transformers(self, engine, case, run, sampling) -> None:
        prompts = make_prompts(48)
        outputs = run(generate_all(engine, prompts, SamplingParams(max_tokens=48, **sampling)))
        assert sum(len(output.token_ids) for output in outputs) == 48 * 48 >= 2000
        assert case.gap(prompts, outputs, sampling["temperature"]) <= TOLERANCE

    def test_greedy_tokens_are_those_of_transformers(self, engine, case, run) -> None:
        prompts = make_prompts(16, seed=1)
        outputs = run(generate_all(engine, prompts, SamplingParams(max_tokens=24, temperature=0.0)))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert len(output.token_ids) == 24
            # Each is the most likely one after those before it.
            logits = case.models.module()(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
            assert output.token_ids == logits.argmax(-1).tolist()
        assert case.gap(prompts, outputs) <= TOLERANCE

    def test_requests_of_every_kind_share_a_batch(self, engine, case, run) -> None:
        prompts = make_prompts(24, seed=2)
        kinds = [
            {"temperature": 0.0},
            {"temperature": 0.5, "seed": 3},
            {"temperature": 1.0, "top_k": 5},
            {"temperature": 0.8, "top_p": 0.5},
        ]

        async def main():
            return await asyncio.gather(
                *(engine.generate(each, SamplingParams(32, **kinds[i % 4]), f"r{i}") for i, each in enumerate(prompts))
            )

        outputs = run(main())
        for number, kind in enumerate(kinds):
            gap = case.gap(prompts[number::4], outputs[number::4], kind["temperature"] or 1.0)
            assert gap <= TOLERANCE

    def test_a_request_ends_at_its_own_stop_ids_only(self, engine, run) -> None:
        prompts = make_prompts(200, 1, 4, seed=3)
        stops = tuple(range(0, VOCAB, 5))
        assert EOS not in stops
        with_stops = run(generate_all(engine, prompts, SamplingParams(60, temperature=1.5, stop_token_ids=stops)))
        for output in with_stops:
            assert not set(output.token_ids[:-1]) & set(stops)
            if output.finish_reason == "stop":
                assert output.token_ids[-1] in stops
            else:
                assert len(output.token_ids) == 60
        # The model's own end of sequence is sampled, and does not end a request that has not asked for it.
        assert EOS in [token for output in with_stops for token in output.token_ids[:-1]]
        without = run(generate_all(engine, prompts[:64], SamplingParams(60, temperature=1.5)))
        assert {(output.finish_reason, len(output.token_ids)) for output in without} == {("length", 60)}
        assert any(EOS in output.token_ids[:-1] for output in without)

    @pytest.mark.parametrize("prompt_length", [1, MAX_MODEL_LEN - 60, MAX_MODEL_LEN - 1])
    def test_the_whole_context_can_be_used(self, engine, case, run, prompt_length) -> None:
        (prompt,) = make_prompts(1, prompt_length, prompt_length, seed=4)
        output = run(engine.generate(prompt, SamplingParams(MAX_MODEL_LEN), "whole"))
        assert len(prompt) + len(output.token_ids) == MAX_MODEL_LEN
        assert output.finish_reason == "length"
        assert case.gap([prompt], [output]) <= TOLERANCE

    def test_impossible_requests_are_refused_and_the_engine_survives(self, engine, run) -> None:
        for prompt, params, message in (
            ([], SamplingParams(1), "empty"),
            ([1] * MAX_MODEL_LEN, SamplingParams(1), "no room"),
            ([VOCAB], SamplingParams(1), f"token id {VOCAB} is outside"),
            ([-1], SamplingParams(1), "token id -1 is outside"),
            ([1], SamplingParams(0), "max_tokens is 0"),
            ([1], SamplingParams(1, top_p=2.0), "top_p"),
        ):
            with pytest.raises(ValueError, match=message):
                run(engine.generate(prompt, params, "r"))
        assert len(run(engine.generate([1], SamplingParams(1), "r")).token_ids) == 1
        run(engine.health())

    def test_abort_returns_what_was_sampled(self, engine, case, run) -> None:
        prompt = [1, 2, 3]

        async def main():
            task = asyncio.create_task(engine.generate(prompt, SamplingParams(250), "r"))
            await engine.generate(prompt, SamplingParams(20), "other")
            return await engine.abort("r"), await task, await engine.abort("r"), await engine.abort("unknown")

        aborted, output, again, unknown = run(main())
        assert aborted == output
        assert output.finish_reason == "abort"
        assert 0 < len(output.token_ids) < 250
        assert output.spans == [PolicySpan(0, 0, len(output.token_ids))]
        assert case.gap([prompt], [output]) <= TOLERANCE
        assert (again, unknown) == (None, None)

    def test_a_cancelled_request_ends_in_the_engine_too(self, engine, run) -> None:
        async def main():
            task = asyncio.create_task(engine.generate([1, 2], SamplingParams(250), "r"))
            await engine.generate([1, 2], SamplingParams(4), "other")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            again = await engine.generate([1, 2], SamplingParams(4), "r")
            await engine.pause("drain")
            await engine.resume()
            return again

        assert len(run(main()).token_ids) == 4

    def test_turns_share_their_cache(self, engine, run) -> None:
        (prompt,) = make_prompts(1, 60, 60, seed=5)

        async def main():
            first = await engine.generate(prompt, SamplingParams(20), "s")
            engine.metrics()
            await engine.generate([*prompt, *first.token_ids, 7], SamplingParams(4), "s")
            return engine.metrics()

        metrics = run(main())
        assert metrics["prompt_tokens"] == 81
        assert self.cacheable(80) <= metrics["cached_tokens"] <= 80


class WeightsSuite(Suite):
    """Updates: the output is the new model's, whatever was cached or running.

    ``forgets_weights``: sleep level 2 drops them, and an update must follow.
    """

    forgets_weights = False

    @pytest.mark.parametrize("form", ["files", "buckets"])
    def test_after_each_update_the_output_is_the_new_models(self, engine, case, run, form) -> None:
        async def main():
            outputs, cached = [], []
            for version in range(1, 11):
                await engine.update_weights(getattr(case.models, form)(version), version)
                engine.metrics()
                # The same prompt as before the update, then once more: it is computed again, then cached.
                outputs.append([await engine.generate(LONG, SamplingParams(16), "s") for _ in range(2)])
                cached.append(engine.metrics()["cached_tokens"])
            return outputs, cached

        outputs, cached = run(main())
        for version, pair in enumerate(outputs, start=1):
            assert case.gap([LONG, LONG], pair, seed=version) <= TOLERANCE
            assert all(output.spans == [PolicySpan(version, 0, 16)] for output in pair)
        assert all(self.cacheable(len(LONG)) <= tokens <= len(LONG) for tokens in cached)

    def test_only_tied_weights_may_come_under_the_output_layers_name(self, engine, case, run) -> None:
        tensors = [
            ("lm_head.weight" if "embed" in name else name, *rest)
            for name, *rest in case.models.tensors(3)
            if name != "lm_head.weight"
        ]
        update = WeightUpdate([bucket_of(tensors)])
        if not case.models.tied:
            with pytest.raises(EngineError, match="model.embed_tokens.weight: missing"):
                run(engine.update_weights(update, 3))
            return
        run(engine.update_weights(update, 3))
        output = run(engine.generate(LONG, SamplingParams(16), "s"))
        assert case.gap([LONG], [output], seed=3) <= TOLERANCE

    @pytest.mark.parametrize("paused", [True, False], ids=["keep", "unpaused"])
    def test_requests_in_flight_go_on_with_the_new_weights(self, engine, case, run, paused) -> None:
        prompts = make_prompts(32, 5, 30)

        async def main():
            crowd = asyncio.create_task(generate_all(engine, prompts, SamplingParams(200)))
            # When this one has its tokens, so have the others.
            await engine.generate([1], SamplingParams(20), "clock")
            if paused:
                await engine.pause("keep")
            await engine.update_weights(case.models.files(1), 1)
            if paused:
                late = asyncio.create_task(engine.generate([5], SamplingParams(3), "late"))
                await asyncio.sleep(0)
                await engine.resume()
                assert (await late).spans == [PolicySpan(1, 0, 3)]
            return await crowd

        for prompt, output in zip(prompts, run(main()), strict=True):
            assert (output.finish_reason, len(output.token_ids)) == ("length", 200)
            old, new = output.spans
            assert (old.version, old.start, new.version, new.end) == (0, 0, 1, 200)
            assert 0 < old.end == new.start < 200
            before, after = output.token_ids[: old.end], output.token_ids[old.end :]
            head = log_probs(case.models.module(0), prompt, before)
            tail = log_probs(case.models.module(1), [*prompt, *before], after)
            assert output.log_probs == pytest.approx([*head, *tail], abs=1e-4)

    def test_wrong_weights_are_named_and_nothing_changes(self, engine, case, run) -> None:
        wrong = [
            (
                "model.norms.weight" if name == "model.norm.weight" else name,
                shape[::-1] if "layers.0.mlp.up_proj" in name else shape,
                *rest,
            )
            for name, shape, *rest in case.models.tensors(1)
        ]
        with pytest.raises(EngineError) as caught:
            run(engine.update_weights(WeightUpdate([bucket_of(wrong)]), 1))
        message = str(caught.value)
        assert "model.norms.weight: the model has no such tensor (nearest: model.norm.weight)" in message
        assert "model.norm.weight: missing" in message
        assert "up_proj.weight: shape [128, 256] was given, the model has [256, 128]" in message
        output = run(engine.generate(LONG, SamplingParams(16), "s"))
        assert output.spans == [PolicySpan(0, 0, 16)]
        assert case.gap([LONG], [output]) <= TOLERANCE

    def test_pause_and_sleep(self, engine, case, run) -> None:
        prompts = make_prompts(8)

        async def crowd():
            running = asyncio.create_task(generate_all(engine, prompts, SamplingParams(200)))
            await engine.generate([1], SamplingParams(8), "clock")
            return running

        async def main():
            running = await crowd()
            await engine.pause("keep")
            held = asyncio.create_task(engine.generate([1], SamplingParams(3), "held"))
            with pytest.raises(EngineError, match="paused requests hold the engine awake"):
                await engine.sleep(1)
            aborted = await engine.abort("r0")
            assert aborted is not None and aborted.finish_reason == "abort"
            await engine.resume()
            await engine.pause("drain")
            outputs = await running
            assert [len(output.token_ids) for output in outputs[1:]] == [200] * 7
            await engine.resume()
            assert len((await held).token_ids) == 3

            running = await crowd()
            await engine.pause("abort")
            ended = await running
            assert {output.finish_reason for output in ended} == {"abort"}
            await engine.resume()

            for level in (1, 2):
                await engine.sleep(level)
                asleep = asyncio.create_task(engine.generate([1], SamplingParams(3), "asleep"))
                await engine.wake_up(["weights"])
                if level == 2 and self.forgets_weights:
                    await engine.update_weights(case.models.files(), 0)
                assert not asleep.done()
                await engine.wake_up(["kv_cache"])
                assert len((await asleep).token_ids) == 3
            return outputs[1:], ended

        outputs, ended = run(main())
        assert case.gap(prompts[1:], outputs) <= TOLERANCE
        assert case.gap(prompts, ended) <= TOLERANCE
