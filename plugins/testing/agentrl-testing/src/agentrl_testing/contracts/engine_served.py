"""An engine that is started for its contract, its model, and what transformers says about its outputs."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
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
    PolicySpan,
    SamplingParams,
    SessionEngine,
    TokenOutput,
    WeightUpdate,
)
from agentrl_core.api.weights import Running
from agentrl_core.controller.event_loop import EventLoop
from agentrl_testing.contracts.case import PluginCase

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
        vision: the family of the model with images: ``qwen2_5_vl`` or ``qwen3_vl``.
    """

    context: Mapping[str, Any] = field(default_factory=dict)
    tie_word_embeddings: bool = True
    tolerance: float = TOLERANCE
    vision: str = "qwen2_5_vl"


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
        """Weights under the names of the checkpoint, tied ones once."""
        from transformers.core_model_loading import revert_weight_conversion

        named = revert_weight_conversion(self.module, dict(self.module.named_parameters()))
        return {name: value.detach().numpy() for name, value in named.items()}

    def buckets(self) -> WeightUpdate:
        """An update as two buckets of bytes."""
        items = list(self.tensors().items())
        halves = [items[: len(items) // 2], items[len(items) // 2 :]]
        return WeightUpdate([bucket_of(half) for half in halves])

    def file(self, folder: Path) -> WeightUpdate:
        """An update as a safetensors file."""
        from safetensors.numpy import save_file

        path = folder / "weights.safetensors"
        save_file({name: np.ascontiguousarray(value) for name, value in self.tensors().items()}, path)
        return WeightUpdate(files=(str(path),))


def send(address: str, backend: str, models: Sequence[Model]) -> None:
    """All weights of these models, one after the other, as an actor sends them."""
    import torch

    from agentrl_core.engine_kit.weight_group import WeightGroup

    # An engine that does not come fails the check that waits for its answer.
    with suppress(EngineError), WeightGroup(address, 0, 2, backend, timeout=DEADLINE) as group:
        for model in models:
            for bucket in model.buckets():
                group.broadcast(torch.from_numpy(bucket.data.copy()))


def bucket_of(items: Sequence[tuple[str, np.ndarray[Any, Any]]]) -> ArrayBucket:
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
        self.model = self.first()
        self.version = 0
        fields = {"max_model_len": 512, "vocab_size": 256, **plugin.context}
        context = EngineContext(model_path=self.model.save(folder / "model"), **fields)
        self._loop = EventLoop()
        self.engine: InferenceEngine = plugin.build(context)
        self.run(self.engine.start(), 600.0)

    def first(self) -> Model:
        """The model that the engine begins with."""
        return Model(0, self.plugin.tie_word_embeddings)

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

    async def update(self, model: Model, running: Running = "recompute") -> None:
        """The same in the engine's loop, while requests run."""
        await self.engine.update_weights(replace(model.buckets(), running=running), self.version + 1)
        self.version += 1
        self.model = model

    def fresh(self) -> None:
        """The weights that it began with, if a test has changed them."""
        if self.version:
            model = self.first()
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


S = TypeVar("S", bound=Served)


def of_class(request: pytest.FixtureRequest, name: str, start: Callable[[Path], S]) -> S:
    """An engine that the tests of a class share, under this name: started by the first one, and ended after the last.

    Args:
        start: gets a folder that is removed in the end.
    """
    cls = request.cls
    if name not in cls.__dict__:
        folder = tempfile.TemporaryDirectory(prefix="agentrl-contract-")
        setattr(cls, name, start(Path(folder.name)))

        def end() -> None:
            getattr(cls, name).close()
            delattr(cls, name)
            folder.cleanup()

        request.node.getparent(pytest.Class).addfinalizer(end)
    served: S = getattr(cls, name)
    return served


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
