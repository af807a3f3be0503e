"""Faults planted by row and sample under load: metrics and records count each of them once, and nothing else."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir
from tests.reference.plain_step import PlainRun
from tests.reference.test_training_step import check_metrics, check_weights

PROMPTS, SAMPLES, STEPS = 5, 8, 2
PLAN = (
    "tool raises", "tool raises", "tool hangs", "tool dies", "reward raises", "reward is NaN", "reward raises once",
    "engine fails", "engine fails once", "engine fails once after the call", "tool is unknown",
    "tool hangs as it scores",
    *["nothing"] * 8,
)  # fmt: skip
"""What happens to the trajectories of a step, in this order, again and again."""
EXCLUDED = {
    "reward raises": "reward_error", "reward is NaN": "reward_error", "engine fails": "engine_error",
    "tool hangs as it scores": "timeout",
}  # fmt: skip
RETRIED_ONCE = {"reward raises once", "engine fails once", "engine fails once after the call"}
FAILED_CALLS = {"tool raises", "tool hangs", "tool dies", "tool is unknown"}
PLANNED = f"""
def planned(trajectory_id):
    prompt, sample = map(int, trajectory_id.split("-")[2:4])
    return {PLAN!r}[(prompt * {SAMPLES} + sample) % {len(PLAN)}]
"""
ENGINE = '''
import json
from transformers import AutoTokenizer
from agentrl_core.api import EngineError
from agentrl_testing.scripted_engine import ScriptedEngine
from agentrl_testing.scripted_config import ScriptedConfig


class Engine(ScriptedEngine):
    """Calls the tool, and then writes the trajectory's id, which the reward reads."""
    capabilities = frozenset({"logprobs", "weight_update", "sessions"})

    def __init__(self, config, context):
        super().__init__(ScriptedConfig(log_prob=-4.0), context, script=self.answer)
        self.tokenizer = AutoTokenizer.from_pretrained(context.model_path)

    def answer(self, request_id, turn, prompt_ids):
        if not request_id.startswith("train-"):
            return self.tokenizer.encode("the check before the first step")
        trajectory_id, _, attempt = request_id.rpartition("-")
        plan = planned(trajectory_id)
        once = attempt == "0" and (plan, turn) in {("engine fails once", 0), ("engine fails once after the call", 1)}
        if plan == "engine fails" or once:
            raise EngineError("as planted")
        call = {"name": "nobody" if plan == "tool is unknown" else "faulty", "arguments": {"what": plan}}
        text = trajectory_id if turn else f"<tool_call>{json.dumps(call)}</tool_call>"
        return self.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
'''
FAULTY = """
import os, signal, time
from agentrl_core.api import Tool, ToolResponse, ToolResult, function_schema


class Faulty(Tool):
    schema = function_schema("faulty", "Does what it is told.", {"what": {"type": "string"}})
    isolation = "process"

    async def execute(self, instance_id, parameters, **kwargs):
        what = parameters["what"]
        if what == "tool raises":
            raise ValueError("as planted")
        if what == "tool dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "tool hangs":
            time.sleep(1000)
        return ToolResult(ToolResponse("well"))

    async def calc_reward(self, instance_id, **kwargs):
        if planned(instance_id) == "tool hangs as it scores":
            time.sleep(1000)
"""
SCORE = """
raised = set()


def score(trajectory):
    name = trajectory.last_text[:22]
    plan = planned(name)
    if plan == "reward raises" or (plan == "reward raises once" and name not in raised):
        raised.add(name)
        raise ValueError("as planted")
    return float("nan") if plan == "reward is NaN" else int(name[-3:]) / 10
"""


def plan(prompt: int, sample: int) -> str:
    return PLAN[(prompt * SAMPLES + sample) % len(PLAN)]


@pytest.fixture
def run(fit: Callable[..., RunDir], tmp_path: Path) -> RunDir:
    for name, source in {"engine": ENGINE, "faulty": FAULTY, "score": SCORE}.items():
        (tmp_path / f"{name}.py").write_text(PLANNED + source)
    changes = {
        "data.batch_size": PROMPTS,
        "data.max_prompt_length": 1024,
        "rollout.n": SAMPLES,
        "rollout.engine": {"name": "./engine.py:Engine"},
        "rollout.agent": {"loops": ["tool_agent"], "num_workers": 2},
        "rollout.max_response_length": 400,
        "rollout.retries": 2,
        "rollout.max_failed_fraction": 0.25,
        "tools": [{"name": "./faulty.py:Faulty", "timeout": 3.0, "processes": 3}],
        "reward.functions": [{"name": "./score.py:score", "isolation": "inline"}],
        "reward.num_workers": 2,
        "trainer.steps": STEPS,
        "trainer.checkpoint": {"interval": 1},
    }
    return fit(changes, None)


@pytest.mark.slow
def test_every_planted_fault_is_counted_once_and_what_it_excludes_is_not_trained(run: RunDir) -> None:
    trajectories = [(prompt, sample) for prompt in range(PROMPTS) for sample in range(SAMPLES)]
    plans = [plan(*each) for each in trajectories]
    planted, total = Counter(plans), len(plans)
    plain = PlainRun(run.path)
    for step, metrics in enumerate(run.read_metrics(), start=1):
        records = list(read_rollouts(run.rollout_file(step, "train")))
        names = [f"train-{step:06d}-{prompt:05d}-{sample:03d}" for prompt, sample in trajectories]
        assert [record.trajectory_id for record in records] == names

        for record, what in zip(records, plans, strict=True):
            assert record.termination == EXCLUDED.get(what, "completed"), (what, record.error)
            assert (record.reward is None) == (record.advantage is None) == (what in EXCLUDED), what
            calls = [] if what == "engine fails" else [what in FAILED_CALLS]
            assert [call["failed"] for call in record.tool_calls] == calls, what

        excluded = sum(planted[what] for what in EXCLUDED)
        retries = 2 * excluded + sum(planted[what] for what in RETRIED_ONCE)
        requests = {"engine fails": 3, "engine fails once": 3, "engine fails once after the call": 4,
                    "tool hangs as it scores": 6}  # fmt: skip
        expected = {
            "rollout/failed_fraction": excluded / total,
            "rollout/retries": retries,
            "rollout/tool_calls_mean": 1 - planted["engine fails"] / total,
            "rollout/tool_failures": sum(planted[what] for what in FAILED_CALLS) / total,
            "rollout/engine/requests": sum(requests.get(what, 2) for what in plans),
            "rollout/termination/completed": 1 - excluded / total,
            **{
                f"rollout/termination/{name}": Counter(EXCLUDED.values())[name] * planted["reward raises"] / total
                for name in set(EXCLUDED.values())
            },
        }
        assert {name: metrics[name] for name in expected} == pytest.approx(expected)
        assert not {name for name in metrics if name.startswith("rollout/termination/")} - expected.keys()

        # The reference sees the trained records only.
        recomputed, models = plain.step(step)
        check_metrics(metrics, recomputed, step)
        check_weights(
            plain.saved(step, "actor"), models["actor"].parameters(), plain.config["actor"]["optimizer"]["lr"]
        )
