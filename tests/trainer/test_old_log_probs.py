"""The log-probs of the policy before the update, which a run computes or takes from its engine.

On the first step of a run nothing has moved: the ratio of new to old policy is 1 for every token, however the tokens
were sampled.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir

Fit = Callable[..., RunDir]
FILES = {
    "cools.py": '''
from agentrl_core.api import AgentLoopBase


class Cools(AgentLoopBase):
    """Samples colder than the run in every second sample."""

    async def run(self, sampling_params, *, session, raw_prompt, sample_index, **row):
        trajectory = session.trajectory(raw_prompt)
        turn = await trajectory.generate({**sampling_params, **({"temperature": 0.4} if sample_index else {})})
        return trajectory.finish(turn.termination)


class Mixes(AgentLoopBase):
    """A cold turn, then one of the run."""

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        trajectory = session.trajectory(raw_prompt)
        await trajectory.generate({**sampling_params, "temperature": 0.4, "max_tokens": 3})
        turn = await trajectory.generate(sampling_params)
        return trajectory.finish(turn.termination)


class Own(Cools):
    """Makes its row by hand, and does not say where the log-probs come from."""

    async def run(self, sampling_params, **row):
        from agentrl_core.api import AgentLoopOutput

        rows = await super().run(sampling_params, **row)
        return AgentLoopOutput(
            rows.prompt_ids, rows.response_ids, rows.response_mask, rows.response_logprobs, rows.termination
        )
''',
    "sees.py": """
import json
from agentrl_core.api import hookimpl


class Sees:
    def __init__(self, config, context):
        self.file = context.run_dir / "old.json"

    @hookimpl
    def on_batch_ready(self, batch):
        columns = ("old_log_probs", "rollout_log_probs", "response_mask", "responses", "input_ids", "attention_mask")
        self.file.write_text(json.dumps({name: batch.batch[name].tolist() for name in columns}))
