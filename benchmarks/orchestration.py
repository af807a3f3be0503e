"""Overhead of the rollout loop with the model taken out.

    python benchmarks/orchestration.py [--json FILE]

A scripted engine answers at once; everything else is what a run uses: AgentLoopManager on the local runtime, the tool
agent, the Hermes parser, the calculator with a schema of about 400 tokens, the naive reward manager with hash_answer.
A trajectory has four turns of the policy and three tool calls.

1. CPU: 512 trajectories at once, CPU milliseconds per trajectory, beside a lean loop that makes the same ids.
2. Latency: the engine takes 20 ms, 150 trajectories are in flight at any time; how late the event loop wakes a timer.

Each is measured for prompts that are all distinct, for prompts with 8 samples each, and for a policy that writes
nothing but calls. The exit code is 0 whatever the figures are.
"""

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from _lean_loop import LeanLoop
from _report import Figure, report
from _verbose_calculator import VerboseCalculator
from _workload import CHAT_TEMPLATE, ENGINE, STOP, TOOL_CALLS, make_workload, script, train_tokenizer
from transformers import PreTrainedTokenizerFast

from agentrl_core.api import EngineContext, ToolContext
from agentrl_core.config import ResolvedConfig, load_config
from agentrl_core.controller import LocalRuntime
from agentrl_core.data.rows import PromptBatch
from agentrl_core.rollout.manager import AgentLoopManager
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.serving.replicas import EngineReplicas
from agentrl_testing.scripted_engine import ScriptedEngine
from agentrl_tools_basic.config import CalculatorConfig

CPU_GOAL_MS = 1.0
LAG_GOAL_MS = 20.0
TICK_MS = 1.0
MAX_MODEL_LEN = 4096
MAX_RESPONSE_LENGTH = 2048
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": None}

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """How many prompts, how often each is sampled, and how many words of reasoning the policy writes in a turn."""

    prompts: int
    samples: int
    words: int

    @property
    def name(self) -> str:
        return (
            f"{self.prompts} prompts × {self.samples}, {f'{self.words} words a turn' if self.words else 'calls only'}"
        )


class Benchmark:
    """The parts that all measurements share.

    Args:
        directory: for the tokenizer and the configuration.
        vocabulary: size of the tokenizer.
    """

    def __init__(self, directory: Path, vocabulary: int) -> None:
        schema = json.dumps(VerboseCalculator.schema)
        self.directory = directory
        self.tokenizer: PreTrainedTokenizerFast = train_tokenizer(directory, schema, vocabulary, seed=0)
        self.schema_tokens = len(self.tokenizer.encode(schema))

    def config(self, delay: float, max_concurrent: int) -> ResolvedConfig:
        """A configuration as a run has it."""
        settings = {
            "model": {"path": str(self.directory)},
            "data": {"train_files": ["none.parquet"]},
            "rollout": {
                "engine": {"name": "scripted", "config": {"script": ENGINE.script, "delay": delay}},
                "agent": {"loops": [{"name": "tool_agent"}], "max_concurrent": max_concurrent},
                "max_response_length": MAX_RESPONSE_LENGTH,
            },
            "tools": [{"name": f"{Path(__file__).parent / '_verbose_calculator.py'}:VerboseCalculator"}],
            "reward": {"functions": [{"name": "hash_answer"}]},
        }
        path = self.directory / "config.yaml"
        path.write_text(json.dumps(settings), encoding="utf-8")
        return load_config(path, check_files=False)

    def manager(self, runtime: LocalRuntime, delay: float, max_concurrent: int) -> AgentLoopManager:
        """A manager whose engine is started."""
        place = EngineContext(
            model_path=str(self.directory), max_model_len=MAX_MODEL_LEN, vocab_size=len(self.tokenizer)
        )
        config = self.config(delay, max_concurrent)
        engines = EngineReplicas(runtime, config, place)
        engines.start()
        return AgentLoopManager(config, runtime, engines)

    def lean_loop(self) -> LeanLoop:
        """The yardstick."""
        engine = ScriptedEngine(ENGINE, EngineContext(str(self.directory)), script=script)
        tool = VerboseCalculator(CalculatorConfig(), ToolContext("calculator"))
        return LeanLoop(self.tokenizer.backend_tokenizer, CHAT_TEMPLATE, engine, tool, STOP)

    def prompts(self, case: Case, seed: int) -> PromptBatch:
        """The batch of a step, another one for every seed; the engine will answer with its turns."""
        workload = make_workload(case.prompts, case.words, seed)
        script.play(workload.turns, self.tokenizer)
        return PromptBatch.sampled(workload.rows, 1, "train", case.samples, SAMPLING)


