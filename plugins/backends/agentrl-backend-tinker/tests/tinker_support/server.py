"""``agentrl tinker serve`` in a process."""

import os
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep


@dataclass
class Server:
    """One that can be killed, and started again at the same address with the same states."""

    model: str
    state: Path
    port: int
    options: tuple[str, ...] = ()
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, wait: bool = True) -> None:
        command = [
            sys.executable, "-m", "agentrl_core.cli.main", "tinker", "serve", "--model", self.model,
            "--state", str(self.state), "--port", str(self.port), "--device", "cpu", "--max-model-len", "256",
            *self.options,
        ]  # fmt: skip
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        if wait:
            self.wait()

    def wait(self) -> None:
        end = monotonic() + 250
        while True:
            assert self.process is not None and self.process.poll() is None, "the server ended"
            try:
                urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5).close()
                return
            except OSError:
                assert monotonic() < end, "the server did not start"
                sleep(0.1)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
