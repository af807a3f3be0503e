"""A sleeper in every kind of plugin: the run goes on or ends within its deadline, and names who slept.

What can be awaited sleeps for ever and is cancelled. Synchronous code cannot be interrupted: it sleeps until the log
has named it.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import AgentRLError
from agentrl_core.fsdp2 import backend
from agentrl_core.plugins import boundary
from agentrl_core.rollout import worker
from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.serving import replicas
from agentrl_core.trainer import trackers

PARTS = """
import asyncio, time
from pathlib import Path
import torch
from agentrl_core.api import (
    AdvantageEstimator, AdvantageOutput, AgentLoopBase, CorrectionOutput, Environment, Episode, Interaction,
    InteractionTurn, ParsedText, PolicyLoss, PolicyLossOutput, PromptDataset, PromptSampler, RewardManager,
    RewardResult, RolloutCorrection, Tool, ToolCall, ToolParser, ToolResponse, ToolResult, Tracker, Renderer,
    function_schema, hookimpl,
)
from agentrl_testing.scripted_config import ScriptedConfig
from agentrl_testing.scripted_engine import ScriptedEngine


async def waits(where):
    if where == SLEEPER:
        await asyncio.sleep(1e9)


def blocks(where):
    # Long enough for any machine, and yet the test ends if nobody names it.
    end = time.monotonic() + 120
    while where == SLEEPER and not NAMED.exists() and time.monotonic() < end:
        time.sleep(0.01)


class SleepyEngine(ScriptedEngine):
    capabilities = frozenset({"logprobs", "weight_update", "sessions"})

    def __init__(self, config, context):
        blocks("engine.__init__")
        super().__init__(ScriptedConfig(log_prob=-4.0), context, script=lambda name, *_: [66 + len(name) % 9, 260])

    async def start(self):
        await waits("engine.start")

    async def generate(self, prompt_ids, params, request_id, multi_modal=None):
        if request_id.startswith("train"):
            await waits("engine.generate")
        return await super().generate(prompt_ids, params, request_id)

    async def open_session(self, session_id):
        await waits("engine.open_session")

    async def health(self):
        await waits("engine.health")

    async def update_weights(self, update, version):
        await waits("engine.update_weights")

    async def close(self):
        await waits("engine.close")


class SleepyLoop(AgentLoopBase):
    capabilities = frozenset({"tools", "interactions"})

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        await waits("loop.run")
        blocks("loop blocks")
        tools = await session.open_tools()
        talks = await session.open_interaction()
        trajectory = session.trajectory(raw_prompt, tools=tools)
        turn = await trajectory.generate(sampling_params)
        for name in [tool["function"]["name"] for tool in tools]:
            outcome = await session.call_tool(ToolCall(name, {}, id="0"))
            trajectory.add_messages([outcome.message])
        if talks:
            await session.interact([])
        turn = await trajectory.generate(sampling_params)
        return trajectory.finish(turn.termination)

    async def close(self):
        await waits("loop.close")


class SleepyTool(Tool):
    schema = function_schema("look", "Looks.", {})

    async def create(self, instance_id, **kwargs):
        await waits("tool.create")

    async def execute(self, instance_id, parameters, **kwargs):
        await waits("tool.execute")
        blocks("tool blocks")
        return ToolResult(ToolResponse("nothing"))

    async def calc_reward(self, instance_id, **kwargs):
        await waits("tool.calc_reward")

    async def release(self, instance_id, **kwargs):
        await waits("tool.release")

    async def close(self):
        await waits("tool.close")


class SleepyPartner(Interaction):
    async def start_interaction(self, instance_id, **kwargs):
        await waits("interaction.start_interaction")

    async def generate_response(self, instance_id, messages, **kwargs):
        await waits("interaction.generate_response")
        return InteractionTurn(True, "")

    async def calculate_score(self, instance_id, **kwargs):
        await waits("interaction.calculate_score")

    async def finalize_interaction(self, instance_id, **kwargs):
        await waits("interaction.finalize_interaction")


class SleepyEpisode(Episode):
    messages = [{"role": "user", "content": "go"}]
    tools = [function_schema("move", "Moves.", {})]

    async def call(self, name, arguments):
        await waits("environment.call")
        return ToolResult(ToolResponse("moved"))

    async def reply(self, messages):
        await waits("environment.reply")
        return InteractionTurn(True, "")

    async def score(self, trajectory):
        await waits("environment.score")
        return 1.0

    async def close(self):
        if SleepyWorld.opened > 1:
            await waits("environment.close episode")


