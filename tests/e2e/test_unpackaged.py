"""A run every plugin of which comes from one file beside the configuration."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import KINDS
from agentrl_core.plugins.lock import read_lock
from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir

MINE = '''
"""One plugin of every kind."""

import json

from agentrl_algorithms.config import GRPOConfig, PPOConfig
from agentrl_algorithms.grpo import GRPO
from agentrl_algorithms.ppo import PPO
from agentrl_core.api import CorrectionOutput, Environment, Episode, Interaction, InteractionTurn, PromptSampler
from agentrl_core.api import RewardManager, RolloutCorrection, Tracker, hookimpl
from agentrl_testing.scripted_config import ScriptedConfig
from agentrl_testing.scripted_engine import ScriptedEngine
from agentrl_core.fsdp2.backend import Fsdp2
from agentrl_core.fsdp2.config import Fsdp2Config
from agentrl_core.fsdp2.plugin import FSDP2
from agentrl_core.rollout.deadline import Deadline
from agentrl_dataset_prompts.config import PromptsConfig
from agentrl_dataset_prompts.prompts import PromptsFromFiles
from agentrl_loop_tool_agent.config import ToolAgentConfig
from agentrl_loop_tool_agent.loop import ToolAgentLoop
from agentrl_tool_parsers.formats import HermesParser


class Engine(ScriptedEngine):
    config_class = ScriptedConfig
    capabilities = {"logprobs", "weight_update", "sessions"}


class Loop(ToolAgentLoop):
    config_class = ToolAgentConfig
    capabilities = {"tools", "interactions"}


class Parser(HermesParser):
    pass


def shout(text: str) -> str:
    """Shouts."""
    return text.upper()


class Nod(Interaction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return InteractionTurn(terminate=True, text="", reward=0.25)


class World(Environment):
    def tasks(self, split):
        return [{}] if split == "train" else []

    async def open(self, task, seed):
        return Idle()


class Idle(Episode):
    messages = [{"role": "user", "content": "Hello"}]


class Manager(RewardManager):
    async def score(self, trajectory):
        function, environment = self.context.functions
        return await (function if trajectory.environment is None else environment)(trajectory)


def heard(trajectory):
    return float("LOUD" in trajectory.full_text) + trajectory.turn_scores[0] + 0.01 * len(trajectory.last_text)


class Estimator(GRPO):
    config_class = GRPOConfig
    capabilities = {"groups"}


class Loss(PPO):
    config_class = PPOConfig


class Correction(RolloutCorrection):
    def __call__(self, batch):
        return CorrectionOutput(batch.response_mask.float())


class Policy(Deadline):
    pass


class Sampler(PromptSampler):
    def __init__(self, config, context):
        self.context = context

    def batch(self, step):
        return list(range(self.context.batch_size))


class Prompts(PromptsFromFiles):
    config_class = PromptsConfig


class Backend(Fsdp2):
    config_class = Fsdp2Config
    capabilities = FSDP2.capabilities


class Memory(Tracker):
    def log(self, metrics, step):
        with (self.context.run_dir / "mine.jsonl").open("a") as file:
            file.write(json.dumps([step, metrics["reward/mean"]]) + "\\n")


class Bell:
    def __init__(self, config, context):
        self.run_dir = context.run_dir

    @hookimpl
    def on_run_end(self, status):
        (self.run_dir / "bell.txt").write_text(status)
'''
CALL = '<tool_call>\n{"name": "shout", "arguments": {"text": "loud"}}\n</tool_call>'
EVERY_SLOT: dict[str, Any] = {
    "rollout.engine": {"name": "./mine.py:Engine", "config": {"turns": [CALL, "done"]}},
    "rollout.agent.loops": ["./mine.py:Loop"],
    "rollout.tool_parser": "./mine.py:Parser",
    "tools": ["./mine.py:shout"],
    "interactions": ["./mine.py:Nod"],
    "environments": ["./mine.py:World"],
    "reward.functions": ["./mine.py:heard"],
    "reward.manager": "./mine.py:Manager",
    "algorithm.advantage": "./mine.py:Estimator",
    "algorithm.loss": "./mine.py:Loss",
    "algorithm.correction": "./mine.py:Correction",
    "data.dataset": "./mine.py:Prompts",
    "data.sampler": "./mine.py:Sampler",
    "rollout.batch_policy": "./mine.py:Policy",
    "trainer.backend": "./mine.py:Backend",
    "trainer.trackers": ["./mine.py:Memory"],
    "hooks": ["./mine.py:Bell"],
    "rollout.max_response_length": 400,
    "data.max_prompt_length": 2048,
    "trainer.steps": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_every_plugin_may_come_from_a_file(
    fit: Callable[..., RunDir], tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    rows = tiny_run.rows(4)
    for row in rows:
        row["extra_info"]["interaction_kwargs"] = {"name": "Nod"}
    run = fit({**EVERY_SLOT, "cluster.runtime": runtime}, rows)
    records = list(read_rollouts(run.rollout_file(1, "train")))
    assert [record.reward for record in records] == [pytest.approx(1.29)] * 4
    assert json.loads((run.path / "mine.jsonl").read_text())[0] == 1
    assert (run.path / "bell.txt").read_text() == "completed"
    digest = hashlib.sha256(MINE.encode()).hexdigest()
    for lock in (run.lock_file, run.checkpoints_dir / "latest" / "plugins.lock.json"):
        locked = read_lock(lock).plugins
        assert {plugin.kind for plugin in locked} == set(KINDS)
        assert {(plugin.dist, plugin.version) for plugin in locked if plugin.kind != "renderer"} == {("file", digest)}
