"""A host of a replica that computes for another one, which is where requests go."""

import asyncio
import multiprocessing
import os
from collections.abc import Sequence
from typing import Any

from agentrl_core.api.engine import EngineContext, InferenceEngine, MultiModal, SamplingParams, TokenOutput
from agentrl_core.api.errors import EngineError
from agentrl_core.engine_kit.memory_files import SharedMemoryOf
from agentrl_core.engine_kit.requests import read_model_config
from agentrl_engine_vllm.config import VLLMConfig
from agentrl_engine_vllm.launch import BACKEND, check_installed, engine_arguments, environment


class VLLMFollower(InferenceEngine):
    """The workers of this host, which take their orders from vLLM's core on host 0."""

    def __init__(self, config: VLLMConfig, context: EngineContext) -> None:
        self._config = config
        self._context = context
        self._executor: Any = None
        self._memory: SharedMemoryOf | None = None

    async def start(self) -> None:
        """Raises whatever vLLM raises where its workers do not come up, or do not find host 0."""
        check_installed()
        os.environ.update(environment(self._config, self._context))
        model = read_model_config(self._context.model_path)
        arguments = engine_arguments(self._config, self._context, model)
        others = set(multiprocessing.active_children())
        self._executor = await asyncio.to_thread(_make, arguments)
        workers = set(multiprocessing.active_children()) - others
        self._memory = SharedMemoryOf([worker.pid for worker in workers if worker.pid is not None])

    async def health(self) -> None:
        """Raises EngineError where a worker has ended."""
        if self._executor is None or self._executor.is_failed:
            raise EngineError(f"vLLM's workers on host {self._context.node_rank} do not run")

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        request_id: str,
        multi_modal: MultiModal | None = None,
    ) -> TokenOutput:
        """Raises EngineError: requests go to host 0."""
        raise EngineError(f"host {self._context.node_rank} of a vLLM replica takes no requests; host 0 does")

    async def close(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            await asyncio.to_thread(executor.shutdown)
        if self._memory is not None:
            self._memory.close()


def _make(arguments: dict[str, Any]) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    engine_args = AsyncEngineArgs(weight_transfer_config=WeightTransferConfig(backend=BACKEND), **arguments)
    executor = MultiprocExecutor(engine_args.create_engine_config(headless=True), monitor_workers=False)
    executor.start_worker_monitor()
    return executor
