"""A server of a tiny model in this process, without sockets."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl_testing.tiny_model import save_tiny_model
from agentrl_tinker.app import Api
from agentrl_tinker.client import Client
from agentrl_tinker.serving import Options, serving

KEY, OTHER_KEY = "tml-one", "tml-two"


class Server:
    """With two clients, ``one`` and ``two``."""

    def __init__(self, api: Api, model: str) -> None:
        self.api, self.model = api, model
        self.service: Any = api._service
        self.http = self.connect()
        self.one, self.two = Client(self.http, KEY), Client(self.http, OTHER_KEY)

    def connect(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.api.app), base_url="http://test", timeout=60)


Scenario = Callable[[Server], Awaitable[Any]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tinker-model"))


@pytest.fixture
def serve(model: str, tmp_path: Path) -> Callable[..., Any]:
    """``serve(scenario)`` runs a coroutine function with a server; the next one finds its checkpoints."""

    def run(scenario: Scenario, **options: Any) -> Any:
        settings = {"keys": (KEY, OTHER_KEY), "max_model_len": 256, "micro_batch_tokens": 64, **options}

        async def main() -> Any:
            async with serving(Options(model=model, state=tmp_path / "state", device="cpu", **settings)) as api:
                server = Server(api, model)
                async with server.http:
                    return await scenario(server)

        return asyncio.run(main())

    return run
