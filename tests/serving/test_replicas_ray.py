"""Engine replicas in processes and an interpreter of their own: killed, replaced, and fed with new weights."""

import asyncio
import itertools
import site
import sys
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from agentrl_core.api import (
    ArrayBucket,
    EngineContext,
    EngineError,
    SamplingParams,
    WeightUpdate,
    WorkerError,
)
from agentrl_core.config import load_config
from agentrl_core.controller import Runtime
from agentrl_core.data.rows import PromptBatch
from agentrl_core.engine_kit.memory_files import WeightFile
from agentrl_core.rollout.batching import to_data_proto
from agentrl_core.rollout.manager import AgentLoopManager
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.serving.replica_changes import ReplicaChange, change_replicas
from agentrl_core.serving.replicas import EngineReplicas
from agentrl_core.serving.weight_transport import Weights

pytestmark = pytest.mark.ray
TURNS = 3
BLOCKED = ("torch", "tensordict", "transformers", "datasets", "safetensors")

ENGINE = """
import asyncio
import os
import signal
import sys
from pathlib import Path

import numpy as np

from agentrl_core.api import EngineError, InferenceEngine, PolicySpan, TokenOutput


class Byte(InferenceEngine):
    # Answers with the first byte of its weights. One replica kills its process, once, when a file asks for it.
    capabilities = frozenset({"logprobs", "weight_update", "sessions"})

    def __init__(self, config, context):
        self.context, self.token, self.version, self.requests, self.sessions = context, 0, 0, 0, set()

    async def start(self):
        print("loading the model")
        assert all(sys.modules[name] is None for name in BLOCKED), "this is the engine's own environment"
        if Path(MARKS, "slow").exists():
            await asyncio.Event().wait()

    async def generate(self, prompt_ids, params, request_id, multi_modal=None):
        assert request_id in self.sessions, "a replica that takes a trajectory over opens its session"
        self.requests += 1
        mark = Path(MARKS, "kill")
        if self.context.replica == 0 and self.requests == 20 and mark.exists():
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(0.02)
        return TokenOutput([self.token, 260], [-1.0, -1.0], "stop", [PolicySpan(self.version, 0, 2)])

    async def open_session(self, session_id):
        self.sessions.add(session_id)

    async def close_session(self, session_id):
        self.sessions.discard(session_id)

    async def update_weights(self, update, version):
        assert update.files, "these weights come by files"
        tensors = [data for bucket in update for name, shape, dtype, data in bucket.tensors() if name == "token"]
        if not tensors:
            raise EngineError("the model has token [4], which the update lacks")
        self.token, self.version = int(tensors[0][0]), version
"""
LOOP = f"""
from agentrl_core.api import AgentLoopBase, Termination


class Turns(AgentLoopBase):
    async def run(self, sampling_params, *, session, raw_prompt, **row):
        t = session.trajectory(raw_prompt)
        for turn in range({TURNS}):
            await t.generate({{**sampling_params, "max_tokens": 2}})
            if turn < {TURNS - 1}:
                t.add_messages([{{"role": "user", "content": "more"}}])
        return t.finish(Termination.COMPLETED)
"""


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another interpreter with this environment's packages, less those that an engine's environment need not have."""
    folder = tmp_path_factory.mktemp("engine-env")
    venv.create(folder, with_pip=False)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = folder / "lib" / version / "site-packages"
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "driver.pth").write_text("\n".join([*lines, "import block_heavy"]))
    (packages / "block_heavy.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({BLOCKED}))\n")
    return str(folder / "bin" / "python")


class TokenFile:
    """A file in memory that is overwritten by every update, as the actor's is."""

    file: WeightFile | None = None

    def write(self, buckets: list[ArrayBucket]) -> tuple[str]:
        self.file = self.file or WeightFile(buckets)
        for bucket in buckets:
            for name, _, _, data in bucket.tensors():
                self.file.views[name][:] = data
        return (self.file.path,)


@pytest.fixture
def weights() -> Iterator[TokenFile]:
    made = TokenFile()
    yield made
    if made.file is not None:
        made.file.close()


def token(value: int) -> list[ArrayBucket]:
    return [ArrayBucket(("token",), ((4,),), ("uint8",), np.full(4, value, np.uint8))]


@pytest.fixture
def make_manager(tiny_run: Any, ray_runtime: Runtime, interpreter: str) -> Iterator[Any]:
    made: list[tuple[AgentLoopManager, EngineReplicas]] = []

    def make(**engine: Any) -> tuple[AgentLoopManager, EngineReplicas]:
        header = f"BLOCKED, MARKS = {BLOCKED!r}, {str(tiny_run.folder)!r}\n"
        (tiny_run.folder / "engine.py").write_text(header + ENGINE)
        (tiny_run.folder / "loop.py").write_text(LOOP)
        slot = {"name": "./engine.py:Byte", "python": interpreter, "health_interval": 0.1, "max_in_flight": 8}
        changes = {
            "cluster.runtime": "ray",
            "rollout.engine": {**slot, **engine},
            "rollout.agent": {"loops": [{"name": "./loop.py:Turns"}], "num_workers": 2},
            "rollout.max_response_length": 500,
        }
        config = load_config(tiny_run(changes))
        context = EngineContext(config.model.path, max_model_len=1000, vocab_size=261)
        engines = EngineReplicas(ray_runtime, config, context)
        made.append((AgentLoopManager(config, ray_runtime, engines), engines))
        return made[-1]

    yield make
    for manager, engines in made:
        manager.close()
        engines.close()


