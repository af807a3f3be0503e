"""Real engines as a run uses them: replicas on Ray that answer agents, take weights, and are killed process by process.

Run in the trainer's environment by ``make test-engines``, which builds the others.
"""

import asyncio
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl_core.api import EngineContext, SamplingParams
from agentrl_core.api.tree import ids_of
from agentrl_core.config import load_config
from agentrl_core.controller import Runtime, make_runtime
from agentrl_core.data.rows import PromptBatch
from agentrl_core.engine_kit.memory_files import MEMORY, mapped_memory
from agentrl_core.engine_kit.processes import family
from agentrl_core.rollout.manager import AgentLoopManager
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.serving.replicas import EngineReplicas
from agentrl_core.serving.weight_transport import Weights
from tests_real.engine_suite import LONG, MAX_MODEL_LEN, TOLERANCE, VOCAB, Models, log_probs

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]
logger = logging.getLogger(__name__)
ROOT = Path(__file__).parents[1]
TURNS = 4
TOKENS = 8
BLOCK = 32
"""Tokens of a block of the engines' KV caches, at most."""
AGENTS = f"""
import asyncio
from pathlib import Path
from agentrl_core.api import AgentLoopBase, Termination


class Turns(AgentLoopBase):
    async def run(self, sampling_params, *, session, raw_prompt, **row):
        t = session.trajectory(raw_prompt)
        for turn in range({TURNS}):
            await t.generate({{**sampling_params, "max_tokens": {TOKENS}}})
            Path(__file__).with_name("busy").touch()
            if turn < {TURNS - 1}:
                # What a tool takes: all others ask meanwhile.
                await asyncio.sleep(0.05)
                t.add_messages([{{"role": "user", "content": "more"}}])
        return t.finish(Termination.COMPLETED)


async def solve(base_url, api_key, model, messages, row):
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=600) as client:
        for _ in range({TURNS}):
            answer = await client.chat.completions.create(model=model, messages=messages, max_tokens={TOKENS})
            messages = [*messages, answer.choices[0].message.model_dump(), {{"role": "user", "content": "more"}}]
    return 1.0


def letters(trajectory):
    return len({{*trajectory.model_text}})
"""


def python_of(engine: str) -> str:
    python = ROOT / ".engines" / engine / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no environment .engines/{engine}: `make help` says how to build it")
    return str(python)


def write_inputs(folder: Path) -> None:
    """``agents.py`` and the prompts."""
    (folder / "agents.py").write_text(AGENTS)
    row = {"prompt": [{"role": "user", "content": "say"}], "reward_model": {"ground_truth": ""}}
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(12)))


