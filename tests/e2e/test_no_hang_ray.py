"""A sleeper behind the remote calls of a run on Ray: the run goes on within its deadline, and names who slept.

What ``waits`` is cancelled by the deadline of its own process; what ``blocks`` or ``freezes`` has no deadline of its
own any more. `tests/rollout/test_worker_deaths_ray.py` freezes the workers, and `test_no_hang.py` has the sleepers
that take the same road on the local runtime.
"""

import asyncio
import itertools
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_core.api import ArrayBucket, EngineContext, EngineError, WeightUpdate, WorkerError
from agentrl_core.config import load_config
from agentrl_core.controller import ClassWithInitArgs, Dispatch, Runtime, Worker, ray_failures, register
from agentrl_core.data.rows import PromptBatch
from agentrl_core.rollout import manager as manager_module
from agentrl_core.rollout.manager import AgentLoopManager
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.serving import replicas
from agentrl_core.serving.replicas import EngineReplicas
from agentrl_core.serving.weight_transport import Weights
from agentrl_core.trainer.roles import start_workers
from tests.conftest import TinyRuns

pytestmark = pytest.mark.ray
PARTS = """
import asyncio, os, signal, time
from pathlib import Path
from agentrl_core.api import AgentLoopBase, InferenceEngine, PolicySpan, RewardManager, RewardResult, TokenOutput


async def sleeps(where):
    for how in ("waits", "blocks", "freezes"):
        try:
            Path(MARKS, f"{where} {how}").unlink()
        except FileNotFoundError:
            continue
        if how == "waits":
            await asyncio.sleep(1e9)
        elif how == "blocks":
            time.sleep(1e6)
        else:
            # Again and again: the kernel may stop the main thread first, and this one would go on and answer.
            while True:
                os.kill(os.getpid(), signal.SIGSTOP)


class SleepyEngine(InferenceEngine):
    capabilities = frozenset({"logprobs", "weight_update", "sessions", "sleep"})

    def __init__(self, config, context):
        self.version = 0

    async def start(self):
        await sleeps("engine.start")

    async def generate(self, prompt_ids, params, request_id, multi_modal=None):
        await sleeps("engine.generate")
        return TokenOutput([65, 260], [-1.0, -1.0], "stop", [PolicySpan(self.version, 0, 2)])

    async def open_session(self, session_id):
        await sleeps("engine.open_session")

    async def close_session(self, session_id):
        await sleeps("engine.close_session")

    async def health(self):
        await sleeps("engine.health")

    async def update_weights(self, update, version):
        await sleeps("engine.update_weights")
        self.version = version

    async def sleep(self, level=1):
        await sleeps("engine.sleep")

    async def wake_up(self, tags):
        await sleeps("engine.wake_up")

    async def close(self):
        await sleeps("engine.close")


class SleepyLoop(AgentLoopBase):
    async def run(self, sampling_params, *, session, raw_prompt, **row):
        await sleeps("loop")
        trajectory = session.trajectory(raw_prompt)
        turn = await trajectory.generate(sampling_params)
        return trajectory.finish(turn.termination)


class SleepyScore:
    isolation = "inline"

    def __init__(self, config, context): ...

    async def __call__(self, trajectory):
        await sleeps("reward")
        return 1.0


class SleepyManager(RewardManager):
    capabilities = frozenset({"group"})

    async def score(self, trajectory):
        (function,) = self.context.functions
        return await function(trajectory)

    async def score_group(self, trajectories, results):
        await sleeps("group")
        return results
"""
LOSS = """
import time
from pathlib import Path
from agentrl_core.api import PolicyLoss, PolicyLossOutput


class SleepyLoss(PolicyLoss):
    def __init__(self, config, context):
        while not Path(NAMED).exists():
            time.sleep(0.01)

    def __call__(self, batch):
        return PolicyLossOutput(-batch.log_probs * batch.advantages)
"""
SOON = 2.0
"""Seconds that pass before a sleeper is given up. What does not sleep may take longer on a busy machine: no test may
fail because of that."""
LONG = 1000.0


