"""The sandbox service over HTTP, against a real server on this machine."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agentrl_core.api import ToolContext, ToolError, ToolUnavailableError
from agentrl_testing.contracts import ToolCase, ToolContract
from agentrl_tools_sandbox.config import RemotePythonConfig
from agentrl_tools_sandbox.plugin import REMOTE_PYTHON
from agentrl_tools_sandbox.remote import RemotePythonTool

ANSWERS: dict[str, Any] = {
    "print(1)": ("Success", "Finished", "1\n", ""),
    "1/0": ("Failed", "Error", "", "ZeroDivisionError\n"),
    "loop": ("Failed", "TimeLimitExceeded", "begun\n", ""),
    "long": ("Success", "Finished", "x" * 1000, ""),
    "numbers": ("Success", "Finished", 1, 2),
    "lists": ("Success", "Finished", ["1"], ["2"]),
    "sick": ("SandboxError", "Error", "", ""),
}


class Service(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["language"] == "python" and body["run_timeout"] == 2.0
        if body["code"] == "hang":
            self.server.released.wait(30)  # type: ignore[attr-defined]
        if self.path != "/run_code" or body["code"] not in ANSWERS:
            self.send_error(500)
            return
        status, run, stdout, stderr = ANSWERS[body["code"]]
        result = {"status": run, "return_code": 0, "stdout": stdout, "stderr": stderr}
        data = json.dumps({"status": status, "message": "no space", "run_result": result}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.released = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.released.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


class TestRemotePython(ToolContract):
    @pytest.fixture
    def plugin(self, url: str) -> ToolCase:
        config = RemotePythonConfig(url, timeout=2.0)
        return ToolCase(REMOTE_PYTHON, config=config, arguments={"code": "print(1)"}, expected="1")


def call(url: str, code: str, **options: Any) -> Any:
    tool = RemotePythonTool(RemotePythonConfig(url, timeout=2.0, **options), ToolContext("python"))
    return asyncio.run(tool.execute("a", {"code": code}))


@pytest.mark.parametrize(
    ("code", "text", "failed"),
    [
        ("1/0", "ZeroDivisionError", 1.0),
        ("loop", "begun\n[stopped after 2 s]", 1.0),
        ("long", "x" * 100 + "\n[800 characters were cut]\n" + "x" * 100, 0.0),
    ],
)
def test_what_the_model_sees(url, code, text, failed) -> None:
    result = call(url, code, max_output=200)
    assert result.response.text == text and result.metrics["failed"] == failed


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sick", "SandboxError: no space"),
        ("numbers", "TypeError"),
        ("lists", "TypeError"),
        ("other", "500"),
        ("hang", "no whole answer within answer_timeout=0.2 s"),
    ],
)
def test_a_service_that_fails_is_not_the_models_fault(url, code, message) -> None:
    with pytest.raises(ToolUnavailableError, match=message):
        call(url, code, answer_timeout=0.2 if code == "hang" else 60.0)


def test_output_without_end_is_the_models_fault(url) -> None:
    with pytest.raises(ToolError, match="output of the code is too long: .*/run_code: .*max_body_bytes=500") as info:
        call(url, "long", max_body_bytes=500)
    assert not isinstance(info.value, ToolUnavailableError)


def test_a_service_that_is_not_there(url) -> None:
    with pytest.raises(ToolUnavailableError, match="no usable answer .* http://127.0.0.1:9/run_code: ConnectError"):
        call("http://127.0.0.1:9", "print(1)")
