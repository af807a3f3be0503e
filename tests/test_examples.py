"""Every configuration that is shipped loads and trains: keys, types, plugins, their options, and one step."""

import json
from pathlib import Path

import pytest

from agentrl_core.config import load_config
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.testing.tiny_model import save_tiny_model
from agentrl_core.trainer import Trainer

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path for path in (ROOT / "examples").rglob("*.yaml"))


def test_there_are_examples() -> None:
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_example_config_loads(path: Path) -> None:
    # Model and data are made by the example's prepare.py, so they need not exist here.
    config = load_config(path, check_files=False)
    assert config.trainer.name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_example_config_trains_for_a_step(path: Path, tmp_path: Path) -> None:
    """With a tiny model and two rows in place of what the example's prepare.py makes."""
    save_tiny_model(tmp_path / "model")
    row = {
        "prompt": "What is 1 + 1?",
        "data_source": "calculator",
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"interaction_kwargs": {"name": "tutor", "ground_truth": "2"} if path.stem == "tutor" else None},
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_text(2 * (json.dumps(row) + "\n"))
    has_files = load_config(path, check_files=False).data.train_files
    overrides = [
        f"model.path={tmp_path / 'model'}",
        *([f"data.train_files=[{rows}]", f"data.validation_files=[{rows}]"] if has_files else []),
        "data.batch_size=2",
        "data.max_prompt_length=1024",
        "rollout.n=2",
        "rollout.max_response_length=16",
        "rollout.resample_rounds=0",
        "trainer.steps=1",
        "trainer.validation.before=false",
        "trainer.validation.max_prompts=2",
        f"trainer.output_dir={tmp_path / 'runs'}",
    ]
    run = RunDir(Trainer(load_config(path, overrides)).fit())
    assert run.metrics_file.read_text().count("\n") == 1
