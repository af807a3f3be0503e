"""Stands in for ``sglang.launch_server``: the endpoints that the engine uses, with the real server's replies.

Token ``i`` of an answer is ``(sum of the ids before it + 1000 x version) % VOCAB``, its log-probability minus that
divided by 1000. ``STAND_IN`` in the environment makes it misbehave: ``silent`` (never ready), ``broken`` (ends at
once), ``bad_update`` (refuses weights).
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

from aiohttp import web

VOCAB = 200
TOKEN_SECONDS = 0.002
KNOWN_SAMPLING = {
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "logit_bias", "stop_token_ids", "sampling_seed",
    "ignore_eos",
}  # fmt: skip


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Server:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.model_path = arguments.model_path
        self.context_length = arguments.context_length
        self.version = arguments.weight_version
        self.moving = asyncio.Event()
        self.moving.set()
        self.aborted: dict[str, asyncio.Event] = {}
        self.published = 0.0
        self.adapters: dict[str, Path] = {}
        self.using: list[str] = []

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        sampling = body["sampling_params"]
        for name in sampling.keys() - KNOWN_SAMPLING:
            return web.json_response({"error": f"unknown field `{name}`, expected one of ..."}, status=400)
        prompt = body["input_ids"]
        if max(prompt) >= VOCAB or min(prompt) < 0:
            say("IndexError: index out of range in self")
            os.killpg(0, signal.SIGKILL)
        total = len(prompt) + sampling["max_new_tokens"]
        if total > self.context_length:
            message = f"Requested token count exceeds the model's maximum context length: {total} tokens."
            return web.json_response({"error": {"message": message}}, status=400)
        adapter = body.get("lora_path")
        if adapter is not None and adapter not in self.adapters:
            message = f"Got LoRA adapter that has never been loaded: {adapter}"
            return web.json_response({"error": {"message": message}}, status=400)
        aborted = self.aborted[body["rid"]] = asyncio.Event()
        self.using.append(adapter)
        ids, spans, reason = await self.sample(prompt, sampling, aborted)
        self.using.remove(adapter)
        say("answered with", adapter)
        del self.aborted[body["rid"]]
        meta = {
            "id": body["rid"],
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "weight_version": self.version,
            "num_retractions": len(spans) - 1 if spans else 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [[-token / 1000, token, None] for token in ids],
            "output_token_logprobs_length": len(ids),
            "reasoning_tokens": 0,
            "completion_tokens": len(ids),
            "cached_tokens": len(prompt) - 1,
            "weight_versions": spans,
            "cached_tokens_details": None,
            "dp_rank": None,
            "e2e_latency": 0.02,
            "response_sent_to_client_ts": 0.0,
        }
        return web.json_response({"output_ids": ids, "meta_info": meta})

    async def sample(self, prompt, sampling, aborted):
        ids: list[int] = []
        spans: list[dict] = []
        while len(ids) < sampling["max_new_tokens"]:
            await asyncio.sleep(TOKEN_SECONDS)
            while not self.moving.is_set() and not aborted.is_set():
                await asyncio.sleep(TOKEN_SECONDS)
            if aborted.is_set():
                return ids, spans, {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            ids.append((sum(prompt) + sum(ids) + 1000 * int(self.version)) % VOCAB)
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": len(ids) - 1, "end": len(ids)})
            spans[-1]["end"] = len(ids)
            if ids[-1] in sampling["stop_token_ids"]:
                return ids, spans, {"type": "stop", "matched": ids[-1]}
        return ids, spans, {"type": "length", "length": len(ids)}

    async def abort(self, request: web.Request) -> web.Response:
        event = self.aborted.get((await request.json())["rid"])
        if event is not None:
            event.set()
        return web.Response()

    async def pause(self, request: web.Request) -> web.Response:
        assert (await request.json())["mode"] == "retract"
        self.moving.clear()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        self.moving.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if os.environ.get("STAND_IN") == "bad_update" or not files:
            message = "Failed to update weights: shapes differ.\nRolling back to original weights."
            return web.json_response({"success": False, "message": message, "num_paused_requests": 0}, status=400)
        say("weights", [file.stat().st_size for file in files])
        self.version = body["weight_version"]
        message = f"Succeeded to update model weights. Weight version updated to {self.version}."
        return web.json_response({"success": True, "message": message, "num_paused_requests": 0})

    async def load_lora(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, folder = body["lora_name"], Path(body["lora_path"])
        assert name not in self.adapters
        assert {path.name for path in folder.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
        if "bad" in name:
            return web.json_response({"success": False, "error_message": "not supported here"}, status=400)
        self.adapters[name] = folder
        say("loaded", name)
        return web.json_response({"success": True, "error_message": None, "loaded_adapters": {name: str(folder)}})

    async def unload_lora(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        assert self.adapters.pop(name).exists(), "it may be read until it is unloaded"
        while name in self.using:
            await asyncio.sleep(TOKEN_SECONDS)
        say("unloaded", name)
        return web.json_response({"success": True, "error_message": None, "loaded_adapters": {}})

    async def memory(self, request: web.Request) -> web.Response:
        if self.aborted:
            say("AssertionError: should be called only when server is idle.")
            os.killpg(0, signal.SIGKILL)
        say(request.path, (await request.json())["tags"])
        return web.json_response(None)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def loads(self, request: web.Request) -> web.Response:
        """A scheduler publishes while it computes."""
        if self.aborted:
            self.published = time.time()
        return web.json_response({"loads": [{"dp_rank": 0, "timestamp": self.published}]})

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self.model_path, "weight_version": self.version})


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in (("model-path", str), ("host", str), ("port", int), ("context-length", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--weight-version", required=True)
    parser.add_argument("--api-key")
    parser.add_argument("--config", type=Path)
    arguments, _ = parser.parse_known_args()
    if arguments.config:
        assert arguments.config.stat().st_mode & 0o077 == 0, "other users can read the key"
        arguments.api_key = json.loads(arguments.config.read_text())["api-key"]
    say("arguments", json.dumps(sys.argv[1:]))
    mode = os.environ.get("STAND_IN", "")
    if mode == "broken":
        say("\n".join(f"line {number}" for number in range(100)))
        raise ValueError("Model architectures ['OddForCausalLM'] are not supported for now.")
    if mode == "silent":
        say("loading for ever")
        signal.pause()
    try:
        web.run_app(application(arguments), host=arguments.host, port=arguments.port, print=None, handle_signals=False)
    except OSError as error:
        if mode != "bind-hangs":
            raise
        say(f"ERROR:    {error}")
        signal.pause()


async def application(arguments: argparse.Namespace) -> web.Application:
    server = Server(arguments)

    @web.middleware
    async def authorise(request: web.Request, handler):
        wanted = arguments.api_key and f"Bearer {arguments.api_key}"
        if wanted and request.path != "/health" and request.headers.get("Authorization") != wanted:
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    app = web.Application(middlewares=[authorise])
    app.add_routes(
        [
            web.get("/health", server.health),
            web.get("/v1/loads", server.loads),
            web.get("/model_info", server.model_info),
            web.post("/generate", server.generate),
            web.post("/abort_request", server.abort),
            web.post("/pause_generation", server.pause),
            web.post("/continue_generation", server.resume),
            web.post("/update_weights_from_disk", server.from_disk),
            web.post("/load_lora_adapter", server.load_lora),
            web.post("/unload_lora_adapter", server.unload_lora),
            web.post("/release_memory_occupation", server.memory),
            web.post("/resume_memory_occupation", server.memory),
        ]
    )
    return app


if __name__ == "__main__":
    main()
