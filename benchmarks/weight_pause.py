"""How long requests stand still while an engine takes new weights, with the engine in its own process on Ray.

    python benchmarks/weight_pause.py [--engine hf] [--engine vllm=PATH] [--modes recompute continue restart]

For each engine: updates without requests, which take the transport's own time, and updates while 32 requests run, as
a run makes them: one safetensors file in memory, one call of the replica. The pause is the metric
``timing/engine/pause``: from the call to its return, while requests run. The silence is what a client sees: the longest
time around the update in which the engine reports no progress, the prefill that ``recompute`` needs included.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import torch
from _conversations import LARGE, TINY, make_model, random_prompts, save
from _report import Figure, report

from agentrl_core.api import EngineContext, SamplingParams, WeightUpdate
from agentrl_core.config import load_config
from agentrl_core.controller import make_runtime
from agentrl_core.fsdp2.weights import ModelWeights
from agentrl_core.serving.replicas import EngineReplicas
from agentrl_core.serving.weight_transport import Weights

VOCABULARY = 2048
MAX_MODEL_LEN = 1024
REQUESTS, PROMPT = 32, 64
GOAL_MS = 50.0
"""What a pause may take beyond the transport's own time."""
CLOCK_TOKENS = 24
"""Of a short request; when it is answered, the others have about as many."""


def measure(engine: str, modes: Sequence[str], shape: dict[str, int], updates: int, folder: Path) -> Iterator[Figure]:
    """The figures of one engine."""
    name, _, python = engine.partition("=")
    model = make_model(shape, VOCABULARY)
    save(model, folder / "model")
    case = f"{name}, {sum(each.nbytes for each in model.parameters()) / 2**20:.0f} MiB"
    for mode in modes:
        path = folder / f"{name}-{mode}.json"
        slot = {"name": name, **({"python": python} if python else {})}
        settings = {
            "model": {"path": str(folder / "model")},
            "data": {"train_files": ["none.parquet"]},
            "rollout": {
                "engine": {**slot, "replicas": 1},
                "agent": {"loops": [{"name": "single_turn"}]},
                "on_new_weights": mode,
            },
            "reward": {"functions": [{"name": "hash_answer"}]},
            "cluster": {"runtime": "ray"},
        }
        path.write_text(json.dumps(settings), encoding="utf-8")
        config = load_config(path, check_files=False)
        context = EngineContext(str(folder / "model"), max_model_len=MAX_MODEL_LEN, vocab_size=VOCABULARY)
        with make_runtime("ray", num_cpus=32) as runtime, closing(ModelWeights(model)) as files:
            runtime.overlap()
            replicas = EngineReplicas(runtime, config, context)
            replicas.start()
            updater = Updater(replicas, files)
            idle = [updater.seconds() for _ in range(updates + 1)][1:]
            replicas.metrics()
            taken = [runtime.run(updater.under_load(number)) for number in range(updates + 1)][1:]
        own, (pauses, silences) = statistics.median(idle), map(list, zip(*taken, strict=True))
        where = f"{case}, {mode}"
        yield Figure(where, "update without requests, median", 1000 * own, "ms")
        yield Figure(where, "pause with 32 requests, median", 1000 * statistics.median(pauses), "ms")
        beyond = 1000 * (statistics.median(pauses) - own)
        yield Figure(where, "pause beyond the update, median", beyond, "ms", GOAL_MS)
        yield Figure(where, "pause with 32 requests, largest", 1000 * max(pauses), "ms")
        yield Figure(where, "silence around the update, median", 1000 * statistics.median(silences), "ms")


class Updater:
    """Updates a replica as a run does."""

    def __init__(self, replicas: EngineReplicas, files: ModelWeights) -> None:
        self._replicas = replicas
        self._files = files
        self._version = 0

    def _weights(self) -> Weights:
        self._version += 1
        return Weights(self._version, write=lambda: [WeightUpdate(files=self._files.write_file())])

    def seconds(self) -> float:
        """Of an update that no request meets, without writing the file."""
        weights = self._weights()
        assert weights.write is not None
        weights.update, weights.write = weights.write(), None
        start = time.perf_counter()
        self._replicas.update_weights(weights)
        return time.perf_counter() - start

    async def under_load(self, round_number: int) -> tuple[float, float]:
        """The pause of an update while requests run, and the longest silence around it."""
        rng, (server,) = random.Random(round_number), self._replicas.servers
        prompts = random_prompts(rng, REQUESTS, VOCABULARY, PROMPT)

        def ask(request: str, prompt: list[int], tokens: int) -> asyncio.Task[object]:
            return asyncio.create_task(self._ask(request, prompt, tokens))

        tokens = MAX_MODEL_LEN - PROMPT - 1
        crowd = [ask(f"{round_number}-{number}", prompt, tokens) for number, prompt in enumerate(prompts)]
        await ask(f"{round_number}-clock", prompts[0], CLOCK_TOKENS)
        heard: list[float] = []
        listening = asyncio.create_task(self._listen(heard))
        await ask(f"{round_number}-clock", prompts[0], CLOCK_TOKENS)
        await asyncio.to_thread(self._replicas.update_weights, self._weights())
        await ask(f"{round_number}-clock", prompts[0], CLOCK_TOKENS)
        listening.cancel()
        for task in crowd:
            task.cancel()
        await asyncio.gather(listening, *crowd, return_exceptions=True)
        pause = (await server.call("metrics"))["pause_seconds"]
        return pause, max(after - before for before, after in zip(heard, heard[1:], strict=False))

    async def _ask(self, request: str, prompt: list[int], tokens: int) -> object:
        (server,) = self._replicas.servers
        if self._replicas.has_sessions:
            await server.call("open_session", request)
        try:
            return await server.call("generate", prompt, SamplingParams(tokens, seed=1), request)
        finally:
            if self._replicas.has_sessions:
                await server.call("close_session", request)

    async def _listen(self, heard: list[float]) -> None:
        """Note when the engine's progress changes."""
        (server,), last = self._replicas.servers, None
        while True:
            number = (await server.call("progress")).number
            if number != last:
                last = number
                heard.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--engine", action="append", metavar="NAME[=PYTHON]", help="engine, and its interpreter")
    parser.add_argument("--modes", nargs="+", default=["recompute", "continue", "restart"], help="on_new_weights")
    parser.add_argument("--updates", type=int, default=10, help="measured updates of each kind")
    parser.add_argument("--large", action="store_true", help="a model of 0.1 billion parameters")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = LARGE if options.large else TINY

    def figures() -> Iterator[Figure]:
        for engine in options.engine or ["hf"]:
            with tempfile.TemporaryDirectory() as folder:
                yield from measure(engine, options.modes, shape, options.updates, Path(folder))

    report("Pauses of engines that take new weights", figures(), options.json)


if __name__ == "__main__":
    main()
