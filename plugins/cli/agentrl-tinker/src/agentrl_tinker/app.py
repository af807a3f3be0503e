"""The API over HTTP: routes, keys, limits, and refusals of what is not there."""

import json
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import ValidationError

from agentrl_tinker import requests
from agentrl_tinker.queues import Work
from agentrl_tinker.refusals import Refusal
from agentrl_tinker.service import Service, TrainedModel
from agentrl_tinker.store import Checkpoint, Store, owner_of

PREFIX = "/api/v1"
MAX_BODY = 64 << 20
WAIT = 20.0
"""Seconds for which a request for a result waits; the SDK gives up after 45."""
PROTOBUF = "application/x-protobuf"
B = TypeVar("B", bound=requests.Body)

REFUSED = {
    "training_runs/{run}/checkpoints/{checkpoint:path}/publish": "it has no public checkpoints",
    "training_runs/{run}/checkpoints/{checkpoint:path}/ttl": "the time of a checkpoint is set when it is saved",
    "copy_weights": "a checkpoint stays where it was saved",
    "create_custom_loss": "custom losses run in the client, by forward_backward_custom",
    "auth/token": "it takes API keys as they are",
    "sessions": "it does not list sessions",
    "sessions/search": "it does not list sessions",
    "sessions/{session_id}": "it does not describe sessions",
    "sessions/{session_id}/project": "it has no projects",
    "sessions/{session_id}/trace_export": "it records no traces",
    "audit": "it keeps no audit log",
    "billing/{what:path}": "it bills nothing",
    "auth/apikey/me": "API keys are in the file that it was started with (--keys)",
    "retrieve_futures": "results are fetched one by one, by retrieve_future",
    "join_sampling_session": "a copy of a sampling client picks its own numbers",
}
"""What else the SDK can ask for, and what is missing."""


