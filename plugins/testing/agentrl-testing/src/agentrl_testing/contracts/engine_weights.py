"""What engines must do with new weights, also while requests run."""

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from agentrl_core.api import PausableEngine, SamplingParams, TokenOutput, WeightUpdate
from agentrl_core.api.weights import Broadcast, Running
from agentrl_core.engine_kit.ports import free_port
from agentrl_testing.contracts.case import needs
from agentrl_testing.contracts.engine_served import (
    DEADLINE,
    PROMPTS,
    Model,
    Served,
    bucket_of,
    check_cover,
    check_spans,
    send,
)

GAP = 1e-4
"""Largest gap of a log-prob to that of the weights that its version names."""
LONG_PROMPTS = [[(17 * row + 7 * column) % 190 + 10 for column in range(80 + 3 * row)] for row in range(8)]
"""Long enough for caches that keep whole blocks."""
TURN = 120
"""Tokens of a request that runs while weights change."""


class WeightCases:
    """Cases of :class:`EngineContract`."""

    @pytest.mark.parametrize("road", ["buckets", "files"])
    def test_new_weights_answer_after_an_update(self, served: Served, road: str) -> None:
        """Every cache of the old ones is gone, and spans have the new number."""
        needs(served.plugin, "weight_update")
        for seed in (1, 2, 3):
            served.run(served.together(PROMPTS, temperature=0.0))
            model = Model(seed, served.plugin.tie_word_embeddings)
            update = model.buckets() if road == "buckets" else model.file(served.folder)
            served.take(model, update)
            for prompt, output in zip(PROMPTS, served.run(served.together(PROMPTS, temperature=0.0)), strict=True):
                expected = model.greedy(prompt, 16)
                assert output.token_ids == expected, f"after update {seed} the answer is not the new model's"
                check_spans(output, served.version)
                if output.log_probs is not None:
                    assert served.gap(prompt, output) <= served.plugin.tolerance, f"stale log-probs after update {seed}"

    @pytest.mark.parametrize("backend", ["gloo", "ipc"])
    def test_weights_that_are_sent_in_a_group_are_received(self, served: Served, backend: str) -> None:
        """Bucket by bucket, in one group for several updates, and in another one after it."""
        needs(served.plugin, "broadcast", "weight_update", *(["ipc"] if backend == "ipc" else []))
        for seeds in ((1, 2), (3,)):
            address = f"127.0.0.1:{free_port()}"
            models = [Model(seed, served.plugin.tie_word_embeddings) for seed in seeds]
            sender = threading.Thread(target=send, args=(address, backend, models), daemon=True)
            sender.start()
            for model in models:
                layout = tuple(replace(bucket, data=np.empty(0, np.uint8)) for bucket in model.buckets())
                served.take(model, WeightUpdate(broadcast=Broadcast(address, backend, 2, 1, layout)))
                output = served.run(served.generate(PROMPTS[0], temperature=0.0))
                assert output.token_ids == model.greedy(PROMPTS[0], 16), "the answer is not the new model's"
                check_spans(output, served.version)
            sender.join(DEADLINE)
            assert not sender.is_alive(), "the engine has not taken all that was sent"

    def test_weights_that_do_not_fit_are_refused(self, served: Served) -> None:
        """The error names the tensor."""
        needs(served.plugin, "weight_update")
        tensors = Model(1, served.plugin.tie_word_embeddings).tensors()
        name = "model.layers.0.mlp.up_proj.weight"
        wrong = {**tensors, name: np.zeros((3, 5), np.float32)}
        with pytest.raises(Exception, match=name.replace(".", r"\.")):
            served.run(served.engine.update_weights(WeightUpdate([bucket_of(list(wrong.items()))]), served.version + 1))
        model = Model(4, served.plugin.tie_word_embeddings)
        served.take(model, model.buckets())
        output = served.run(served.generate(PROMPTS[0], temperature=0.0))
        assert output.token_ids == model.greedy(PROMPTS[0], 16), "after a refused update nothing is taken"

    def test_pause_keep_goes_on_with_new_weights(self, served: Served) -> None:
        """Requests survive an update; each token says which weights sampled it, and the tail is the new model's."""
        needs(served.plugin, "pause", "weight_update", "logprobs")
        engine = served.engine
        assert isinstance(engine, PausableEngine), "it lacks the methods of a capability that it declares"
        model = Model(5, served.plugin.tie_word_embeddings)

        async def main() -> list[TokenOutput]:
            crowd = asyncio.ensure_future(served.together(PROMPTS * 4, max_tokens=400))
            await asyncio.sleep(0.3)
            await engine.pause("keep")
            served.version += 1
            await served.engine.update_weights(model.buckets(), served.version)
            await engine.resume()
            return await crowd

        outputs = served.run(main())
        served.model = model
        for prompt, output in zip(PROMPTS * 4, outputs, strict=True):
            assert len(output.token_ids) == 400, f"a request ended with {len(output.token_ids)} of 400 tokens"
            check_cover(output)
            tail = output.spans[-1]
            assert tail.version == served.version, f"the last tokens are of version {tail.version}"
            assert output.log_probs is not None, "the engine returned no log-probs"
            expected = model.log_probs(prompt, output.token_ids)
            gaps = [abs(output.log_probs[i] - expected[i]) for i in range(tail.start, tail.end)]
            assert max(gaps) <= 1e-4, f"the tail's log-probs differ from the new model's by {max(gaps):.1e}"

    def test_requests_that_run_compute_their_cache_again(self, served: Served) -> None:
        """Three updates while 32 requests run: each token has the log-prob of the weights that its version names."""
        needs(served.plugin, "live_update", "logprobs")
        check_live_updates(served, "recompute")

    def test_requests_that_run_keep_their_cache(self, served: Served) -> None:
        """The same, but tokens after an update are the new weights' on the keys and values that the old ones left."""
        needs(served.plugin, "old_cache", "live_update", "logprobs")
        check_live_updates(served, "continue")

    def test_requests_end_before_weights_that_they_must_not_meet(self, served: Served) -> None:
        """What the core does for ``rollout.on_new_weights: restart``: no answer has tokens of two versions."""
        needs(served.plugin, "live_update", "pause", "logprobs")
        engine = served.engine
        assert isinstance(engine, PausableEngine), "it lacks the methods of a capability that it declares"

        async def main() -> list[TokenOutput]:
            crowd = asyncio.ensure_future(served.together(PROMPTS * 4, max_tokens=TURN))
            await served.generate(PROMPTS[0], "clock", max_tokens=8)
            await engine.pause("abort")
            await served.update(model)
            await engine.resume()
            return await crowd

        before, model = served.model, Model(1, served.plugin.tie_word_embeddings)
        outputs = served.run(main())
        assert any(output.finish_reason == "abort" for output in outputs), "no request ran when the weights changed"
        for prompt, output in zip(PROMPTS * 4, outputs, strict=True):
            if output.token_ids:
                check_spans(output, served.version - 1)
            check_versions({served.version - 1: before}, prompt, output, "recompute")

    @pytest.mark.parametrize("running", ["recompute", "continue"])
    def test_a_new_request_finds_no_cache_of_other_weights(self, served: Served, running: Running) -> None:
        """Right after an update, while older requests with the same prompt run, its log-probs are the new weights'."""
        needs(served.plugin, "live_update", "logprobs", *(["old_cache"] if running == "continue" else []))

        async def main() -> list[list[TokenOutput]]:
            # Of those that have ended there may be a cache too.
            await served.together(LONG_PROMPTS, "ended", max_tokens=2)
            crowds, later = [], []
            for number in (1, 2):
                crowds.append(asyncio.ensure_future(served.together(LONG_PROMPTS, f"old{number}-", max_tokens=TURN)))
                await served.generate(PROMPTS[0], "clock", max_tokens=8)
                models[number] = Model(number, served.plugin.tie_word_embeddings)
                await served.update(models[number], running)
                later.append(await served.together(LONG_PROMPTS, f"new{number}-", max_tokens=4))
            await asyncio.gather(*crowds)
            return later

        models: dict[int, Model] = {}
        first = served.version
        for number, outputs in enumerate(served.run(main()), 1):
            for prompt, output in zip(LONG_PROMPTS, outputs, strict=True):
                check_spans(output, first + number)
                check_versions({first + number: models[number]}, prompt, output, "recompute")