class SleepyWorld(Environment):
    opened = 0

    def tasks(self, split):
        blocks("environment.tasks")
        return [{"number": number} for number in range(4)]

    async def open(self, task, seed):
        # The first one is opened as the run is prepared.
        type(self).opened += 1
        if self.opened > 1:
            await waits("environment.open")
        return SleepyEpisode()

    async def close(self):
        if self.opened > 1:
            await waits("environment.close")


class SleepyScore:
    isolation = "inline"

    def __init__(self, config, context): ...

    async def __call__(self, trajectory):
        await waits("reward")
        blocks("reward blocks")
        return 1.0


class SleepyManager(RewardManager):
    capabilities = frozenset({"group"})

    async def score(self, trajectory):
        await waits("manager.score")
        (function,) = self.context.functions
        return await function(trajectory)

    async def score_group(self, trajectories, results):
        await waits("manager.score_group")
        return [RewardResult(float(number)) for number in range(len(results))]


class SleepyParser(ToolParser):
    def parse(self, text):
        blocks("parser.parse")
        return ParsedText(text)


class SleepyRenderer(Renderer):
    @property
    def stop_token_ids(self):
        return self.context.base.stop_token_ids

    def render(self, messages, tools=(), *, generation_prompt=False):
        blocks("renderer.render")
        return self.context.base.render(messages, tools, generation_prompt=generation_prompt)

    def parse(self, ids, tools):
        blocks("renderer.parse")
        return self.context.base.parse(ids, tools)

    def bridge(self, so_far, added, *, generation_prompt=True):
        return self.context.base.bridge(so_far, added, generation_prompt=generation_prompt)


class SleepyAdvantage(AdvantageEstimator):
    def __call__(self, batch):
        blocks("estimator")
        ones = batch.response_mask.float()
        return AdvantageOutput(ones, ones)


class SleepyLoss(PolicyLoss):
    def prepare(self, batch):
        blocks("loss.prepare")
        return super().prepare(batch)

    def __call__(self, batch):
        blocks("loss")
        return PolicyLossOutput(-batch.log_probs * batch.advantages)


class SleepyCorrection(RolloutCorrection):
    def __call__(self, batch):
        blocks("correction")
        return CorrectionOutput(torch.ones_like(batch.old_log_probs))


class SleepyRows(PromptDataset):
    def __init__(self, config, context):
        blocks("dataset.__init__")

    def __len__(self):
        return 4

    def __getitem__(self, index):
        blocks("dataset[]")
        return {
            "raw_prompt": [{"role": "user", "content": str(index)}],
            "extra_info": {"index": index, "interaction_kwargs": {"name": "SleepyPartner"}},
        }


class SleepyOrder(PromptSampler):
    def __init__(self, config, context):
        self.context = context

    def batch(self, step):
        blocks("sampler.batch")
        return list(range(self.context.batch_size))

    def update(self, step, outcomes):
        blocks("sampler.update")


class SleepyTracker(Tracker):
    def __init__(self, config, context):
        blocks("tracker.__init__")

    def log(self, metrics, step):
        blocks("tracker.log")

    def log_trajectories(self, trajectories, step):
        blocks("tracker.log_trajectories")

    def progress(self, phase, done=0, total=0):
        blocks("tracker.progress")

    def finish(self, status):
        blocks("tracker.finish")


class SleepyHook:
    def __init__(self, config, context): ...

    @hookimpl
    def on_run_start(self):
        blocks("hook.on_run_start")

    @hookimpl
    def on_trajectory_end(self):
        blocks("hook.on_trajectory_end")

    @hookimpl
    def on_run_end(self):
        blocks("hook.on_run_end")
