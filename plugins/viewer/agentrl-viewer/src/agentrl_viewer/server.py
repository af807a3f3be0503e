"""The local server: loopback only, a random token in the address, GET only, fixed files, the runs and their images."""

import json
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from agentrl_viewer import page
from agentrl_viewer.index import ORDERS, Filter
from agentrl_viewer.run import Run

MAX_PAGE = 500


def _whole(text: str) -> int:
    """A whole number that SQLite can hold."""
    number = int(text)
    if abs(number) >= 2**63:
        raise ValueError(f"{text[:40]}: allowed is a whole number with at most 18 digits")
    return number


_NUMBERS: dict[str, Callable[[str], Any]] = {
    "first_step": _whole, "last_step": _whole, "min_reward": float, "max_reward": float,
}  # fmt: skip


class Viewer:
    """Serves runs until it is closed, and keeps their indexes up to date meanwhile.

    Args:
        runs: at least one.
        port: 0: any free one.
        refresh_seconds: between two looks at the run directories.
    """

    def __init__(self, runs: Sequence[Run], port: int = 0, refresh_seconds: float = 1.0) -> None:
        self.runs = {run.name: run for run in runs}
        self.token = secrets.token_urlsafe(24)
        self._refresh_seconds = refresh_seconds
        self._ended = threading.Event()
        handler = type("Handler", (_Handler,), {"viewer": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self._threads = [
            threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True),
            threading.Thread(target=self._keep_fresh, daemon=True),
        ]

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://127.0.0.1:{self._server.server_port}/{self.token}/"

    def __enter__(self) -> "Viewer":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()

    def _keep_fresh(self) -> None:
        while not self._ended.is_set():
            for run in self.runs.values():
                run.refresh()
            self._ended.wait(self._refresh_seconds)

    def answer(self, name: str, query: dict[str, str]) -> Any:
        """The content of ``api/<name>`` as plain objects; None if there is no such thing.

        Raises:
            ValueError: a value of the query is not allowed.
        """
        if name == "runs":
            return [run.summary() for run in self.runs.values()]
        run = self.runs.get(query.get("run", ""))
        if run is None:
            return None
        place = (query.get("split", "train"), _whole(query.get("step", "0")))
        answers: dict[str, Callable[[], Any]] = {
            "series": run.series,
            "config": run.flat_config,
            "facets": run.index.facets,
            "list": lambda: self._list(run, query),
            "trajectory": lambda: run.trajectory(*place, _whole(query.get("line", "0"))),
            "timeline": lambda: run.timeline(*place),
        }
        return answers[name]() if name in answers else None

    @staticmethod
    def _list(run: Run, query: dict[str, str]) -> Any:
        names = {item.name for item in fields(Filter)}
        given = {name: _NUMBERS.get(name, str)(value) for name, value in query.items() if name in names and value}
        if given.get("order", "newest") not in ORDERS:
            raise ValueError(f"order: allowed is {', '.join(ORDERS)}")
        return run.index.listed(
            Filter(**given), max(_whole(query.get("offset", "0")), 0), min(_whole(query.get("limit", "100")), MAX_PAGE)
        )


class _Handler(BaseHTTPRequestHandler):
    viewer: Viewer
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        # A browser that leaves the page closes its connections.
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        port = self.server.server_port  # type: ignore[attr-defined]
        # Another host name here is a page of somebody else, whose name points to this machine.
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            return self._send(403, "text/plain", b"use the address that agentrl view printed\n")
        parts = urlsplit(self.path)
        token, _, path = unquote(parts.path).lstrip("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.viewer.token.encode()):
            return self._send(403, "text/plain", b"use the address that agentrl view printed\n")
        if path == "":
            nonce = secrets.token_urlsafe(16)
            return self._send(200, "text/html", page.served(nonce), page.policy(nonce))
        if (static := page.static(path)) is not None:
            return self._send(200, *static)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if path.startswith("media/"):
            return self._send_image(path.removeprefix("media/"), query.get("run", ""))
        try:
            found = self.viewer.answer(path.removeprefix("api/"), query) if path.startswith("api/") else None
        except ValueError as error:
            return self._send(400, "text/plain", str(error).encode())
        if found is None:
            return self._send(404, "text/plain", b"not found\n")
        return self._send(200, "application/json", json.dumps(found, default=str).encode())

    def _send_image(self, name: str, run: str) -> None:
        data = self.viewer.runs[run].image(name) if run in self.viewer.runs else None
        if data is None:
            return self._send(404, "text/plain", b"not found\n")
        return self._send(200, f"image/{name.rpartition('.')[2]}", data)

    def _send(self, status: int, kind: str, content: bytes, policy: str = "default-src 'none'") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the address holds the token."""
