"""What an author gets: new packages of every kind and one from outside of this tree, installed from wheels by their
published metadata alone into a clean environment, tested and trained with from a working directory of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl_core.api import KINDS
from agentrl_testing.devtools.scaffold import render, scaffold

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
ACME = ROOT / "examples/third_party/acme-agentrl-extras"
OURS = [
    ROOT / "plugins" / path
    for path in (
        "algorithms/agentrl-algorithms",
        "datasets/agentrl-dataset-prompts",
        "rewards/agentrl-rewards-basic",
        "testing/agentrl-testing",
        "tools/agentrl-tool-parsers",
        "trackers/agentrl-trackers-basic",
    )
]
NEW = {kind: f"new-{kind.replace('_', '-')}" for kind in KINDS}
ACME_PLUGINS = {
    "agent_loop": "acme_second_thought",
    "tool": "acme_convert",
    "reward_function": "acme_closeness",
    "advantage_estimator": "acme_weakest_part",
    "policy_loss": "acme_agreement",
}


@dataclass
class CleanEnvironment:
    """A virtual environment and a working directory that has nothing to do with this tree."""

    python: Path
    folder: Path
    sources: dict[str, Path]

    def run(self, *command: str) -> str:
        """Standard output of a command of the environment; its whole output if it fails."""
        done = subprocess.run(
            [self.python.parent / command[0], *command[1:]],
            cwd=self.folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def train(self, name: str, model: Path, changes: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Path:
        """Three steps; the run's directory."""
        (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = {
            "model": {"path": str(model)},
            "data": {"train_files": [f"{name}.jsonl"], "batch_size": 2, "max_prompt_length": 1024},
            "algorithm": {"advantage": NEW["advantage_estimator"], "loss": "ppo"},
            "trainer": {"name": name, "steps": 3, "trackers": ["jsonl"], "checkpoint": {"interval": 0}},
            "cluster": {"device": "cpu", "cpu_threads": 1},
        }
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(config | changes))
        self.run("agentrl", "train", f"{name}.yaml")
        return self.folder / "runs" / name


def environment() -> dict[str, str]:
    """Nothing of this process's Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


BUILD = """
import os, sys
from hatchling.build import build_wheel
wheels, *projects = sys.argv[1:]
for project in projects:
    os.chdir(project)
    build_wheel(wheels)
