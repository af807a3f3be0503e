"""A proxy in front of a server that loses requests and answers, or gives other answers."""

import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = str | int | None
"""``before`` or ``after`` the server has the request the connection is lost; a number is the status of an answer."""


class Proxy:
    """Forwards to a port of this machine.

    Args:
        fault: what happens to a request, given its route and how many there were of this route before.
    """

    def __init__(self, port: int, fault: Callable[[str, int], Fault]) -> None:
        self.fault = fault
        self.seen: list[str] = []
        self.faults: list[tuple[str, Fault]] = []
        lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                route = self.path.removeprefix("/api/v1/").partition("/")[0]
                with lock:
                    fault = None if route == "session_heartbeat" else proxy.fault(route, proxy.seen.count(route))
                    proxy.seen.append(route)
                    if fault is not None:
                        proxy.faults.append((route, fault))
                if fault == "before":
                    return self._lose()
                if isinstance(fault, int):
                    return self._answer(fault, b'{"detail": "a fault"}', "application/json")
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
                try:
                    headers = {key: value for key, value in self.headers.items() if key.lower() != "connection"}
                    connection.request(self.command, self.path, body, headers)
                    response = connection.getresponse()
                    content, kind = response.read(), response.headers.get("content-type", "application/json")
                except OSError:
                    return self._lose()
                finally:
                    connection.close()
                if fault == "after":
                    return self._lose()
                self._answer(response.status, content, kind)

            def _answer(self, status: int, content: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def _lose(self) -> None:
                self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        for method in ("GET", "POST", "DELETE"):
            setattr(Handler, f"do_{method}", Handler._handle)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def every(number: int, fault: Fault) -> Callable[[str, int], Fault]:
    """Every ``number``-th request of each route fails, the first one among them."""
    return lambda route, before: fault if before % number == 0 else None