"""
ALL: dict[str, Any] = {
    "data.dataset": {"name": "./parts.py:SleepyRows"},
    "data.sampler": {"name": "./parts.py:SleepyOrder"},
    "data.max_prompt_length": 1024,
    "rollout.engine": {"name": "./parts.py:SleepyEngine"},
    "rollout.agent.loops": ["./parts.py:SleepyLoop"],
    "rollout.tool_parser": {"name": "./parts.py:SleepyParser"},
    "rollout.renderer": {"name": "./parts.py:SleepyRenderer"},
    "rollout.max_response_length": 400,
    "rollout.max_failed_fraction": 1.0,
    "tools": [{"name": "./parts.py:SleepyTool"}],
    "interactions": [{"name": "./parts.py:SleepyPartner"}],
    "reward.functions": [{"name": "./parts.py:SleepyScore"}],
    "reward.manager": {"name": "./parts.py:SleepyManager"},
    "algorithm.advantage": {"name": "./parts.py:SleepyAdvantage"},
    "algorithm.loss": {"name": "./parts.py:SleepyLoss"},
    "algorithm.correction": {"name": "./parts.py:SleepyCorrection"},
    "trainer.trackers": ["jsonl", "./parts.py:SleepyTracker"],
    "hooks": ["./parts.py:SleepyHook"],
    "trainer.steps": 1,
}
WORLD: dict[str, Any] = {
    "data.train_files": None, "data.dataset": None, "tools": [], "interactions": [],
    "environments": [{"name": "./parts.py:SleepyWorld"}],
}  # fmt: skip
SOON = 1.0
"""Seconds for what sleeps for ever."""

IN_RECORDS = {
    "loop.run": ({"rollout.trajectory_timeout": SOON}, "rollout.trajectory_timeout of 1 s passed while"),
    "engine.generate": ({"rollout.turn_timeout": SOON}, "request train-.*: no answer within 1 s"),
    "tool.create": ({"tools": [{"name": "./parts.py:SleepyTool", "timeout": SOON}]}, "tool 'look': no answer"),
    "tool.execute": ({"tools": [{"name": "./parts.py:SleepyTool", "timeout": SOON}]}, "tool 'look': no answer"),
    "tool.calc_reward": ({"tools": [{"name": "./parts.py:SleepyTool", "timeout": SOON}]}, "tool 'look': no answer"),
    "reward": (
        {"reward.functions": [{"name": "./parts.py:SleepyScore", "timeout": SOON}]},
        "reward function 'SleepyScore': no answer within 1 s",
    ),
    "manager.score": ({"reward.timeout": SOON}, "reward manager '.*parts.py:SleepyManager': no answer within 1 s"),
    "manager.score_group": ({"reward.timeout": SOON}, "reward manager '.*parts.py:SleepyManager': no answer"),
    **{
        f"interaction.{method}": (
            {"interactions": [{"name": "./parts.py:SleepyPartner", "timeout": SOON}]},
            "interaction 'SleepyPartner': no answer within 1 s",
        )
        for method in ("start_interaction", "generate_response", "calculate_score")
    },
    **{
        f"environment.{method}": (
            {**WORLD, "environments": [{"name": "./parts.py:SleepyWorld", "timeout": SOON}]},
            "environment 'SleepyWorld'.* no answer within 1 s",
        )
        for method in ("open", "call", "reply", "score")
    },
}
"""Sleepers that cost their trajectories only: configuration, and what the records say of them."""
IN_LOG = {
    "tool.release": (IN_RECORDS["tool.execute"][0], "release of tool 'look' failed"),
    "interaction.finalize_interaction": (IN_RECORDS["interaction.calculate_score"][0], "finalize_interaction failed"),
    "environment.close episode": (IN_RECORDS["environment.call"][0], "close of the episode of environment"),
    "environment.close": (IN_RECORDS["environment.call"][0], "closing environment 'SleepyWorld' failed"),
    "engine.close": ({}, "closing engine-0 failed"),
    "loop.close": ({}, "closing agent loop 'SleepyLoop' failed"),
    "tool.close": ({}, "closing tool 'look' failed"),
}
BLOCKING = {
    **dict.fromkeys(("loop blocks", "tool blocks", "reward blocks", "parser.parse", "renderer.parse"),
                    "the event loop has been blocked .*parts.py"),
    "engine.__init__": "building inference engine 'parts.py:SleepyEngine' has not returned",
    "renderer.render": "the renderer or tool parser, .*, has not returned",
    "dataset.__init__": "dataset '.*parts.py:SleepyRows', loading train rows, has not returned",
    "dataset[]": "dataset '.*parts.py:SleepyRows', loading train rows, has not returned",
    "sampler.batch": "data.sampler, choosing the rows of step 1, has not returned",
    "sampler.update": "data.sampler, learning from step 1, has not returned",
    "estimator": "advantage estimator '.*parts.py:SleepyAdvantage' has not returned",
    "correction": "the rollout correction has not returned",
    "loss.prepare": "policy loss '.*parts.py:SleepyLoss' has not returned",
    "loss": "policy loss '.*parts.py:SleepyLoss' has not returned",
    **{f"hook.{name}": f"hook 'SleepyHook' in {name} has not returned"
       for name in ("on_run_start", "on_trajectory_end", "on_run_end")},
    **dict.fromkeys(("tracker.__init__", "tracker.log", "tracker.log_trajectories", "tracker.progress",
                     "tracker.finish"), "tracker '.*SleepyTracker' failed .* has not returned within"),
}  # fmt: skip
"""What cannot be interrupted, and who the log says it is."""


class Named(logging.Handler):
    """Wakes the sleeper when the log has said this."""

    def __init__(self, said: str, wakes: Path) -> None:
        super().__init__()
        self._said, self._wakes = said, wakes

    def emit(self, record: logging.LogRecord) -> None:
        if re.search(self._said, record.getMessage(), re.DOTALL):
            self._wakes.touch()


@pytest.fixture
def sleeping(fit: Callable[..., RunDir], tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Trains one step with a sleeper, ``(sleeper, changes, who)``, and returns the run and what woke it."""
    monkeypatch.setattr(replicas, "CLOSE_TIMEOUT", 3 * SOON)
    monkeypatch.setattr(worker, "CLOSE_SECONDS", SOON)
    monkeypatch.setattr(replicas, "START_GRACE", SOON)
    monkeypatch.setattr(boundary, "HANG_SECONDS", 0.5)
    monkeypatch.setattr(worker, "WATCHDOG_SECONDS", 0.5)
    monkeypatch.setattr(trackers, "DEADLINE_SECONDS", SOON)
    handlers: list[Named] = []

    def run(sleeper: str, changes: dict[str, Any], who: str) -> tuple[RunDir, Path]:
        named = tiny_run.folder / "named"
        handlers.append(Named(who, named))
        logging.getLogger().addHandler(handlers[-1])
        given = f"from pathlib import Path\nSLEEPER, NAMED = {sleeper!r}, Path({str(named)!r})\n"
        (tiny_run.folder / "parts.py").write_text(given + PARTS)
        return fit({**ALL, **changes}), named

    yield run
    for handler in handlers:
        logging.getLogger().removeHandler(handler)


