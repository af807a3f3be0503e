import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from vllm import VOCAB, AsyncEngineArgs, Completion, FlatLogprobs, RequestOutput, SamplingParams, Span


class AsyncLLM:
    """The last one that was made is ``AsyncLLM.last``; ``calls`` is what it was told, ``dead`` kills it.

    With ``most_tokens`` no answer grows longer until new weights have come.
    """

    last: "AsyncLLM"
    dead = False
    bad_update = False
    most_tokens: int | None = None

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.calls: list[tuple[Any, ...]] = []
        self.version = "default"
        self.moving = True
        self.aborted: set[str] = set()
        self.running: set[str] = set()
        self.params: list[SamplingParams] = []
        self.salts: list[str] = []
        self.sizes: list[int] = []
        self.loras: list[Any] = []
        self.loaded: dict[int, Path] = {}

    @classmethod
    def from_engine_args(cls, args: AsyncEngineArgs, stat_loggers: list[Any]) -> "AsyncLLM":
        cls.last = cls(args.arguments)
        cls.last.stat_loggers = [factory(None, 0) for factory in stat_loggers]
        return cls.last

    async def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[None]:
        self.calls.append((name, *args))
        return [None, None]

    async def update_weight_version(self, version: str) -> None:
        self.version = version

    def shutdown(self) -> None:
        self.calls.append(("shutdown",))

    async def check_health(self) -> None:
        if self.dead:
            raise RuntimeError("EngineCore encountered an issue")

    async def generate(
        self, prompt: dict[str, Any], params: SamplingParams, request_id: str, lora_request: Any = None
    ) -> AsyncIterator[RequestOutput]:
        self.params.append(params)
        self.loras.append(lora_request)
        self.salts.append(prompt["cache_salt"])
        self.running.add(request_id)
        start = prompt["prompt_token_ids"]
        ids: list[int] = []
        spans: list[Span] = []
        reason = "length"
        try:
            while len(ids) < params.max_tokens:
                await asyncio.sleep(0)
                if request_id in self.aborted:
                    reason = "abort"
                    break
                if not self.moving or len(ids) == self.most_tokens:
                    continue
                for logger in self.stat_loggers:
                    logger.record(engine_idx=0, scheduler_stats=None, iteration_stats=None, mm_cache_stats=None)
                ids.append((sum(start) + sum(ids) + 1000 * int(self.version)) % VOCAB)
                if not spans or spans[-1].version != self.version:
                    spans.append(Span(self.version, len(ids) - 1, len(ids)))
                spans[-1].end = len(ids)
                if ids[-1] in params.stop_token_ids:
                    reason = "stop"
                    break
        finally:
            self.running.discard(request_id)
            self.aborted.discard(request_id)
        scored = FlatLogprobs(list(ids), [-token / 1000 for token in ids])
        yield RequestOutput([Completion(ids, scored, reason, spans or None)], len(start) - 1)

    async def add_lora(self, lora_request: Any) -> bool:
        if "bad" in lora_request.lora_name:
            raise ValueError("not supported here")
        folder = Path(lora_request.lora_path)
        assert {path.name for path in folder.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
        self.loaded[lora_request.lora_int_id] = folder
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        assert self.loaded.pop(lora_id).exists(), "it may be read until it is removed"
        return True

    async def abort(self, request_ids: list[str]) -> None:
        self.calls.append(("abort", *request_ids))
        self.aborted |= self.running & set(request_ids)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(("pause", mode, clear_cache))
        if mode == "wait":
            self.moving = True
            while self.running:
                await asyncio.sleep(0)
        self.moving = False

    async def reset_prefix_cache(self) -> bool:
        self.calls.append(("reset",))
        return not self.running

    async def resume_generation(self) -> None:
        self.calls.append(("resume",))
        self.moving = True

    async def start_weight_update(self) -> None:
        assert not self.moving or not self.running
        self.sizes = []

    async def update_weights(self, request: Any) -> None:
        if self.bad_update:
            raise RuntimeError("size mismatch in a worker")
        self.sizes += [Path(path).stat().st_size for path in request.update_info["files"]]

    async def finish_weight_update(self, version: str) -> None:
        self.calls.append(("weights", version))
        self.most_tokens = None
        self.version = version

    async def sleep(self, level: int, mode: str) -> None:
        await self.pause_generation(mode=mode, clear_cache=True)
        self.calls.append(("sleep", level))

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", tuple(tags)))
        if "kv_cache" in tags:
            self.moving = True