""",
}
LOOP = "rollout.agent.loops"
RESHAPED: dict[str, tuple[dict[str, Any], str]] = {
    "repetition penalty": ({"repetition_penalty": 2.0}, "4 of 4 rows with temperature=1.3, repetition_penalty=2.0"),
    "presence penalty": ({"presence_penalty": 1.0}, "presence_penalty=1.0"),
    "frequency penalty": ({"frequency_penalty": 1.0}, "frequency_penalty=1.0"),
    "bias": ({"logit_bias": {5: 3.0, 70: -100.0}}, "logit_bias={5: 3.0, 70: -100.0}"),
    "a loop's temperature": ({LOOP: ["./cools.py:Cools"]}, "2 of 4 rows with temperature=0.4"),
    "two temperatures": ({LOOP: ["./cools.py:Mixes"]}, "4 of 4 rows with temperature=0.4 or temperature=1.3"),
    "a row of the loop": ({LOOP: ["./cools.py:Own"]}, "4 of 4 rows with settings that its agent loop does not name"),
}
PLAIN: dict[str, dict[str, Any]] = {
    "temperature": {}, "top-p": {"top_p": 0.7}, "top-k": {"top_k": 3}, "min-p": {"min_p": 0.2},
    "all three": {"top_p": 0.9, "top_k": 20, "min_p": 0.01},
}  # fmt: skip


@pytest.fixture
def first_step(fit: Fit, tmp_path: Path) -> Callable[..., RunDir]:
    def run(settings: dict[str, Any], **changes: Any) -> RunDir:
        for name, source in FILES.items():
            (tmp_path / name).write_text(source)
        keys = {key if "." in key else f"rollout.sampling.{key}": value for key, value in settings.items()}
        return fit({
            "trainer.steps": 1, "rollout.sampling": {"temperature": 1.3}, **keys, "hooks": ["./sees.py:Sees"],
            "algorithm.loss": {"name": "ppo", "config": {"clip_low": 1e-4, "clip_high": 1e-4}}, **changes,
        })  # fmt: skip

    return run


def old_log_probs(run: RunDir, name: str = "old_log_probs") -> torch.Tensor:
    columns = {key: torch.tensor(value) for key, value in json.loads((run.path / "old.json").read_text()).items()}
    return torch.where(columns["response_mask"], columns[name], 0.0)


def reference(run: RunDir, model: Path, temperature: float) -> torch.Tensor:
    """Each row alone, in float64."""
    columns = {key: torch.tensor(value) for key, value in json.loads((run.path / "old.json").read_text()).items()}
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager").eval()
    expected = torch.zeros(columns["responses"].shape, dtype=torch.float64)
    width = columns["input_ids"].shape[1] - columns["responses"].shape[1]
    for row, mask in enumerate(columns["response_mask"]):
        start = width - int(columns["attention_mask"][row, :width].sum())
        end = width + int(columns["attention_mask"][row, width:].sum())
        ids = columns["input_ids"][row, start:end]
        with torch.no_grad():
            log_probs = (policy(ids.unsqueeze(0)).logits[0] / temperature).log_softmax(-1)
        for place in mask.nonzero().squeeze(-1).tolist():
            expected[row, place] = log_probs[width - start + place - 1, columns["responses"][row, place]]
    return expected


@pytest.mark.parametrize("name", RESHAPED)
def test_log_probs_of_another_distribution_are_computed_again(
    first_step: Any, tiny_model: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    settings, shown = RESHAPED[name]
    run = first_step(settings)
    metrics = run.read_metrics()[-1]
    assert metrics["actor/ratio"] == pytest.approx(1.0, abs=1e-5) and metrics["actor/clip_fraction"] == 0.0
    expected = reference(run, tiny_model, 1.3).float()
    torch.testing.assert_close(old_log_probs(run), expected, atol=1e-5, rtol=0)
    assert (old_log_probs(run, "rollout_log_probs") - expected).abs().max() > 0.01
    (warning,) = [each.getMessage() for each in caplog.records if "computes them again" in each.getMessage()]
    assert shown in warning and "not of the policy at temperature 1.3" in warning


@pytest.mark.parametrize("name", PLAIN)
def test_log_probs_of_the_policy_itself_are_reused(
    first_step: Any, tiny_model: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """What only cuts off unlikely tokens leaves the log-probs as they are."""
    caplog.set_level(logging.WARNING)
    run = first_step(PLAIN[name])
    metrics = run.read_metrics()[-1]
    assert metrics["actor/ratio"] == pytest.approx(1.0, abs=1e-5) and metrics["actor/clip_fraction"] == 0.0
    assert torch.equal(old_log_probs(run), old_log_probs(run, "rollout_log_probs"))
    torch.testing.assert_close(old_log_probs(run), reference(run, tiny_model, 1.3).float(), atol=1e-5, rtol=0)
    assert "computes them again" not in caplog.text


def test_a_run_that_insists_on_the_rollouts_log_probs_is_warned(first_step: Any, caplog: Any) -> None:
    run = first_step({LOOP: ["./cools.py:Cools"]}, **{"algorithm.old_log_probs": "rollout", "trainer.steps": 2})
    assert torch.equal(old_log_probs(run), old_log_probs(run, "rollout_log_probs"))
    (warning,) = [each.getMessage() for each in caplog.records if "2 of 4 rows" in each.getMessage()]
    assert "algorithm.old_log_probs=rollout compares two distributions" in warning


def test_greedy_turns_are_at_temperature_1(first_step: Any, tiny_model: Path) -> None:
    run = first_step({"temperature": 0.0})
    assert len(list(read_rollouts(run.rollout_file(1, "train")))) == 4
    assert torch.equal(old_log_probs(run), old_log_probs(run, "rollout_log_probs"))
    torch.testing.assert_close(old_log_probs(run), reference(run, tiny_model, 1.0).float(), atol=1e-5, rtol=0)
