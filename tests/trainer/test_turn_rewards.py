"""A tool's reward reaches the advantage on the turn that called the tool."""

import json
from collections.abc import Callable
from typing import Any

from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir

FILES = '''
import json
from agentrl_core.api import RewardResult, Tool, ToolResponse, ToolResult, function_schema, hookimpl

class Look(Tool):
    """Its second call is worth 2, the others 1."""
    calls = {}

    def __init__(self, config, context):
        super().__init__(config, context)
        self.schema = function_schema("look", "looks", {})

    async def execute(self, instance_id, parameters):
        self.calls[instance_id] = self.calls.get(instance_id, 0) + 1
        return ToolResult(ToolResponse("a room"), 2.0 if self.calls[instance_id] == 2 else 1.0)

def outcome(trajectory):
    return RewardResult(4.0, components={})

class Sees:
    def __init__(self, config, context):
        self.file = context.run_dir / "batch.json"

    @hookimpl
    def on_batch_ready(self, batch):
        names = ("rm_scores", "turn_ids", "response_mask", "turn_rewards", "outcomes", "scores", "advantages")
        columns = {name: batch.batch[name].tolist() for name in names}
        components = batch.non_tensor_batch["reward_components"].tolist()
        self.file.write_text(json.dumps({**columns, "components": components}))
'''
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def test_a_tools_reward_reaches_the_batch_on_its_turn(fit: Callable[..., RunDir], tiny_run: Any) -> None:
    (tiny_run.folder / "parts.py").write_text(FILES)
    run = fit({
        "rollout.engine": {"name": "scripted", "config": {"turns": [CALL, CALL, "done"]}},
        "rollout.agent": {"loops": ["tool_agent"]},
        "rollout.max_response_length": 800,
        "data.max_prompt_length": 800,
        "tools": [{"name": "./parts.py:Look", "isolation": "inline"}],
        "reward.functions": [{"name": "./parts.py:outcome", "isolation": "inline"}],
        "reward.manager": {"name": "naive", "config": {"tool_reward_weight": 0.5}},
        "algorithm.advantage": {"name": "turn_rloo"},
        "hooks": ["./parts.py:Sees"],
        "trainer.steps": 1,
    })  # fmt: skip
    seen = json.loads((run.path / "batch.json").read_text())
    for rewards, turns, mask in zip(seen["rm_scores"], seen["turn_ids"], seen["response_mask"], strict=True):
        last = {turn: place for place, turn in enumerate(turns) if turn >= 0}
        assert [turn >= 0 for turn in turns] == mask and set(last) == {0, 1, 2}
        expected = {last[0]: 0.5, last[1]: 1.0, last[2]: 4.0}
        assert {place: reward for place, reward in enumerate(rewards) if reward} == expected
    assert seen["turn_rewards"][0] == [0.5, 1.0, 0.0] and seen["outcomes"][0] == 4.0 and seen["scores"][0] == 5.5
    assert seen["components"][0] == {"outcome": 4.0, "tool/look": 3.0}
    (metrics,) = run.read_metrics()
    assert metrics["reward/tool/look"] == 3.0 and metrics["reward/mean"] == 5.5
    record = next(read_rollouts(next(run.rollouts_dir.glob("*.jsonl"))))
    assert record.turn_rewards == [0.5, 1.0] and record.reward_components == {"outcome": 4.0, "tool/look": 3.0}
