"""The engine: an SGLang server process that belongs to this object, driven over HTTP."""

import asyncio
import importlib.util
import itertools
import logging
import secrets
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentrl_core.api.concurrency import together
from agentrl_core.api.engine import (
    EngineContext,
    InferenceEngine,
    MultiModal,
    PauseMode,
    SamplingParams,
    TokenOutput,
)
from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import WeightUpdate
from agentrl_core.engine_kit.adapter_folders import AdapterFolder, AdapterFolders
from agentrl_core.engine_kit.adapters import linear_modules
from agentrl_core.engine_kit.memory_files import MemoryFolder
from agentrl_core.engine_kit.model_tensors import ModelTensors
from agentrl_core.engine_kit.ports import held_port
from agentrl_core.engine_kit.requests import check_request, covering_spans, read_model_config
from agentrl_engine_sglang.client import SGLangClient
from agentrl_engine_sglang.config import SGLangConfig
from agentrl_engine_sglang.counters import Counters
from agentrl_engine_sglang.gate import Gate
from agentrl_engine_sglang.launch import (
    KEY_FILE,
    command_line,
    on_cpu,
    served_folder,
    server_arguments,
    server_environment,
)
from agentrl_engine_sglang.process import ServerProcess
from agentrl_engine_sglang.requests import (
    check_expansion,
    request_body,
    routed_experts_shape,
    shown,
    token_output,
)
from agentrl_engine_sglang.weights import ServerWeights

logger = logging.getLogger(__name__)

PORT_ATTEMPTS = 3
POLL_INTERVAL = 0.2
PROBE_TIMEOUT = 2.0
END_INTERVAL = 1.0
ABORT_ATTEMPTS = 3
ABORT_INTERVAL = 2.0
BIND_FAILED = "error while attempting to bind on address"
"""What uvicorn writes where another process listens on the port."""
MEMORY_TAGS = ("weights", "kv_cache")


Output = TypeVar("Output", TokenOutput, None)


@dataclass
class _Running:
    """A request that the server has, under a name that no other had: it remembers aborted ones for a while."""

    request_id: str
    call: "asyncio.Task[dict[str, Any]]"
    ended: "asyncio.Future[TokenOutput | None]"


