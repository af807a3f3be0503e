"""The engine: vLLM's AsyncLLM in this process, its core and workers in processes of their own."""

import asyncio
import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl_core.api.engine import EngineContext, InferenceEngine, MultiModal, PauseMode, SamplingParams, TokenOutput
from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import WeightUpdate
from agentrl_core.engine_kit.adapter_folders import AdapterFolder, AdapterFolders, FolderVersion
from agentrl_core.engine_kit.adapters import linear_modules
from agentrl_core.engine_kit.memory_files import SharedMemoryOf
from agentrl_core.engine_kit.model_tensors import ModelTensors
from agentrl_core.engine_kit.requests import check_request, covering_spans, read_model_config
from agentrl_engine_vllm.adapters import lora_request
from agentrl_engine_vllm.config import VLLMConfig
from agentrl_engine_vllm.counters import Counters, StepCounter
from agentrl_engine_vllm.follower import VLLMFollower
from agentrl_engine_vllm.images import image_prompt
from agentrl_engine_vllm.launch import BACKEND, check_installed, engine_arguments, environment
from agentrl_engine_vllm.requests import sampling_arguments, token_output
from agentrl_engine_vllm.weights import WorkerWeights

ABORT_INTERVAL = 0.5
PAUSE_MODES = {"abort": "abort", "drain": "wait", "keep": "keep"}
MEMORY_TAGS = ("weights", "kv_cache")


