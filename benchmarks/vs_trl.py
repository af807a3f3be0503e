"""Seconds per GRPO step of ``agentrl train`` beside TRL's GRPOTrainer, step by step in turns.

    python -m venv TRL && TRL/bin/python -m pip install torch==2.13.0 transformers==5.19.0 'trl==1.16.*'
    python benchmarks/vs_trl.py --trl-python TRL/bin/python [--cases CASE ...] [--threads 1 2] [--steps 20]
        [--adapter] [--json FILE]

Both train the same model of 1.1 M parameters in float32 on the same prompts, 4 prompts x 8 samples and one update a
step. Each is its own process; while one makes a step the other waits.

    short    prompts of 70 tokens, completions of at most 64
    schemas  the same with the schemas of tools before each prompt: 450 tokens
    turns    three turns of 44 tokens with a tool: TRL has its own ``tools``, agentrl its tool agent
    forks    the same for TRL. agentrl samples twice for each prompt and goes on in two branches after either call: as
             many samples, whose first turns are sampled and trained once

With ``--adapter`` both train a LoRA adapter of rank 16 in all linear layers instead of all weights; TRL then needs PEFT
(``TRL/bin/python -m pip install peft``).

A random model calls no tools. That of ``turns`` and ``forks`` has weights with which each token follows from a set that
the token before it decides, so that every turn is a call with random arguments.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import torch
from _conversations import TINY, make_model
from _report import Figure, report
from _turns import ADDRESS, find_places
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from agentrl_testing.tiny_model import tiny_tokenizer

WARM_UP = 2
RANK = 16
"""Of the adapter with ``--adapter``."""
VOCABULARY = 2048
PHASES = "timing/"
SIDE = Path(__file__).parent / "_turns_agentrl.py"
SCHEMAS = "You may answer with calls of these tools: " + json.dumps(get_json_schema(find_places))[:330]
ARGUMENTS, CHOICES = 40, 40
"""Tokens of a call's arguments, and how many of them may stand at each place."""
CALL = ('<tool_call>\n{"name": "find_places", "arguments": {"near": "', '"}}\n</tool_call>')
"""A call in front of and behind its arguments, a token each."""


@dataclass(frozen=True)
class Case:
    """How both are run.

    Args:
        goal: seconds of a step in parts of TRL's.
        system: what stands in front of each question.
        response: most tokens of a completion, tools' answers counted.
        turns: of a completion; with more than one, there is a tool.
        samples: trajectories of agentrl for each prompt.
        loop: of agentrl.
    """

    goal: float
    system: str = ""
    response: int = 64
    turns: int = 1
    samples: int = 8
    loop: dict[str, Any] = field(default_factory=lambda: {"name": "single_turn"})


CASES = {
    "short": Case(0.6),
    "schemas": Case(0.22, SCHEMAS),
    "turns": Case(0.3, response=400, turns=3, loop={"name": "tool_agent", "config": {"max_assistant_turns": 3}}),
    "forks": Case(0.3, response=400, turns=3, samples=2, loop={"name": f"{SIDE}:Forks"}),
}


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


