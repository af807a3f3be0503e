from pathlib import Path

import pytest

from agentrl_testing.plugins import isolated_plugins
from agentrl_testing.tiny_model import save_tiny_model

__all__ = ["isolated_plugins"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny_model(tmp_path_factory.mktemp("tiny-model")))