class VLLMEngine(InferenceEngine):
    """One AsyncLLM: started by :meth:`start`, ended by :meth:`close` or with this process.

    Where vLLM and the contract differ, the engine makes up for it: requests end at their own stop ids only,
    log-probabilities are those before top-p and top-k, an update of the weights takes every cache with it, and an
    engine whose update failed half-way says that it is unhealthy, because nobody knows what it holds.
    """

    def __init__(self, config: VLLMConfig, context: EngineContext) -> None:
        self._config = config
        self._context = context
        self._counters = Counters()
        self._steps = StepCounter()
        self._requests: dict[str, asyncio.Future[TokenOutput | None]] = {}
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._calls: set[asyncio.Future[TokenOutput]] = set()
        self._closed_by: set[str] = set()
        self._is_frozen = False
        self._asleep: set[str] = set()
        self._lost_weights = False
        self._control = asyncio.Lock()
        self._version = 0
        # Prefixes are cached under it, and those of other updates are never found.
        self._updates = 0
        self._ended_because = ""
        self._vocab_size = 0
        self._weights = WorkerWeights(context.nodes)
        self._adapters = self._folders({})
        self._closing = threading.Event()
        self._memory: SharedMemoryOf | None = None
        self._llm: Any = None

    # Life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises EngineError, or whatever vLLM raises, where it does not come up."""
        check_installed()
        model = read_model_config(self._context.model_path)
        size = int((model.get("text_config") or model).get("vocab_size") or self._context.vocab_size)
        self._vocab_size = min(size, self._context.vocab_size or size)
        self._tensors = ModelTensors.read(self._context.model_path, model)
        self._adapters = self._folders(linear_modules(self._tensors.shapes))
        os.environ.update(environment(self._config, self._context))
        arguments = engine_arguments(self._config, self._context, model)
        others = set(multiprocessing.active_children())
        try:
            # It takes a minute, in which this process must be able to say how it is.
            self._llm = await asyncio.to_thread(_make, arguments, self._steps, self._closing)
            await self._llm.collective_rpc("agentrl_score_whole_distribution", args=(list(self._context.reserved_ids),))
            await self._llm.update_weight_version(str(self._version))
            started = set(multiprocessing.active_children()) - others
            self._memory = SharedMemoryOf([child.pid for child in started if child.pid is not None])
        except BaseException:
            await self.close()
            # One that is still starting has no other handle.
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
            raise

    async def close(self) -> None:
        self._closing.set()
        llm, self._llm = self._llm, None
        self._ended_because = self._ended_because or "it has been closed"
        # Whoever waits for an answer gets an error instead: see _call.
        for waiting in (*self._waiting.values(), *self._calls):
            waiting.cancel()
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)
        self._adapters.close()
        if self._memory is not None:
            self._memory.close()

    async def health(self) -> None:
        """Raises EngineError where vLLM has ended or must not be used any more."""
        try:
            await self._running().check_health()
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM has ended: {error}") from error

    async def progress(self) -> float:
        """Steps whose results have come from vLLM's processes."""
        self._running()
        return float(self._steps.steps)

    def metrics(self) -> dict[str, float]:
        """``prompt_tokens`` (``cached_tokens`` of them not computed again)."""
        return self._counters.take()

    def _folders(self, modules: Mapping[str, tuple[int, ...]]) -> AdapterFolders:
        async def load(folder: AdapterFolder) -> None:
            await self._running().add_lora(lora_request(folder))

        async def unload(folder: AdapterFolder) -> None:
            await self._running().remove_lora(folder.number)

        return AdapterFolders("vllm", self._context.adapters, modules, load, unload)

    def _running(self) -> Any:
        if self._llm is None:
            reason = self._ended_because or "call start() first"
            raise EngineError(f"the vllm engine does not run: {reason}")
        return self._llm

    # Generation ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        request_id: str,
        multi_modal: MultiModal | None = None,
    ) -> TokenOutput:
        """Raises ValueError for a request that cannot be served; others are not affected."""
        self._running()
        length = self._context.max_model_len
        check_request(
            request_id,
            prompt_ids,
            sampling_params,
            multi_modal,
            vocab_size=self._vocab_size,
            max_model_len=length,
            max_images=self._context.max_images,
        )
        with self._session(request_id) as ended:
            adapter = self._adapters.enter(sampling_params)
            try:
                arguments = sampling_arguments(len(prompt_ids), sampling_params, length)
                shown = multi_modal if multi_modal is not None and multi_modal.images else None
                output = await self._call([int(token) for token in prompt_ids], arguments, request_id, adapter, shown)
            finally:
                self._adapters.leave(adapter)
            ended.set_result(output)
        return output

    async def _call(
        self,
        prompt_ids: list[int],
        arguments: dict[str, Any],
        request_id: str,
        adapter: FolderVersion | None,
        shown: MultiModal | None,
    ) -> TokenOutput:
        call = asyncio.ensure_future(self._sample(prompt_ids, arguments, request_id, adapter, shown))
        self._calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            self._running()  # raises where the request was cancelled because the engine has ended
            raise
        finally:
            self._calls.discard(call)

    @contextlib.contextmanager
    def _session(self, request_id: str) -> Iterator["asyncio.Future[TokenOutput | None]"]:
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is running already: a session has one at a time")
        ended = self._requests[request_id] = asyncio.get_running_loop().create_future()
        try:
            yield ended
        finally:
            del self._requests[request_id]
            if not ended.done():
                ended.set_result(None)

    async def _enter(self, request_id: str) -> bool:
        """Wait while the engine takes no request. False where this one was aborted meanwhile."""
        while self._closed_by:
            turn = self._waiting[request_id] = asyncio.get_running_loop().create_future()
            try:
                if not await turn:
                    return False
            finally:
                del self._waiting[request_id]
        return True

    def _open(self, reason: str) -> None:
        self._closed_by.discard(reason)
        if not self._closed_by:
            for turn in self._waiting.values():
                if not turn.done():
                    turn.set_result(True)

    async def _sample(
        self,
        prompt_ids: list[int],
        arguments: dict[str, Any],
        request_id: str,
        adapter: FolderVersion | None,
        shown: MultiModal | None,
    ) -> TokenOutput:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm import TokensPrompt
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        if not await self._enter(request_id):
            return TokenOutput([], [], "abort")
        llm = self._running()
        if self._lost_weights:
            raise EngineError("the weights are gone since sleep(2): update_weights() first")
        if schema := arguments.pop("json_schema", None):
            arguments["structured_outputs"] = StructuredOutputsParams(json=schema)
        params = VLLMSamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **arguments)
        final = None
        if shown is None:
            prompt = TokensPrompt(prompt_token_ids=prompt_ids, cache_salt=str(self._updates))
        else:
            prompt = await image_prompt(llm, request_id, prompt_ids, shown, self._updates)
        lora = None if adapter is None else lora_request(adapter.held)
        async for answer in llm.generate(prompt, params, request_id, lora_request=lora):
            final = answer
        if final is None or not final.finished:
            raise EngineError(f"request {request_id!r}: vLLM ended it without an answer")
        output = token_output(final.outputs[0], self._version)
        if adapter is not None:
            # vLLM counts updates of the model's own weights.
            output.spans = covering_spans([], len(output.token_ids), adapter.version)
        self._counters.finished(len(prompt_ids), final.num_cached_tokens or 0)
        return output

    async def abort(self, request_id: str) -> TokenOutput | None:
        ended = self._requests.get(request_id)
        if ended is None:
            return None
        await self._end({request_id: ended})
        return ended.result()

    async def _end(self, requests: Mapping[str, "asyncio.Future[TokenOutput | None]"]) -> None:
        """Abort requests together: a call for each would take longer than the update that waits for them."""
        while left := [name for name, ended in requests.items() if not ended.done()]:
            turns = [turn for name in left if (turn := self._waiting.get(name)) is not None and not turn.done()]
            for turn in turns:
                turn.set_result(False)
            if len(turns) < len(left):
                await self._running().abort(left)
            # An abort that overtakes its request is lost, so it is said again.
            await asyncio.wait([requests[name] for name in left], timeout=ABORT_INTERVAL)

    # Between requests ---------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "keep") -> None:
        """``keep`` keeps the KV cache too, until an update takes it. New requests wait.

        After ``abort`` vLLM itself need not pause, which takes 20 ms: nothing runs, and what is new waits here.
        """
        llm = self._running()
        if mode not in PAUSE_MODES:
            raise ValueError(f"pause mode {mode!r}; allowed are {', '.join(PAUSE_MODES)}")
        self._closed_by.add("pause")
        async with self._control:
            if mode == "abort":
                await self._end({name: each for name, each in self._requests.items() if name not in self._waiting})
            else:
                await llm.pause_generation(mode=PAUSE_MODES[mode], clear_cache=False)
            self._is_frozen = mode == "keep"

    async def resume(self) -> None:
        llm = self._running()
        async with self._control:
            self._is_frozen = False
            self._closed_by.discard("pause")
            if not self._asleep:
                await llm.resume_generation()
            self._open("pause")

    async def update_weights(self, update: WeightUpdate, version: int) -> None:
        """What runs goes on with the new weights, and computes its KV cache again unless it is to keep it.

        Raises:
            EngineError: the tensors are not the model's, and nothing was sent; or vLLM failed in the middle of the
                update, and was ended, because nobody knows what it holds.
        """
        self._running()
        if update.adapter is not None:
            await self._adapters.update(update, version)
            return
        update = await asyncio.to_thread(self._checked, update)
        async with self._control:
            llm = self._running()
            self._closed_by.add("update")
            try:
                await self._halt(llm, update.running == "recompute")
                await llm.start_weight_update()
                await self._weights.send(llm, update)
                await llm.finish_weight_update(str(version))
                self._version = version
                self._updates += 1
                self._lost_weights = False
                if not self._closed_by & {"pause", "sleep"}:
                    await llm.resume_generation()
            except BaseException as error:
                self._ended_because = f"it was ended after an update to weights {version} that failed ({error!r})"
                await self.close()
                raise EngineError(f"weights {version}: {error}; restart the vllm engine") from error
            finally:
                self._open("update")

    async def _halt(self, llm: Any, clears: bool) -> None:
        """Nothing is computed, and nothing is cached for anyone if it ``clears``, which includes what runs."""
        is_idle = len(self._requests) == len(self._waiting)
        # A pause takes vLLM 20 ms. While anything runs, it would not clear the cache without one, and not say so.
        if "pause" in self._closed_by and is_idle and await llm.reset_prefix_cache():
            return
        # It raises where it cannot clear the cache.
        await llm.pause_generation(mode="keep", clear_cache=clears)

    def _checked(self, update: WeightUpdate) -> WeightUpdate:
        if update.shared:
            raise EngineError("the vllm engine computes in processes of its own: it cannot share the actor's module")
        if self._context.adapters is not None:
            raise EngineError(
                "the vllm engine was started for adapters, and cannot update the model's own weights below them: start "
                "it without adapters, or send those alone"
            )
        self._weights.check(update)
        return self._tensors.normalised(update)

    async def sleep(self, level: int = 1) -> None:
        """Requests wait until :meth:`wake_up`; those that run are finished first.

        Level 2 gives up the weights for good: requests after waking need an update. With adapters nobody would send
        them, so it keeps them in the host's memory, as level 1. On a CPU vLLM frees nothing.
        """
        llm = self._running()
        if level not in (1, 2):
            raise ValueError(f"sleep level {level}; allowed are 1 (the KV cache) and 2 (the weights too)")
        async with self._control:
            if self._is_frozen and len(self._requests) > len(self._waiting):
                raise EngineError("paused requests hold the engine awake: resume() or pause('abort') first")
            self._closed_by.add("sleep")
            level = 1 if self._context.adapters is not None else level
            await llm.sleep(level, mode="wait")
            self._asleep = set(MEMORY_TAGS)
            self._lost_weights = self._lost_weights or level == 2

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        llm = self._running()
        wanted = set(MEMORY_TAGS if tags is None else tags)
        if wanted - set(MEMORY_TAGS):
            raise ValueError(f"wake_up tags {sorted(wanted)}; allowed are {', '.join(MEMORY_TAGS)}")
        async with self._control:
            back = [tag for tag in MEMORY_TAGS if tag in wanted & self._asleep]
            if back:
                await llm.wake_up(back)
                self._asleep -= wanted
            if not self._asleep:
                self._open("sleep")


def _make(arguments: dict[str, Any], steps: StepCounter, closing: threading.Event) -> Any:
    """An AsyncLLM; raises EngineError where nobody waits for it any more."""
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    engine_args = AsyncEngineArgs(weight_transfer_config=WeightTransferConfig(backend=BACKEND), **arguments)
    # A thread cannot be cancelled.
    llm = None if closing.is_set() else AsyncLLM.from_engine_args(engine_args, stat_loggers=[steps])
    if closing.is_set():
        if llm is not None:
            llm.shutdown()
        raise EngineError("the vllm engine was closed while it started")
    return llm


def make_engine(config: VLLMConfig, context: EngineContext) -> InferenceEngine:
    """The engine of a replica's first host, or what runs on the others.

    Raises:
        EngineError: vLLM cannot be spread like that.
    """
    if context.nodes > 1 and context.data_parallel > 1:
        raise EngineError(
            f"rollout.engine.data_parallel={context.data_parallel}: the vllm engine spreads tensor and pipeline "
            "parallelism over hosts, not data parallelism; set rollout.engine.nodes=1, or data_parallel=1 and more "
            "replicas"
        )
    return VLLMFollower(config, context) if context.node_rank else VLLMEngine(config, context)