def prepare(directory: Path, case: Case) -> tuple[Path, Path]:
    """The model's folder and the prompts, made here."""
    is_text = case.turns > 1
    names = [f"<{number}>" for number in range(VOCABULARY - 261 - len(CALL) * is_text)]
    tokenizer = tiny_tokenizer(extra_tokens=[] if is_text else names)
    if is_text:
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*CALL, *names)])
    module = make_model(TINY, VOCABULARY)
    if is_text:
        module = calling(module, tokenizer, names)
    module.config.eos_token_id = module.generation_config.eos_token_id = tokenizer.eos_token_id
    model, data = directory / "model", directory / "train.jsonl"
    module.save_pretrained(model)
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.save_pretrained(model)
    system = [{"role": "system", "content": case.system}] if case.system else []
    rows = [
        {
            "prompt": [*system, {"role": "user", "content": f"Say something about {number:04d}."}],
            "reward_model": {"ground_truth": ""},
        }
        for number in range(512)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return model, data


def calling(module: Any, tokenizer: PreTrainedTokenizerFast, names: list[str]) -> Any:
    """The model with weights that call the tool in every turn: each token's embedding says in which place of a call it
    stands, the layers add nothing to it, and the head makes the tokens of the next place likely.

    Rows of names differ in length, so that rewards differ.
    """
    opening, closing = tokenizer.convert_tokens_to_ids(list(CALL))
    choices = [
        tokenizer.convert_tokens_to_ids([names[place + ARGUMENTS * choice] for choice in range(CHOICES)])
        for place in range(ARGUMENTS)
    ]
    (newline,) = tokenizer.encode("\n")
    places = [[newline], [opening], *choices, [closing], [tokenizer.eos_token_id]]
    own = torch.zeros(VOCABULARY, TINY["hidden_size"])
    follows = torch.zeros(VOCABULARY, TINY["hidden_size"])
    for place, tokens in enumerate(places):
        own[tokens, place] = 1.0
        follows[tokens, place - 1] = 2.0 if place else 0.0
    # Other tokens are nowhere.
    own[own.sum(-1) == 0, -1] = 1.0
    with torch.no_grad():
        for layer in module.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        module.model.embed_tokens.weight.copy_(own)
        module.lm_head.weight = torch.nn.Parameter(follows)
    module.config.tie_word_embeddings = False
    return module


def agentrl_command(
    directory: Path, model: Path, data: Path, steps: int, threads: int, case: Case, rank: int
) -> list[str]:
    """``agentrl train`` with what TRL does by default: no KL term, gradients clipped at 1, no validation."""
    settings = {
        "model": {"path": str(model)},
        "data": {"train_files": [str(data)], "batch_size": 4, "max_prompt_length": 600},
        "rollout": {
            "engine": {"name": "hf"},
            "agent": {"loops": [case.loop]},
            "n": case.samples,
            "max_response_length": case.response,
        },
        "reward": {"functions": [{"name": f"{SIDE}:distinct"}]},
        "algorithm": {"advantage": {"name": "grpo"}, "loss": {"name": "ppo"}},
        "actor": {"optimizer": {"lr": 1.0e-4}, "mini_batches": 1, "micro_batch_tokens": 16384, "grad_clip": 1.0},
        "trainer": {"name": f"vs-trl-{threads}", "steps": steps, "output_dir": str(directory / "runs")},
        "hooks": [{"name": f"{SIDE}:TakeTurns"}],
        "cluster": {"cpu_threads": threads},
    }
    if rank:
        settings["model"]["adapter"] = {"rank": rank, "alpha": 2 * rank}
    if case.turns > 1:
        settings["tools"] = [{"name": f"{SIDE}:find_places", "isolation": "inline"}]
    path = directory / f"agentrl-{threads}.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return [str(Path(sys.executable).with_name("agentrl")), "train", str(path)]


def measure(directory: Path, options: argparse.Namespace, name: str, threads: int) -> list[Figure]:
    """Pairs of steps with so many threads on either side."""
    case = CASES[name]
    model, data = prepare(directory, case)
    # The run's own end, with its validation and checkpoint, lies beyond what is counted.
    steps = options.steps + WARM_UP + 5
    rank = RANK if options.adapter else 0
    ours = agentrl_command(directory, model, data, steps, threads, case, rank)
    script = Path(__file__).parent / "_turns_trl.py"
    numbers = map(str, (steps, threads, case.response, case.turns, rank))
    theirs = [str(options.trl_python), str(script), str(model), str(data), *numbers]
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
        counted = {side: each.steps[WARM_UP:] for side, each in sides.items()}
    label = f"{name}{', adapter' if rank else ''}, {threads} thread{'s' if threads > 1 else ''}"
    figures = []
    for side, made in counted.items():
        figures.append(Figure(label, f"{side}: a step", statistics.median(step["seconds"] for step in made), "s"))
        length = statistics.mean(step["response_length/mean"] for step in made)
        figures.append(Figure(label, f"{side}: response length", length, "tokens"))
    ratio = statistics.median(
        mine["seconds"] / other["seconds"] for mine, other in zip(counted["agentrl"], counted["TRL"], strict=True)
    )
    figures.append(Figure(label, "agentrl / TRL, median of pairs", ratio, "", None if rank else case.goal))
    everywhere = set.intersection(*(set(step) for step in counted["agentrl"]))
    phases = sorted(name for name in everywhere if name.startswith(PHASES) and name.count("/") == 1)
    for phase in phases:
        seconds = statistics.median(step[phase] for step in counted["agentrl"])
        figures.append(Figure(label, f"agentrl: {phase}", seconds, "s"))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, metavar="PATH", help="interpreter with TRL 1.16")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="on either side")
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps, after the warm-up")
    parser.add_argument("--adapter", action="store_true", help="train a LoRA adapter on either side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    if options.trl_python is None:
        sys.stdout.write("Not measured: TRL, which needs --trl-python PATH; --help says how to make it.\n")
        return
    with tempfile.TemporaryDirectory() as folder:

        def figures() -> Iterator[Figure]:
            for name in options.cases:
                for threads in options.threads:
                    directory = Path(folder) / f"{name}-{threads}"
                    directory.mkdir()
                    yield from measure(directory, options, name, threads)

        report("A GRPO step", figures(), options.json)


if __name__ == "__main__":
    main()