class Api:
    """The application.

    Args:
        keys: API keys that are let in; None: every key, each with what it has made itself.
    """

    def __init__(self, service: Service, keys: Collection[str] | None) -> None:
        self._service = service
        self._keys = None if keys is None else {owner_of(key) for key in keys}
        self.app = FastAPI(openapi_url=None)
        self.app.add_exception_handler(Refusal, _refused)
        self.app.add_exception_handler(ValidationError, _invalid)
        post: dict[str, Callable[..., Any]] = {
            "client/config": self._config, "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session, "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish, "telemetry": self._telemetry,
            "create_model": self._create_model, "get_info": self._get_info, "weights_info": self._weights_info,
            "forward_backward": self._forward_backward, "optim_step": self._optim_step,
            "save_weights": self._save_weights, "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external, "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample, "cancel_future": self._cancel, "retrieve_future": self._retrieve,
        }  # fmt: skip
        get: dict[str, Callable[..., Any]] = {
            "healthz": self._health, "get_server_capabilities": self._capabilities,
            "samplers/{sampler_id}": self._sampler, "training_runs": self._runs, "checkpoints": self._checkpoints,
            "training_runs/{run}/checkpoints/external_weights/{name}/external_weights_urls": self._urls,
            "downloads/{token}/{name}": self._download,
            "training_runs/{run}": self._run, "training_runs/{run}/checkpoints": self._checkpoints,
        }  # fmt: skip
        for path, handler in post.items():
            self.app.add_api_route(f"{PREFIX}/{path}", handler, methods=["POST"])
        for path, handler in get.items():
            self.app.add_api_route(f"{PREFIX}/{path}", handler, methods=["GET"])
        deleted = f"{PREFIX}/training_runs/{{run}}/checkpoints/{{checkpoint:path}}"
        self.app.add_api_route(deleted, self._delete, methods=["DELETE"])
        for path, why in REFUSED.items():
            self.app.add_api_route(f"{PREFIX}/{path}", _refusing(why), methods=["GET", "POST", "PUT", "DELETE"])
        self.app.add_api_route("/{rest:path}", _unknown, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])

    def stop(self) -> None:
        """Answer those who wait for results."""
        if not self._service.results.stopping.done():
            self._service.results.stopping.set_result({})

    # Keys and bodies ----------------------------------------------------------------------------------------------

    def _owner(self, request: Request) -> str:
        key = request.headers.get("x-api-key", "")
        owner = owner_of(key)
        if not key:
            raise Refusal("no API key: set TINKER_API_KEY, which the SDK sends as X-API-Key", 401)
        if self._keys is not None and owner not in self._keys:
            raise Refusal("this API key is not in the file that the server was started with (--keys)", 401)
        return owner

    async def _body(self, request: Request) -> bytes:
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise Refusal(f"the body is encoded as {encoding}; this server takes bodies as they are", 415)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                raise Refusal(f"the body has more than {MAX_BODY >> 20} MiB. Send fewer datums in a request", 413)
        return bytes(body)

    async def _read(self, request: Request, model: type[B]) -> tuple[str, B]:
        owner = self._owner(request)
        return owner, model.model_validate(_parsed(await self._body(request)))

    # Sessions -----------------------------------------------------------------------------------------------------

    async def _health(self) -> Any:
        return {"status": "ok"}

    async def _config(self, request: Request) -> Any:
        self._owner(request)
        return {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": False}

    async def _dynamic_config(self, request: Request) -> Any:
        self._owner(request)
        return {"sample_cancel_enabled": True}

    async def _telemetry(self, request: Request) -> Any:
        self._owner(request)
        await self._body(request)
        return {"status": "accepted"}

    async def _capabilities(self, request: Request) -> Any:
        self._owner(request)
        service = self._service
        supported = {"model_name": service.name, "max_context_length": service.max_model_len}
        return {"supported_models": [supported | {"trainable": True, "sampleable": True}]}

    async def _create_session(self, request: Request) -> Any:
        owner, body = await self._read(request, requests.CreateSession)
        return {"session_id": self._service.create_session(owner, body), "type": "create_session"}

    async def _heartbeat(self, request: Request) -> Any:
        owner, body = await self._read(request, requests.Session)
        # 410 tells the SDK to stop.
        self._service.session(owner, body.session_id, gone=410)
        return {"type": "session_heartbeat"}

    async def _finish(self, request: Request, session_id: str) -> Any:
        owner = self._owner(request)
        self._service.session(owner, session_id)
        await self._service.end_session(session_id)
        return {}

    # Training -----------------------------------------------------------------------------------------------------

    async def _create_model(self, request: Request) -> Any:
        owner, body = await self._read(request, requests.CreateModel)
        request_id = self._service.create_model(owner, body)
        return {"request_id": request_id, "model_id": request_id.rpartition(":")[0]}

    async def _get_info(self, request: Request) -> Any:
        owner, body = await self._read(request, requests.Model)
        model, name = self._service.model(owner, body.model_id), self._service.name
        data = {"arch": self._service.trainer.architecture, "model_name": name, "tokenizer_id": self._service.tokenizer}
        return {
            "type": "get_info", "model_id": model.model_id, "model_data": data, "is_lora": True,
            "lora_rank": model.shape.rank, "model_name": name, "optimizer_config": {"type": "adamw"},
        }  # fmt: skip

    async def _forward_backward(self, request: Request) -> Any:
        owner = self._owner(request)
        if PROTOBUF not in request.headers.get("content-type", ""):
            raise Refusal(f"forward_backward takes {PROTOBUF}, as SDKs from 0.36 on send it", 415)
        body = await self._body(request)
        training, service = requests.Training(body), self._service

        def read(model: TrainedModel) -> Work:
            rows, loss, settings = training.read(service.trainer.vocabulary, service.max_model_len)
            return service.train(model, rows, loss, settings, backward=not training.forward_only)

        return self._submitted(owner, training.model_id, training.seq_id, body, read)

    async def _optim_step(self, request: Request) -> Any:
        return await self._ordered(request, requests.OptimStep, self._service.optim_step)

    async def _save_weights(self, request: Request) -> Any:
        return await self._ordered(request, requests.SaveWeights, self._service.save)

    async def _save_for_sampler(self, request: Request) -> Any:
        return await self._ordered(request, requests.SaveForSampler, self._service.save_for_sampler)

    async def _save_external(self, request: Request) -> Any:
        return await self._ordered(request, requests.SaveExternal, self._service.save_external)

    async def _urls(self, request: Request, run: str, name: str) -> Any:
        token, files, expires = self._service.lend(self._owner(request), f"tinker://{run}/external_weights/{name}")
        base = str(request.base_url).rstrip("/")
        return {
            "urls": {file: f"{base}{PREFIX}/downloads/{token}/{file}" for file in files},
            "expires": _time(expires),
        }

    async def _download(self, token: str, name: str) -> Any:
        # Without a key: the address is the secret.
        return FileResponse(self._service.lent(token, name))

    async def _load_weights(self, request: Request) -> Any:
        owner = self._owner(request)
        content = await self._body(request)
        parsed = _parsed(content)
        if isinstance(parsed, dict) and parsed.get("model_id") is not None:
            return self._submitted_json(owner, content, requests.LoadWeights, self._service.load)
        request_id = self._service.load_new_model(owner, requests.LoadWeights.model_validate(parsed))
        return {"request_id": request_id, "model_id": request_id.rpartition(":")[0]}

    async def _ordered(self, request: Request, body: type[B], work: Callable[[TrainedModel, B], Work]) -> Any:
        return self._submitted_json(self._owner(request), await self._body(request), body, work)

    def _submitted_json(
        self, owner: str, content: bytes, body: type[B], work: Callable[[TrainedModel, B], Work]
    ) -> Any:
        parsed = _parsed(content)
        found = parsed if isinstance(parsed, dict) else {}
        model_id, seq_id = found.get("model_id"), found.get("seq_id")
        if not isinstance(model_id, str) or not isinstance(seq_id, int):
            raise Refusal("the request needs model_id and seq_id")

        def read(model: TrainedModel) -> Work:
            try:
                return work(model, body.model_validate(parsed))
            except ValidationError as error:
                raise Refusal(requests.problems(error)) from error

        return self._submitted(owner, model_id, seq_id, content, read)

    def _submitted(
        self, owner: str, model_id: str, seq_id: int, body: bytes, read: Callable[[TrainedModel], Work]
    ) -> Any:
        return {"request_id": self._service.submit(owner, model_id, seq_id, body, read), "model_id": model_id}

    # Sampling and results -----------------------------------------------------------------------------------------

    async def _create_sampler(self, request: Request) -> Any:
        owner, body = await self._read(request, requests.CreateSampler)
        sampler_id = self._service.create_sampler(owner, body)
        return {"sampling_session_id": sampler_id, "type": "create_sampling_session"}

    async def _sampler(self, request: Request, sampler_id: str) -> Any:
        sampler = self._service.sampler_of(self._owner(request), sampler_id)
        return {
            "sampler_id": sampler_id,
            "base_model": self._service.name,
            "model_path": sampler.asked and sampler.asked.model_path,
        }

    async def _sample(self, request: Request) -> Any:
        owner, body = await self._read(request, requests.Sample)
        request_id, sequence_ids = self._service.sample(owner, body)
        return {"request_id": request_id, "sample_sequence_ids": sequence_ids}

    async def _cancel(self, request: Request) -> Any:
        owner, body = await self._read(request, requests.Retrieve)
        self._service.cancel(owner, body.request_id)
        return {}

    async def _retrieve(self, request: Request) -> Any:
        owner, body = await self._read(request, requests.Retrieve)
        result = await self._service.results.wait(body.request_id, owner, WAIT)
        if result is None:
            waits = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(waits, status_code=408)
        return Response(result, media_type=PROTOBUF) if isinstance(result, bytes) else result

    # Checkpoints --------------------------------------------------------------------------------------------------

    @property
    def _store(self) -> Store:
        return self._service.store

    async def _weights_info(self, request: Request) -> Any:
        owner, body = await self._read(request, requests.WeightsInfo)
        found, _ = self._store.find(owner, body.tinker_path)
        shape = {key: value for key, value in found.shape.items() if key != "rank"}
        return {"base_model": found.base_model, "is_lora": True, "lora_rank": found.shape["rank"], **shape}

    async def _checkpoints(self, request: Request, run: str | None = None) -> Any:
        return _paged(request, "checkpoints", [_described(each) for each in self._store.all(self._owner(request), run)])

    async def _runs(self, request: Request) -> Any:
        found = self._store.all(self._owner(request))
        runs = [self._run_of(found, run) for run in dict.fromkeys(each.run for each in found)]
        return _paged(request, "training_runs", runs)

    async def _run(self, request: Request, run: str) -> Any:
        found = self._store.all(self._owner(request), run)
        if not found:
            raise Refusal(f"there is no training run {run!r} with checkpoints of this API key", 404)
        return self._run_of(found, run)

    def _run_of(self, checkpoints: list[Checkpoint], run: str) -> dict[str, Any]:
        found = {each.kind: each for each in checkpoints if each.run == run}
        newest = max(found.values(), key=lambda each: each.time)
        last = {"last_checkpoint": found.get("weights"), "last_sampler_checkpoint": found.get("sampler_weights")}
        return {
            "training_run_id": run, "base_model": newest.base_model, "model_owner": "self", "is_lora": True,
            "lora_rank": newest.shape["rank"], "last_request_time": _time(newest.time),
            "user_metadata": newest.user_metadata,
            **{key: each and _described(each) for key, each in last.items()},
        }  # fmt: skip

    async def _delete(self, request: Request, run: str, checkpoint: str) -> Any:
        self._store.delete(self._owner(request), f"tinker://{run}/{checkpoint}")
        return {}


def _described(found: Checkpoint) -> dict[str, Any]:
    kind = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}[found.kind]
    return {
        "checkpoint_id": f"{found.kind}/{found.name}", "tinker_path": found.path, "size_bytes": found.bytes,
        "checkpoint_type": kind, "time": _time(found.time),
        "user_metadata": found.user_metadata, "expires_at": None if found.expires is None else _time(found.expires),
    }  # fmt: skip


def _paged(request: Request, key: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    page = requests.Page.model_validate(dict(request.query_params))
    limit = len(found) if page.limit is None else page.limit
    cursor = {"offset": page.offset, "limit": limit, "total_count": len(found)}
    return {key: found[page.offset : page.offset + limit], "cursor": cursor}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is no JSON: {error}") from error


def _refusing(why: str) -> Callable[[], Awaitable[Any]]:
    async def refuse() -> Any:
        raise Refusal(f"this server does not do this: {why}", 400)

    return refuse


async def _unknown(request: Request) -> Any:
    raise Refusal(f"this server has no {request.method} {request.url.path}; it speaks the API of SDK 0.38", 404)


async def _refused(_: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, status_code=error.status if isinstance(error, Refusal) else 500)


async def _invalid(_: Request, error: Exception) -> Response:
    detail = requests.problems(error) if isinstance(error, ValidationError) else str(error)
    return JSONResponse({"detail": detail}, status_code=400)
