"""The warm-start example: demonstrations become rows to the token, and GRPO starts from what SFT has learned."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl_core.cli.main import app
from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir

EXAMPLE = Path(__file__).parents[2] / "examples/warm_start"
LOOP = {"name": str(EXAMPLE / "demonstrations.py:Demonstration")}
SFT = {
    "rollout.agent.loops": [LOOP],
    "rollout.n": 1,
    "rollout.max_response_length": 200,
    "data.max_prompt_length": 1024,
    "algorithm": {"advantage": "reinforce_plus_plus", "loss": "sft"},
    "trainer.steps": 1,
}
TOOLS = 'def shout(text: str) -> str:\n    """Shouts."""\n    return text.upper()\n'
CALL = {"type": "function", "function": {"name": "shout", "arguments": {"text": "hi"}}}
TURNS = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "shout", "content": "HI"},
    {"role": "assistant", "content": "they said HI"},
]


def test_a_demonstration_is_trained_to_the_token(
    fit: Callable[..., RunDir], tiny_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tiny_run.folder / "tools.py").write_text(
        'def shout(text: str) -> str:\n    """Shouts."""\n    return text.upper()\n'
    )
    rows = [{**row, "demonstration": TURNS} for row in tiny_run.rows(6)]
    run = fit({**SFT, "tools": ["./tools.py:shout"], "trainer.steps": 10}, rows)
    assert "Usual causes" not in caplog.text
    (record, *_) = read_rollouts(run.rollout_file(1, "train"))
    sampled = [text for mask, text in record.segments if mask]
    assert [text.removesuffix("<|im_end|>") != text for text in sampled] == [True, True]
    assert '"name": "shout"' in sampled[0] and sampled[1] == "they said HI<|im_end|>"
    assert [text for mask, text in record.segments if not mask][0].count("HI") == 1
    assert sum(record.response_mask) < len(record.response_mask) and "shout" in record.prompt_text


def test_grpo_starts_from_what_sft_has_learned(fit: Callable[..., RunDir], tiny_run: Any) -> None:
    rows = [{**row, "reward_model": {"ground_truth": "abc"}} for row in tiny_run.rows(6)]
    changes = {**SFT, "data.batch_size": 6, "trainer.steps": 40, "actor.optimizer.lr": 1e-2, "trainer.name": "sft"}
    run = fit(changes, rows)
    losses = [row["actor/nll"] for row in run.read_metrics()]
    assert losses[-1] < 0.1 * losses[0]
    warmed = tiny_run.folder / "warmed"
    result = CliRunner().invoke(app, ["export", str(run.path / "checkpoints/latest"), str(warmed)])
    assert result.exit_code == 0, result.output
    start = {"rollout.max_response_length": 6, "trainer.steps": 1}
    cold = fit({**start, "trainer.name": "cold"}, rows).read_metrics()[0]["reward/mean"]
    warm = fit({**start, "model.path": str(warmed), "trainer.name": "warm"}, rows).read_metrics()[0]["reward/mean"]
    assert cold < 0.4 and warm > 0.7


def test_the_prepared_demonstrations_fit_their_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import prepare

    turns = prepare.demonstration("What is 37 * 45?", "1665")
    assert json.loads(json.dumps(turns)) == turns
    assert [turn["role"] for turn in turns] == ["assistant", "tool", "assistant"]
    assert turns[0]["tool_calls"][0]["function"]["arguments"] == {"expression": "37 * 45"}
    assert turns[-1]["content"] == "#### 1665"
    sys.modules.pop("prepare")
