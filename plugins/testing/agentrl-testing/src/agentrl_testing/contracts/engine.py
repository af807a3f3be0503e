"""The contract of inference engines, on a tiny model with real weights and in a real event loop.

The engine runs in this interpreter. Run pytest in the engine's environment if it has a separate one.
"""

import asyncio
import json
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from agentrl_core.api import (
    ArrayBucket,
    EngineContext,
    EngineError,
    InferenceEngine,
    MeasuredEngine,
    PausableEngine,
    PolicySpan,
    ProgressingEngine,
    SamplingParams,
    SessionEngine,
    SleepingEngine,
    TokenOutput,
    WeightUpdate,
)
from agentrl_core.api.weights import Broadcast
from agentrl_core.controller.event_loop import EventLoop
from agentrl_core.engine_kit.ports import free_port
from agentrl_testing.contracts.case import PluginCase, PluginContract, needs

T = TypeVar("T")
DEADLINE = 120.0
"""Seconds that one call may take."""
TOLERANCE = 2e-5
"""Largest gap to the log-probs of transformers in float32."""
STOP = 7
PROMPTS = [[(13 * row + 7 * column) % 190 + 10 for column in range(5 + 3 * row)] for row in range(8)]


@dataclass(kw_only=True)
class EngineCase(PluginCase):
    """An engine under test.

    Args:
        context: fields of :class:`EngineContext` other than ``model_path``.
        tie_word_embeddings: of the model.
        tolerance: largest gap of log-probs to transformers.
    """

    context: Mapping[str, Any] = field(default_factory=dict)
    tie_word_embeddings: bool = True
    tolerance: float = TOLERANCE


