"""How long the prompts of a run take to load: read, check, render, measure.

python benchmarks/prompts.py [--rows 20000] [--repetitions 3] [--json FILE]
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from _report import Figure, print_figures, write_json
from _verbose_calculator import VerboseCalculator
from _workload import make_workload, train_tokenizer

from agentrl_core.config import Config, load_config
from agentrl_core.data.chat_template import ChatTemplateRenderer
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.trainer.prompt_data import PromptLoader

GOAL_SECONDS = 4.0
GOAL_ROWS = 20_000


def make_config(directory: Path, rows: int, vocabulary: int) -> Config:
    """A configuration over ``rows`` different prompts and a tokenizer, all of them in ``directory``."""
    train_tokenizer(directory, json.dumps(VerboseCalculator.schema), vocabulary, seed=0)
    data = directory / "train.jsonl"
    with data.open("w", encoding="utf-8") as file:
        for row in make_workload(rows, words=12, seed=0).rows:
            row["prompt"] = row.pop("raw_prompt")
            file.write(json.dumps(row) + "\n")
    settings = {
        "model": {"path": str(directory)},
        "trainer": {"output_dir": str(directory / "runs")},
        "data": {"train_files": [str(data)], "max_prompt_length": 2048},
        "rollout": {"engine": {"name": "scripted"}, "agent": {"loops": [{"name": "tool_agent"}]}},
        "tools": [{"name": f"{Path(__file__).parent / '_verbose_calculator.py'}:VerboseCalculator"}],
        "reward": {"functions": [{"name": "hash_answer"}]},
    }
    path = directory / "config.yaml"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return load_config(path, check_files=False)


def measure(config: Config, rows: int, repetitions: int) -> list[Figure]:
    """Seconds and CPU seconds of first starts and of second ones, which know the lengths of the prompts.

    The very first load also fills the cache of ``datasets`` and does not count.
    """
    figures = []
    for start in ("first", "second"):
        figures += _measure(config, rows, repetitions, start)
    return figures


def _measure(config: Config, rows: int, repetitions: int, which: str) -> list[Figure]:
    seconds, cpu = [], []
    for repetition in range(repetitions + 1):
        if which == "first":
            shutil.rmtree(config.trainer.output_dir, ignore_errors=True)
        renderer = HFChatRenderer.from_config(config.model)
        start, cpu_start = time.perf_counter(), time.process_time()
        data = PromptLoader(config, ChatTemplateRenderer.of(renderer)).load()
        if repetition:
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - cpu_start)
        assert len(data.train) == rows, f"{len(data.train)} of {rows} rows were kept"
    case = f"{rows} prompts, longest {data.longest_prompt} tokens, {which} start"
    goal = GOAL_SECONDS if rows == GOAL_ROWS and which == "first" else None
    return [
        Figure(case, "time, median", statistics.median(seconds), "s", goal),
        Figure(case, "CPU, median", statistics.median(cpu), "s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=GOAL_ROWS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=4_000, help="size of the tokenizer")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), options.rows, options.vocabulary)
        figures = measure(config, options.rows, options.repetitions)
    print_figures("Loading prompts", figures)
    if options.json is not None:
        write_json(options.json, figures)


if __name__ == "__main__":
    main()
