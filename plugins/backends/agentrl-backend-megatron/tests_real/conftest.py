"""Tiny models, and processes that train them.

Run by ``make test-megatron`` in the environment of ``make megatron-env``.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from reference import make_model, trained  # noqa: E402 - beside this file

STEPS = 3


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, dict[str, Any]]]:
    """The path of a kind of model, and how transformers trains it."""
    made: dict[str, tuple[str, dict[str, Any]]] = {}

    def of(kind: str) -> tuple[str, dict[str, Any]]:
        if kind not in made:
            path = make_model(kind, tmp_path_factory.mktemp("models") / kind)
            made[kind] = path, trained(path, STEPS)
        return made[kind]

    return of
