"""How long the prompts of a run take to load: read, check, render, measure; and how much memory they need.

python benchmarks/prompts.py [--rows 20000] [--repetitions 3] [--streaming] [--json FILE]

The memory is what the process has more of at the end, files that are mapped into memory left out.
"""

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from _report import Figure, report
from _verbose_calculator import VerboseCalculator
from _workload import make_workload, train_tokenizer

from agentrl_core.config import Config, load_config
from agentrl_core.data.chat_template import ChatTemplateRenderer
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.trainer.prompt_data import PromptData, PromptLoader

GOAL_SECONDS = 4.0
GOAL_ROWS = 20_000


DIFFERENT = 20_000
"""Prompts; further rows repeat them with a number."""


def make_config(directory: Path, rows: int, vocabulary: int, streaming: bool) -> Config:
    """A configuration over ``rows`` different prompts and a tokenizer, all of them in ``directory``."""
    train_tokenizer(directory, json.dumps(VerboseCalculator.schema), vocabulary, seed=0)
    data = directory / "train.jsonl"
    with data.open("w", encoding="utf-8") as file:
        made = make_workload(min(rows, DIFFERENT), words=12, seed=0).rows
        for number in range(rows):
            row = made[number % DIFFERENT]
            *before, last = row["raw_prompt"]
            prompt = [*before, {**last, "content": f"{last['content']} {number // DIFFERENT}".removesuffix(" 0")}]
            fields = {key: value for key, value in row.items() if key != "raw_prompt"}
            file.write(json.dumps({**fields, "prompt": prompt}) + "\n")
    settings = {
        "model": {"path": str(directory)},
        "trainer": {"output_dir": str(directory / "runs")},
        "data": {"train_files": [str(data)], "max_prompt_length": 2048, "streaming": streaming},
        "rollout": {"engine": {"name": "scripted"}, "agent": {"loops": [{"name": "tool_agent"}]}},
        "tools": [{"name": f"{Path(__file__).parent / '_verbose_calculator.py'}:VerboseCalculator"}],
        "reward": {"functions": [{"name": "hash_answer"}]},
    }
    path = directory / "config.yaml"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return load_config(path, check_files=False)


def measure(config: Config, rows: int, repetitions: int) -> Iterator[Figure]:
    """Seconds, CPU seconds and memory of first starts and of second ones, which know the lengths of the prompts.

    The very first load also fills the cache of ``datasets`` and is a figure of its own.
    """
    size = Path(config.data.train_files[0]).stat().st_size
    seconds, _, data = _load(config)
    assert len(data.train) == rows, f"{len(data.train)} of {rows} rows were kept"
    mode = "streamed" if config.data.streaming else "read at once"
    case = f"{rows} prompts in {size / 2**20:.0f} MiB, {mode}"
    yield Figure(f"{case}, nothing cached", "time to the first batch", seconds, "s")
    for start in ("first", "second"):
        yield from _measure(config, repetitions, case, start)


def _load(config: Config) -> tuple[float, float, PromptData]:
    """Seconds and CPU seconds to the first batch, and the data."""
    renderer = HFChatRenderer.from_config(config.model)
    start, cpu_start = time.perf_counter(), time.process_time()
    data = PromptLoader(config, ChatTemplateRenderer.of(renderer)).load()
    data.batch(1)
    return time.perf_counter() - start, time.process_time() - cpu_start, data


def _measure(config: Config, repetitions: int, case: str, which: str) -> list[Figure]:
    seconds, cpu, memory = [], [], []
    for _ in range(repetitions):
        if which == "first":
            shutil.rmtree(config.trainer.output_dir, ignore_errors=True)
        gc.collect()
        before = _own_memory()
        wall, own, data = _load(config)
        seconds.append(wall)
        cpu.append(own)
        memory.append(_own_memory() - before)
        del data
    first = which == "first" and not config.data.streaming
    goal = GOAL_SECONDS if f"{GOAL_ROWS} prompts" in case and first else None
    case = f"{case}, {which} start"
    return [
        Figure(case, "time to the first batch, median", statistics.median(seconds), "s", goal),
        Figure(case, "CPU, median", statistics.median(cpu), "s"),
        Figure(case, "memory, largest", max(memory), "MiB"),
    ]


def _own_memory() -> float:
    """Resident memory of this process in MiB, without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=GOAL_ROWS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--streaming", action="store_true", help="with data.streaming")
    parser.add_argument("--vocabulary", type=int, default=4_000, help="size of the tokenizer")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), options.rows, options.vocabulary, options.streaming)
        report("Loading prompts", measure(config, options.rows, options.repetitions), options.json)


if __name__ == "__main__":
    main()
