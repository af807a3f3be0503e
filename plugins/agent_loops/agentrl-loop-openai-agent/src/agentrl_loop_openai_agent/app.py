"""The chat endpoint as a web application: authorisation, limits, errors, streams."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ValidationError

from agentrl_core.api import AgentRLError, ConfigError, DeadlineError, ImageError, TemplateError
from agentrl_loop_openai_agent.config import OpenAIAgentConfig
from agentrl_loop_openai_agent.conversation import BranchLimitError, Completion, ContextLengthError, Conversation, Reply
from agentrl_loop_openai_agent.messages import MessagesRequest, message_body, message_error, message_events
from agentrl_loop_openai_agent.responses import ResponsesRequest, response_body, response_events
from agentrl_loop_openai_agent.wire import (
    Answer,
    ChatRequest,
    Choice,
    Decode,
    error_body,
    event,
    logprobs_of,
    models_body,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

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

    def body(self) -> dict[str, Any]:
        return error_body(str(self), self.kind, self.code)


@dataclass(frozen=True)
class Protocol:
    """One of the languages that clients speak.

    Args:
        path: of its requests.
        prefix: of the ids of answers.
        request: model of a body; its ``chat_request()`` is the same as a request for a chat completion.
        body: the answer in one piece.
        events: the answer as server-sent events.
        error: body of an error.
        error_event: name of the event that ends a stream with an error.
    """

    path: str
    prefix: str
    request: type[BaseModel]
    body: Callable[[Answer], dict[str, Any]]
    events: Callable[[Answer, ChatRequest], Iterator[str]]
    error: Callable[[RequestError], dict[str, Any]]
    error_event: str = ""


PROTOCOLS = (
    Protocol(
        "/v1/chat/completions", "chatcmpl-", ChatRequest, Answer.body,
        lambda answer, wanted: answer.events(wanted.usage_wanted), RequestError.body,
    ),
    Protocol(
        "/v1/responses", "resp_", ResponsesRequest, response_body,
        lambda answer, _: response_events(answer), RequestError.body, "error",
    ),
    Protocol(
        "/v1/messages", "msg_", MessagesRequest, message_body,
        lambda answer, _: message_events(answer), lambda error: message_error(error.status, str(error)), "error",
    ),
)  # fmt: skip


class ChatApp:
    """Answers requests from conversations.

    Args:
        conversations: by run token; a request is authorised by being found here.
        model: the only model there is.
        config: of the agent loop.
        decode: text of ids, for log-probs.
        capabilities: of the engine.
    """

    def __init__(
        self,
        conversations: Mapping[str, Conversation],
        model: str,
        config: OpenAIAgentConfig,
        decode: Decode,
        capabilities: frozenset[str] = frozenset(),
    ) -> None:
        self._conversations = conversations
        self._model = model
        self._config = config
        self._decode = decode
        self._capabilities = capabilities
        self._warned: set[str] = set()
        self.app = FastAPI(title="agentrl", docs_url=None, redoc_url=None, openapi_url=None)
        self.app.add_api_route("/v1/models", self.models, methods=["GET"], response_model=None)
        for protocol in PROTOCOLS:
            self.app.add_api_route(protocol.path, self._speaker(protocol), methods=["POST"], response_model=None)
        self.app.add_exception_handler(RequestError, _answer_error)

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        self._authorised(request)
        return JSONResponse(models_body(self._model))

    def _speaker(self, protocol: Protocol) -> Callable[[Request], Awaitable[Response]]:
        async def speak(request: Request) -> Response:
            conversation = self._authorised(request)
            body = await self._read(request)
            wanted = self._enforced(self._checked(lambda: protocol.request.model_validate_json(body).chat_request()))  # type: ignore[attr-defined]
            schema = self._schema(wanted)
            replies = await self._prepared(request, conversation, wanted, schema, large=len(body) > LARGE_BYTES)
            identifier = f"{protocol.prefix}{uuid.uuid4().hex}"
            answer = partial(self._answer, request, replies, identifier, wanted)
            if wanted.stream:
                events = self._events(answer, wanted, protocol)
                return StreamingResponse(events, media_type="text/event-stream")
            return JSONResponse(protocol.body(await answer()))

        return speak

    async def _answer(self, request: Request, replies: Sequence[Reply], identifier: str, wanted: ChatRequest) -> Answer:
        try:
            completions = await _while_connected(request, replies)
            choices = [self._choice(index, each, wanted) for index, each in enumerate(completions)]
            return Answer(identifier, self._model, choices)
        except Exception as error:
            raise _as_request_error(error) from error

    def _choice(self, index: int, completion: Completion, wanted: ChatRequest) -> Choice:
        if not wanted.logprobs:
            return Choice(index, completion)
        turn = completion.turn
        if turn.log_probs is None and turn.token_ids:
            raise RequestError(400, "logprobs: this run's engine reports no log-probabilities; leave logprobs out")
        return Choice(index, completion, logprobs_of(turn.token_ids, turn.log_probs or (), self._decode))

    async def _prepared(
        self, request: Request, conversation: Conversation, wanted: ChatRequest, schema: str | None, large: bool
    ) -> list[Reply]:
        try:
            retried = int(request.headers.get("x-stainless-retry-count", "0")) > 0
        except ValueError:
            retried = False
        try:
            messages = await conversation.images.named(wanted.messages)
        except ImageError as error:
            raise RequestError(400, str(error), code="invalid_image") from error
        prepare = partial(
            conversation.prepare, messages, wanted.schemas, wanted.limit, retried, wanted.stops, wanted.n or 1,
            schema,
        )  # fmt: skip
        try:
            async with conversation.preparing:
                return await asyncio.to_thread(prepare) if large else prepare()
        except ContextLengthError as error:
            raise RequestError(400, str(error), code="context_length_exceeded") from error
        except BranchLimitError as error:
            raise RequestError(400, str(error), code="too_many_branches") from error
        except ImageError as error:
            raise RequestError(400, str(error), code="invalid_image") from error
        except TemplateError as error:
            conversation.failure = error
            raise RequestError(400, str(error)) from error
        except Exception as error:
            conversation.failure = error
            raise _as_request_error(error) from error

    def _authorised(self, request: Request) -> Conversation:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        conversation = self._conversations.get(key)
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
                    if len(body) > self._config.max_body_bytes:
                        limit = f"max_body_bytes={self._config.max_body_bytes} of the agent loop openai_agent"
                        raise RequestError(413, f"the body is longer than {limit}")
        except TimeoutError as error:
            raise RequestError(408, f"the body did not arrive within {BODY_SECONDS:g} s", "timeout_error") from error
        return bytes(body)

    def _schema(self, wanted: ChatRequest) -> str | None:
        unenforced = wanted.unenforced(self._capabilities)
        return None if "response_format" in unenforced else self._checked(wanted.json_schema)

    def _checked(self, parse: Callable[[], T]) -> T:
        try:
            return parse()
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in item['loc']) or 'body'}: {item['msg']}" for item in error.errors()
            )
            raise RequestError(400, f"this endpoint cannot answer that: {problems}") from error
        except ValueError as error:
            raise RequestError(400, f"this endpoint cannot answer that: {error}") from error

    def _enforced(self, wanted: ChatRequest) -> ChatRequest:
        """The request, if nothing in it is refused."""
        if wanted.model != self._model:
            raise RequestError(
                404, f"there is no model {wanted.model!r}; there is {self._model!r}", code="model_not_found"
            )
        unenforced = wanted.unenforced(self._capabilities)
        if unenforced and self._config.unenforced == "refuse":
            name, reason = next(iter(unenforced.items()))
            raise RequestError(
                400,
                f"{name}: {reason}, so this cannot be enforced. Leave it out, or set unenforced: accept of the agent "
                "loop openai_agent to train without it",
            )
        for name in sorted(unenforced.keys() - self._warned):
            self._warned.add(name)
            logger.warning("the chat endpoint accepts %s of a request and does not enforce it on the policy", name)
        return wanted

    async def _events(
        self, answering: Callable[[], Coroutine[Any, Any, Answer]], wanted: ChatRequest, protocol: Protocol
    ) -> AsyncIterator[str]:
        task = asyncio.ensure_future(answering())
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=KEEP_ALIVE_SECONDS)
                if not task.done():
                    yield ": waiting\n\n"
            try:
                answer = task.result()
            except Exception as error:  # noqa: BLE001 - the stream has begun: its error is an event
                yield event(protocol.error(_as_request_error(error)), protocol.error_event)
                return
            for each in protocol.events(answer, wanted):
                yield each
        finally:
            task.cancel()
            await asyncio.wait({task})


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError), "registered for this class"
    bodies = {protocol.path: protocol.error for protocol in PROTOCOLS}
    return JSONResponse(bodies.get(request.url.path, RequestError.body)(error), status_code=error.status)


def _as_request_error(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, DeadlineError):
        return RequestError(504, str(error), "timeout_error")
    if isinstance(error, ConfigError) or not isinstance(error, AgentRLError):
        logger.error("the chat endpoint failed", exc_info=error)
    return RequestError(500, f"{type(error).__name__}: {error}", "server_error")


async def _while_connected(request: Request, replies: Sequence[Reply]) -> list[Completion]:
    """The completions, when all have ended; if the client leaves, their generation ends."""
    tasks = [asyncio.ensure_future(reply.generate()) for reply in replies]
    generation = asyncio.ensure_future(asyncio.wait(tasks))
    disconnect = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([generation, disconnect], return_when=asyncio.FIRST_COMPLETED)
        if any(task.cancelled() for task in tasks):
            raise RequestError(409, "the same request was sent again, and that one is answered", "superseded")
        if generation.done():
            return [task.result() for task in tasks]
        raise RequestError(499, "the client closed the connection", "client_closed_request")
    finally:
        for task in (*tasks, disconnect):
            task.cancel()
        await asyncio.wait([*tasks, generation, disconnect])
        for reply in replies:
            reply.release()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