def prompts(count: int, step: int) -> Any:
    row = {"raw_prompt": [{"role": "user", "content": "go"}], "data_source": "tests", "reward_model": {}}
    rows = [{**row, "uid": f"p{index}", "prompt_index": index, "sample_index": 0} for index in range(count)]
    return PromptBatch(rows, step, "train", {"temperature": 1.0})


def test_a_killed_replica_loses_nothing_and_comes_back_with_current_weights(
    make_manager: Any, weights: TokenFile, tiny_run: Any, ray_runtime: Runtime
) -> None:
    manager, engines = make_manager(replicas=2)
    engines.start()
    (tiny_run.folder / "kill").touch()
    engines.update_weights(Weights(7, [WeightUpdate(files=weights.write(token(65)))]))
    results = manager.generate_sequences(prompts(64, step=1))

    assert not (tiny_run.folder / "kill").exists(), "the replica was killed"
    assert len({result.trajectory_id for result in results}) == len(results) == 64
    assert all(result.status == "trained" and result.attempts == 1 for result in results)
    batch = to_data_proto(results, 0, {})
    assert len(batch) == 64 and batch.batch["response_mask"].sum() == 64 * TURNS * 2
    assert all(set(output.policy_versions) == {7, -1} for result in results for output in result.outputs)

    async def all_back() -> None:
        while engines._restarting:
            await asyncio.wait(engines._restarting.values())

    ray_runtime.run(engines.watched(all_back()))
    assert engines.metrics()["restarts"] == 1
    answers = engines.probe([1, 2], SamplingParams(2))
    assert [(answer.token_ids[0], answer.spans[0].version) for answer in answers] == [(65, 7), (65, 7)]

    # Overwritten in place, and both replicas serve trajectories again.
    engines.update_weights(Weights(8, [WeightUpdate(files=weights.write(token(66)))]))
    results = manager.generate_sequences(prompts(32, step=2))
    assert all(output.response_ids[0] == 66 for result in results for output in result.outputs)
    served = [ray_runtime.run(server.call("metrics"))["requests"] for server in engines.servers]
    assert all(requests > 0 for requests in served)


@pytest.mark.slow
def test_replicas_are_added_and_drained_while_a_run_runs(
    make_manager: Any, weights: TokenFile, tiny_run: Any, ray_runtime: Runtime
) -> None:
    manager, engines = make_manager(replicas=2)
    engines.start()
    engines.update_weights(Weights(7, [WeightUpdate(files=weights.write(token(65)))]))
    run = RunDir.create(tiny_run.folder, "changed")
    run.config_file.write_text("cluster: {runtime: ray}")
    run.write_state("running", 0)
    steps = itertools.count(1)

    def meanwhile(action: Any, replica: int = -1) -> str:
        """What the run says of a change while its rollouts go on; every trajectory of them is whole."""
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(change_replicas, run.path, ReplicaChange(action, replica))
            while not asked.done():
                results = manager.generate_sequences(prompts(32, next(steps)))
                assert all(result.status == "trained" and result.attempts == 1 for result in results)
                assert all(set(output.policy_versions) == {7, -1} for each in results for output in each.outputs)
        return asked.result()

    with run.locked():
        engines.accept_changes(run.path)
        assert meanwhile("add") == "replica 2 serves"
        assert meanwhile("drain", 0) == "replica 0 has answered its requests and is closed"
        assert meanwhile("drain", 1) == "replica 1 has answered its requests and is closed"
        for replica, message in [
            (2, "replica 2 is the only one that serves; add another one first"),
            (0, "replica 0 does not serve; those that do are 2"),
            (9, "replica 9 does not serve; those that do are 2"),
        ]:
            with pytest.raises(EngineError, match=message):
                meanwhile("drain", replica)
    with pytest.raises(WorkerError, match="it was killed"):
        ray_runtime.run(engines.servers[0].call("metrics"))
    engines.update_weights(Weights(8, [WeightUpdate(files=weights.write(token(66)))]))
    results = manager.generate_sequences(prompts(32, next(steps)))
    assert {node.request.replica for result in results for node in result.turns} == {2}
    assert all(output.response_ids[0] == 66 for result in results for output in result.outputs)
    assert "restarts" not in engines.metrics()


def test_weights_that_do_not_fit_are_refused_by_name(make_manager: Any, weights: TokenFile) -> None:
    _, engines = make_manager()
    engines.start()
    other = [ArrayBucket(("other",), ((1,),), ("uint8",), np.zeros(1, np.uint8))]
    with pytest.raises(EngineError, match="the model has token"):
        engines.update_weights(Weights(1, [WeightUpdate(files=weights.write(other))]))


def test_a_server_that_never_becomes_healthy_ends_with_its_last_log_lines(make_manager: Any, tiny_run: Any) -> None:
    (tiny_run.folder / "slow").touch()
    _, engines = make_manager(start_timeout=0.2)
    with pytest.raises(EngineError, match=r"(?s)not healthy after 0.2 s.*loading the model"):
        engines.start()
