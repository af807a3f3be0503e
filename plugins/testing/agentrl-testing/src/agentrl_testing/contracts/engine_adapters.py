"""What engines must do with LoRA adapters: several of them and several versions of each, in one batch."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_core.api import (
    Adapter,
    AdapterSlots,
    PausableEngine,
    PolicySpan,
    SamplingParams,
    SleepingEngine,
    TokenOutput,
    WeightUpdate,
)
from agentrl_core.engine_kit.adapters import PREFIX, scaling
from agentrl_testing.contracts.case import needs
from agentrl_testing.contracts.engine_served import (
    PROMPTS,
    EngineCase,
    Model,
    Served,
    bucket_of,
    check_spans,
    of_class,
)
from agentrl_testing.contracts.engine_weights import LONG_PROMPTS

GAP = 1e-3
"""Largest gap of a log-prob to that of transformers with the adapter."""
DIFFERENCE = 0.1
"""What an adapter changes at least, somewhere in an answer."""
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
SLOTS = AdapterSlots(names=("first", "second"), versions=2, rank=8, targets=(*ATTENTION, *MLP))
NEVER_SENT = 999
"""A version."""


class AdaptedModel(Model):
    """The model with which an engine begins, with a random LoRA adapter merged into it.

    Args:
        seed: of the adapter.
        tied: embeddings.
        rank, alpha, targets: of the adapter.
    """

    def __init__(
        self, seed: int, tied: bool, rank: int = 4, alpha: int = 8, targets: Sequence[str] = SLOTS.targets
    ) -> None:
        import torch

        super().__init__(0, tied)
        self.config: dict[str, Any] = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0,
            "bias": "none", "target_modules": list(targets),
        }  # fmt: skip
        self.lora: dict[str, np.ndarray[Any, Any]] = {}
        random = np.random.default_rng(seed)
        for name, layer in self.module.named_modules():
            if name.rpartition(".")[2] in targets:
                a, b = (
                    random.normal(0, 0.1, shape).astype(np.float32)
                    for shape in ((rank, layer.in_features), (layer.out_features, rank))
                )
                self.lora |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
                with torch.no_grad():
                    layer.weight += scaling(self.config) * torch.from_numpy(b @ a)

    def update(self, name: str, folder: Path | None = None) -> WeightUpdate:
        """A new version of the adapter of this name, as buckets; in a folder, as a file."""
        adapter = Adapter(name, self.config)
        if folder is None:
            items = list(self.lora.items())
            return WeightUpdate([bucket_of(items[:5]), bucket_of(items[5:])], adapter=adapter)
        from safetensors.numpy import save_file

        path = folder / f"{name}.safetensors"
        save_file(self.lora, path)
        return WeightUpdate(files=(str(path),), adapter=adapter)


class Adapted(Served):
    """An engine that was started for :data:`SLOTS`, and the models that its adapters make, by name and version."""

    def __init__(self, plugin: EngineCase, folder: Path) -> None:
        super().__init__(replace(plugin, context={**plugin.context, "adapters": SLOTS}), folder)
        self.models: dict[tuple[str, int], Model] = {("", 0): self.model}

    async def adapt(self, name: str, seed: int, road: str = "buckets", **fields: Any) -> int:
        """Send a new version of an adapter; returns its number."""
        model = AdaptedModel(seed, self.plugin.tie_word_embeddings, **fields)
        self.version += 1
        self.models[name, self.version] = model
        update = model.update(name, self.folder if road == "files" else None)
        await self.engine.update_weights(update, self.version)
        return self.version

    async def ask(self, name: str, version: int, prompts: Sequence[Sequence[int]], tag: str = "r",
                  newest: bool = False, **params: Any) -> None:  # fmt: skip
        """Requests with a version of an adapter, whose answers must be its own.

        Args:
            newest: the requests name no version, and must get this one.
        """
        asked = {"adapter": name, "version": None if newest or not name else version}
        outputs = await self.together(prompts, f"{tag}-{name}-{version}-", **asked, **params)
        for prompt, output in zip(prompts, outputs, strict=True):
            self.check(name, version, prompt, output)

    def check(self, name: str, version: int, prompt: Sequence[int], output: TokenOutput) -> None:
        """The answer is of this version of this adapter."""
        check_spans(output, version)
        assert output.log_probs is not None, "the engine returned no log-probs"
        gap = self.distance(self.models[name, version], prompt, output)
        if gap > GAP:
            near = min(self.models, key=lambda key: self.distance(self.models[key], prompt, output))
            own = self.distance(self.models[near], prompt, output)
            raise AssertionError(
                f"log-probs of adapter {name!r}, version {version}, differ by {gap:.1e} from transformers with it; "
                f"nearest is {near[0] or 'the model alone'!r}, version {near[1]}, with {own:.1e}"
            )

    def distance(self, model: Model, prompt: Sequence[int], output: TokenOutput) -> float:
        """Largest gap between the log-probs of an answer and those of a model."""
        expected = model.log_probs(prompt, output.token_ids)
        return max(abs(own - other) for own, other in zip(output.log_probs or [], expected, strict=True))


class AdapterCases:
    """Cases of :class:`EngineContract`."""

    @pytest.fixture
    def adapted(self, request: pytest.FixtureRequest, plugin: EngineCase) -> Iterator[Adapted]:
        """The engine of this class that serves adapters."""
        needs(plugin, "adapters", "weight_update", "logprobs")
        yield of_class(request, "_adapted", lambda folder: Adapted(plugin, folder))

    @pytest.mark.parametrize("road", ["buckets", "files"])
    def test_an_adapter_answers_after_its_update(self, adapted: Adapted, road: str) -> None:
        """Version after version, with the log-probs of transformers with it, and not those of the model alone."""

        async def main() -> None:
            for seed, fields in ((1, {}), (2, {"rank": SLOTS.rank, "alpha": 4}), (3, {"targets": ATTENTION})):
                version = await adapted.adapt("first", seed, road, **fields)
                await adapted.ask("first", version, PROMPTS, "greedy", newest=True, temperature=0.0)
                outputs = await adapted.together(PROMPTS, adapter="first")
                for prompt, output in zip(PROMPTS, outputs, strict=True):
                    adapted.check("first", version, prompt, output)
                changed = max(
                    adapted.distance(adapted.model, prompt, output)
                    for prompt, output in zip(PROMPTS, outputs, strict=True)
                )
                assert changed > DIFFERENCE, f"the adapter changes log-probs by {changed:.1e}"

        adapted.run(main())

    def test_adapters_and_versions_answer_in_one_batch(self, adapted: Adapted) -> None:
        """Two versions of two adapters and the model alone, with the same prompts: each is its own. Requests of a third
        version of each run on, so that an engine has no place left."""

        async def main() -> None:
            crowds = []
            for seed, name in enumerate(SLOTS.names, 10) if adapted.plugin.has("live_update") else ():
                asked = adapted.ask(name, await adapted.adapt(name, seed), PROMPTS, "old", newest=True, max_tokens=300)
                crowds.append(asyncio.ensure_future(asked))
                await adapted.generate(PROMPTS[0], "clock", max_tokens=8)
            kept = [(name, await adapted.adapt(name, seed)) for seed, name in enumerate(SLOTS.names * 2, 12)]
            rounds = [*kept, ("", 0)]
            await asyncio.gather(
                *(adapted.ask(name, version, [*PROMPTS, *LONG_PROMPTS], max_tokens=24) for name, version in rounds)
            )
            await asyncio.gather(*crowds)

        adapted.run(main())

    def test_a_version_that_is_dropped_serves_its_requests_to_their_end(self, adapted: Adapted) -> None:
        """No new request gets it, and the error names the versions that there are."""
        needs(adapted.plugin, "live_update")

        async def main() -> None:
            first = await adapted.adapt("first", 20)
            crowd = asyncio.ensure_future(adapted.ask("first", first, PROMPTS, "old", newest=True, max_tokens=450))
            await adapted.generate(PROMPTS[0], "clock", max_tokens=8)
            later = [await adapted.adapt("first", seed) for seed in (21, 22, 23)]
            with pytest.raises(Exception, match=f"(?s)first.* {first}.*{later[-2]}, {later[-1]}"):
                await adapted.generate(PROMPTS[0], "late", adapter="first", version=first)
            assert not crowd.done(), "the requests had ended before their version was dropped"
            for version in later[-2:]:
                await adapted.ask("first", version, PROMPTS, "new")
            await adapted.ask("first", later[-1], PROMPTS, "newest", newest=True)
            await crowd

        adapted.run(main())

    def test_a_paused_request_keeps_its_version(self, adapted: Adapted) -> None:
        """It was held while the new one came; those that begin later have the new one."""
        needs(adapted.plugin, "live_update", "pause")
        engine = adapted.engine
        assert isinstance(engine, PausableEngine), "it lacks the methods of a capability that it declares"

        async def main() -> None:
            first = await adapted.adapt("second", 30)
            crowd = asyncio.ensure_future(adapted.ask("second", first, PROMPTS, "held", newest=True, max_tokens=200))
            await adapted.generate(PROMPTS[0], "clock", max_tokens=8)
            await engine.pause("keep")
            second = await adapted.adapt("second", 31)
            await engine.resume()
            await adapted.ask("second", second, PROMPTS, "later", newest=True)
            await crowd

        adapted.run(main())

    def test_no_prefix_of_another_version_or_adapter_is_read(self, adapted: Adapted) -> None:
        """A new version answers prompts that are cached for the old one, of requests that ended and that run, and of
        the session's own last turn."""
        needs(adapted.plugin, "live_update")

        async def session(name: str) -> None:
            async with adapted.session(name):
                prompt = LONG_PROMPTS[0]
                for seed in (41, 42):
                    version = await adapted.adapt("first", seed)
                    params = SamplingParams(8, adapter="first", seed=1)
                    output = await adapted.engine.generate(prompt, params, name)
                    adapted.check("first", version, prompt, output)
                    prompt = [*prompt, *output.token_ids, 20, 21, 22]
                output = await adapted.engine.generate(prompt, SamplingParams(8, seed=1), name)
                adapted.check("", 0, prompt, output)

        async def main() -> None:
            await session("turns")
            crowds = []
            for seed in (45, 46):
                for name in SLOTS.names:
                    version = await adapted.adapt(name, seed)
                    # Of those that have ended there may be a cache too.
                    await adapted.ask(name, version, LONG_PROMPTS, "ended", max_tokens=2, newest=True)
                    asked = adapted.ask(name, version, LONG_PROMPTS, "runs", max_tokens=100, newest=True)
                    crowds.append(asyncio.ensure_future(asked))
                    await adapted.generate(PROMPTS[0], "clock", max_tokens=8)
                await adapted.ask("", 0, LONG_PROMPTS, "base", max_tokens=4)
            await asyncio.gather(*crowds)

        adapted.run(main())

    def test_spans_name_the_version_of_the_adapter(self, adapted: Adapted) -> None:
        """Not the last update's; those of the model alone have the number of its own weights."""

        async def main() -> dict[tuple[str, int], list[PolicySpan]]:
            versions = [(name, await adapted.adapt(name, seed)) for seed, name in enumerate(SLOTS.names * 2, 50)]
            spans = {}
            for name, version in [*versions, ("", 0)]:
                asked: dict[str, Any] = {"adapter": name, "version": version if name else None}
                spans[name, version] = (await adapted.generate(PROMPTS[0], **asked)).spans
            return spans

        for (name, version), spans in adapted.run(main()).items():
            assert spans == [PolicySpan(version, 0, 16)], f"spans of {name!r}, version {version}, are {spans}"

    def test_adapters_that_do_not_fit_are_refused(self, adapted: Adapted) -> None:
        """The error says what is wrong, and all answers are as before."""
        tied = adapted.plugin.tie_word_embeddings
        good = AdaptedModel(60, tied)
        tensor = next(iter(good.lora))
        odd = AdaptedModel(60, tied)
        odd.lora[tensor] = odd.lora[tensor][:, :5]
        lacking = AdaptedModel(60, tied)
        del lacking.lora[tensor]
        infinite = AdaptedModel(60, tied)
        infinite.lora[tensor] = infinite.lora[tensor] * np.inf
        updates = [
            (good.update("third"), "third.*first, second"),
            (AdaptedModel(60, tied, rank=SLOTS.rank + 1).update("first"), f"r is {SLOTS.rank + 1}.*{SLOTS.rank}"),
            (AdaptedModel(60, tied, targets=("q_proj", "lm_head")).update("first"), "lm_head.*q_proj"),
            *((each.update("first"), tensor.replace(".", r"\.")) for each in (odd, lacking, infinite)),
        ]
        requests: list[tuple[Mapping[str, Any], str]] = [
            ({"adapter": "third"}, "third.*first, second"),
            ({"adapter": "first", "version": NEVER_SENT}, f"first.*{NEVER_SENT}"),
            ({"version": NEVER_SENT}, str(NEVER_SENT)),
        ]

        async def main() -> None:
            versions = {name: await adapted.adapt(name, 61 + number) for number, name in enumerate(SLOTS.names)}
            for update, words in updates:
                with pytest.raises(Exception, match=f"(?s){words}"):
                    await adapted.engine.update_weights(update, NEVER_SENT)
            for params, words in requests:
                with pytest.raises(ValueError, match=f"(?s){words}"):
                    await adapted.generate(PROMPTS[0], **params)
            for name, version in versions.items():
                await adapted.ask(name, version, PROMPTS, newest=True)
            await adapted.ask("", 0, PROMPTS)

        adapted.run(main())

    @pytest.mark.parametrize("level", [1, 2])
    def test_weights_and_adapters_are_there_after_sleep(self, adapted: Adapted, level: int) -> None:
        """Those from before it, and a version that comes while it sleeps; nobody sends the model's own weights."""
        needs(adapted.plugin, "sleep")
        engine = adapted.engine
        assert isinstance(engine, SleepingEngine), "it lacks the methods of a capability that it declares"

        async def main() -> None:
            first, second = [await adapted.adapt(name, 70) for name in SLOTS.names]
            await adapted.ask("first", first, PROMPTS)
            await engine.sleep(level)
            await engine.wake_up(["weights"])
            third = await adapted.adapt("first", 71)
            await engine.wake_up(["kv_cache"])
            kept = [("first", first), ("first", third), ("second", second), ("", 0)]
            await asyncio.gather(*(adapted.ask(name, version, PROMPTS) for name, version in kept))

        adapted.run(main())
