"""Agent-loop workers and reward workers whose processes die or freeze in the middle of a rollout, on Ray."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ObjectLostError

from agentrl_core.api import EngineContext, WorkerError
from agentrl_core.config import load_config
from agentrl_core.controller import Runtime
from agentrl_core.data.rows import PromptBatch
from agentrl_core.rollout import manager as manager_module
from agentrl_core.rollout.manager import AgentLoopManager
from agentrl_core.rollout.summaries import handed, whole
from agentrl_core.serving.replicas import EngineReplicas
from agentrl_core.trainer.roles import start_named_engines

pytestmark = pytest.mark.ray

PARTS = """
import os, signal
from pathlib import Path
from agentrl_core.api import AgentLoopBase, InferenceEngine, PolicySpan, TokenOutput

class Byte(InferenceEngine):
    capabilities = frozenset({"logprobs", "weight_update"})

    def __init__(self, config, context):
        self.seen = set()

    async def generate(self, prompt_ids, params, request_id, multi_modal=None):
        assert request_id not in self.seen, f"{request_id} came twice"
        self.seen.add(request_id)
        return TokenOutput([65, 260], [-1.0, -1.0], "stop", [PolicySpan(0, 0, 2)])

def once(what):
    # Two workers may be here at the same time: only the one that takes the mark ends.
    try:
        Path(MARKS, what).unlink()
    except FileNotFoundError:
        return
    # Again and again: the kernel may stop the main thread first, and until then this one would go on and answer.
    while True:
        os.kill(os.getpid(), signal.SIGSTOP if "freeze" in what else signal.SIGKILL)

class Once(AgentLoopBase):
    async def run(self, sampling_params, *, session, raw_prompt, **row):
        once("kill the loop worker")
        once("freeze the loop worker")
        trajectory = session.trajectory(raw_prompt)
        turn = await trajectory.generate(sampling_params)
        return trajectory.finish(turn.termination)

def score(trajectory):
    once("kill the reward worker")
    once("freeze the reward worker")
    return 1.0

class Mortal(Byte):
    async def generate(self, *request):
        once("kill the judge")
        return await super().generate(*request)

class Asks:
    def __init__(self, config, context):
        self.judge = context.engines["judge"]

    async def __call__(self, trajectory):
        return float(await self.judge.chat([{"role": "user", "content": "good?"}], max_tokens=2) == "b</tool_call>")
"""


@pytest.fixture
def make_manager(tiny_run: Any, ray_runtime: Runtime) -> Iterator[Any]:
    made: list[AgentLoopManager] = []

    def make(**changes: Any) -> AgentLoopManager:
        (tiny_run.folder / "parts.py").write_text(f"MARKS = {str(tiny_run.folder)!r}\n" + PARTS)
        settings = {
            "cluster.runtime": "ray",
            "rollout.engine": {"name": "./parts.py:Byte", "health_interval": 0.1},
            "rollout.agent": {"loops": [{"name": "./parts.py:Once"}], "num_workers": 2},
            "rollout.max_response_length": 50,
            "rollout.retries": 2,
            "reward.functions": [{"name": "./parts.py:score", "isolation": "inline"}],
            **changes,
        }
        config = load_config(tiny_run(settings))
        context = EngineContext(config.model.path, max_model_len=1000, vocab_size=261)
        named = start_named_engines(config, ray_runtime)
        engines = EngineReplicas(ray_runtime, config, context)
        made.append((AgentLoopManager(config, ray_runtime, engines, named), engines))
        engines.start()
        return made[-1][0]

    yield make
    for manager, engines in made:
        manager.close()
        engines.close()


def prompts(count: int, step: int = 1) -> PromptBatch:
    row = {"raw_prompt": [{"role": "user", "content": "go"}], "data_source": "tests", "reward_model": {}}
    return PromptBatch.sampled([row] * count, step, "train", 1, {"temperature": 1.0})


@pytest.mark.slow
def test_a_worker_that_dies_or_freezes_costs_only_what_ran_there(
    make_manager: Any, tiny_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = 1000.0
    manager = make_manager(**{"rollout.trajectory_timeout": moving, "reward.timeout": moving})
    monkeypatch.setattr(manager_module, "FROZEN_GRACE", 3.0 - moving)
    faults = [
        "",
        "kill the reward worker",
        "kill the loop worker",
        "",
        "freeze the loop worker",
        "freeze the reward worker",
        "",
    ]
    for step, what in enumerate(faults):
        mark: Path = tiny_run.folder / (what or "nothing")
        mark.touch()
        results = manager.generate_sequences(prompts(8, step))
        assert mark.exists() == (not what)
        assert [result.trajectory_id for result in results] == [f"train-{step:06d}-{row:05d}-000" for row in range(8)]
        assert all(result.reward.score == 1.0 and result.attempts <= 2 for result in results)


def test_a_judge_that_is_killed_comes_back_and_no_trajectory_is_lost(make_manager: Any, tiny_run: Any) -> None:
    judge = {"name": "./parts.py:Mortal", "model": str(tiny_run.model), "max_model_len": 500, "health_interval": 0.1}
    manager = make_manager(
        engines={"judge": judge}, **{"reward.functions": [{"name": "./parts.py:Asks", "timeout": 200.0}]}
    )
    mark: Path = tiny_run.folder / "kill the judge"
    mark.touch()
    results = manager.generate_sequences(prompts(8))
    assert not mark.exists(), "the judge was killed"
    assert [result.reward.score for result in results] == [1.0] * 8
    assert all(result.attempts == 1 for result in results)
    assert manager.named_metrics()["engines/judge/restarts"] == 1


class Pair:
    def both(self, size: int) -> tuple[str, bytes]:
        return "short", b"x" * size


def test_what_is_kept_outlives_its_process_and_a_loss_is_an_error(
    ray_runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = ray_runtime.actor(Pair, name="pair")
    # Ray sends small values at once.
    for size in (10, 1_000_000):
        short, kept = ray_runtime.run(actor.call_keeping("both", size))
        assert short == "short" and len(kept.get()) == size
    actor.kill()
    assert len(kept.get()) == size

    def lost(reference: Any, timeout: float) -> None:
        raise ObjectLostError(reference.hex(), None, "")

    # As Ray says where the node has died.
    monkeypatch.setattr(ray, "get", lost)
    with pytest.raises(WorkerError, match=r"it is lost with the node that kept it: ObjectLostError"):
        kept.get()


def test_texts_stay_with_the_workers_until_somebody_asks(make_manager: Any) -> None:
    results = make_manager().generate_sequences(prompts(4, 9))
    assert all(node.text == "" and not node.messages for result in results for node in result.tree.nodes)
    found = list(whole(handed(results)))
    assert [each.trajectory_id for each in found] == [each.trajectory_id for each in results]
    assert all(each.tree.nodes[0].messages[0]["content"] == "go" for each in found)
