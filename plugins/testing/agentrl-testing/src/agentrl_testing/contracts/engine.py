"""The contract of inference engines, on a tiny model with real weights and in a real event loop.

The engine runs in this interpreter. Run pytest in the engine's environment if it has a separate one.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from agentrl_core.api import (
    MeasuredEngine,
    PausableEngine,
    ProgressingEngine,
    SamplingParams,
    SessionEngine,
    SleepingEngine,
    TokenOutput,
)
from agentrl_testing.contracts.case import PluginContract, needs
from agentrl_testing.contracts.engine_adapters import AdapterCases
from agentrl_testing.contracts.engine_experts import ExpertCases
from agentrl_testing.contracts.engine_images import ImageCases
from agentrl_testing.contracts.engine_served import (
    DEADLINE,
    PROMPTS,
    STOP,
    EngineCase,
    Model,
    Served,
    check_cover,
    check_spans,
    of_class,
)
from agentrl_testing.contracts.engine_weights import WeightCases

__all__ = ["EngineCase", "EngineContract"]


class EngineContract(WeightCases, AdapterCases, ImageCases, ExpertCases, PluginContract):
    """What every engine must do. One engine is started per class, and one more each for adapters, images and experts,
    where it serves them."""

    kind = "engine"

    @pytest.fixture
    def served(self, request: pytest.FixtureRequest, plugin: EngineCase) -> Iterator[Served]:
        """The engine of this class, with the weights that it began with."""
        served = of_class(request, "_served", lambda folder: Served(plugin, folder))
        served.fresh()
        yield served

    def test_answers_fit_their_request(self, served: Served) -> None:
        """At most ``max_tokens`` ids of the vocabulary, with a reason, and spans without a gap."""
        served.run(served.engine.health())
        for limit in (1, 5, 20):
            for output in served.run(served.together(PROMPTS, max_tokens=limit)):
                count = len(output.token_ids)
                assert 1 <= count <= limit, f"{count} tokens for max_tokens={limit}"
                assert all(0 <= token < 256 for token in output.token_ids), "ids outside the vocabulary"
                assert output.finish_reason == "length", f"without stop ids the reason is {output.finish_reason!r}"
                assert count == limit, f"{count} of {limit} tokens with finish_reason 'length'"
                check_spans(output, served.version)

    def test_greedy_is_the_likeliest_continuation(self, served: Served) -> None:
        """The same ids as transformers, also with others in the batch."""
        outputs = served.run(served.together(PROMPTS, temperature=0.0))
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            expected = served.model.greedy(prompt, 16)
            assert output.token_ids == expected, f"greedy gave {output.token_ids}, transformers {expected}"

    def test_a_stop_id_ends_the_answer_and_belongs_to_it(self, served: Served) -> None:
        """The policy chose it."""
        prompt = PROMPTS[3]
        whole = served.run(served.generate(prompt, temperature=0.0)).token_ids
        stop = whole[5]
        cut = served.run(served.generate(prompt, temperature=0.0, stop_token_ids=(stop,)))
        assert cut.token_ids == whole[: whole.index(stop) + 1], (
            f"with the stop id {stop} {whole} became {cut.token_ids}"
        )
        assert cut.finish_reason == "stop", f"the reason is {cut.finish_reason!r}, not 'stop'"

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_log_probs_are_those_of_transformers(self, served: Served, temperature: float) -> None:
        """Of each sampled id, under the softmax of logits / temperature."""
        needs(served.plugin, "logprobs")
        for output, prompt in zip(
            served.run(served.together(PROMPTS * 4, max_tokens=64, temperature=temperature)), PROMPTS * 4, strict=True
        ):
            gap = served.gap(prompt, output, temperature)
            assert gap <= served.plugin.tolerance, f"log-probs differ by {gap:.1e} at temperature {temperature}"

    def test_greedy_log_probs_are_those_at_temperature_one(self, served: Served) -> None:
        """Zero has no softmax."""
        needs(served.plugin, "logprobs")
        output = served.run(served.generate(PROMPTS[2], temperature=0.0))
        assert served.gap(PROMPTS[2], output) <= served.plugin.tolerance, "greedy log-probs are not those at 1.0"

    def test_log_probs_are_those_before_truncation(self, served: Served) -> None:
        """top-p and top-k choose; the log-prob is that of the whole distribution, as in training."""
        needs(served.plugin, "logprobs")
        for params in ({"top_k": 3}, {"top_p": 0.6}):
            output = served.run(served.generate(PROMPTS[4], seed=1, **params))
            gap = served.gap(PROMPTS[4], output)
            assert gap <= served.plugin.tolerance, f"with {params} log-probs differ by {gap:.1e}"

    @pytest.mark.parametrize(
        "params",
        [
            {"presence_penalty": 2.0},
            {"presence_penalty": -2.0},
            {"frequency_penalty": 1.5},
            {"repetition_penalty": 1.8},
            {"logit_bias": {17: 3.0, 40: -4.0, 41: 2.5}},
            {"frequency_penalty": 0.7, "presence_penalty": 0.5, "logit_bias": {19: 2.0}},
            {"repetition_penalty": 1.7, "frequency_penalty": 0.6, "logit_bias": {17: 3.0, 40: -4.0, 41: 2.5}},
        ],
        ids=str,
    )
    def test_penalties_and_biases_are_those_of_transformers(self, served: Served, params: dict[str, Any]) -> None:
        """Greedy takes the likeliest token after them, and log-probs are those after them; others are unaffected."""
        for name in params:
            needs(served.plugin, name)

        async def both() -> tuple[list[TokenOutput], list[TokenOutput], TokenOutput]:
            greedy = [
                served.generate(prompt, f"g{number}", temperature=0.0, max_tokens=24, **params)
                for number, prompt in enumerate(PROMPTS[:4])
            ]
            sampled = served.together(PROMPTS[:4], "s", max_tokens=24, **params)
            plain = served.generate(PROMPTS[5], "plain", temperature=0.0)
            return await asyncio.gather(*greedy), await sampled, await plain

        greedy, sampled, plain = served.run(both())
        for outputs in (greedy, sampled):
            for prompt, output in zip(PROMPTS, outputs, strict=False):
                likeliest, expected = served.model.reshaped(prompt, output.token_ids, params)
                if outputs is greedy:
                    assert output.token_ids == likeliest, f"{params}: {output.token_ids}, transformers {likeliest}"
                for found, wanted in zip(output.log_probs or [], expected, strict=False):
                    assert abs(found - wanted) <= served.plugin.tolerance, f"{params}: a log-prob {found}, not {wanted}"
        assert plain.token_ids == served.model.greedy(PROMPTS[5], 16), "a request without penalties is penalized too"

    def test_a_large_bias_decides_the_token(self, served: Served) -> None:
        """Whatever the policy says; also at temperature 1."""
        needs(served.plugin, "logit_bias")
        for temperature in (0.0, 1.0):
            output = served.run(
                served.generate(PROMPTS[2], temperature=temperature, max_tokens=3, logit_bias={123: 1000.0})
            )
            assert output.token_ids == [123] * 3, f"with a bias of 1000 for 123 the ids are {output.token_ids}"

    def test_min_p_leaves_the_likely_tokens(self, served: Served) -> None:
        """At 1 only the likeliest one; log-probs stay those of the whole distribution."""
        needs(served.plugin, "min_p")
        for prompt in PROMPTS[:3]:
            output = served.run(served.generate(prompt, min_p=1.0))
            assert output.token_ids == served.model.greedy(prompt, 16), "min_p=1.0 is not greedy"
        for output in served.run(served.together(PROMPTS[:1] * 16, "m", max_tokens=4, min_p=0.4)):
            for place in range(len(output.token_ids)):
                before = output.token_ids[:place]
                likeliest = served.model.greedy([*PROMPTS[0], *before], 1)
                (best,) = served.model.log_probs([*PROMPTS[0], *before], likeliest)
                (own,) = served.model.log_probs([*PROMPTS[0], *before], output.token_ids[place : place + 1])
                assert own >= best + np.log(0.4) - 1e-4, (
                    f"min_p=0.4 took a token of {np.exp(own - best):.3f} of the best"
                )
            if output.log_probs is not None:
                assert served.gap(PROMPTS[0], output) <= served.plugin.tolerance, "log-probs are those after min_p"

    @pytest.mark.parametrize("params", [{"top_k": 6}, {"min_p": 0.1}, {"top_k": 5, "min_p": 0.05}], ids=str)
    def test_top_p_takes_its_share_of_what_is_left(self, served: Served, params: dict[str, Any]) -> None:
        """After top-k and min-p, as transformers chains them."""
        needs(served.plugin, "chained_truncation")
        outputs = served.run(served.together(PROMPTS * 6, "c", max_tokens=12, temperature=1.5, top_p=0.6, **params))
        for prompt, output in zip(PROMPTS * 6, outputs, strict=True):
            allowed = served.model.allowed(prompt, output.token_ids, {"temperature": 1.5, "top_p": 0.6, **params})
            for token, ids in zip(output.token_ids, allowed, strict=True):
                assert token in ids, f"with {params} and top_p=0.6 token {token} was sampled, not one of {sorted(ids)}"

    def test_what_no_engine_serves_is_refused_and_numpy_is_served(self, served: Served) -> None:
        """Bounds are those of ``engine_kit.requests.sampling_problem``; other requests are not affected."""
        plain = served.run(served.generate(PROMPTS[1], temperature=0.0)).token_ids
        bad: list[dict[str, Any]] = [
            *({"temperature": value} for value in (2.5, 0.001, float("nan"), float("inf"))),
            {"stop_token_ids": (256,)}, {"top_p": 0.0}, {"max_tokens": 0},
        ]  # fmt: skip
        for params in bad:
            with pytest.raises(ValueError, match=next(iter(params))):
                served.run(served.generate(PROMPTS[1], **params))
        numbers: dict[str, Any] = {
            "temperature": np.float32(0),
            "max_tokens": np.int64(16),
            "stop_token_ids": tuple(np.array([255])),
        }

        async def from_numpy() -> TokenOutput:
            async with served.session("n"):
                return await served.engine.generate(np.array(PROMPTS[1]), SamplingParams(**numbers), "n")  # type: ignore[arg-type]

        output = served.run(from_numpy())
        expected = plain[: plain.index(255) + 1] if 255 in plain else plain
        assert output.token_ids == expected, "a prompt in an array has another answer than in a list"

    def test_a_schema_is_kept_by_its_request_alone(self, served: Served) -> None:
        """The text is JSON that fits, and ends there; an invalid schema fails its request alone."""
        needs(served.plugin, "json_schema")
        values = ["yes", {"sure": True}]
        params: dict[str, Any] = {"max_tokens": 40, "stop_token_ids": (STOP,)}

        async def both() -> tuple[list[TokenOutput], TokenOutput]:
            fitting = served.together(PROMPTS, "fitting", json_schema=json.dumps({"enum": values}), **params)
            plain = served.generate(PROMPTS[5], "plain", temperature=0.0)
            return await asyncio.gather(fitting, plain)

        fitting, plain = served.run(both())
        for output in fitting:
            text = served.model.tokenizer.decode(output.token_ids[:-1])
            assert output.finish_reason == "stop", f"the text {text!r} ended with {output.finish_reason!r}"
            assert _json_of(text) in values, f"the text {text!r} does not fit a schema that allows {values}"
            check_spans(output, served.version)
        assert plain.token_ids == served.model.greedy(PROMPTS[5], 16), "a request without a schema is constrained too"
        likely = {token: 50.0 for token in served.model.tokenizer.convert_tokens_to_ids(["\u0120", "\u010a", "\u0109"])}
        crowded = served.run(
            served.generate(PROMPTS[0], json_schema=json.dumps({"enum": values[1:]}), logit_bias=likely, **params)
        )
        assert crowded.finish_reason == "stop", "whitespace without end fits the schema"
        for schema in ("{", '{"type": "nonsense"}'):
            with pytest.raises(Exception, match="(?i)schema"):
                served.run(served.generate(PROMPTS[0], json_schema=schema, **params))
        served.run(served.engine.health())
        plain = served.run(served.generate(PROMPTS[5], "plain", temperature=0.0))
        assert plain.token_ids == served.model.greedy(PROMPTS[5], 16), "after a refused schema answers differ"

    def test_a_seed_repeats_an_answer_in_any_company(self, served: Served) -> None:
        """Seeds do not depend on what else is in the batch."""
        needs(served.plugin, "seeds")
        prompt = PROMPTS[1]
        alone = served.run(served.generate(prompt, seed=5)).token_ids
        other = served.run(served.generate(prompt, seed=6)).token_ids
        assert alone != other, "two seeds give the same 16 tokens"

        async def among_others() -> list[int]:
            crowd = asyncio.ensure_future(served.together(PROMPTS, tag="crowd", max_tokens=30))
            output = await served.generate(prompt, seed=5)
            await crowd
            return output.token_ids

        assert served.run(among_others()) == alone, "the same seed gives other tokens in company"

    def test_turns_of_a_session_continue(self, served: Served) -> None:
        """The second turn's prompt holds the first turn: caches between turns change nothing."""

        async def turns(name: str) -> tuple[list[int], TokenOutput]:
            params = SamplingParams(max_tokens=8, temperature=0.0)
            async with served.session(name):
                first = await served.engine.generate(PROMPTS[0], params, name)
                prompt = [*PROMPTS[0], *first.token_ids, 20, 21, 22]
                return prompt, await served.engine.generate(prompt, params, name)

        prompt, second = served.run(turns("session"))
        assert second.token_ids == served.model.greedy(prompt, 8), "the second turn differs"
        if isinstance(served.engine, SessionEngine):
            served.run(served.engine.close_session("never opened"))

    def test_abort_returns_what_was_generated(self, served: Served) -> None:
        """The request's own call returns it too."""
        needs(served.plugin, "abort")

        async def main() -> TokenOutput:
            task = asyncio.ensure_future(served.generate(PROMPTS[0], "long", max_tokens=450))
            while not task.done():
                await asyncio.sleep(0.02)
                if await served.engine.abort("long") is not None:
                    break
            assert await served.engine.abort("unknown request") is None, "an unknown request was aborted"
            return await task

        output = served.run(main())
        if output.finish_reason != "length":
            assert output.finish_reason == "abort", f"the reason is {output.finish_reason!r}, not 'abort'"
            assert len(output.token_ids) < 450, "an aborted request returned everything"
            if output.token_ids and output.log_probs is not None:
                assert served.gap(PROMPTS[0], output) <= served.plugin.tolerance, "the log-probs of the rest are wrong"

    def test_a_cancelled_request_ends(self, served: Served) -> None:
        """Its client is gone; the others go on."""

        async def main() -> list[TokenOutput]:
            long = asyncio.ensure_future(served.generate(PROMPTS[0], "cancelled", max_tokens=450))
            await asyncio.sleep(0.05)
            long.cancel()
            await asyncio.wait({long})
            return await served.together(PROMPTS, tag="after", temperature=0.0)

        outputs = served.run(main())
        assert outputs[0].token_ids == served.model.greedy(PROMPTS[0], 16), "answers differ afterwards"

    @pytest.mark.parametrize("mode", ["abort", "drain"])
    def test_pause_empties_the_engine(self, served: Served, mode: Any) -> None:
        """``abort`` ends what runs, ``drain`` waits for it; later requests wait for ``resume``."""
        needs(served.plugin, "pause")
        engine = served.engine
        assert isinstance(engine, PausableEngine), "it lacks the methods of a capability that it declares"

        async def main() -> tuple[list[TokenOutput], TokenOutput]:
            start = time.monotonic()
            await served.generate(PROMPTS[0], "before", temperature=0.0)
            usual = time.monotonic() - start
            crowd = asyncio.ensure_future(served.together(PROMPTS, max_tokens=100))
            await asyncio.sleep(0.1)
            await engine.pause(mode)
            await asyncio.wait({crowd}, timeout=DEADLINE / 2)
            assert crowd.done(), f"after pause({mode!r}) requests still run"
            later = asyncio.ensure_future(served.generate(PROMPTS[0], "later", temperature=0.0))
            await asyncio.sleep(max(0.1, 3 * usual))
            assert not later.done(), "a paused engine answered a new request"
            await engine.resume()
            return crowd.result(), await later

        outputs, later = served.run(main())
        for output in outputs:
            check_cover(output)
            ended = ("length",) if mode == "drain" else ("length", "abort")
            assert output.finish_reason in ended, f"after pause({mode!r}) a request ended with {output.finish_reason!r}"
        assert later.token_ids == served.model.greedy(PROMPTS[0], 16), "after resume answers differ"

    @pytest.mark.parametrize("level", [1, 2])
    def test_sleep_and_wake(self, served: Served, level: int) -> None:
        """New weights come while it sleeps, as in a run; then it answers with them."""
        needs(served.plugin, "sleep", "weight_update")
        engine = served.engine
        assert isinstance(engine, SleepingEngine), "it lacks the methods of a capability that it declares"
        other = Model(1, served.plugin.tie_word_embeddings)
        served.run(served.generate(PROMPTS[0], temperature=0.0))
        served.version += 1

        async def main() -> None:
            await engine.sleep(level)
            await engine.wake_up(["weights"])
            await served.engine.update_weights(other.buckets(), served.version)
            await engine.wake_up(["kv_cache"])

        served.run(main())
        output = served.run(served.generate(PROMPTS[0], temperature=0.0))
        assert output.token_ids == other.greedy(PROMPTS[0], 16), "after waking answers are not those of the new weights"
        check_spans(output, served.version)

    def test_progress_shows_that_requests_are_computed(self, served: Served) -> None:
        """An engine that reports its progress reports another number after a request: else it would be replaced."""
        engine = served.engine
        if not isinstance(engine, ProgressingEngine):
            pytest.skip("the engine does not report its progress")

        async def changes() -> None:
            before = await engine.progress()
            await served.generate(PROMPTS[0], max_tokens=8)
            while await engine.progress() == before:
                await asyncio.sleep(0.01)

        served.run(changes())

    def test_metrics_are_numbers(self, served: Served) -> None:
        """They are added up over replicas and logged."""
        served.run(served.generate(PROMPTS[0]))
        metrics = served.engine.metrics() if isinstance(served.engine, MeasuredEngine) else {}
        bad = {key: value for key, value in metrics.items() if not isinstance(value, int | float)}
        assert not bad, f"metrics that are not numbers: {bad}"


def _json_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