@pytest.mark.slow
@pytest.mark.parametrize("sleeper", IN_RECORDS)
def test_what_sleeps_in_a_trajectory_costs_that_trajectory_and_is_in_its_record(sleeping: Any, sleeper: str) -> None:
    changes, who = IN_RECORDS[sleeper]
    run, _ = sleeping(sleeper, changes, who)
    records = list(read_rollouts(run.rollout_file(1, "train")))
    said = [f"{record.error} {[call['response'] for call in record.tool_calls]}" for record in records]
    assert len(said) == 4 and all(re.search(who, each) for each in said), said


@pytest.mark.slow
@pytest.mark.parametrize("sleeper", IN_LOG)
def test_what_sleeps_as_it_is_closed_is_left_behind_and_named(sleeping: Any, sleeper: str) -> None:
    run, named = sleeping(sleeper, *IN_LOG[sleeper])
    state = run.read_state()
    assert named.exists() and state is not None and state.status == "completed"


@pytest.mark.parametrize(
    ("sleeper", "who"),
    [("engine.start", "replica 0 is not healthy after 1 s"), ("engine.health", "replica 0 is not healthy after 1 s"),
     ("engine.update_weights", "has not taken new weights within 1 s")],
)  # fmt: skip
def test_an_engine_that_sleeps_as_it_starts_or_updates_ends_the_run(sleeping: Any, sleeper: str, who: str) -> None:
    engine = {"name": "./parts.py:SleepyEngine", "start_timeout": SOON, "restarts": 0, "health_interval": 0.1}
    with pytest.raises(AgentRLError, match=who):
        sleeping(sleeper, {"rollout.engine": engine}, who)


@pytest.mark.parametrize("sleeper", BLOCKING)
def test_what_blocks_the_run_is_named(sleeping: Any, sleeper: str) -> None:
    run, named = sleeping(sleeper, {}, BLOCKING[sleeper])
    state = run.read_state()
    assert named.exists() and state is not None and state.status == "completed"


def test_an_environment_that_blocks_as_it_lists_its_tasks_is_named(sleeping: Any) -> None:
    _, named = sleeping("environment.tasks", WORLD, "environment 'SleepyWorld' has not returned")
    assert named.exists()


def test_a_model_that_is_never_loaded_is_named(sleeping: Any, tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleepy_load(*args: Any) -> Any:
        end = time.monotonic() + 120
        while not (tiny_run.folder / "named").exists() and time.monotonic() < end:
            time.sleep(0.01)
        return load(*args)

    load = backend.load_causal_lm
    monkeypatch.setattr(backend, "load_causal_lm", sleepy_load)
    run, named = sleeping("", {}, "the actor, loading .*tiny-model.*, has not returned .*sleepy_load")
    state = run.read_state()
    assert named.exists() and state is not None and state.status == "completed"
