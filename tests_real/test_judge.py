"""A run whose reward is the verdict of a judge on a real engine, compared with what transformers says.

Run in the trainer's environment by ``make test-engines-learn``, which builds the others.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentrl_core.config.schema import ModelConfig
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir
from tests_real.engine_suite import SHAPE, Models

ROOT = Path(__file__).parents[1]
TOKENS = 12


def verdict(models: Models, template: str) -> float | None:
    """The last number that the model says to this text; None: it says none, or another token is as likely."""
    renderer = HFChatRenderer.from_config(ModelConfig(models.folder()))
    ids = renderer.encode_prompt(renderer.render([{"role": "user", "content": template}], generation_prompt=True))
    said: list[int] = []
    while len(said) < TOKENS:
        with torch.no_grad():
            top = models.module()(torch.tensor([[*ids, *said]])).logits[0, -1].topk(2)
        if top.values[0] - top.values[1] < 1e-2:
            return None
        said.append(int(top.indices[0]))
        if said[-1] in renderer.stop_token_ids:
            break
    numbers = re.findall(r"-?\d+(?:\.\d+)?", renderer.decode(said, skip_special_tokens=True))
    return float(numbers[-1]) if numbers else None


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_verdict_of_a_real_engine_is_the_reward(tmp_path: Path, engine: str) -> None:
    python = ROOT / ".engines" / engine / "bin" / "python"
    if not python.exists():
        pytest.skip(f"make engines-cpu-{engine} has not been run")
    assert SHAPE["initializer_range"] > 0.1, "a judge with near ties says something else in each engine"
    models = Models(tmp_path, tied=True)
    questions = (f"Rate this, take {number}:" for number in range(1000))
    question, expected = next(
        (each, score) for each in questions if (score := verdict(models, f"{each} ab")) is not None
    )
    row = {"prompt": [{"role": "user", "content": "say"}], "reward_model": {"ground_truth": ""}}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(2)))
    judge = {"name": engine, "python": str(python), "model": models.folder(), "max_model_len": 128}
    options = {"engine": "judge", "template": f"{question} {{answer}}", "retries": 0, "max_tokens": TOKENS}
    config = {
        "model": {"path": models.folder()},
        "data": {"train_files": ["train.jsonl"], "batch_size": 2},
        "rollout": {
            "engine": {"name": "scripted", "config": {"turns": ["ab"]}}, "agent": {"loops": ["single_turn"]}, "n": 2,
            "max_response_length": 8,
        },
        "engines": {"judge": judge},
        "reward": {"functions": [{"name": "judge", "config": options, "timeout": 300.0}]},
        "actor": {"optimizer": {"lr": 1e-3}},
        "trainer": {"name": "judged", "output_dir": str(tmp_path / "runs"), "steps": 2, "trackers": ["jsonl"]},
        "cluster": {"device": "cpu", "runtime": "ray"},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    command = [Path(sys.executable).parent / "agentrl", "train", "config.yaml"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=800)
    run = RunDir(tmp_path / "runs" / "judged")
    rewards = [record.reward for step in (1, 2) for record in read_rollouts(run.rollout_file(step, "train"))]
    assert rewards == [pytest.approx(expected)] * 8