class Fleet:
    """Two replicas of an engine behind the workers of a run; the weights are those of a seed."""

    def __init__(self, engine: str, folder: Path, runtime: Runtime) -> None:
        self.name, self.memory = engine, set[str]()
        self.busy = folder / "busy"
        """Exists from the first turn of a rollout on."""
        self.models, self.runtime, self.step = Models(folder / "models", tied=True), runtime, 0
        write_inputs(folder)
        slot = {"name": engine, "python": python_of(engine), "replicas": 2, "restarts": 20, "health_interval": 1.0}
        loops = ["./agents.py:Turns", {"name": "openai_agent", "config": {"agent": "./agents.py:solve"}}]
        config = {
            "model": {"path": self.models.folder()},
            "data": {"train_files": ["train.jsonl"]},
            "rollout": {
                "engine": slot, "agent": {"loops": loops, "num_workers": 2}, "max_response_length": 160, "retries": 0,
            },
            "reward": {"functions": [{"name": "./agents.py:letters", "isolation": "inline"}]},
            "trainer": {"output_dir": str(folder / "runs")},
            "cluster": {"device": "cpu", "runtime": "ray"},
        }  # fmt: skip
        (folder / "config.yaml").write_text(json.dumps(config))
        loaded = load_config(folder / "config.yaml")
        context = EngineContext(loaded.model.path, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB)
        self.replicas = EngineReplicas(runtime, loaded, context)
        self.manager = AgentLoopManager(loaded, runtime, self.replicas)
        self.replicas.start()
        self.update(0)

    def update(self, seed: int) -> None:
        self.seed = seed
        self.replicas.update_weights(Weights(seed, self.models.files(seed)))

    def rollout(self, count: int, loop: str = "Turns") -> list[TrajectoryResult]:
        self.step += 1
        self.busy.unlink(missing_ok=True)
        row = {"data_source": "tests", "reward_model": {}, "agent_name": loop}
        rows = [
            {**row, "raw_prompt": [{"role": "user", "content": chr(65 + index % 26) * (8 + index)}],
             "uid": f"p{index}", "prompt_index": index, "sample_index": 0}
            for index in range(count)
        ]  # fmt: skip
        return self.manager.generate_sequences(PromptBatch(rows, self.step, "train", {"temperature": 1.0}))

    def processes(self, replica: int) -> list[psutil.Process]:
        """The actor's process, and all that it has started; notes what memory they share."""
        pid, _ = self.runtime.run(self.replicas.servers[replica].call("process"))
        pids = [pid, *sorted(family(pid) - {pid})]
        self.memory.update(*map(mapped_memory, pids))
        return [psutil.Process(each) for each in pids]

    def restarts(self) -> int:
        """How many there have been, once none is under way."""

        async def settled() -> None:
            while self.replicas._restarting:
                await asyncio.wait(self.replicas._restarting.values())

        self.runtime.run(self.replicas.watched(settled()))
        return int(self.replicas.metrics().get("restarts", 0))

    def check(self, results: list[TrajectoryResult]) -> None:
        """Every trajectory ended at its first attempt, with the log-probs of the weights that it names."""
        for result in results:
            assert not result.failed and result.attempts == 1, result.error
            (output,) = result.outputs
            assert {*output.policy_versions} == {self.seed, -1} and output.response_logprobs is not None
            expected = log_probs(self.models.module(self.seed), output.prompt_ids, output.response_ids)
            mask = output.response_mask
            gaps = [abs(a - b) for a, b, m in zip(output.response_logprobs, expected, mask, strict=True) if m]
            assert len(gaps) == sum(mask) and max(gaps) <= 10 * TOLERANCE

    def check_weights(self) -> None:
        """Both replicas answer with the newest ones."""
        for output in self.replicas.probe(LONG, SamplingParams(16)):
            assert [span.version for span in output.spans] == [self.seed]
            expected = log_probs(self.models.module(self.seed), LONG, output.token_ids)
            assert output.log_probs == pytest.approx(expected, abs=TOLERANCE)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with make_runtime("ray", num_cpus=32, start_timeout=300) as made:
        yield made


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def fleet(request: Any, runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(request.param, tmp_path_factory.mktemp(request.param), runtime)
    yield made
    gone = [each for replica in (0, 1) for each in made.processes(replica)]
    made.manager.close()
    made.replicas.close()
    _, alive = psutil.wait_procs(gone, timeout=60)
    assert not alive, f"the engines are closed, and these processes live on: {alive}"
    left = [name for name in made.memory if (MEMORY / name).exists()]
    assert made.memory and not left, f"the engines are closed, and their shared memory is still there: {left}"


def test_turns_stay_with_the_replica_that_has_their_cache(fleet: Fleet) -> None:
    fleet.replicas.metrics()
    results = fleet.rollout(48)
    metrics = fleet.replicas.metrics()
    fleet.check(results)
    served = [[node.request.replica for node in result.turns] for result in results]
    assert all(len(each) == TURNS and len({*each}) == 1 for each in served)
    assert {replica for each in served for replica in each} == {0, 1}
    tokens = [[(len(ids_of(node.path[:-1])), len(node.ids)) for node in result.turns] for result in results]
    prompts = sum(prompt for turns in tokens for prompt, _ in turns)
    # Of each turn but the first all that was there before is cached, in whole blocks.
    reusable = sum(prompt + sampled for turns in tokens for prompt, sampled in turns[:-1])
    logger.info("%s: hit rate %.3f of at most %.3f", fleet.name, metrics["cache_hit_rate"], reusable / prompts)
    assert metrics["prompt_tokens"] == prompts
    assert metrics["cached_tokens"] >= reusable - (BLOCK + 1) * len(results) * (TURNS - 1)


def test_the_chat_endpoint_under_load(fleet: Fleet) -> None:
    results = fleet.rollout(128, "openai_agent")
    fleet.check(results)
    assert all(result.outputs[0].num_turns >= 2 * TURNS - 1 for result in results)


def test_each_process_of_a_replica_may_be_killed_during_a_rollout(fleet: Fleet) -> None:
    count = len(fleet.processes(0))
    assert count > 1
    for number in range(count):
        before, restarts = fleet.processes(0), fleet.restarts()
        victim = before[min(number, len(before) - 1)]
        what = f"{victim.pid} of {[(each.pid, each.name()) for each in before]}"
        fleet.busy.unlink(missing_ok=True)
        killer = threading.Thread(target=kill_when, args=(victim, fleet.busy))
        killer.start()
        results = fleet.rollout(64)
        killer.join()
        fleet.check(results)
        after = fleet.restarts()
        logger.info("killed %s: %d restarts", what, after - restarts)
        assert after - restarts <= 1, what
        fleet.check_weights()
        if after > restarts:
            _, alive = psutil.wait_procs(before, timeout=60)
            assert not alive, f"the replica was replaced after the death of {what}, and these live on: {alive}"


def kill_when(victim: psutil.Process, mark: Path) -> None:
    while not mark.exists():
        time.sleep(0.01)
    victim.kill()


@pytest.mark.parametrize("who", ["actor", "child"])
def test_a_process_that_dies_in_the_middle_of_an_update(fleet: Fleet, who: str) -> None:
    restarts, (actor, *children) = fleet.restarts(), fleet.processes(1)
    fleet.models.folder(fleet.seed + 1)
    victim = actor if who == "actor" else max(children, key=lambda each: each.memory_info().rss)
    # Stopped, it cannot end the update before it is killed.
    victim.suspend()
    updating = threading.Thread(target=fleet.update, args=(fleet.seed + 1,))
    updating.start()
    updating.join(3)
    assert updating.is_alive()
    victim.kill()
    updating.join(600)
    assert not updating.is_alive()
    assert fleet.restarts() == restarts + 1
    fleet.check_weights()
    fleet.check(fleet.rollout(16))


RUN = {
    "two replicas": {"replicas": 2},
    "shards": {"tensor_parallel": 2},
    "two replicas, broadcast": {"replicas": 2, "weight_transfer": "broadcast"},
}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("shape", RUN)
def test_two_training_processes_feed_the_engines(tmp_path: Path, engine: str, shape: str) -> None:
    """What FSDP shards over two ranks reaches every replica and shard."""
    models = Models(tmp_path / "models", tied=True)
    write_inputs(tmp_path)
    slot: dict[str, Any] = {"name": engine, "python": python_of(engine), **RUN[shape]}
    if engine == "sglang" and "tensor_parallel" in slot:
        slot["config"] = {"env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
    config = {
        "model": {"path": models.folder()},
        "data": {"train_files": ["train.jsonl"], "batch_size": 4},
        "rollout": {"engine": slot, "agent": {"loops": ["./agents.py:Turns"]}, "n": 2, "max_response_length": 160},
        "reward": {"functions": [{"name": "./agents.py:letters", "isolation": "inline"}]},
        "actor": {"optimizer": {"lr": 1e-3}},
        "trainer": {"name": "run", "output_dir": str(tmp_path / "runs"), "steps": 3, "trackers": ["jsonl"]},
        "cluster": {"device": "cpu", "runtime": "ray", "processes_per_node": 2},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    command = [Path(sys.executable).parent / "agentrl", "train", "config.yaml"]
    done = subprocess.run(command, cwd=tmp_path, timeout=1700, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [each for each in RunDir(tmp_path / "runs" / "run").read_metrics() if each["step"]]
    logger.info("%s, %s: gaps %s", engine, shape, [each["rollout/logprob_gap_max"] for each in steps])
    assert len(steps) == 3 and all(each["actor/grad_norm"] > 0 for each in steps)
    assert max(each["rollout/logprob_gap_max"] for each in steps) <= 1e-3
