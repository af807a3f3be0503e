"""Every configuration that is shipped loads: keys, types, plugins and their options."""

from pathlib import Path

import pytest

from agentrl_core.config import load_config

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path for path in (ROOT / "examples").rglob("*.yaml"))


def test_there_are_examples() -> None:
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_example_config_loads(path: Path) -> None:
    # Model and data are made by the example's prepare.py, so they need not exist here.
    config = load_config(path, check_files=False)
    assert config.trainer.name
