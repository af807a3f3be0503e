"""A run whose judge is another engine than the policy's, with processes that die."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.config import load_config
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer import Trainer

JUDGED: dict[str, Any] = {
    "cluster.runtime": "ray",
    "rollout.engine": {"name": "scripted", "config": {"turns": ["ab"]}},
    "rollout.retries": 2,
    "engines": {"judge": {"name": "hf", "model": None, "max_model_len": 256, "health_interval": 0.1}},
    "trainer.steps": 3,
}
READS = r"""
class Length:
    def __init__(self, config, context):
        self.engine = context.engines["judge"]

    async def __call__(self, trajectory):
        question = [{"role": "user", "content": trajectory.last_text}]
        return len(await self.engine.chat(question, temperature=0.0, max_tokens=4))
"""


class KillsTheJudge(Trainer):
    """Kills the judge's process before the rollout of step 2."""

    def rollout(self, step: int) -> list[TrajectoryResult]:
        if step == 2:
            judge: Any = self.roles.rollout._named["judge"]
            pid, _ = judge.runtime.run(judge.servers[0].call("process"))
            os.kill(pid, signal.SIGKILL)
        return super().rollout(step)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_runtime")
def test_a_judge_on_the_embedded_engine_is_killed_and_the_run_survives(
    tiny_run: Any, tiny_model: Path, installed_plugins: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl_core.plugins.resolution.registrations", installed_plugins)
    (tiny_run.folder / "reads.py").write_text(READS)
    changes = {
        **JUDGED,
        "engines": {"judge": {**JUDGED["engines"]["judge"], "model": str(tiny_model)}},
        "reward.functions": [{"name": "./reads.py:Length", "timeout": 300.0}],
    }
    run = RunDir(KillsTheJudge(load_config(tiny_run(changes))).fit())
    metrics = run.read_metrics()
    assert [row.get("engines/judge/restarts", 0) for row in metrics] == [0, 1, 1]
    records = [list(read_rollouts(run.rollout_file(step, "train"))) for step in (1, 2, 3)]
    assert [len(step) for step in records] == [4, 4, 4], "no trajectory is lost"
    rewards = {record.reward for step in records for record in step}
    assert len(rewards) == 1 and rewards.pop() > 0, "the judge says the same of the same answer, before and after"
    state = run.read_state()
    assert state is not None and (state.status, state.step) == ("completed", 3)
