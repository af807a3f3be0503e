"""Every line of the shell blocks of the docs runs, in one directory with a tiny model, or says here why it does not."""

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from agentrl_core.cli.main import app
from tests.test_docs import BLOCK, PAGES, ROOT, blocks, workplace

__all__ = ["workplace"]  # a fixture
SHELL = re.compile(r"^(agentrl|make|pip|pytest|python|source|eval|twine)\b")

# The rest of each line may change; the reason is for whoever adds a line.
NOT_RUN = {
    "make ": "installs, trains for long or needs a GPU; test_packaging builds the wheels",
    "source .venv/bin/activate": "what it activates was not made here",
    "pip install": "downloads; tests/scaffold installs a scaffold in a clean environment",
    "pytest": "of a package that is not here, or needs a GPU; tests/scaffold runs the tests of scaffolds",
    "python -m build": "of a package that is not here",
    "python benchmarks/gpu_step.py": "needs a GPU",
    "twine upload": "publishes",
    "agentrl plugins check my-plugin": "my-plugin stands for the reader's own",
    "agentrl completion fish": "needs fish; tests/cli reads what it prints",
    "agentrl backends setup": "installs Megatron-Core; the tests of agentrl-engines show what it runs",
    "agentrl engines setup": "installs an engine; the tests of agentrl-engines run it with a stand-in for pip",
    "agentrl engines bench": "needs SGLang",
    "agentrl engines add": "needs a run that runs; tests/serving changes one's replicas",
    "agentrl engines drain": "needs a run that runs",
    "agentrl train config.yaml cluster.runtime=ray": "needs SGLang, eight GPUs or a second host",
    "agentrl train examples/calculator/config.yaml cluster.runtime=ray": "starts Ray; tests/e2e trains with it",
    "agentrl bench config.yaml": "trains several times in processes of their own; tests/e2e measures with it",
    "python examples/calculator/prepare.py": "makes a model for a minute; tests/examples try the script",
    "agentrl train examples/calculator/tinker.yaml": "needs a server; the tests of agentrl-backend-tinker start one",
    "agentrl eval config.yaml --checkpoint runs/NAME/checkpoints/latest rollout.engine.name=hf": "needs such a run",
    "agentrl tinker serve": "serves until it is stopped; the tests of agentrl-tinker start one",
    "agentrl tinker check": "needs a server; the tests of agentrl-tinker check one",
    "agentrl view runs/calculator": "serves until it is stopped; the tests of agentrl-viewer open the page",
}
RUN = ("agentrl view runs/calculator --export",)
"""Runs, although its beginning is in NOT_RUN."""

STANDS_FOR = {
    "Qwen/Qwen3-0.6B": "examples/calculator/model",
    "PATH": "examples/calculator/model",
    "path/to/model": "examples/calculator/model",
    "runs/NAME": "runs/calculator",
}
SMALLER = {
    "agentrl train letters/config.yaml": "trainer.steps=1 rollout.n=2 data.batch_size=2 rollout.max_response_length=8",
    "agentrl train examples/calculator/ppo.yaml": "trainer.steps=1 rollout.n=2 data.batch_size=2",
    "agentrl train examples/calculator/config.yaml": "trainer.validation.interval=20 trainer.checkpoint.interval=20",
}
VERL_SCRIPT = """\
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.rollout.n=5 trainer.total_epochs=1 $@
"""


def shell_lines() -> list[str]:
    """Each line of a block that begins with a command, once, in the order of the pages."""
    texts = [text for page in PAGES for language, text in BLOCK.findall(page.read_text()) if language in ("", "bash")]
    lines = [line.partition(" #")[0].strip() for text in texts if SHELL.match(text) for line in text.splitlines()]
    return list(dict.fromkeys(line for line in lines if line))


def runs(line: str) -> bool:
    return line.startswith(RUN) or not line.startswith(tuple(NOT_RUN))


def install(project: Path, site: Path) -> None:
    """As ``pip install -e`` does, without pip."""
    about = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    info = site / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    groups = about["entry-points"].items()
    points = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in named.items()) for group, named in groups
    ]
    (info / "entry_points.txt").write_text("\n".join(points))
    # Its folder is on the path already: it was not there when that was last read.
    importlib.invalidate_caches()


@pytest.fixture
def site(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the pages take for granted: files of the reader, and a directory in which packages can be installed."""
    example = workplace / "examples/calculator"
    (example / "ppo.yaml").write_text((ROOT / "examples/calculator/ppo.yaml").read_text())
    (workplace / "reward.py").write_text("def score(trajectory):\n    return 0.5\n")
    (workplace / "corpus.jsonl").write_text('{"text": "The lynx is a wild cat"}\n')
    (workplace / "run_qwen2-7b.sh").write_text(VERL_SCRIPT)
    site = workplace / "site"
    site.mkdir()
    for path in (workplace / "word-count/src", site):
        monkeypatch.syspath_prepend(str(path))
        # For the processes in which `plugins check` tries a plugin.
        monkeypatch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)
    return site


@pytest.mark.slow
def test_commands_of_the_docs_run(workplace: Path, site: Path) -> None:
    for line in filter(runs, shell_lines()):
        words = line + "".join(f" {more}" for begin, more in SMALLER.items() if line.startswith(begin))
        for name, path in STANDS_FOR.items():
            words = re.sub(rf"\b{name}\b", path, words)
        if words.startswith("agentrl "):
            result = CliRunner().invoke(app, shlex.split(words)[1:])
            assert result.exit_code == 0, f"{line}\n{result.output}"
        else:
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            subprocess.run(["bash", "-ec", words], check=True, timeout=200, env={**os.environ, "PATH": path})
        if line == "agentrl plugins new tool word-count":
            install(workplace / "word-count", site)
            snippets = [text for page, text in blocks("yaml") if page.name == "write-a-tool.md"]
            for number in range(len(snippets)):
                text = "\n".join(["extends: examples/calculator/config.yaml", *snippets[: number + 1]])
                (workplace / "with-tool.yaml").write_text(text)
                result = CliRunner().invoke(app, ["train", "with-tool.yaml", "--dry-run"])
                assert result.exit_code == 0, result.output
    held = (workplace / "calculator.html").read_bytes()
    assert b'"timelines"' in held
    assert yaml.safe_load((workplace / "config.yaml").read_text())["rollout"]["n"] == 5
    assert (workplace / "out/model.safetensors").exists() and (workplace / "corpus-index").exists()


def test_every_reason_not_to_run_a_line_is_that_of_a_line() -> None:
    lines = shell_lines()
    assert [begin for begin in NOT_RUN if not any(line.startswith(begin) for line in lines)] == []