def check_live_updates(served: Served, running: Running) -> None:
    """Update the weights three times while 32 sessions run; each has a second turn after that."""
    models, first = {served.version: served.model}, served.version
    prompts = PROMPTS * 4
    seen: list[tuple[list[int], TokenOutput]] = []

    async def session(number: int) -> None:
        async with served.session(name := f"s{number}"):
            prompt = prompts[number]
            for seed, length in enumerate((TURN, 8)):
                params = SamplingParams(length, seed=100 * seed + number)
                output = await served.engine.generate(prompt, params, name)
                seen.append((prompt, output))
                prompt = [*prompt, *output.token_ids, 20, 21, 22]

    async def main() -> None:
        crowd = asyncio.gather(*(session(number) for number in range(len(prompts))))
        for seed in (1, 2, 3):
            # When it is answered, the others have some tokens of the present weights.
            await served.generate(PROMPTS[0], "clock", max_tokens=8)
            await served.update(Model(seed, served.plugin.tie_word_embeddings), running)
            models[served.version] = served.model
        await crowd

    served.run(main())
    versions = {span.version for prompt, output in seen for span in output.spans}
    assert versions == models.keys(), f"no token of {models.keys() - versions}; unknown: {versions - models.keys()}"
    assert any(len(output.spans) > 1 for _, output in seen), f"no request went on after version {first}"
    for prompt, output in seen:
        check_cover(output)
        check_versions(models, prompt, output, running)


