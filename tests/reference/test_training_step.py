"""What a run logs and saves, step by step, against the plain reference in ``plain_step.py``."""

import fnmatch
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl_core.runs.run_dir import RunDir
from tests.reference.plain_step import PlainRun

NOT_RECOMPUTED = {
    "time": "the clock",
    "timing/*": "the clock",
    "perf/rss_gib": "the memory of the process",
    "perf/throughput": "the clock",
    "perf/tokens_per_second": "the clock",
    "perf/engine/*": "the engine's clock",
    "rollout/engine/*": "how the engine batched its requests, which no record says",
    "rollout/parse_errors": "a record has the calls that could be read",
    "rollout/retries": "a record has the last attempt only",
    "rollout/template_*": "what the renderer found while the rows were built",
}
TALK = '''
from agentrl_core.api import AgentLoopBase, ToolCall


class Talk(AgentLoopBase):
    """Turns of up to five tokens with calls of a tool in between; every third prompt has a second branch."""

    capabilities = {"tools"}

    async def run(self, sampling_params, *, session, raw_prompt, extra_info, **row):
        tools = await session.open_tools()
        trajectory = session.trajectory(raw_prompt, tools=tools)
        short = {**sampling_params, "max_tokens": 5}
        turn = await trajectory.generate(short)
        for number in range(extra_info["index"] % 3):
            outcome = await session.call_tool(ToolCall("look", {"number": number}, id=str(number)))
            trajectory.add_messages([outcome.message])
            turn = await trajectory.generate(short)
        rows = [trajectory.finish(turn.termination)]
        if extra_info["index"] % 3 == 1:
            branch = session.trajectory([*raw_prompt, {"role": "assistant", "content": "short"}, *raw_prompt])
            rows.append(branch.finish((await branch.generate(short)).termination))
        return rows
'''
LOOK = '''
def look(number: int) -> str:
    """Looks at a number."""
    if number > 0:
        raise ValueError("too far")
    return f"it is {number}"
'''
SCORE = '''
from agentrl_core.api import RewardResult


def score(trajectory):
    """Fails for some, and pays some in their first turn."""
    number = sum(map(ord, trajectory.model_text)) % 7
    if number == 0:
        raise ValueError("the judge is ill")
    return RewardResult(number / 7, turn_rewards=[0.25] if number % 2 else [])
'''
COMMON: dict[str, Any] = {
    "data.batch_size": 2, "data.max_prompt_length": 1024,
    "rollout.n": 4, "rollout.max_response_length": 256, "rollout.max_failed_fraction": 1.0,
    "rollout.sampling": {"temperature": 0.8},
    "rollout.agent.loops": ["./talk.py:Talk"], "tools": [{"name": "./look.py:look", "isolation": "inline"}],
    "reward.functions": [{"name": "./score.py:score", "isolation": "inline"}],
    "trainer.steps": 3, "trainer.checkpoint": {"interval": 1},
    # Several micro-batches, on which the result must not depend.
    "actor.micro_batch_tokens": 1500, "actor.epochs": 2,
    "actor.optimizer": {"lr": 0.004, "weight_decay": 0.1, "betas": [0.8, 0.95], "schedule": "cosine",
                        "warmup_steps": 2, "min_lr_ratio": 0.1},
    "algorithm.loss": {"name": "ppo", "config": {"clip_low": 0.05, "clip_high": 0.1}},
}  # fmt: skip
GRPO: dict[str, Any] = {"algorithm.kl_coef": 0.2, "algorithm.entropy_coef": 0.05, "algorithm.old_log_probs": "actor"}
PPO: dict[str, Any] = {
    "algorithm.advantage": {"name": "gae", "config": {"gamma": 0.98, "lam": 0.9}},
    "algorithm.kl_coef": 0.05, "algorithm.kl_placement": "reward",
    "critic.optimizer.lr": 0.004, "critic.epochs": 2, "critic.value_clip": 0.1, "critic.micro_batch_tokens": 1500,
}  # fmt: skip
SCRIPTED = {"rollout.engine": {"name": "scripted", "config": {"turns": ["aB", "c", "XyzXyz"], "log_prob": -4.0}}}
CASES = {
    "grpo with kl and entropy": GRPO,
    "grpo, mean of rows": {**GRPO, "algorithm.aggregation": "seq-mean-token-mean"},
    # Its engine's log-probs are not the policy's.
    "ppo with a critic": {**PPO, **SCRIPTED},
}


@pytest.mark.parametrize("case", CASES)
def test_every_step_is_that_of_the_papers(fit: Callable[..., RunDir], tmp_path: Path, case: str) -> None:
    for name, text in {"talk": TALK, "look": LOOK, "score": SCORE}.items():
        (tmp_path / f"{name}.py").write_text(text)
    plain = PlainRun(fit({**COMMON, **CASES[case]}).path)
    logged = plain.metrics()
    for step in (1, 2, 3):
        expected, models = plain.step(step)
        check_metrics(logged[step], expected, step)
        for role, model in models.items():
            check_weights(plain.saved(step, role), model.parameters(), plain.config[role]["optimizer"]["lr"])
    # Scripted answers all have a score.
    excluded = () if case == "ppo with a critic" else ("rollout/failed_fraction",)
    for name in ("actor/clip_fraction", "rollout/tool_failures", *excluded):
        assert any(logged[step][name] > 0 for step in logged), name
    grad_clip = plain.config["actor"]["grad_clip"]
    assert any(logged[step]["actor/grad_norm"] > grad_clip for step in logged), "no gradient was clipped"


def check_metrics(logged: Mapping[str, float], expected: Mapping[str, float], step: int) -> None:
    known = {name for name in logged if any(fnmatch.fnmatch(name, pattern) for pattern in NOT_RECOMPUTED)}
    assert {*logged} - known - {"step"} == {*expected}
    wrong = {
        name: (logged[name], value)
        for name, value in expected.items()
        if logged[name] != pytest.approx(value, rel=2e-3, abs=1e-5)
    }
    assert not wrong, f"step {step}, logged and expected: {wrong}"


def check_weights(saved: Mapping[str, Tensor], expected: Mapping[str, Tensor], lr: float) -> None:
    """Most weights are equal to a hundredth of a step. AdamW moves a weight whose gradient is a rounding error by a
    whole one, so no single weight is compared."""
    assert {*expected} == {*saved}
    gaps = torch.cat([(saved[name] - expected[name].detach()).abs().flatten() for name in expected]) / lr
    assert gaps.max() < 3 and gaps.mean() < 1e-3 and (gaps > 0.01).float().mean() < 0.01
