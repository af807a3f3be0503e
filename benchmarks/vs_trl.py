"""Seconds per GRPO step of ``agentrl train`` beside TRL's GRPOTrainer, step by step in turns.

    python -m venv TRL && TRL/bin/python -m pip install torch==2.13.0 transformers==5.19.0 'trl==1.16.*'
    python benchmarks/vs_trl.py --trl-python TRL/bin/python [--threads 1 2] [--steps 20] [--json FILE]

Both train the same random model of 1.1 M parameters in float32 on the same prompts: 4 prompts x 8 completions of at
most 64 tokens, one update a step. Each is its own process; while one makes a step the other waits.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from _conversations import TINY, make_model
from _report import Figure, report
from _turns import ADDRESS

from agentrl_core.testing.tiny_model import tiny_tokenizer

GOAL = 0.6
WARM_UP = 2
VOCABULARY = 2048
RESPONSE = 64
PHASES = "timing/"


class Side:
    """One training run that waits for its turns."""

    def __init__(self, command: list[str], directory: Path, name: str, threads: int) -> None:
        address = str(directory / f"{name}-{threads}.sock")
        self._log = directory / f"{name}-{threads}.log"
        environment = os.environ | {ADDRESS: address, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._listener = Listener(address, "AF_UNIX")
        # The listener itself cannot notice that nobody will come.
        self._listener._listener._socket.settimeout(300.0)  # type: ignore[attr-defined]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self._connection: Connection | None = None
        self.steps: list[dict[str, float]] = []

    def first(self) -> None:
        """Wait for the end of the first step, which is not counted."""
        try:
            self._connection = self._listener.accept()
            self._connection.recv_bytes()
        except (OSError, EOFError) as error:
            raise RuntimeError(f"{self._log.name} ended early:\n{self._log.read_text()[-3000:]}") from error

    def step(self) -> None:
        """Let it make one step, alone."""
        if self._connection is None:
            raise RuntimeError("first() comes first")
        self._connection.send_bytes(b"go")
        try:
            self.steps.append(json.loads(self._connection.recv_bytes()))
        except EOFError as error:
            raise RuntimeError(f"{self._log.name} ended early:\n{self._log.read_text()[-3000:]}") from error

    def close(self) -> None:
        """End it in the middle: what comes after the last step is of no interest."""
        self._process.kill()
        self._process.wait()
        self._listener.close()


def prepare(directory: Path) -> tuple[Path, Path]:
    """The model's folder and the prompts, made here."""
    tokenizer = tiny_tokenizer(extra_tokens=[f"<{number}>" for number in range(VOCABULARY - 261)])
    module = make_model(TINY, VOCABULARY)
    module.config.eos_token_id = module.generation_config.eos_token_id = tokenizer.eos_token_id
    model, data = directory / "model", directory / "train.jsonl"
    module.save_pretrained(model)
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.save_pretrained(model)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Say something about {number:04d}."}],
            "reward_model": {"ground_truth": ""},
        }
        for number in range(512)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return model, data


def agentrl_command(directory: Path, model: Path, data: Path, steps: int, threads: int) -> list[str]:
    """``agentrl train`` with what TRL does by default: no KL term, gradients clipped at 1, no validation."""
    side = Path(__file__).parent / "_turns_agentrl.py"
    settings = {
        "model": {"path": str(model)},
        "data": {"train_files": [str(data)], "batch_size": 4, "max_prompt_length": 128},
        "rollout": {
            "engine": {"name": "hf"},
            "agent": {"loops": [{"name": "single_turn"}]},
            "n": 8,
            "max_response_length": RESPONSE,
        },
        "reward": {"functions": [{"name": f"{side}:distinct"}]},
        "algorithm": {"advantage": {"name": "grpo"}, "loss": {"name": "ppo"}},
        "actor": {"optimizer": {"lr": 1.0e-4}, "mini_batches": 1, "micro_batch_tokens": 8192, "grad_clip": 1.0},
        "trainer": {"name": f"vs-trl-{threads}", "steps": steps, "output_dir": str(directory / "runs")},
        "hooks": [{"name": f"{side}:TakeTurns"}],
        "cluster": {"cpu_threads": threads},
    }
    path = directory / f"agentrl-{threads}.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return [str(Path(sys.executable).with_name("agentrl")), "train", str(path)]


def measure(directory: Path, options: argparse.Namespace, model: Path, data: Path, threads: int) -> list[Figure]:
    """Pairs of steps with so many threads on either side."""
    # The run's own end, with its validation and checkpoint, lies beyond what is counted.
    steps = options.steps + WARM_UP + 5
    ours = agentrl_command(directory, model, data, steps, threads)
    script = Path(__file__).parent / "_turns_trl.py"
    theirs = [str(options.trl_python), str(script), str(model), str(data), str(steps), str(threads)]
    with ExitStack() as stack:
        sides = {
            "agentrl": Side(ours, directory, "agentrl", threads),
            "TRL": Side(theirs, directory, "trl", threads),
        }
        for side in sides.values():
            stack.callback(side.close)
        for side in sides.values():
            side.first()
        for _ in range(WARM_UP + options.steps):
            for side in sides.values():
                side.step()
        counted = {name: side.steps[WARM_UP:] for name, side in sides.items()}
    case = f"{threads} thread{'s' if threads > 1 else ''}"
    figures = []
    for name, made in counted.items():
        figures.append(Figure(case, f"{name}: a step", statistics.median(step["seconds"] for step in made), "s"))
        length = statistics.mean(step["response_length/mean"] for step in made)
        figures.append(Figure(case, f"{name}: response length", length, "tokens"))
    ratio = statistics.median(
        mine["seconds"] / other["seconds"] for mine, other in zip(counted["agentrl"], counted["TRL"], strict=True)
    )
    figures.append(Figure(case, "agentrl / TRL, median of pairs", ratio, "", GOAL))
    everywhere = set.intersection(*(set(step) for step in counted["agentrl"]))
    phases = sorted(name for name in everywhere if name.startswith(PHASES) and name.count("/") == 1)
    for phase in phases:
        seconds = statistics.median(step[phase] for step in counted["agentrl"])
        figures.append(Figure(case, f"agentrl: {phase}", seconds, "s"))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, metavar="PATH", help="interpreter with TRL 1.16")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="on either side")
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps, after the warm-up")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    if options.trl_python is None:
        sys.stdout.write("Not measured: TRL, which needs --trl-python PATH; --help says how to make it.\n")
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model, data = prepare(directory)
        figures = (
            figure for threads in options.threads for figure in measure(directory, options, model, data, threads)
        )
        report("A GRPO step", figures, options.json)


if __name__ == "__main__":
    main()
