"""Every configuration that is shipped loads and trains: keys, types, plugins, their options, and one step."""

import json
from pathlib import Path

import pytest

from agentrl_core.config import load_config
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer import Trainer
from agentrl_testing.tiny_model import save_tiny_model
from agentrl_testing.tiny_vision import save_tiny_vision_model
from agentrl_tool_search.index import build_index

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path for path in (ROOT / "examples").rglob("*.yaml"))


def test_there_are_examples() -> None:
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_example_config_loads(path: Path) -> None:
    # Model and data are made by the example's prepare.py, so they need not exist here.
    config = load_config(path, check_files=False)
    assert config.trainer.name


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_example_config_trains_for_a_step(path: Path, tmp_path: Path) -> None:
    """With a tiny model and two rows in place of what the example's prepare.py makes."""
    config = load_config(path, check_files=False)
    crops = any(tool.name.endswith("shapes.py:Crop") for tool in config.tools)
    (save_tiny_vision_model if crops else save_tiny_model)(tmp_path / "model")
    with_user = {"ground_truth": "2", "day": "Friday", "hour": "19", "people": "2", "goal": "You want to book a table."}
    row = {
        "prompt": "What is 1 + 1?",
        "data_source": (config.trainer.checkpoint.best_metric or "validation/calculator/").split("/")[1],
        "reward_model": {"ground_truth": "2"},
        "extra_info": {
            "interaction_kwargs": {"name": config.interactions[0].name, **with_user} if config.interactions else None,
            "prices": {"lamp": 37},
            **({"tools_kwargs": {"crop": {"create_kwargs": {"drawing": "none.png"}}}} if crops else {}),
        },
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_text(2 * (json.dumps(row) + "\n"))
    has_files = config.data.train_files
    if any(tool.name == "search" for tool in config.tools):
        build_index([rows], tmp_path / "index", column="prompt")
    overrides = [
        f"model.path={tmp_path / 'model'}",
        *([f"data.train_files=[{rows}]", f"data.validation_files=[{rows}]"] if has_files else []),
        *[f"engines.{name}.model={tmp_path / 'model'}" for name in config.engines],
        *[
            f"tools.{n}.config.index={tmp_path / 'index'}"
            for n, tool in enumerate(config.tools)
            if tool.name == "search"
        ],
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
    if config.trainer.backend.has("remote_weights"):
        # There is no server here; agentrl-backend-tinker is tried with one.
        overrides += ["trainer.backend=fsdp2", "rollout.engine=hf"]
    run = RunDir(Trainer(load_config(path, overrides)).fit())
    assert run.metrics_file.read_text().count("\n") == 1
