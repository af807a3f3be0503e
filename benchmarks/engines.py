"""Tokens per second of the engines, always beside something else in the same run.

    python benchmarks/engines.py [--vllm-python PATH] [--sglang-python PATH] [--large] [--json FILE]

1. Embedded against ``model.generate`` and against transformers' continuous batching, lengths ragged.
2. Four-turn conversations, embedded, with and without the keys and values of the earlier turns.
3. Embedded against vLLM on the same ragged prompts.
4. vLLM and SGLang through the router and Ray against the same engine in its own process, 32 requests at once.

Parts 3 and 4 run where the interpreter is given. ``--large`` takes a model of 0.1 billion parameters for part 4.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import torch
from _conversations import LARGE, TINY, Requests, make_model, ragged, random_prompts, save
from _report import Figure, report
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from agentrl_core.api import EngineContext, SamplingParams
from agentrl_core.config import load_config
from agentrl_core.controller import make_runtime
from agentrl_core.serving.replicas import EngineReplicas
from agentrl_core.serving.router import AsyncLLMServerManager
from agentrl_engine_hf.config import HFEngineConfig
from agentrl_engine_hf.engine import HFEngine

VOCABULARY = 2048
MAX_MODEL_LEN = 512
GENERATE_GOAL, VLLM_GOAL, TURNS_GOAL = 2.5, 1.0, 2.0
ROUTER_GOAL, ROUTER_GOAL_LARGE = 0.8, 0.9
TURNS, FIRST_PROMPT, ANSWER, OBSERVATION = 4, 400, 16, 32

Measure = Callable[[], float]


class Embedded:
    """The embedded engine on a module."""

    def __init__(self, runner: asyncio.Runner, module: Any) -> None:
        self._runner = runner
        context = EngineContext("", max_model_len=2 * MAX_MODEL_LEN, vocab_size=VOCABULARY, shared_module=module)
        self._engine = HFEngine(HFEngineConfig(), context)
        self._number = 0
        runner.run(self._engine.start())

    def seconds(self, requests: Requests) -> float:
        """All at once."""
        return self._runner.run(self._sample(requests))

    async def _sample(self, requests: Requests) -> float:
        self._number += 1
        names = [f"{self._number}-{index}" for index in range(len(requests.prompts))]
        start = time.perf_counter()
        outputs = await asyncio.gather(
            *(
                self._engine.generate(prompt, SamplingParams(max_tokens=tokens, seed=index), name)
                for index, (name, prompt, tokens) in enumerate(
                    zip(names, requests.prompts, requests.max_tokens, strict=True)
                )
            )
        )
        seconds = time.perf_counter() - start
        check_tokens(sum(len(output.token_ids) for output in outputs), requests)
        for name in names:
            await self._engine.close_session(name)
        return seconds

    def conversations(self, prompts: list[list[int]], keep: bool) -> float:
        """Turns of all conversations at once; without ``keep`` each turn is its own session."""
        return self._runner.run(self._converse(prompts, keep))

    async def _converse(self, prompts: list[list[int]], keep: bool) -> float:
        self._number += 1
        start = time.perf_counter()
        await asyncio.gather(
            *(self._conversation(f"{self._number}-{i}", prompt, keep) for i, prompt in enumerate(prompts))
        )
        return time.perf_counter() - start

    async def _conversation(self, name: str, prompt: list[int], keep: bool) -> None:
        ids = list(prompt)
        rng = random.Random(len(prompt))
        for turn in range(TURNS):
            session = name if keep else f"{name}-{turn}"
            output = await self._engine.generate(ids, SamplingParams(max_tokens=ANSWER, seed=turn), session)
            ids += output.token_ids + [rng.randrange(VOCABULARY) for _ in range(OBSERVATION)]
            if not keep or turn == TURNS - 1:
                await self._engine.close_session(session)

    def close(self) -> None:
        """Ends its thread."""
        self._runner.run(self._engine.close())


class Child:
    """An engine in its own interpreter, without any of ours around it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def seconds(self, requests: Requests) -> float:
        """All at once, timed there."""
        work = {"prompts": requests.prompts, "max_tokens": requests.max_tokens}
        self._connection.send_bytes(json.dumps(work).encode())
        answer = json.loads(self._connection.recv_bytes())
        check_tokens(answer["tokens"], requests)
        return float(answer["seconds"])


@contextmanager
def child(name: str, python: Path, model: Path) -> Iterator[Child]:
    """Start the engine, end it afterwards."""
    address = str(model.parent / f"{name}.sock")
    log = (model.parent / f"{name}.log").open("w+")
    with Listener(address, "AF_UNIX") as listener, log:
        script = Path(__file__).parent / "_engine_child.py"
        command = [python, script, name, model, address]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            connection = accept(listener, process, log)
            connection.recv_bytes()
            yield Child(connection)
            connection.send_bytes(b"null")
            process.wait(30)
        finally:
            # With the processes that the engine has made.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def accept(listener: Listener, process: "subprocess.Popen[bytes]", log: Any) -> Connection:
    """The child's connection, or its last lines where it ends before."""
    # The listener itself cannot wait for two things.
    socket = listener._listener._socket  # type: ignore[attr-defined]
    socket.settimeout(1.0)
    while True:
        try:
            return listener.accept()
        except TimeoutError:
            if process.poll() is not None:
                log.seek(0)
                raise RuntimeError("the engine ended as it started:\n" + log.read()[-3000:]) from None