def check_versions(models: Mapping[int, Model], prompt: list[int], output: TokenOutput, running: Running) -> None:
    """Each token has the log-prob of the weights that its version names; ``running``: on which cache."""
    assert output.log_probs is not None, "the engine returned no log-probs"
    expected = _on_old_cache(models, prompt, output) if running == "continue" else _of_versions(models, prompt, output)
    gaps = [abs(own - other) for own, other in zip(output.log_probs, expected, strict=True)]
    worst = int(np.argmax(gaps)) if gaps else 0
    assert not gaps or gaps[worst] <= GAP, (
        f"token {worst} of {len(gaps)} differs by {gaps[worst]:.1e} from the weights of its version; {output.spans}"
    )


def _of_versions(models: Mapping[int, Model], prompt: list[int], output: TokenOutput) -> list[float]:
    whole = {span.version: models[span.version].log_probs(prompt, output.token_ids) for span in output.spans}
    return [whole[span.version][place] for span in output.spans for place in range(span.start, span.end)]


def _on_old_cache(models: Mapping[int, Model], prompt: list[int], output: TokenOutput) -> list[float]:
    """Each version feeds the tokens from the one before its first on, after what the versions before have computed."""
    import torch

    ids = [*prompt, *output.token_ids]
    cache, fed, log_probs = None, 0, []
    for span in output.spans:
        end = len(prompt) + span.end - 1
        with torch.no_grad():
            answer = models[span.version].module(torch.tensor([ids[fed:end]]), past_key_values=cache, use_cache=True)
        logits = answer.logits[0, -(span.end - span.start) :].float()
        sampled = torch.tensor(output.token_ids[span.start : span.end])
        log_probs += torch.log_softmax(logits, -1).gather(1, sampled[:, None])[:, 0].tolist()
        cache, fed = answer.past_key_values, end
    return log_probs
