"""``agentrl tinker serve`` in the environment of the trainer, for clients that have an environment of their own."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TINKER_TELEMETRY"] = "0"
AGENTRL = os.environ.get("AGENTRL_PYTHON", sys.executable)


@dataclass
class Server:
    url: str
    model: str
    process: "subprocess.Popen[bytes]"


@contextmanager
def running(model: Path, folder: Path, *options: str) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    keys = folder / "keys"
    keys.write_text("tml-one\ntml-two\n")
    command = [
        AGENTRL, "-m", "agentrl_core.cli.main", "tinker", "serve", "--model", str(model),
        "--state", str(folder / "state"),
        "--port", str(port), "--keys", str(keys), "--device", "cpu", "--max-model-len", "2048", *options,
    ]  # fmt: skip
    process = subprocess.Popen(command)
    server = Server(f"http://127.0.0.1:{port}", str(model), process)
    try:
        for _ in range(600):
            assert process.poll() is None, "the server ended"
            try:
                urllib.request.urlopen(f"{server.url}/api/v1/healthz", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    with ExitStack() as stack:
        yield lambda model, *options: stack.enter_context(running(model, tmp_path_factory.mktemp("server"), *options))


@pytest.fixture(scope="session")
def server(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Of a tiny model, made by agentrl's environment."""
    model = tmp_path_factory.mktemp("model")
    make = f"from agentrl_testing.tiny_model import save_tiny_model; save_tiny_model({str(model)!r})"
    subprocess.run([AGENTRL, "-c", make], check=True)
    return start(model)