@contextmanager
def routed(name: str, python: Path, model: Path, requests: Requests) -> Iterator[Measure]:
    """Seconds of the same through ``AsyncLLMServerManager``, Ray and our plugin."""
    settings = {
        "model": {"path": str(model)},
        "data": {"train_files": ["none.parquet"]},
        "rollout": {
            "engine": {"name": name, "python": str(python)},
            "agent": {"loops": [{"name": "single_turn"}]},
        },
        "reward": {"functions": [{"name": "hash_answer"}]},
        "cluster": {"runtime": "ray"},
    }
    path = model.parent / f"{name}.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    config = load_config(path, check_files=False)
    place = EngineContext(str(model), max_model_len=MAX_MODEL_LEN, vocab_size=VOCABULARY)
    with make_runtime("ray", num_cpus=32) as runtime:
        replicas = EngineReplicas(runtime, config, place)
        replicas.start()
        router = AsyncLLMServerManager(
            replicas.servers,
            turn_timeout=300.0,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCABULARY,
            capabilities=config.rollout.engine.plugin.spec.capabilities,
        )
        rounds = iter(range(1_000_000))

        async def sample() -> float:
            number = next(rounds)
            start = time.perf_counter()
            outputs = await asyncio.gather(
                *(
                    router.generate(f"{number}-{index}", prompt, SamplingParams(max_tokens=tokens, seed=index))
                    for index, (prompt, tokens) in enumerate(zip(requests.prompts, requests.max_tokens, strict=True))
                )
            )
            seconds = time.perf_counter() - start
            check_tokens(sum(len(output.token_ids) for output in outputs), requests)
            return seconds

        yield lambda: runtime.run(sample())


def concurrent_requests(count: int, tokens: int) -> Requests:
    """Of part 4, with answers of so many tokens."""
    return Requests(random_prompts(random.Random(1), count, VOCABULARY, 32), [tokens] * count)


def check_tokens(tokens: int, requests: Requests) -> None:
    """Everybody sampled the same number, otherwise the seconds mean nothing."""
    if tokens != requests.tokens:
        raise RuntimeError(f"{tokens} tokens were sampled, {requests.tokens} were asked for")


def generate(module: Any, requests: Requests) -> float:
    """``model.generate`` runs all rows for as long as the longest; what comes after a row's own end is not counted."""
    width = max(map(len, requests.prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in requests.prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in requests.prompts])
    start = time.perf_counter()
    module.generate(
        ids, attention_mask=mask, do_sample=True, max_new_tokens=max(requests.max_tokens), top_k=0, top_p=1.0
    )
    return time.perf_counter() - start


@contextmanager
def continuous_batching(module: Any) -> Iterator[Callable[[Requests], float]]:
    """transformers' own, with the smaller pages that are faster here."""
    generation = GenerationConfig(do_sample=True, max_new_tokens=128, eos_token_id=-1, pad_token_id=0)
    settings = ContinuousBatchingConfig(num_blocks=512, page_size=32, max_batch_tokens=2048, return_logprobs=True)
    attention = module.config._attn_implementation
    manager = module.init_continuous_batching(generation_config=generation, continuous_batching_config=settings)
    manager.start()

    def seconds(requests: Requests) -> float:
        start = time.perf_counter()
        for prompt, tokens in zip(requests.prompts, requests.max_tokens, strict=True):
            manager.add_request(prompt, max_new_tokens=tokens)
        sampled = ended = 0
        while ended < len(requests.prompts):
            result = manager.get_result(timeout=5.0)
            if result is None or result.error:
                raise RuntimeError(f"transformers' continuous batching stopped: {result and result.error}")
            ended += 1
            sampled += len(result.generated_tokens)
        elapsed = time.perf_counter() - start
        check_tokens(sampled, requests)
        return elapsed

    try:
        yield seconds
    finally:
        manager.stop(block=True, timeout=10)
        module.set_attn_implementation(attention)


def compare(case: str, tokens: int, ours: tuple[str, Measure], others: dict[str, tuple[Measure, float | None]],
            repetitions: int) -> list[Figure]:  # fmt: skip
    """One after the other in each repetition; the first is a warm-up. Ratios are of tokens/s, medians over pairs."""
    name, measure = ours
    times: dict[str, list[float]] = {key: [] for key in (name, *others)}
    for _ in range(repetitions + 1):
        times[name].append(measure())
        for key, (other, _) in others.items():
            times[key].append(other())
    figures = [
        Figure(case, key, statistics.median(tokens / seconds for seconds in values[1:]), "tokens/s")
        for key, values in times.items()
    ]
    for key, (_, goal) in others.items():
        ratio = statistics.median(theirs / mine for mine, theirs in zip(times[name][1:], times[key][1:], strict=True))
        figures.append(Figure(case, f"{name} / {key}", ratio, "", goal, at_least=True))
    return figures