class Model:
    """A tiny Qwen3 and what transformers says about an output."""

    def __init__(self, seed: int, tied: bool) -> None:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # A wide initialisation makes peaked distributions, so that greedy sampling has no near ties.
            config = Qwen3Config(
                vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=4, head_dim=32, max_position_embeddings=512, initializer_range=0.12,
                tie_word_embeddings=tied, eos_token_id=STOP, pad_token_id=0, bos_token_id=None,
            )  # fmt: skip
            self.module = Qwen3ForCausalLM(config).eval()

    def save(self, path: Path) -> str:
        """A folder for ``model_path``."""
        self.module.save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        return str(path)

    @cached_property
    def tokenizer(self) -> Any:
        """A token for each byte; ``STOP`` ends a text."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        alphabet[STOP] = "<stop>"
        bytewise = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(alphabet)}, merges=[]))
        bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bytewise.decoder = decoders.ByteLevel()
        bytewise.add_tokens([AddedToken("<stop>", special=True, normalized=False)])
        return PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<stop>")

    def log_probs(self, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Of each id of the output, under the softmax of logits / temperature."""
        import torch

        with torch.no_grad():
            logits = self.module(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].float()
        log_probs = torch.log_softmax(logits / temperature, -1)
        return [float(row[token]) for row, token in zip(log_probs, output, strict=True)]

    def reshaped(
        self, prompt: Sequence[int], output: Sequence[int], params: Mapping[str, Any]
    ) -> tuple[list[int], list[float]]:
        """For each place of the output: the likeliest id, and the log-prob of the id that stands there, after the
        penalties and biases as transformers and OpenAI's documentation define them, at temperature 1."""
        import torch
        from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

        processors = LogitsProcessorList()
        if bias := params.get("logit_bias"):
            processors.append(SequenceBiasLogitsProcessor([[[token], float(each)] for token, each in bias.items()]))
        if (penalty := params.get("repetition_penalty", 1.0)) != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(penalty))
        with torch.no_grad():
            logits = self.module(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].float()
        likeliest, log_probs = [], []
        for place, token in enumerate(output):
            row = processors(torch.tensor([[*prompt, *output[:place]]]), logits[place : place + 1].clone())[0]
            for seen in set(output[:place]):
                count = list(output[:place]).count(seen)
                row[seen] -= params.get("frequency_penalty", 0.0) * count + params.get("presence_penalty", 0.0)
            likeliest.append(int(row.argmax()))
            log_probs.append(float(torch.log_softmax(row, -1)[token]))
        return likeliest, log_probs

    def allowed(self, prompt: Sequence[int], output: Sequence[int], params: Mapping[str, Any]) -> list[set[int]]:
        """For each place of the output: the ids that top-k, min-p and top-p leave, as transformers chains them."""
        import torch
        from transformers import (
            LogitsProcessorList,
            MinPLogitsWarper,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        warpers = LogitsProcessorList([TemperatureLogitsWarper(params["temperature"])])
        if "top_k" in params:
            warpers.append(TopKLogitsWarper(params["top_k"]))
        if "min_p" in params:
            warpers.append(MinPLogitsWarper(params["min_p"]))
        # A token at the very edge may fall on either side of it.
        warpers.append(TopPLogitsWarper(params["top_p"] + 1e-5))
        with torch.no_grad():
            logits = self.module(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].float()
        kept = warpers(torch.zeros(len(output), 1, dtype=torch.long), logits).isfinite()
        return [set(row.nonzero()[:, 0].tolist()) for row in kept]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The likeliest continuation; requests without stop ids do not stop."""
        import torch

        ids = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                ids.append(int(self.module(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    def tensors(self) -> dict[str, np.ndarray[Any, Any]]:
        """Weights by name, tied ones once."""
        return {name: value.detach().numpy() for name, value in self.module.named_parameters()}

    def buckets(self) -> WeightUpdate:
        """An update as two buckets of bytes."""
        items = list(self.tensors().items())
        halves = [items[: len(items) // 2], items[len(items) // 2 :]]
        return WeightUpdate([_bucket(half) for half in halves])

    def file(self, folder: Path) -> WeightUpdate:
        """An update as a safetensors file."""
        from safetensors.numpy import save_file

        path = folder / "weights.safetensors"
        save_file({name: np.ascontiguousarray(value) for name, value in self.tensors().items()}, path)
        return WeightUpdate(files=(str(path),))


def _send(address: str, backend: str, models: Sequence[Model]) -> None:
    """All weights of these models, one after the other, as an actor sends them."""
    import torch

    from agentrl_core.engine_kit.weight_group import WeightGroup

    # An engine that does not come fails the check that waits for its answer.
    with suppress(EngineError), WeightGroup(address, 0, 2, backend, timeout=DEADLINE) as group:
        for model in models:
            for bucket in model.buckets():
                group.broadcast(torch.from_numpy(bucket.data.copy()))


def _bucket(items: Sequence[tuple[str, np.ndarray[Any, Any]]]) -> ArrayBucket:
    return ArrayBucket(
        names=tuple(name for name, _ in items),
        shapes=tuple(value.shape for _, value in items),
        dtypes=("float32",) * len(items),
        data=np.concatenate([np.ascontiguousarray(value).reshape(-1).view(np.uint8) for _, value in items]),
    )


class Served:
    """A started engine, its model, and the loop that it lives in."""

    def __init__(self, plugin: EngineCase, folder: Path) -> None:
        self.plugin = plugin
        self.folder = folder
        self.model = Model(0, plugin.tie_word_embeddings)
        self.version = 0
        fields = {"max_model_len": 512, "vocab_size": 256, **plugin.context}
        context = EngineContext(model_path=self.model.save(folder / "model"), **fields)
        self._loop = EventLoop()
        self.engine: InferenceEngine = plugin.build(context)
        self.run(self.engine.start(), 600.0)

    def run(self, coroutine: Coroutine[Any, Any, T], deadline: float | None = None) -> T:
        """Run in the engine's loop, within a deadline: ``DEADLINE``, or another."""

        async def bounded() -> T:
            async with asyncio.timeout(deadline or DEADLINE):
                return await coroutine

        return self._loop.run(bounded())

    async def generate(self, prompt: Sequence[int], name: str = "r", **params: Any) -> TokenOutput:
        """One request in a new session."""
        async with self.session(name):
            return await self.engine.generate(list(prompt), SamplingParams(**{"max_tokens": 16, **params}), name)

    @asynccontextmanager
    async def session(self, name: str) -> AsyncIterator[None]:
        """A session, where the engine keeps them."""
        engine = self.engine
        if not isinstance(engine, SessionEngine):
            yield
            return
        await engine.open_session(name)
        try:
            yield
        finally:
            await engine.close_session(name)

    async def together(self, prompts: Sequence[Sequence[int]], tag: str = "r", **params: Any) -> list[TokenOutput]:
        """Many requests at once, each with its own seed."""
        return list(
            await asyncio.gather(
                *(
                    self.generate(prompt, f"{tag}{number}", seed=number, **params)
                    for number, prompt in enumerate(prompts)
                )
            )
        )

    def take(self, model: Model, update: WeightUpdate) -> None:
        """Give the engine another model's weights."""
        self.version += 1
        self.run(self.engine.update_weights(update, self.version))
        self.model = model

    def fresh(self) -> None:
        """The weights that it began with, if a test has changed them."""
        if self.version:
            model = Model(0, self.plugin.tie_word_embeddings)
            self.take(model, model.buckets())

    def gap(self, prompt: Sequence[int], output: TokenOutput, temperature: float = 1.0) -> float:
        """Largest difference between the engine's log-probs and those of transformers."""
        assert output.log_probs is not None, "the engine returned no log-probs"
        expected = self.model.log_probs(prompt, output.token_ids, temperature)
        return max((abs(a - b) for a, b in zip(output.log_probs, expected, strict=True)), default=0.0)

    def close(self) -> None:
        """End the engine; twice, as it may be."""
        self.run(self.engine.close())
        self.run(self.engine.close())
        self._loop.close()


class EngineContract(PluginContract):
    """What every engine must do. One engine is started per class."""

    kind = "engine"

    @pytest.fixture
    def served(self, request: pytest.FixtureRequest, plugin: EngineCase) -> Iterator[Served]:
        """The engine of this class, with the weights that it began with."""
        cls = request.cls
        served: Served | None = cls.__dict__.get("_served")
        if served is None:
            folder = tempfile.TemporaryDirectory(prefix="agentrl-contract-")
            served = cls._served = Served(plugin, Path(folder.name))

            def end() -> None:
                del cls._served
                served.close()
                folder.cleanup()

            request.node.getparent(pytest.Class).addfinalizer(end)
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
            sender = threading.Thread(target=_send, args=(address, backend, models), daemon=True)
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
            served.run(served.engine.update_weights(WeightUpdate([_bucket(list(wrong.items()))]), served.version + 1))
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


def check_cover(output: TokenOutput) -> None:
    """Spans cover the tokens without a gap."""
    end = 0
    for span in output.spans:
        assert span.start == end <= span.end, f"spans have a gap: {output.spans}"
        end = span.end
    assert end == len(output.token_ids), f"spans end at {end}, there are {len(output.token_ids)} tokens"


def check_spans(output: TokenOutput, version: int) -> None:
    """All tokens are of one version."""
    assert output.spans == [PolicySpan(version, 0, len(output.token_ids))], (
        f"spans are {output.spans}, the weights have the version {version}"
    )
