"""Any request to the chat endpoint, as bytes on a socket: it is answered or closed, and the next one is answered."""

import asyncio
import json
import re
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_loop_openai_agent.config import OpenAIAgentConfig
from agentrl_loop_openai_agent.server import EndpointServer
from agentrl_testing.loops import FakeSession
from tests.fuzz.fuzzing import changed, corpus, fuzz, mutated

PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/models", "/", "/docs", "/v1/chat/completions/x"]
REQUESTS = corpus("request")
BODY_LIMIT = 20_000
Exchange = Callable[[bytes], bytes]


class Endless(FakeSession):
    """Has an answer for every request."""

    def __init__(self) -> None:
        super().__init__(["four"] * 100_000, budget=10**9)


class Endpoint:
    """One endpoint with an event loop and a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.key = ""
        self.port = 0
        self._stop = asyncio.Event()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=[self._serve()])
        self._thread.start()
        self._ready.result(60)

    async def _serve(self) -> None:
        config = OpenAIAgentConfig(agent="json:dumps", max_body_bytes=BODY_LIMIT, max_branches=10**9)
        server = EndpointServer(config, lambda ids: "x" * len(ids))
        async with server.open(Endless(), {}) as (self.key, _):
            self.port = int(re.findall(r":(\d+)/", server.base_url)[0])
            self._ready.set_result(None)
            await self._stop.wait()
            await server.close()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine in the endpoint's own event loop: one that hangs would hang it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    async def exchange(self, *pieces: bytes, leave: bool = False) -> bytes:
        """All that is answered to these bytes, until the endpoint closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if leave:
                writer.write_eof()
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    def request(self, path: str, body: bytes, key: str | None = None, method: str = "POST") -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.key if key is None else key}\r\n"
        return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode("utf-8", "ignore") + body

    def still_answers(self) -> None:
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "two"}]}).encode()
        assert b'"content":"four"' in self.call(self.exchange(self.request(PATHS[0], body)))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    started = Endpoint()
    yield started
    started.close()


def status(answer: bytes) -> int:
    found = re.match(rb"HTTP/1.1 (\d+) ", answer)
    return int(found[1]) if found else 0


@fuzz
@given(
    mutated(REQUESTS).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.sampled_from([json.loads(text) for text in REQUESTS])
    .flatmap(changed)
    .map(lambda tree: json.dumps(tree).encode())
    | st.binary(max_size=30),
    st.sampled_from(PATHS),
)
def test_any_body(endpoint: Endpoint, body: bytes, path: str) -> None:
    assert 200 <= status(endpoint.call(endpoint.exchange(endpoint.request(path, body)))) < 500
    endpoint.still_answers()


@fuzz
@given(st.data())
def test_any_bytes(endpoint: Endpoint, data: st.DataObject) -> None:
    """What is not HTTP is refused or closed, also in pieces."""
    valid = endpoint.request(PATHS[0], REQUESTS[0].encode()).decode()
    text = data.draw(
        mutated([valid, "GET / HTTP/1.1\r\n\r\n", "POST /v1/messages HTTP/1.1\r\nTransfer-Encoding: chunked"])
    )
    sent = text.encode("utf-8", "surrogatepass")
    cut = data.draw(st.integers(0, len(sent)))
    assert status(endpoint.call(endpoint.exchange(sent[:cut], sent[cut:], leave=True))) < 500
    endpoint.still_answers()


@fuzz
@given(st.text(max_size=60) | st.just(""), st.sampled_from(PATHS[:4]))
def test_no_other_key_is_accepted(endpoint: Endpoint, key: str, path: str) -> None:
    sent = endpoint.request(path, REQUESTS[0].encode(), key, "GET" if path.endswith("models") else "POST")
    assert key == endpoint.key or status(endpoint.call(endpoint.exchange(sent, leave=True))) in (0, 400, 401)


@pytest.mark.parametrize("path", PATHS[:3])
def test_a_body_above_the_limit_is_refused_before_it_has_arrived(endpoint: Endpoint, path: str) -> None:
    head = endpoint.request(path, b"x" * BODY_LIMIT).partition(b"\r\n\r\n")[0]
    head = re.sub(rb"Content-Length: \d+", b"Content-Length: 999999999999", head)
    answer = endpoint.call(endpoint.exchange(head + b"\r\n\r\n", b"x" * (BODY_LIMIT + 1)))
    assert status(answer) == 413 and b"max_body_bytes" in answer


def test_a_thousand_connections_that_send_nothing_whole_keep_nobody_waiting(endpoint: Endpoint) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 3000:
        pytest.skip("the limit of open files is below 3,000")

    async def opened() -> list[asyncio.StreamWriter]:
        writers = []
        for number in range(1000):
            _, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
            writer.write([b"", b"POST /v1/chat/completions HT", endpoint.request(PATHS[0], b"{")[:-1]][number % 3])
            writers.append(writer)
        return writers

    writers = endpoint.call(opened())
    for _ in range(3):
        endpoint.still_answers()
    endpoint.call(asyncio.wait_for(closed(writers), 60))
    endpoint.still_answers()


async def closed(writers: list[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.close()
