"""What the pages for users of verl and TRL show works: each file trains, and scores as it did there."""

import importlib.util
import json
import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from agentrl_core.api import RewardTrajectory
from agentrl_core.cli.main import app
from agentrl_core.runs.records import RolloutRecord, read_rollouts
from agentrl_testing.tiny_model import save_tiny_model

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n# ([\w.]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SMALL = [
    "model.path=examples/calculator/model", "trainer.steps=1", "trainer.name=page", "data.max_prompt_length=2048",
    "rollout.max_response_length=512", "trainer.validation.before=false", "trainer.validation.interval=0",
    "trainer.validation.max_prompts=1", "trainer.checkpoint.best_metric=null", "rollout.engine.name=scripted",
    "data.batch_size=1", "rollout.n=2", "actor.mini_batches=1",
]  # fmt: skip


def files(page: str) -> dict[str, str]:
    return {name: text for _, name, text in BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    example = tmp_path / "examples/calculator"
    (example / "data").mkdir(parents=True)
    save_tiny_model(example / "model")
    config = yaml.safe_load((ROOT / "examples/calculator/config.yaml").read_text().replace(".parquet", ".jsonl"))
    (example / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(place: Path, page: str, config: str, turns: Sequence[str], row: Any, *more: str) -> list[RolloutRecord]:
    for name, text in files(page).items():
        (place / name).write_text(text)
    for split in ("train", "validation"):
        (place / f"examples/calculator/data/{split}.jsonl").write_text((json.dumps(row) + "\n") * 2)
    answers = f"rollout.engine.config.turns={json.dumps(list(turns))}"
    result = CliRunner().invoke(app, ["train", config, *SMALL, answers, *more])
    assert result.exit_code == 0, result.output
    return list(read_rollouts(place / "runs/page/rollouts/step-000001.jsonl"))


def module(page: str, name: str, folder: Path) -> Any:
    (folder / name).write_text(files(page)[name])
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), folder / name)
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


ROW = {
    "prompt": "6 * 7?",
    "data_source": "sums",
    "reward_model": {"ground_truth": "42"},
    "extra_info": {"tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "42"}}}},
}


def test_a_ported_tool_and_reward_of_verl(place: Path) -> None:
    turns = [call("check", answer="41"), call("check", answer="42"), "It is 42"]
    records = train(place, "coming-from-verl.md", "ported.yaml", turns, ROW)
    for record in records:
        assert [m["content"] for m in record.messages if m["role"] == "tool"] == ["wrong", "right"]
        # Penalty, then none; the final state; compute_score.
        assert record.tool_rewards == pytest.approx([-0.05, 0.0, 1.0])
        assert record.reward == pytest.approx(1.0 + 0.95)


def test_a_ported_agent_loop_of_verl(place: Path) -> None:
    row = {**ROW, "agent_name": "RetryLoop", "extra_info": {}}
    # With tools, some row has to reach them.
    records = train(place, "coming-from-verl.md", "ported.yaml", ["hm", "#### 42"], row, "tools=[]")
    for record in records:
        assert [m["content"] for m in record.messages][1:] == ["hm", "Write the answer after ####.", "#### 42"]
        assert (record.reward, record.termination) == (1.0, "completed")


def test_compute_score_gets_what_verl_gives_it(tmp_path: Path) -> None:
    found = module("coming-from-verl.md", "sums_reward.py", tmp_path)
    trajectory = RewardTrajectory([], "a 42", "42", "a tool 42", ground_truth="42", data_source="sums")
    expected = found.compute_score("sums", "a tool 42", "42", {})
    result = found.score(trajectory)
    assert {"score": result.score, **result.metrics} == expected == {"score": 1.0, "short": 1.0}


def test_a_reward_function_of_trl(tmp_path: Path) -> None:
    """The wrapper passes what TRL 1.16 passes: lists of messages, and columns as lists."""
    found = module("coming-from-trl.md", "trl_rewards.py", tmp_path)
    messages = [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": " 42 "}]
    for answer, expected in (("42", 1.0), ("41", 0.0)):
        trajectory = RewardTrajectory(messages, "42", "42", "42", row={"prompt": messages[:1], "answer": answer})
        theirs = found.accuracy(prompts=[messages[:1]], completions=[messages[1:]], answer=[answer])
        assert found.score(trajectory) == theirs[0] == expected


def test_an_environment_of_trl_and_the_reward_of_its_environments(place: Path) -> None:
    turns = [call("switch", times=3), "Done."]
    records = train(place, "coming-from-trl.md", "lamp.yaml", turns, ROW)
    assert records and all(record.reward == pytest.approx(0.8) for record in records)


def test_trl_scores_the_same_environments_alike(tmp_path: Path) -> None:
    """TRL's own trainer computes the rewards of the page's functions, from its own environments."""
    trl = pytest.importorskip("trl")
    accelerate = pytest.importorskip("accelerate")
    page = module("coming-from-trl.md", "trl_environment.py", tmp_path)
    rewards = module("coming-from-trl.md", "trl_rewards.py", tmp_path)
    lamps = [page.Lamp(), page.Lamp()]
    for lamp, times in zip(lamps, (1, 2), strict=True):
        lamp.reset()
        lamp.switch(times)
    scored = [page.ScoredLamp(), page.ScoredLamp()]
    for lamp, times in zip(scored, (1, 2), strict=True):
        lamp.reset()
        lamp.switch(times)
    prompts = [[{"role": "user", "content": "6 * 7?"}]] * 2
    completions = [[{"role": "assistant", "content": text}] for text in ("42", "43")]
    inputs = [{"prompt": prompt, "answer": "42"} for prompt in prompts]
    # The part of a trainer that scores; a whole one would sample first.
    trainer = trl.GRPOTrainer.__new__(trl.GRPOTrainer)
    parts = {
        "reward_funcs": [rewards.accuracy, page.lit], "reward_processing_classes": [None, None], "environments": lamps,
        "reward_func_names": ["accuracy", "lit"], "_log_completion_extra": None, "_log_metric": None,
        "state": types.SimpleNamespace(global_step=0),
        "accelerator": accelerate.Accelerator(cpu=True), "args": types.SimpleNamespace(report_to=[]),
        "chat_template_kwargs": {},
    }  # fmt: skip
    for name, value in parts.items():
        setattr(trainer, name, value)
    table = trainer._calculate_rewards(inputs, prompts, completions, [[1], [1]])
    ours = [
        [rewards.score(RewardTrajectory([*prompt, *said], "", "", "", row=row)), lamp.get_reward()]
        for prompt, said, row, lamp in zip(prompts, completions, inputs, scored, strict=True)
    ]
    assert table == pytest.approx(torch.tensor(ours))
