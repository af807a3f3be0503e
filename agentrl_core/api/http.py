"""Requests over HTTP whose answers have a limit: bytes after decompression, and seconds until the last byte.

Tools, rewards and environments that ask a server use :func:`fetch` or :func:`fetch_json`; one whose SDK makes the
requests wraps the body with :func:`bounded_body`. The plugin's package requires ``httpx``::

    found = await fetch_json(config.url, json={"query": query}, timeout=config.timeout, limit=config.max_body_bytes)
"""

import asyncio
import functools
import ipaddress
import json as json_module
import socket
import ssl
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from agentrl_core.api.errors import BodyTooLargeError, HttpError

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_PIECE = 256 * 1024
"""Bytes that are decompressed before the event loop runs again."""


async def fetch(
    url: str,
    *,
    timeout: float,
    limit: int,
    json: Any = None,
    content: str | None = None,
    headers: Mapping[str, str] | None = None,
    slots: asyncio.Semaphore | None = None,
    timeout_option: str = "timeout",
    public_only: bool = False,
) -> bytes:
    """The body of a successful answer. Redirects are not followed: a body and its token belong to one server.

    Args:
        timeout: seconds for everything: the wait for ``slots``, the connection, the whole body.
        limit: bytes of the body, decompressed; the caller's option is called ``max_body_bytes``.
        json: posted as JSON.
        content: posted as it is; without both the request is a GET.
        headers: of the request.
        slots: acquired during the request.
        timeout_option: what the caller's option for ``timeout`` is called.
        public_only: for an address that others chose: hosts of this machine and of private networks are refused.

    Raises:
        BodyTooLargeError: the body exceeds ``limit``.
        HttpError: no whole answer, another status than 2xx; ``status`` has it. A host that is refused.
    """
    # Only plugins that ask servers need it.
    import httpx

    posts = json is not None or content is not None
    shown = _without_secrets(url)
    try:
        async with asyncio.timeout(timeout), AsyncExitStack() as stack:
            if slots is not None:
                await stack.enter_async_context(slots)
            client = await stack.enter_async_context(httpx.AsyncClient(verify=_certificates(), timeout=None))
            # Nothing is gained by compression that a limit would not take away again.
            asked = {**(headers or {}), "accept-encoding": "identity"}
            place, extensions = httpx.URL(url), {}
            if public_only:
                # The checked address is the one that is connected to: a second look-up could give another one.
                host = place.raw_host.decode()
                extensions["sni_hostname"], asked["host"] = host, place.netloc.decode()
                place = place.copy_with(host=await _public_address(host))
            method = "POST" if posts else "GET"
            request = client.stream(method, place, json=json, content=content, headers=asked, extensions=extensions)
            response = await stack.enter_async_context(request)
            encoding = response.headers.get("content-encoding", "")
            body = b"".join([piece async for piece in bounded_body(response.aiter_raw(), encoding, limit)])
    except HttpError as error:
        raise type(error)(f"{shown}: {error}") from error
    except TimeoutError as error:
        raise HttpError(f"{shown}: no whole answer within {timeout_option}={timeout:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, OSError, ExceptionGroup) as error:
        # A damaged TLS record is an OSError, and a port beyond 65,535 an exception in a group.
        raise HttpError(f"{shown}: {type(error).__name__}: {error}".rstrip(": ")) from error
    if not response.is_success:
        elsewhere = (
            f", to {response.headers['location']!r:.200}. Write that address" if response.has_redirect_location else ""
        )
        said = elsewhere or f": {body[:200].decode(errors='replace')}"
        raise HttpError(f"{shown}: status {response.status_code}{said}".rstrip(": "), response.status_code)
    return body


async def _public_address(host: str) -> str:
    """An address of a host.

    Raises:
        HttpError: one of them belongs to this machine, a private network or nobody.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found]
    for address in addresses:
        if not is_public(address):
            raise HttpError(f"{host} has the address {address}, which is not one of the public internet")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, also where an IPv6 address stands for one of IPv4."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = (
            ip.ipv4_mapped or ip.sixtofour or (ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None)
        )
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast


async def fetch_json(url: str, **options: Any) -> Any:
    """As :func:`fetch`, parsed.

    Raises:
        HttpError: as there, or the body is no JSON.
    """
    body = await fetch(url, **options)
    try:
        return json_module.loads(body)
    except (ValueError, RecursionError) as error:
        shown = body[:200].decode(errors="replace")
        where = _without_secrets(url)
        raise HttpError(f"{where}: the answer is no JSON ({type(error).__name__}: {error}): {shown!r}") from error


def _without_secrets(url: str) -> str:
    """The address for a message, which a model may read: no user, password or query."""
    address, _, query = url.partition("?")
    scheme, slashes, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}{'?...' if query else ''}"


async def bounded_body(chunks: AsyncIterable[bytes], encoding: str, limit: int | None) -> AsyncIterator[bytes]:
    """The pieces of a body, decompressed little by little; the event loop runs in between.

    Args:
        chunks: as they came over the wire.
        encoding: the header ``Content-Encoding``.
        limit: bytes of the whole body, before and after decompression; None: the caller counts.

    Raises:
        BodyTooLargeError: there are more.
        HttpError: an unknown encoding, or a body that is damaged or cut.
    """
    decoder = _Decoder(encoding)
    received = decoded = 0
    async for chunk in chunks:
        received += len(chunk)
        for piece in decoder.pieces(chunk):
            decoded += len(piece)
            if limit is not None and max(received, decoded) > limit:
                raise BodyTooLargeError(
                    f"the body is longer than max_body_bytes={limit}"
                    + (" after decompression" if decoder.compressed else "")
                    + ". Raise this option if the server is right"
                )
            yield piece
            await asyncio.sleep(0)
    decoder.check_end()


class _Decoder:
    """Undoes gzip and deflate in pieces of a bounded size."""

    def __init__(self, encoding: str) -> None:
        self._name = encoding.strip().lower()
        if self._name not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise HttpError(
                f"the answer has the content-encoding {encoding!r}, although none was asked for; gzip and deflate are "
                "understood. Switch compression off in the server"
            )
        self.compressed = self._name not in ("", "identity")
        # Either header, gzip's or zlib's.
        self._zlib = zlib.decompressobj(zlib.MAX_WBITS | 32)
        self._begun = False

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        if not self.compressed:
            yield from (chunk[start : start + _PIECE] for start in range(0, len(chunk), _PIECE))
            return
        # What follows the end of the compressed stream counts as received, and as nothing else.
        while chunk and not self._zlib.eof:
            yield self._piece(chunk)
            chunk = self._zlib.unconsumed_tail
        yield b""

    def _piece(self, chunk: bytes) -> bytes:
        try:
            try:
                piece = self._zlib.decompress(chunk, _PIECE)
            except zlib.error:
                if self._begun or self._name != "deflate":
                    raise
                # Some servers send deflate without zlib's header.
                self._zlib = zlib.decompressobj(-zlib.MAX_WBITS)
                piece = self._zlib.decompress(chunk, _PIECE)
        except zlib.error as error:
            raise HttpError(f"the answer is no valid {self._name}: {error}") from error
        self._begun = True
        return piece

    def check_end(self) -> None:
        if self.compressed and self._begun and not self._zlib.eof:
            raise HttpError(f"the answer ends in the middle of its {self._name}")


@functools.cache
def _certificates() -> ssl.SSLContext:
    # Reading them takes longer than a call.
    return ssl.create_default_context()