class TickingRuntime(LocalRuntime):
    """Beside every coroutine runs a timer that notes how late it is woken, in milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.lags: list[float] = []

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return super().run(self._beside_timer(coroutine))

    async def _beside_timer(self, coroutine: Coroutine[Any, Any, T]) -> T:
        timer = asyncio.create_task(self._tick())
        try:
            return await coroutine
        finally:
            timer.cancel()

    async def _tick(self) -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(TICK_MS / 1000)
            self.lags.append((time.perf_counter() - start) * 1000 - TICK_MS)


def measure_cpu(benchmark: Benchmark, case: Case, repetitions: int) -> list[Figure]:
    """CPU time per trajectory of the system and of the lean loop, in pairs; the first pair is a warm-up."""
    count = case.prompts * case.samples
    pairs = []
    with LocalRuntime() as runtime:
        manager, lean = benchmark.manager(runtime, 0.0, count), benchmark.lean_loop()
        for seed in range(repetitions + 1):
            prompts = benchmark.prompts(case, seed)
            gc.collect()
            start = time.process_time()
            results = manager.generate_sequences(prompts)
            middle = time.process_time()
            lean_results = runtime.run(lean.run_all(prompts.rows, MAX_RESPONSE_LENGTH))
            end = time.process_time()
            check(results, lean_results)
            pairs.append(((middle - start) * 1000 / count, (end - middle) * 1000 / count))
        manager.close()
    system, yardstick = zip(*pairs[1:], strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs[1:])
    return [
        Figure(case.name, "CPU per trajectory", statistics.median(system), "ms", CPU_GOAL_MS),
        Figure(case.name, "CPU per trajectory, lean loop", statistics.median(yardstick), "ms"),
        Figure(case.name, "ratio", ratio, ""),
    ]


def check(results: Sequence[TrajectoryResult], lean: Sequence[tuple[list[int], float]]) -> None:
    """Both made the same trajectories, token for token, and the same rewards; otherwise the figures mean nothing."""
    for result, (ids, score) in zip(results, lean, strict=True):
        output = result.outputs[0]
        if output.prompt_ids + output.response_ids != ids:
            raise RuntimeError(f"{result.trajectory_id}: the ids differ from those of the lean loop")
        if result.reward is None or result.reward.score != score or len(result.calls) != TOOL_CALLS:
            raise RuntimeError(f"{result.trajectory_id}: reward {result.reward}, calls {result.calls}")


def measure_lag(benchmark: Benchmark, case: Case, concurrent: int, delay: float) -> list[Figure]:
    """How late a timer is woken while ``concurrent`` trajectories are in flight, after a warm-up."""
    with TickingRuntime() as runtime:
        manager = benchmark.manager(runtime, delay, concurrent)
        for seed in range(2):
            prompts = benchmark.prompts(case, seed)
            gc.collect()
            runtime.lags.clear()
            start = time.perf_counter()
            manager.generate_sequences(prompts)
            seconds = time.perf_counter() - start
        lags = runtime.lags
        manager.close()
    name = f"{case.name}, {concurrent} in flight at {delay * 1000:g} ms"
    return [
        Figure(name, "event-loop lag, median", quantile(lags, 0.5), "ms"),
        Figure(name, "event-loop lag, p99", quantile(lags, 0.99), "ms", LAG_GOAL_MS),
        Figure(name, "event-loop lag, maximum", max(lags), "ms"),
        Figure(name, "trajectories per second", case.prompts * case.samples / seconds, ""),
    ]


def python_loop_ms() -> float:
    """How fast this machine is at the moment: what the CPU figures may be scaled by."""
    times = []
    for _ in range(9):
        start = time.process_time()
        sum(range(1_000_000))
        times.append((time.process_time() - start) * 1000)
    return statistics.median(times)


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that is not below a share ``q`` of all values."""
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--trajectories", type=int, default=512, help="of one measurement")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt, where prompts are sampled repeatedly")
    parser.add_argument("--words", type=int, default=12, help="of reasoning before each call")
    parser.add_argument("--concurrent", type=int, default=150, help="in flight while the lag is measured")
    parser.add_argument("--delay", type=float, default=20.0, help="of the engine while the lag is measured, ms")
    parser.add_argument("--repetitions", type=int, default=7, help="of the CPU measurement; medians are reported")
    parser.add_argument("--vocabulary", type=int, default=16384, help="tokens")
    options = parser.parse_args()
    groups = max(options.trajectories // options.samples, 1)
    cases = [
        Case(options.trajectories, 1, options.words),
        Case(groups, options.samples, options.words),
        Case(groups, options.samples, 0),
    ]
    with tempfile.TemporaryDirectory() as directory:
        benchmark = Benchmark(Path(directory), options.vocabulary)
        report("Rollout loop, model taken out", measure(benchmark, cases, options), options.json)


def measure(benchmark: Benchmark, cases: Sequence[Case], options: argparse.Namespace) -> Iterator[Figure]:
    """All figures."""
    yield Figure("setting", "Python loop of 1e6 additions", python_loop_ms(), "ms")
    yield Figure("setting", "tool schema", benchmark.schema_tokens, "tokens")
    for case in cases:
        yield from measure_cpu(benchmark, case, options.repetitions)
    for case in cases:
        yield from measure_lag(benchmark, case, options.concurrent, options.delay / 1000)


if __name__ == "__main__":
    main()
