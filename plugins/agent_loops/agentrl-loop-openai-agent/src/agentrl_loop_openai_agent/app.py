"""The chat endpoint as a web application: authorisation, limits, errors, streams."""

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError

from agentrl_core.api import AgentRLError, ConfigError, DeadlineError, TemplateError
from agentrl_loop_openai_agent.conversation import BranchLimitError, Completion, ContextLengthError, Conversation, Reply
from agentrl_loop_openai_agent.responses import ResponsesRequest, response_body
from agentrl_loop_openai_agent.wire import Answer, ChatRequest, error_body, models_body

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 10.0
"""A stream that waits for the engine says so this often, so that no proxy gives up on it."""

BODY_SECONDS = 60.0
"""A request whose body takes longer is refused."""

LARGE_BYTES = 32 * 1024
"""Longer requests are rendered and tokenised in a thread: that takes longer than other trajectories should wait."""


class RequestError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code

    def response(self) -> JSONResponse:
        return JSONResponse(error_body(str(self), self.kind, self.code), status_code=self.status)


class ChatApp:
    """Answers requests from conversations.

    Args:
        conversations: by run token; a request is authorised by being found here.
        model: the only model there is.
        max_body_bytes: longer bodies are refused with 413.
    """

    def __init__(self, conversations: Mapping[str, Conversation], model: str, max_body_bytes: int) -> None:
        self._conversations = conversations
        self._model = model
        self._max_body_bytes = max_body_bytes
        self._warned: set[str] = set()
        self.app = FastAPI(title="agentrl", docs_url=None, redoc_url=None, openapi_url=None)
        self.app.add_api_route("/v1/models", self.models, methods=["GET"], response_model=None)
        self.app.add_api_route("/v1/chat/completions", self.completions, methods=["POST"], response_model=None)
        self.app.add_api_route("/v1/responses", self.responses, methods=["POST"], response_model=None)
        self.app.add_exception_handler(RequestError, _answer_error)

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        self._authorised(request)
        return JSONResponse(models_body(self._model))

    async def completions(self, request: Request) -> Response:
        """``POST /v1/chat/completions``, in one piece or as server-sent events."""
        conversation = self._authorised(request)
        body = await self._read(request)
        wanted = self._checked(lambda: ChatRequest.model_validate_json(body))
        reply = await self._prepared(request, conversation, wanted, large=len(body) > LARGE_BYTES)
        identifier = f"chatcmpl-{uuid.uuid4().hex}"
        if wanted.stream:
            events = self._events(request, reply, identifier, wanted.usage_wanted)
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse((await self._answer(request, reply, identifier)).body())

    async def responses(self, request: Request) -> Response:
        """``POST /v1/responses``, in one piece."""
        conversation = self._authorised(request)
        body = await self._read(request)
        wanted = self._checked(lambda: ResponsesRequest.model_validate_json(body).chat_request())
        reply = await self._prepared(request, conversation, wanted, large=len(body) > LARGE_BYTES)
        return JSONResponse(response_body(await self._answer(request, reply, f"resp_{uuid.uuid4().hex}")))

    async def _answer(self, request: Request, reply: Reply, identifier: str) -> Answer:
        try:
            return Answer(identifier, self._model, await _while_connected(request, reply))
        except Exception as error:
            raise _as_request_error(error) from error

    async def _prepared(self, request: Request, conversation: Conversation, wanted: ChatRequest, large: bool) -> Reply:
        try:
            retried = int(request.headers.get("x-stainless-retry-count", "0")) > 0
        except ValueError:
            retried = False
        prepare = partial(conversation.prepare, wanted.messages, wanted.schemas, wanted.limit, retried)
        try:
            async with conversation.preparing:
                return await asyncio.to_thread(prepare) if large else prepare()
        except ContextLengthError as error:
            raise RequestError(400, str(error), code="context_length_exceeded") from error
        except BranchLimitError as error:
            raise RequestError(400, str(error), code="too_many_branches") from error
        except TemplateError as error:
            conversation.failure = error
            raise RequestError(400, str(error)) from error
        except Exception as error:
            conversation.failure = error
            raise _as_request_error(error) from error

    def _authorised(self, request: Request) -> Conversation:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        conversation = self._conversations.get(token.strip()) if scheme.lower() == "bearer" else None
        if conversation is None:
            raise RequestError(
                401, "no run has this API key; use the one that the endpoint gave out, while its trajectory runs",
                "authentication_error", "invalid_api_key",
            )  # fmt: skip
        return conversation

    async def _read(self, request: Request) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for piece in request.stream():
                    body += piece
                    if len(body) > self._max_body_bytes:
                        limit = f"max_body_bytes={self._max_body_bytes} of the agent loop openai_agent"
                        raise RequestError(413, f"the body is longer than {limit}")
        except TimeoutError as error:
            raise RequestError(408, f"the body did not arrive within {BODY_SECONDS:g} s", "timeout_error") from error
        return bytes(body)

    def _checked(self, parse: Callable[[], ChatRequest]) -> ChatRequest:
        try:
            wanted = parse()
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in item['loc']) or 'body'}: {item['msg']}" for item in error.errors()
            )
            raise RequestError(400, f"this endpoint cannot answer that: {problems}") from error
        except ValueError as error:
            raise RequestError(400, f"this endpoint cannot answer that: {error}") from error
        if wanted.model != self._model:
            raise RequestError(
                404, f"there is no model {wanted.model!r}; there is {self._model!r}", code="model_not_found"
            )
        for name in sorted({*wanted.unenforced} - self._warned):
            self._warned.add(name)
            logger.warning("the chat endpoint accepts %s of a request and does not enforce it on the policy", name)
        return wanted

    async def _events(self, request: Request, reply: Reply, identifier: str, usage: bool) -> AsyncIterator[str]:
        task = asyncio.ensure_future(_while_connected(request, reply))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=KEEP_ALIVE_SECONDS)
                if not task.done():
                    yield ": waiting\n\n"
            try:
                answer = Answer(identifier, self._model, task.result())
            except Exception as error:  # noqa: BLE001 - the stream has begun: its error is an event
                refused = _as_request_error(error)
                yield _event(error_body(str(refused), refused.kind, refused.code))
                return
            for chunk in answer.chunks(usage):
                yield _event(chunk)
            yield "data: [DONE]\n\n"
        finally:
            task.cancel()
            await asyncio.wait({task})


def _event(body: object) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError), "registered for this class"
    return error.response()


def _as_request_error(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, DeadlineError):
        return RequestError(504, str(error), "timeout_error")
    if isinstance(error, ConfigError) or not isinstance(error, AgentRLError):
        logger.error("the chat endpoint failed", exc_info=error)
    return RequestError(500, f"{type(error).__name__}: {error}", "server_error")


async def _while_connected(request: Request, reply: Reply) -> Completion:
    """The completion; if the client leaves, its generation ends."""
    generation = asyncio.ensure_future(reply.generate())
    disconnect = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({generation, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if generation.cancelled():
            raise RequestError(409, "the same request was sent again, and that one is answered", "superseded")
        if generation.done():
            return generation.result()
        raise RequestError(499, "the client closed the connection", "client_closed_request")
    finally:
        for task in (generation, disconnect):
            task.cancel()
        await asyncio.wait({generation, disconnect})
        reply.release()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