class Log(logging.Handler):
    """Notes the log of the driver, and calls ``found`` when it says something."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.waits_for, self.found = "", lambda: None

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"
        if self.waits_for and re.search(self.waits_for, record.getMessage(), re.DOTALL):
            self.found()


@dataclass
class Run:
    """Workers and engine of a run, without training."""

    folder: Path
    manager: AgentLoopManager
    engines: EngineReplicas
    log: Log = field(default_factory=Log)
    steps: Iterator[int] = field(default_factory=itertools.count)

    def rollout(self, count: int = 2) -> list[TrajectoryResult]:
        row = {"raw_prompt": [{"role": "user", "content": "go"}], "data_source": "tests", "reward_model": {}}
        prompts = PromptBatch.sampled([row] * count, next(self.steps), "train", 1, {"temperature": 1.0})
        return self.manager.generate_sequences(prompts)

    def goes_on(self) -> list[TrajectoryResult]:
        """Soon a rollout has no failure any more: what died is back. Returns that rollout."""

        async def all_back() -> None:
            while self.engines._restarting:
                await asyncio.wait(self.engines._restarting.values())

        for _ in range(20):
            self.manager._runtime.run(self.engines.watched(all_back()))
            results = self.rollout()
            if not any(result.status == "failed" for result in results):
                return results
        raise AssertionError(f"every rollout has a failure:\n{self.log.text}")


@pytest.fixture(scope="module")
def make(ray_runtime: Runtime, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folder = tmp_path_factory.mktemp("sleepers")
    (folder / "parts.py").write_text(f"MARKS = {str(folder)!r}\n" + PARTS)

    def made(**engine: Any) -> tuple[Path, Any, EngineReplicas]:
        slot = {"name": "./parts.py:SleepyEngine", "health_interval": 0.1, "health_timeout": SOON, "sleep": 1}
        changes = {
            "cluster.runtime": "ray",
            "rollout.engine": {**slot, **engine},
            "rollout.agent.loops": ["./parts.py:SleepyLoop"],
            "rollout.max_response_length": 50,
            "rollout.retries": 0,
            "rollout.max_failed_fraction": 1.0,
            "rollout.turn_timeout": SOON,
            "rollout.trajectory_timeout": 2 * SOON,
            "reward.functions": [{"name": "./parts.py:SleepyScore", "timeout": SOON}],
            "reward.manager": "./parts.py:SleepyManager",
            "reward.timeout": 2 * SOON,
        }
        config = load_config(TinyRuns(tiny_model, folder)(changes))
        context = EngineContext(config.model.path, max_model_len=1000, vocab_size=261)
        return folder, config, EngineReplicas(ray_runtime, config, context)

    return made


@pytest.fixture(scope="module")
def started(make: Any, ray_runtime: Runtime) -> Iterator[Run]:
    folder, config, engines = make(restarts=100, start_timeout=LONG)
    run = Run(folder, AgentLoopManager(config, ray_runtime, engines), engines)
    engines.start()
    # Workers that have never answered have as much time as an engine that starts.
    run.goes_on()
    yield run
    run.manager.close()
    engines.close()


@pytest.fixture
def run(started: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(manager_module, "FROZEN_GRACE", -SOON)
    started.log = Log()
    logging.getLogger().addHandler(started.log)
    yield started
    logging.getLogger().removeHandler(started.log)


@pytest.mark.slow
def test_what_waits_in_a_trajectory_costs_that_trajectory_and_is_in_its_record(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A replica that is slow to say that it is healthy counts as frozen, and its requests are repeated without an error.
    monkeypatch.setattr(run.engines, "_slot", replace(run.engines._slot, health_timeout=LONG))
    sleepers = {
        "loop waits": "rollout.trajectory_timeout of 4 s passed while",
        "engine.open_session waits": "open_session of train-.*: no answer within 2 s",
        "engine.generate waits": "request train-.*: no answer within 2 s",
        "reward waits": "reward function 'SleepyScore': no answer within 2 s",
    }
    errors: list[str] = []
    for _ in range(20):
        # Again, because on a busy machine another deadline of the trajectory may pass first.
        left = [name for name, who in sleepers.items() if not any(re.search(who, error) for error in errors)]
        if not left:
            break
        for sleeper in left:
            (run.folder / sleeper).touch()
        errors += [result.error or "" for result in run.rollout(len(left))]
    assert not left, (left, errors)
    run.goes_on()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sleeper", "who"),
    [
        ("engine.health waits", r"engine replica 0 died \(no answer within 2 s\); restarting it"),
        ("engine.generate freezes", r"engine replica 0 died \(no answer within 2 s\); restarting it"),
        ("loop blocks", "agent-loop-0 has not moved for 2 s; killing its process"),
        ("reward blocks", "reward-0 has not moved for 2 s; killing its process"),
    ],
)
def test_a_process_that_stands_still_is_restarted_and_named(run: Run, sleeper: str, who: str) -> None:
    (run.folder / sleeper).touch()
    if sleeper == "engine.health waits":
        # Replicas are examined while trajectories run.
        (run.folder / "loop waits").touch()
    run.rollout()
    run.goes_on()
    assert not (run.folder / sleeper).exists() and re.search(who, run.log.text), run.log.text


@pytest.mark.parametrize("method", ["update_weights", "sleep"])
def test_an_engine_that_freezes_between_rollouts_is_restarted_with_the_new_weights(
    run: Run, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    (run.folder / f"engine.{method} freezes").touch()
    with monkeypatch.context() as short:
        short.setattr(replicas, "START_GRACE", SOON - LONG)
        # The process that takes its place has its whole time again.
        run.log.waits_for, run.log.found = "engine replica 0 died", short.undo
        run.engines.sleep()
        bucket = ArrayBucket(("token",), ((4,),), ("uint8",), np.zeros(4, np.uint8))
        run.engines.update_weights(Weights(7, [WeightUpdate(buckets=[bucket])]))
    asked = "load weights" if method == "update_weights" else f"engine engine-0 does not answer to '{method}': {method}"
    assert re.search(f"{asked}: no answer within 2 s, the process may be frozen", run.log.text), run.log.text
    assert "engine replica 0 is back with weights 7" in run.log.text
    run.goes_on()


def test_a_reward_worker_that_freezes_with_a_group_costs_the_group(run: Run) -> None:
    results = run.goes_on()
    (run.folder / "group freezes").touch()
    run.manager.score_groups(results)
    said = [result.error or "" for result in results]
    assert all("reward-0 has not answered for 2 s" in error for error in said), said
    run.goes_on()


def test_an_engine_that_freezes_as_it_starts_and_as_it_closes_is_named(
    make: Any, ray_runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, engines = make(restarts=0, start_timeout=SOON)
    monkeypatch.setattr(replicas, "START_GRACE", 0.0)
    monkeypatch.setattr(replicas, "CLOSE_TIMEOUT", SOON)
    # Frozen once it is there: a process that only takes long to appear may answer to close().
    pid, _ = ray_runtime.run(engines.servers[0].call("process"))
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match="engine-0 has not answered for 2 s"):
        engines.start()
    engines.close()
    assert "closing engine-0 failed" in caplog.text


class Rank(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def learn(self, sleeper: str) -> int:
        import os
        import signal
        import time

        if self.rank == 1 and sleeper == "freezes":
            os.kill(os.getpid(), signal.SIGSTOP)
        while self.rank == 1 and sleeper and not Path(sleeper).exists():
            time.sleep(0.01)
        return self.rank


def test_a_rank_that_computes_for_ever_is_named_and_one_that_freezes_ends_the_run(
    ray_runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group = ray_runtime.worker_group(ClassWithInitArgs(Rank), "actor", world_size=2)
    assert group.learn("") == [0, 1]
    log = Log()
    log.waits_for, log.found = r"rank 1 of 2 of 'actor'.*'learn' has not returned", (tmp_path / "named").touch
    with monkeypatch.context() as short:
        short.setattr(ray_failures, "SILENT_SECONDS", 0.5)
        short.setattr(ray_failures.logger, "handlers", [log])
        assert group.learn(str(tmp_path / "named")) == [0, 1]
    monkeypatch.setattr(ray_failures, "FROZEN_SECONDS", SOON)
    with pytest.raises(WorkerError, match=r"rank 1 of 2 of 'actor'.*is frozen.*the last method.*actor\.learn"):
        group.learn("freezes")
    group.close()


def test_a_training_process_that_never_has_its_model_is_named(
    ray_runtime: Runtime, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named = tmp_path / "named"
    (tmp_path / "parts.py").write_text(f"NAMED = {str(named)!r}\n" + LOSS)
    config = load_config(
        TinyRuns(tiny_model, tmp_path)({"cluster.runtime": "ray", "algorithm.loss": "./parts.py:SleepyLoss"})
    )
    log = Log()
    log.waits_for, log.found = "rank 0 of 1 of 'actor'.*'init_model' has not returned", named.touch
    monkeypatch.setattr(ray_failures, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(ray_failures.logger, "handlers", [log])
    assert list(start_workers(config, ray_runtime, 1)) == ["actor"] and named.exists()
