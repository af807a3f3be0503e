from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import DatasetContext
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_testing.plugins import isolated_plugins
from agentrl_testing.tiny_model import tiny_tokenizer

__all__ = ["isolated_plugins"]

SCHEMA = {"type": "function", "function": {"name": "calc", "description": "Calculates.", "parameters": {}}}


@pytest.fixture(scope="session")
def renderer() -> HFChatRenderer:
    """One byte is one token; ChatML."""
    return HFChatRenderer(tiny_tokenizer())


@pytest.fixture
def make_context(renderer: HFChatRenderer) -> Callable[..., DatasetContext]:
    def make(*files: Path, most: int = 1000, tools: Sequence[dict[str, Any]] = ()) -> DatasetContext:
        return DatasetContext([str(file) for file in files], "train", renderer, lambda row: tools, most)

    return make