"""


def build(projects: Sequence[Path], wheels: Path) -> None:
    wheels.mkdir()
    command = [sys.executable, "-c", BUILD, str(wheels), *map(str, projects)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    folder = tmp_path_factory.mktemp("author")
    sources = {name: scaffold(kind, name, folder / "sources") for kind, name in NEW.items()}
    sources["acme-agentrl-extras"] = ACME
    build([ROOT, *OURS, *sources.values()], folder / "wheels")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=120)
    python = folder / "venv/bin/python"
    names = [*(f"{name}[test]" for name in sources), *(project.name for project in OURS)]
    install = ["-m", "pip", "install", "--quiet", "--no-compile", "--find-links", folder / "wheels"]
    subprocess.run(
        [python, *install, "-c", ROOT / "constraints.txt", *names],
        cwd=folder,
        env=environment(),
        check=True,
        timeout=500,
    )
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    return CleanEnvironment(python, elsewhere, sources)


def test_nothing_comes_from_this_tree(clean: CleanEnvironment) -> None:
    code = "import agentrl_core, acme_agentrl_extras; print(agentrl_core.__file__); print(acme_agentrl_extras.__file__)"
    for path in clean.run("python", "-c", code).split():
        assert clean.python.parents[1] in Path(path).parents


def test_all_are_listed(clean: CleanEnvironment) -> None:
    rows = json.loads(clean.run("agentrl", "plugins", "list", "--json"))["plugins"]
    found = {(row["kind"], row["name"]): row["status"] for row in rows if row["package"] in clean.sources}
    assert found == dict.fromkeys([*NEW.items(), *ACME_PLUGINS.items()], "ok")


def test_templates_are_in_the_wheel(clean: CleanEnvironment) -> None:
    clean.run("agentrl", "plugins", "new", "tool", "from-the-wheel")
    made = clean.folder / "from-the-wheel"
    files = {file.relative_to(made).as_posix(): file.read_text() for file in made.rglob("*") if file.is_file()}
    assert files == render("tool", "from-the-wheel")


def test_check_passes(clean: CleanEnvironment) -> None:
    clean.run("agentrl", "plugins", "check", *NEW.values(), *ACME_PLUGINS.values())


def test_own_tests_pass(clean: CleanEnvironment) -> None:
    folders = [str(source / "tests") for source in clean.sources.values()]
    output = clean.run(
        "python", "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider",
        f"--rootdir={clean.folder}", *folders,
    )  # fmt: skip
    assert "passed" in output and "no tests ran" not in output


def called(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripted(turns: Sequence[str], loop: str) -> dict[str, Any]:
    return {
        "engine": {"name": "scripted", "config": {"turns": list(turns)}},
        "agent": {"loops": [loop]},
        "tool_parser": "hermes",
        "n": 2,
        "max_response_length": 512,
    }


def question(text: str, truth: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": text}],
        "question": text,
        "answer": truth,
        "data_source": "clean",
        "reward_model": {"ground_truth": truth},
    }


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_trained(run: Path) -> None:
    """Three steps, and every row of them has moved the weights."""
    assert [step["actor/trained_rows_share"] for step in steps_of(run)] == [1.0, 1.0, 1.0]
    assert all(step["actor/grad_norm"] > 0 for step in steps_of(run))


def rollouts_of(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"rollouts/step-{step:06d}.jsonl").read_text().splitlines()]


def test_new_loop_tool_and_reward_train(clean: CleanEnvironment, tiny_model: Path) -> None:
    turns = [called("new-tool", {"text": "one two three"}), "There are 3"]
    changes = {
        "rollout": scripted(turns, NEW["agent_loop"]),
        "tools": [NEW["tool"]],
        "reward": {"functions": [NEW["reward_function"]]},
    }
    run = clean.train("new", tiny_model, changes, [question("How many words?", "3")] * 6)
    assert_trained(run)
    assert [step["reward/mean"] for step in steps_of(run)] == [1.0, 1.0, 1.0]
    for row in rollouts_of(run, 3):
        assert "<tool_response>\n3\n</tool_response>" in json.dumps(row).replace("\\n", "\n")


def test_third_party_loop_tool_and_reward_train(clean: CleanEnvironment, tiny_model: Path) -> None:
    turns = [called("acme_convert", {"value": 3, "source": "km", "target": "m"}), "3000 m", "3300 m"]
    changes = {
        "rollout": scripted(turns, "acme_second_thought"),
        "tools": ["acme_convert"],
        "reward": {"functions": ["acme_closeness"]},
    }
    run = clean.train("acme", tiny_model, changes, [question("3 km in m?", "3000")] * 6)
    assert_trained(run)
    assert [step["reward/mean"] for step in steps_of(run)] == pytest.approx([0.5] * 3)
    lock = json.loads((run / "plugins.lock.json").read_text())
    assert "acme-agentrl-extras" in json.dumps(lock)


def test_new_plugins_of_all_other_kinds_train(clean: CleanEnvironment, tiny_model: Path) -> None:
    changes = {
        "data": {
            "train_files": ["all.jsonl"],
            "batch_size": 2,
            "max_prompt_length": 1024,
            "dataset": NEW["dataset"],
        },
        "rollout": {
            "engine": NEW["engine"],
            "agent": {"loops": [NEW["agent_loop"]]},
            "renderer": NEW["renderer"],
            "tool_parser": NEW["tool_parser"],
            "n": 2,
            "max_response_length": 8,
        },
        "reward": {"manager": NEW["reward_manager"], "functions": [NEW["reward_function"]]},
        "algorithm": {
            # No answer of a random model is right: without a baseline below 0 there would be nothing to learn.
            "advantage": {"name": NEW["advantage_estimator"], "config": {"baseline": -1.0}},
            "loss": NEW["policy_loss"],
        },
        "hooks": [NEW["hook"]],
        "trainer": {
            "name": "all",
            "steps": 3,
            "trackers": ["jsonl", NEW["tracker"]],
            "checkpoint": {"interval": 0},
        },
    }
    run = clean.train("all", tiny_model, changes, [question("How many words?", "3")] * 6)
    assert_trained(run)
    assert json.loads((run / "best.json").read_text())["step"] == 1
    assert (run / "metrics.csv").read_text().count("actor/ratio") == 3
