"""``agentrl tinker serve`` in a process, which tests kill and start again, and a proxy with faults in front of it."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# Beside this file, whose folder is on no path.
sys.path.insert(0, str(Path(__file__).parent))

from tinker_support.server import Server

from agentrl_backend_tinker.backend import TinkerBackend
from agentrl_backend_tinker.config import TinkerBackendConfig
from agentrl_core.api.training_backend import AdapterPlan, TrainingContext
from agentrl_core.engine_kit.ports import free_port
from agentrl_testing.tiny_model import save_tiny_model

RANK = 4


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tinker-model"), initializer_range=0.1)


@pytest.fixture(scope="session")
def server_class() -> type[Server]:
    return Server


@pytest.fixture(scope="session")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that lives as long as the tests; nobody kills it."""
    server = Server(model, tmp_path_factory.mktemp("tinker-state"), free_port())
    server.start()
    yield server
    server.kill()


@dataclass
class Made:
    """Backends of a test, which are closed after it."""

    model: str
    backends: list[TinkerBackend] = field(default_factory=list)

    def __call__(self, url: str, adapter: dict[str, Any] | None = None, options: dict[str, Any] | None = None,
                 **context: Any) -> TinkerBackend:  # fmt: skip
        values = {"rank": RANK, "alpha": 32.0, "dropout": 0.0, "targets": "all-linear", "path": None, **(adapter or {})}
        settings = SimpleNamespace(**values)
        fields: dict[str, Any] = {
            "role": "actor", "head": "tokens", "trains": True, "path": self.model, "key": "model.path",
            "model": SimpleNamespace(path=self.model),
            "settings": SimpleNamespace(optimizer=SimpleNamespace(betas=[0.9, 0.95], weight_decay=0.01)),
            "adapters": {"policy": AdapterPlan(settings, settings.path, 7)}, "sends_adapter": True,
        } | context  # fmt: skip
        config = TinkerBackendConfig(**{"url": url, "patience": 60.0, **(options or {})})
        backend = TinkerBackend(config, TrainingContext(**fields))
        self.backends.append(backend)
        return backend

    def loaded(self, url: str, **kwargs: Any) -> TinkerBackend:
        backend = self(url, **kwargs)
        backend.load()
        return backend


@pytest.fixture
def make(model: str) -> Iterator[Made]:
    made = Made(model)
    yield made
    for backend in made.backends:
        backend.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Load = Callable[..., TinkerBackend]
