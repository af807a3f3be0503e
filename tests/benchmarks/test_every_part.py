"""Benchmarks with few and small cases: every part runs to its end and reports its figures, whose size is not judged.

The parts that need vLLM and SGLang are in ``tests_real/test_benchmarks.py``.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl_core.runs.run_dir import RunDir

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "batch_path.py": ["--rows", "32", "--ranks", "2", "--against", str(BENCHMARKS.parent)],
    "checkpoints.py": ["--mib", "4", "--repetitions", "2"],
    "engines.py": ["--requests", "4", "--repetitions", "1"],
    "images.py": ["--samples", "2", "--turns", "2", "--images", "1"],
    "packing.py": ["--samples", "1", "--repetitions", "1"],
    "prompts.py": ["--rows", "20", "--repetitions", "1", "--vocabulary", "600"],
    "prompts.py, streamed": ["--rows", "20", "--repetitions", "1", "--vocabulary", "600", "--streaming"],
    "sandbox.py": ["--calls", "4", "--at-once", "2"],
    "weights.py": ["--mib", "1", "--repetitions", "1"],
}
CASES = {
    "checkpoints.py": {
        "1 process", "2 processes", "agentrl export --merge", "PREDICTED, 70B on 64 GPUs",
    },
    "engines.py": {
        "4 ragged requests", "1 conversations of 4 turns", "4 ragged requests, transformers",
    },
    "sandbox.py": {"a sandbox per call", "a sandbox per trajectory"},
}  # fmt: skip


RunScript = Callable[..., Any]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_part_reports_its_figures(run_script: RunScript, tmp_path: Path, name: str) -> None:
    report = tmp_path / "figures.json"
    done = run_script(name.partition(",")[0], *SMALL[name], "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(report.read_text(encoding="utf-8"))["figures"]
    found = {figure["case"] for figure in figures}
    for case in CASES.get(name, ()):
        assert any(each == case or each.startswith(f"{case}, ") for each in found), (case, found)
    assert figures and all(figure["value"] >= 0 for figure in figures)


TRL = """
from types import SimpleNamespace

GRPOConfig = SimpleNamespace

class GRPOTrainer:
    def __init__(self, model, reward_funcs, args, train_dataset, callbacks, peft_config):
        assert peft_config.r == 16
        self.steps, self.data, self.callbacks, self.reward = args.max_steps, train_dataset, callbacks, reward_funcs

    def train(self):
        for _ in range(self.steps):
            self.reward([[{"role": "assistant", "content": self.data[0]["prompt"][0]["content"]}]])
            for callback in self.callbacks:
                callback.on_log(None, None, None, {"completions/mean_length": 1.0})
"""


@pytest.mark.slow
def test_steps_take_turns_with_those_of_a_peer(run_script: RunScript, tmp_path: Path) -> None:
    """TRL is not installed here: a module of its names stands for it."""
    (tmp_path / "trl.py").write_text(TRL)
    report = tmp_path / "figures.json"
    options = ["--trl-python", sys.executable, "--threads", "1", "--steps", "2", "--cases", "short"]
    options += ["--adapter", "--json", str(report)]
    done = run_script("vs_trl.py", *options, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = {figure["name"] for figure in json.loads(report.read_text())["figures"]}
    assert any("TRL" in name for name in figures) and any(name.startswith("agentrl: ") for name in figures)


def test_a_turn_of_the_model_without_training_is_a_call(
    import_script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    vs_trl = import_script("vs_trl")
    model, _ = vs_trl.prepare(tmp_path, vs_trl.CASES["turns"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Go."}], add_generation_prompt=True)["input_ids"]
    module, prompts = AutoModelForCausalLM.from_pretrained(model), torch.tensor([ids] * 4)
    turns = module.generate(prompts, max_new_tokens=60, do_sample=True)[:, len(ids) :]
    texts = {tokenizer.decode(turn) for turn in turns}
    opening, closing = vs_trl.CALL
    assert len(texts) == 4 and turns.shape[1] == vs_trl.ARGUMENTS + 3
    assert all(text.startswith(opening) and text.endswith(closing + "<|im_end|>") for text in texts)


def test_a_trajectory_with_forks_has_four_samples_of_three_turns(
    fit: Callable[[dict[str, Any]], RunDir],
) -> None:
    side, call = BENCHMARKS / "_turns_agentrl.py", {"name": "find_places", "arguments": {"near": "here"}}
    tools = [{"name": f"{side}:find_places", "isolation": "inline"}]
    run = fit({
        "data.batch_size": 1, "rollout.n": 2, "trainer.steps": 1, "rollout.max_response_length": 900,
        "data.max_prompt_length": 900, "actor.micro_batch_tokens": 16384,
        "rollout.engine": {"name": "scripted", "config": {"turns": [f"<tool_call>{json.dumps(call)}</tool_call>"]}},
        "rollout.agent": {"loops": [f"{side}:Forks"]}, "tools": tools,
    })  # fmt: skip
    lines = [json.loads(line) for line in (run.path / "rollouts/step-000001.jsonl").read_text().splitlines()]
    for line in lines:
        kinds = [node["kind"] for node in line["nodes"]]
        # Nothing in front of a fork is sampled or answered twice.
        assert (kinds.count("turn"), kinds.count("context")) == (1 + 2 + 4, 1 + 2)
        assert [len(agent["rows"]) for agent in line["agents"]] == [4]


def test_the_tool_parsers_are_timed(run_script: RunScript) -> None:
    done = run_script("formats.py", "--characters", "2000", "--every", "40", "hermes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("hermes")


def test_the_viewer_is_timed(run_script: RunScript) -> None:
    done = run_script("viewer.py", "--trajectories", "3200", "--browser", "/nowhere/chromium")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "page at 0, order" in done.stdout and "index of" in done.stdout


def test_figures_are_written_as_they_come(tmp_path: Path) -> None:
    """A part that fails takes none of the figures before it along."""
    code = (
        "import sys; from pathlib import Path; from _report import Figure, report\n"
        "def measure():\n"
        "    yield Figure('first', 'seconds', 1.0, 's')\n"
        "    raise RuntimeError('the second part fails')\n"
        "report('Parts', measure(), Path(sys.argv[1]))\n"
    )
    path = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=BENCHMARKS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "the second part fails" in done.stderr
    assert [figure["case"] for figure in json.loads(path.read_text())["figures"]] == ["first"]
    assert "first" in done.stdout
