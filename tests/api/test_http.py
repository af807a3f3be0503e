"""Answers of servers that send too much, too slowly, damaged or elsewhere: real sockets, real bytes."""

import asyncio
import functools
import gzip
import json
import ssl
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_core.api import AgentRLError, BodyTooLargeError, HttpError, bounded_body, fetch, fetch_json, http

MIB = 2**20
Write = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


@asynccontextmanager
async def serving(write: Write) -> AsyncIterator[str]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            await write(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"


def answer(body: bytes, headers: str = "", length: int | None = None, status: str = "200 OK") -> Write:
    async def write(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = len(body) if length is None else length
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {size}\r\n{headers}\r\n".encode() + body)
        await writer.drain()

    return write


def asked(write: Write, **options: Any) -> bytes:
    async def main() -> bytes:
        async with serving(write) as url:
            return await fetch(url, **{"timeout": 60.0, "limit": MIB, **options})

    return asyncio.run(main())


@functools.cache
def bomb() -> bytes:
    """256 MiB of zeros in 256 KiB."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join(packer.compress(bytes(MIB)) for _ in range(256)) + packer.flush()


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(1024):
        writer.write(bytes(MIB))
        await writer.drain()


@pytest.mark.parametrize("kind", ["endless", "bomb"])
def test_a_body_without_end_and_a_bomb_cost_no_more_than_the_limit(kind: str) -> None:
    write = endless if kind == "endless" else answer(bomb(), "content-encoding: gzip\r\n")
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLargeError, match=r"http://127\.0\.0\.1:\d+/x: the body is longer than max_body_byt"):
            asked(write)
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()


def test_the_event_loop_runs_while_a_bomb_is_decompressed() -> None:
    async def main() -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counter = asyncio.create_task(count())
        with suppress(BodyTooLargeError):
            async for _ in bounded_body(once(bomb()), "gzip", 64 * MIB):
                pass
        counter.cancel()
        return turns

    # One turn after each quarter of a MiB.
    assert asyncio.run(main()) >= 250


async def once(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


@pytest.mark.parametrize("part", ["headers", "body"])
def test_a_drip_ends_with_the_time_limit(part: str) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n" + (b"\r\n" if part == "body" else b"x-slow: "))
        while True:
            writer.write(b"1")
            await writer.drain()
            await asyncio.sleep(0.01)

    with pytest.raises(HttpError, match=r"/x: no whole answer within answer_timeout=0.3 s"):
        asked(drip, timeout=0.3, timeout_option="answer_timeout")


def test_the_queue_counts_for_the_time_limit() -> None:
    async def main() -> None:
        await fetch("http://127.0.0.1:9/x", timeout=0.05, limit=1, slots=asyncio.Semaphore(0))

    with pytest.raises(HttpError, match="no whole answer within timeout=0.05 s"):
        asyncio.run(main())


@pytest.mark.parametrize(("length", "message"), [(100, "RemoteProtocolError"), (3, None)])
def test_a_wrong_length(length: int, message: str | None) -> None:
    if message is None:
        # HTTP ends where the header says.
        assert asked(answer(b"abcdef", length=length)) == b"abc"
    else:
        with pytest.raises(HttpError, match=message):
            asked(answer(b"abcdef", length=length))


RAW = zlib.compressobj(wbits=-15)
ENCODED = {
    "gzip": gzip.compress(b"hello"),
    "deflate": zlib.compress(b"hello"),
    "deflate without header": RAW.compress(b"hello") + RAW.flush(),
    "identity": b"hello",
}


@pytest.mark.parametrize("name", ENCODED)
def test_encodings_that_are_understood(name: str) -> None:
    assert asked(answer(ENCODED[name], f"content-encoding: {name.split()[0]}\r\n"), limit=30) == b"hello"


@pytest.mark.parametrize("name", ["br", "zstd", "gzip, gzip"])
def test_other_encodings_are_refused_by_name(name: str) -> None:
    with pytest.raises(HttpError, match=f"/x: the answer has the content-encoding '{name}', .*Switch compression off"):
        asked(answer(b"whatever", f"content-encoding: {name}\r\n"))


def test_a_damaged_and_a_cut_body() -> None:
    packed = gzip.compress(bytes(range(256)) * 8)
    for body, message in ((b"no gzip at all", "no valid gzip"), (packed[:-20], "in the middle of its gzip")):
        with pytest.raises(HttpError, match=message):
            asked(answer(body, "content-encoding: gzip\r\n"))


def test_what_follows_the_compressed_stream_counts() -> None:
    with pytest.raises(BodyTooLargeError):
        asked(answer(gzip.compress(b"") + bytes(2 * MIB), "content-encoding: gzip\r\n"))


def test_a_redirect_is_not_followed() -> None:
    moved = answer(b"", "location: http://127.0.0.1:9/elsewhere\r\n", status="307 Temporary Redirect")
    with pytest.raises(HttpError, match=r"status 307, to 'http://127.0.0.1:9/elsewhere'. Write that address") as info:
        asked(moved, json={})
    assert info.value.status == 307


def test_a_damaged_connection_is_no_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a damaged TLS record: httpx passes the error of the ssl module on."""

    async def damaged(*_: Any, **__: Any) -> bytes:
        raise ssl.SSLError(1, "[SSL: BAD_RECORD_TYPE] bad record type")

    monkeypatch.setattr("httpcore._backends.anyio.AnyIOStream.read", damaged)
    with pytest.raises(HttpError, match="/x: SSLError: .*bad record type"):
        asked(answer(b""))


def test_other_failures_name_the_address() -> None:
    for url, message in (
        ("http://127.0.0.1:9/x", "http://127.0.0.1:9/x: ConnectError"),
        ("http://h:x/", "http://h:x/: InvalidURL"),
        ("ftp://h/x", "ftp://h/x: UnsupportedProtocol"),
        ("http://127.0.0.1:99999/x", "http://127.0.0.1:99999/x: ExceptionGroup"),
        ("http://me:secret@127.0.0.1:9/x@y?key=secret", r"^http://127.0.0.1:9/x@y\?\.\.\.: ConnectError"),
    ):
        with pytest.raises(HttpError, match=message):
            asyncio.run(fetch(url, timeout=60.0, limit=1))
    with pytest.raises(HttpError, match="status 503: no space") as info:
        asked(answer(b"no space", status="503 Sorry"))
    assert info.value.status == 503


@pytest.mark.parametrize("body", [b"<html>", b"[" * 500_000, b"\xff\xfe", b""])
def test_what_is_no_json(body: bytes) -> None:
    async def main() -> Any:
        async with serving(answer(body)) as url:
            return await fetch_json(url, timeout=60.0, limit=MIB)

    with pytest.raises(HttpError, match="/x: the answer is no JSON"):
        asyncio.run(main())


@pytest.mark.parametrize("options", [{}, {"json": {"a": 1}}, {"content": "text"}])
def test_what_is_sent(options: dict[str, Any]) -> None:
    """A GET without a body; headers are kept, compression is not asked for."""
    seen: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = [int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-length")]
        seen.append(head + await reader.readexactly(length[0] if length else 0))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    async def main() -> Any:
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await fetch_json(
                f"http://127.0.0.1:{port}/x", timeout=60.0, limit=9, headers={"authorization": "t"}, **options
            )

    assert asyncio.run(main()) == {}
    (request,) = seen
    assert request.startswith(b"POST" if options else b"GET") and b"authorization: t" in request.lower()
    assert b"accept-encoding: identity" in request.lower()
    expected = json.dumps(options["json"], separators=(",", ":")) if "json" in options else options.get("content", "")
    assert request.endswith(b"\r\n\r\n" + expected.encode())


@given(
    body=st.binary(max_size=2000),
    encoding=st.sampled_from(["", "gzip", "deflate"]),
    limit=st.integers(0, 3000),
    cut=st.integers(1, 500),
)
def test_any_body_is_whole_or_refused(body: bytes, encoding: str, limit: int, cut: int) -> None:
    packed = {"": bytes, "gzip": gzip.compress, "deflate": zlib.compress}[encoding](body)
    chunks = [packed[start : start + cut] for start in range(0, len(packed), cut)]

    async def main() -> bytes:
        return b"".join([piece async for piece in bounded_body(once(*chunks), encoding, limit)])

    try:
        assert asyncio.run(main()) == body and len(body) <= limit and len(packed) <= limit
    except AgentRLError as error:
        assert isinstance(error, BodyTooLargeError) and max(len(body), len(packed)) > limit


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True), ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True), ("64:ff9b::5db8:d70e", True),
        ("127.0.0.1", False), ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.1.1", False), ("100.64.0.1", False),
        ("169.254.169.254", False), ("0.0.0.0", False), ("224.0.0.1", False), ("::1", False), ("::", False),
        ("fe80::1%eth0", False), ("fd00::1", False), ("::ffff:127.0.0.1", False), ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
    ],
)  # fmt: skip
def test_addresses_of_the_public_internet(address: str, public: bool) -> None:
    assert http.is_public(address) is public


def test_an_address_that_others_chose_is_not_asked_on_this_machine() -> None:
    for host in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "127.1", "2130706433"):
        with pytest.raises(HttpError, match="is not one of the public internet"):
            asyncio.run(fetch(f"http://{host}:1/x", timeout=60.0, limit=MIB, public_only=True))
    with pytest.raises(HttpError):
        asyncio.run(fetch("http:///x", timeout=60.0, limit=MIB, public_only=True))


def test_the_checked_address_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server still learns the name that was asked for."""
    looked_up: list[str] = []

    async def address(host: str) -> str:
        looked_up.append(host)
        return "127.0.0.1"

    heads: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        await answer(b"whole")(reader, writer)
        writer.close()

    monkeypatch.setattr(http, "_public_address", address)

    async def main() -> bytes:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await fetch(f"http://name.invalid:{port}/x?y=1", timeout=60.0, limit=MIB, public_only=True)

    assert asyncio.run(main()) == b"whole" and looked_up == ["name.invalid"]
    assert b"GET /x?y=1 " in heads[0] and b"host: name.invalid:" in heads[0].lower()