def embedded_figures(module: Any, model: Path, options: argparse.Namespace) -> Iterator[Figure]:
    """Parts 1 to 3."""
    requests = ragged(options.requests, VOCABULARY, prompt=32, mean=32, cap=128)
    conversations = random_prompts(random.Random(2), max(options.requests // 4, 1), VOCABULARY, FIRST_PROMPT)
    with asyncio.Runner() as runner:
        embedded = Embedded(runner, module)
        ours = ("embedded", lambda: embedded.seconds(requests))
        others: dict[str, tuple[Measure, float | None]] = {
            "model.generate": (lambda: generate(module, requests), GENERATE_GOAL)
        }
        yield from compare(f"{options.requests} ragged requests", requests.tokens, ours, others, options.repetitions)
        yield from compare(
            f"{len(conversations)} conversations of {TURNS} turns",
            len(conversations) * TURNS * ANSWER,
            ("cache kept", lambda: embedded.conversations(conversations, True)),
            {"no cache": (lambda: embedded.conversations(conversations, False), TURNS_GOAL)},
            options.repetitions,
        )
        if options.vllm_python:
            with child("vllm", options.vllm_python, model) as vllm:
                vllm_case: dict[str, tuple[Measure, float | None]] = {
                    "vLLM": (lambda: vllm.seconds(requests), VLLM_GOAL)
                }
                yield from compare(
                    f"{options.requests} ragged requests, vLLM", requests.tokens, ours, vllm_case, options.repetitions
                )
        embedded.close()


def continuous_batching_figures(options: argparse.Namespace) -> list[Figure]:
    """Two copies of one model: transformers changes the attention of the one that it serves."""
    requests = ragged(options.requests, VOCABULARY, prompt=32, mean=32, cap=128)
    with (
        asyncio.Runner() as runner,
        continuous_batching(make_model(TINY, VOCABULARY)) as theirs,
    ):
        embedded = Embedded(runner, make_model(TINY, VOCABULARY))
        figures = compare(
            f"{options.requests} ragged requests, transformers",
            requests.tokens,
            ("embedded", lambda: embedded.seconds(requests)),
            {"continuous batching": (lambda: theirs(requests), None)},
            options.repetitions,
        )
        embedded.close()
    return figures


def absolute(text: str) -> Path:
    """Not resolved: an environment is known by the link that is its interpreter."""
    return Path(text).absolute()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=absolute, metavar="PATH", help="interpreter with vLLM and our plugin")
    parser.add_argument("--sglang-python", type=absolute, metavar="PATH", help="interpreter with SGLang and our plugin")
    parser.add_argument("--large", action="store_true", help="0.1 billion parameters behind the router")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer behind the router")
    parser.add_argument("--parts", nargs="+", choices=("embedded", "transformers", "router"), metavar="PART",
                        default=["embedded", "transformers", "router"],
                        help="of embedded, transformers, router")  # fmt: skip
    parser.add_argument(
        "--requests", type=int, default=64, help="of parts 1 and 3; a quarter in part 2, half in part 4"
    )
    parser.add_argument("--threads", type=int, default=1, help="of this process")
    parser.add_argument("--repetitions", type=int, default=5, help="pairs; medians are reported")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    report("Engines", measure(options), options.json)
    for name in ("vllm", "sglang"):
        if getattr(options, f"{name}_python") is None:
            sys.stdout.write(f"Not measured: {name}, which needs --{name}-python PATH.\n")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """The parts that are asked for."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        module = make_model(TINY, VOCABULARY)
        save(module, model)
        if "embedded" in options.parts:
            yield from embedded_figures(module, model, options)
        if "transformers" in options.parts:
            yield from continuous_batching_figures(options)
        if "router" in options.parts:
            yield from router_figures(model, options)


def router_figures(model: Path, options: argparse.Namespace) -> Iterator[Figure]:
    """Part 4."""
    if options.large:
        save(make_model(LARGE, VOCABULARY), model)
    size, goal = ("0.1 B", ROUTER_GOAL_LARGE) if options.large else ("tiny", ROUTER_GOAL)
    concurrent = max(options.requests // 2, 1)
    requests = concurrent_requests(concurrent, options.tokens)
    for name in ("vllm", "sglang"):
        python = getattr(options, f"{name}_python")
        if python is None:
            continue
        with child(name, python, model) as own, routed(name, python, model, requests) as through:
            yield from compare(
                f"{concurrent} at once, {name}, {size}",
                requests.tokens,
                ("through router and Ray", through),
                {"in its own process": ((lambda own=own: own.seconds(requests)), goal)},
                options.repetitions,
            )


if __name__ == "__main__":
    main()