class SGLangEngine(InferenceEngine):
    """One SGLang server: started by :meth:`start`, killed by :meth:`close` or with this process.

    Of a replica on several hosts each host has one, and that of host 0 takes requests and weights.

    Log-probabilities are SGLang's own, which are those of the contract. Where SGLang and the contract differ, the
    engine makes up for it: ids outside the vocabulary, which would kill the server, are refused; requests end at their
    own stop ids only; the whole context can be used; a paused engine takes no request, and ``keep`` retracts what runs,
    so that it goes on with a KV cache of the new weights.

    Requests have seeds only in SGLang's deterministic mode (``deterministic_inference``, GPU only).
    """

    def __init__(self, config: SGLangConfig, context: EngineContext) -> None:
        self._config = config
        self._context = context
        self._counters = Counters()
        self._gate = Gate()
        self._running: dict[str, _Running] = {}
        self._entered: set[str] = set()
        self._numbers = itertools.count()
        self._background: set[asyncio.Task[None]] = set()
        self._control = asyncio.Lock()
        self._frozen = False
        self._asleep: set[str] = set()
        self._version = 0
        self._stopped_because = ""
        self._vocab_size = 0
        self._experts: tuple[int, int] | None = None
        self._process: ServerProcess | None = None
        self._client: SGLangClient | None = None
        self._folder: MemoryFolder | None = None
        self._weights: ServerWeights | None = None
        self._adapters = self._folders({})

    # Life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises EngineError, with the end of the server's log, where it does not come up in time."""
        config, context = self._config, self._context
        if importlib.util.find_spec("sglang") is None:
            raise EngineError(
                f"rollout.engine.python: {sys.executable} has no package sglang; choose an interpreter that has it, or "
                "install it there: pip install 'agentrl-engine-sglang[sglang]'"
            )
        if config.deterministic_inference and on_cpu(context):
            raise EngineError(
                "rollout.engine.config.deterministic_inference: SGLang has no deterministic mode on a CPU; set it to "
                "false, or cluster.device to cuda"
            )
        model = read_model_config(context.model_path)
        text = model.get("text_config") or model
        self._experts = routed_experts_shape(text) if context.routed_experts else None
        size = text.get("vocab_size") or context.vocab_size
        self._vocab_size = min(int(size), context.vocab_size or int(size))
        self._tensors = ModelTensors.read(context.model_path, model)
        self._adapters = self._folders(linear_modules(self._tensors.shapes))
        self._weights = ServerWeights(context)
        self._folder = served_folder(context.model_path)
        try:
            await self._launch(str(self._folder.path))
            if context.reserved_ids and context.node_rank == 0:
                await self._check_hooks(context.reserved_ids[0])
        except BaseException:
            await self.close()
            raise

    async def _launch(self, folder: str) -> None:
        deadline = time.monotonic() + self._config.start_timeout
        preferred = self._config.port
        for attempt in range(1, PORT_ATTEMPTS + 1):
            with held_port(preferred) as held:
                port = held.getsockname()[1]
                # Whoever reaches the port could otherwise replace the weights.
                key = {"api_key": secrets.token_hex(24)}
                arguments = key | server_arguments(self._config, self._context, folder, port)
                process = self._process = ServerProcess(
                    command_line(arguments, Path(folder)),
                    server_environment(self._config, self._context),
                    self._config.log_file,
                )
                process.start()
                self._client = SGLangClient(
                    f"http://127.0.0.1:{arguments['port']}",
                    self._config.update_timeout,
                    self._explain_end,
                    str(arguments["api_key"]),
                )
                if await self._until_ready(process, self._client, folder, deadline):
                    (Path(folder) / KEY_FILE).unlink(missing_ok=True)
                    process.is_ready()
                    logger.info("SGLang server on port %d, log in %s", arguments["port"], process.log_path)
                    return
            if attempt == PORT_ATTEMPTS or not _port_was_taken(process.last_lines()):
                code = process.exit_code
                why = "found its port taken" if code is None else f"ended with exit code {code} before it was ready"
                raise EngineError(f"the SGLang server {why}; its last lines:\n{process.last_lines()}")
            logger.warning("port %d was taken while the SGLang server started; trying another", arguments["port"])
            await self._stop_server()
            preferred = 0

    async def _check_hooks(self, reserved: int) -> None:
        """SGLang only logs that a plugin could not be loaded, or was not named in SGLANG_PLUGINS."""
        likes = SamplingParams(1, temperature=0.0, logit_bias={reserved: 1000.0})
        reply = await self._server().generate(request_body("start", [0], likes, self._context.max_model_len, False))
        if reply["output_ids"] == [reserved]:
            raise EngineError(
                f"the SGLang server samples token {reserved}, which stands for images: it has not loaded its plugin "
                "'agentrl' (agentrl_engine_sglang.hooks). Name it in SGLANG_PLUGINS if you set that, and install "
                "agentrl-engine-sglang in the engine's interpreter again"
            )

    async def _until_ready(self, process: ServerProcess, client: SGLangClient, folder: str, deadline: float) -> bool:
        """False where the process ends first, or could not have its port: it stays for ever then, without answering."""
        while process.exit_code is None:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the SGLang server was not ready within {self._config.start_timeout:g} s "
                    f"(rollout.engine.config.start_timeout); its last lines:\n{process.last_lines()}"
                )
            try:
                async with asyncio.timeout(PROBE_TIMEOUT):
                    await client.health()
                    # On a port that was taken meanwhile, somebody else may answer, or nobody. Hosts that compute for
                    # another one say nothing but that they are well.
                    if self._context.node_rank > 0 or await client.model_path() == folder:
                        return True
            except (EngineError, TimeoutError, KeyError, TypeError) as error:
                logger.debug("the SGLang server is not ready yet: %s", error)
            if BIND_FAILED in process.last_lines():
                return False
            await asyncio.sleep(POLL_INTERVAL)
        return False

    async def close(self) -> None:
        await self._stop_server()
        for task in self._background:
            task.cancel()
        self._adapters.close()
        if self._weights is not None:
            self._weights.close()
        if self._folder is not None:
            self._folder.close()

    async def _stop_server(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._process is not None:
            await self._process.kill()

    async def health(self) -> None:
        """Raises EngineError where the server is gone or does not answer."""
        await self._server().health()

    async def progress(self) -> float:
        """The times at which the schedulers have published their loads, added up."""
        return sum(float(load["timestamp"]) for load in await self._server().loads())

    def metrics(self) -> dict[str, float]:
        """``prompt_tokens`` (``cached_tokens`` of them not computed again), ``retractions`` (requests that had
        to give up their KV cache)."""
        return self._counters.take()

    # Generation ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        request_id: str,
        multi_modal: MultiModal | None = None,
    ) -> TokenOutput:
        """Raises ValueError for a request that cannot be served; others are not affected."""
        self._server()
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
        if request_id in self._entered:
            raise ValueError(f"request {request_id!r} is running already: a session has one at a time")
        adapter = self._adapters.enter(sampling_params)
        self._entered.add(request_id)
        try:
            if not await self._gate.enter(request_id):
                return TokenOutput([], [], "abort")
            rid = f"{request_id}#{next(self._numbers)}"
            seeded = self._config.deterministic_inference
            name = "" if adapter is None else adapter.held.name
            body = request_body(rid, prompt_ids, sampling_params, length, seeded, name, self._context.routed_experts)
            expanded = None
            if multi_modal is not None and multi_modal.images:
                body |= shown(multi_modal)
                expanded = prompt_ids
            output = await self._run(request_id, rid, body, None if adapter is None else adapter.version, expanded)
        finally:
            self._entered.discard(request_id)
            self._adapters.leave(adapter)
        return output

    async def _run(
        self, request_id: str, rid: str, body: dict[str, Any], version: int | None, expanded: Sequence[int] | None
    ) -> TokenOutput:
        """One request to its end.

        Args:
            version: that of an adapter: SGLang counts updates of the model's own weights.
            expanded: what SGLang must make of a prompt with images.
        """
        client = self._server()
        call = asyncio.create_task(client.generate(body))
        running = self._running[rid] = _Running(request_id, call, asyncio.get_running_loop().create_future())
        try:
            reply = await asyncio.shield(call)
        except asyncio.CancelledError:
            if call.cancelled():
                return self._end(rid, TokenOutput([], [], "abort"))
            self._spawn(self._abandon(client, rid, running))
            raise
        except BaseException:
            self._end(rid, None)
            raise
        try:
            if expanded is not None:
                check_expansion(reply, expanded, request_id)
            output = token_output(reply, self._version, self._experts)
            if version is not None:
                output.spans = covering_spans([], len(output.token_ids), version)
        except BaseException:
            self._end(rid, None)
            raise
        self._counters.finished(reply["meta_info"])
        return self._end(rid, output)

    async def _explain_end(self) -> None:
        """Where the server has died, its log says more than a broken connection: raises EngineError with it."""
        if self._process is not None and await self._process.ends_within(END_INTERVAL):
            self._server()

    def _end(self, rid: str, output: Output) -> Output:
        self._running.pop(rid).ended.set_result(output)
        return output

    async def _abandon(self, client: SGLangClient, rid: str, running: _Running) -> None:
        """End a request that nobody waits for."""
        try:
            await client.abort(rid)
            await running.call
        except EngineError as error:
            logger.debug("an abandoned request: %s", error)
        finally:
            self._end(rid, None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def abort(self, request_id: str) -> TokenOutput | None:
        if self._gate.turn_away(request_id):
            return TokenOutput([], [], "abort")
        if request_id not in self._entered:
            return None
        rid, running = next(item for item in self._running.items() if item[1].request_id == request_id)
        client = self._server()
        # An abort that overtakes its request is lost, so it is said again; in the end nobody waits any longer.
        for _ in range(ABORT_ATTEMPTS):
            await client.abort(rid)
            done, _pending = await asyncio.wait([running.ended], timeout=ABORT_INTERVAL)
            if done:
                return running.ended.result()
        running.call.cancel()
        return await running.ended

    # Between requests ---------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "keep") -> None:
        client = self._server()
        self._gate.close("pause")
        if mode == "abort":
            await together(self.abort(request_id) for request_id in list(self._entered))
        elif mode == "drain" and not self._frozen:
            await self._idle()
        elif not self._frozen:
            await client.pause()
            self._frozen = True

    async def resume(self) -> None:
        client = self._server()
        if self._frozen:
            await client.resume()
            self._frozen = False
        self._gate.open("pause")

    async def _idle(self) -> None:
        while self._running:
            await asyncio.wait([running.ended for running in self._running.values()])

    async def update_weights(self, update: WeightUpdate, version: int) -> None:
        """What runs goes on with the new weights.

        Raises:
            EngineError: the tensors are not the model's, and nothing was sent; or the server failed in the middle of
                the update, and was stopped, because nobody knows what it holds.
        """
        client, weights = self._server(), self._weights
        if update.adapter is not None:
            await self._adapters.update(update, version)
            return
        if self._context.adapters is not None:
            raise EngineError(
                "the sglang engine was started for adapters, and cannot update the model's own weights below them: "
                "start it without adapters, or send those alone"
            )
        assert weights is not None, "there is no server without start()"
        weights.check(update)
        update = await asyncio.to_thread(self._tensors.normalised, update)
        async with self._control:
            self._gate.close("update")
            try:
                # A retracted request gives up its KV cache, and computes it again with the new weights. Also where
                # nothing runs any more: the server's last step may not have ended, and would keep the cache.
                if not self._frozen:
                    await client.pause()
                await weights.send(client, update, version)
                self._version = version
                if not self._frozen:
                    await client.resume()
            except BaseException as error:
                self._stopped_because = f"stopped after an update to weights {version} that failed ({error!r})"
                await self._stop_server()
                raise
            finally:
                self._gate.open("update")

    async def sleep(self, level: int = 1) -> None:
        """Requests wait until :meth:`wake_up`; those that run are finished first.

        On a CPU SGLang frees nothing.
        """
        client = self._server()
        if level not in (1, 2):
            raise ValueError(f"sleep level {level}; allowed are 1 (the KV cache) and 2 (the weights too)")
        async with self._control:
            if self._frozen and self._running:
                raise EngineError(
                    f"{len(self._running)} paused requests hold the engine awake: resume() or pause('abort') first"
                )
            self._gate.close("sleep")
            await self._idle()
            wanted = {"kv_cache"} if level == 1 else set(MEMORY_TAGS)
            tags = sorted(wanted - self._asleep)
            if tags:
                # A server whose last step has not ended would die of it; one that is paused has ended it.
                await client.pause()
                await client.release_memory(tags)
                await client.resume()
                self._asleep |= wanted

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        client = self._server()
        wanted = set(MEMORY_TAGS if tags is None else tags)
        if wanted - set(MEMORY_TAGS):
            raise ValueError(f"wake_up tags {sorted(wanted)}; allowed are {', '.join(MEMORY_TAGS)}")
        async with self._control:
            back = [tag for tag in MEMORY_TAGS if tag in wanted & self._asleep]
            if back:
                await client.resume_memory(back)
                self._asleep -= wanted
            if not self._asleep:
                self._gate.open("sleep")

    def _folders(self, modules: Mapping[str, tuple[int, ...]]) -> AdapterFolders:
        async def load(folder: AdapterFolder) -> None:
            await self._server().load_lora_adapter(folder)

        async def unload(folder: AdapterFolder) -> None:
            await self._server().unload_lora_adapter(folder.name)

        return AdapterFolders("sglang", self._context.adapters, modules, load, unload)

    def _server(self) -> SGLangClient:
        """The client of a server that runs.

        Raises:
            EngineError: it has not been started, or it has ended.
        """
        process, client = self._process, self._client
        if process is None or client is None or process.pid is None:
            raise EngineError("the sglang engine has not been started: call start() first")
        if process.exit_code is not None:
            raise EngineError(
                f"the SGLang server has ended with exit code {process.exit_code}"
                f"{self._stopped_because and ', ' + self._stopped_because}; its last lines:\n{process.last_lines()}"
            )
        return client


def _port_was_taken(log: str) -> bool:
    text = log.lower()
    return "address already in use" in text or ("port" in text and "not available" in text)
