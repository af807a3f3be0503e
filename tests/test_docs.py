"""The documentation runs: its Python, its configurations, its commands; its tables are current, its links lead on."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

import agentrl_core.api
from agentrl_core.api import ToolCall, ToolParserContext
from agentrl_core.cli.main import COMMANDS, app
from agentrl_core.config import load_config
from agentrl_core.hosting.rewards import RewardWorker
from agentrl_core.hosting.tools import HostedTool
from agentrl_core.plugins.official import OFFICIAL
from agentrl_core.plugins.resolution import resolve
from agentrl_core.runs.records import RolloutRecord, read_rollouts
from agentrl_core.trainer import Trainer
from agentrl_testing.tiny_model import save_tiny_model

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/plugins").glob("*.md"))]
GENERATED = ("api.md", "cli.md", "config.md", "formats.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ROW = '{"prompt": "1 + 1?", "data_source": "calculator", "reward_model": {"ground_truth": "2"}}\n'


def blocks(language: str) -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for found, text in BLOCK.findall(page.read_text(encoding="utf-8")):
            if found == language:
                yield page, text


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that looks like a checkout after `make demo`, but tiny."""
    example = tmp_path / "examples" / "calculator"
    (example / "data").mkdir(parents=True)
    save_tiny_model(example / "model")
    for split in ("train", "validation"):
        (example / "data" / f"{split}.jsonl").write_text(ROW * 4)
    text = (ROOT / "examples/calculator/config.yaml").read_text().replace(".parquet", ".jsonl")
    config = yaml.safe_load(text)
    config["data"] |= {"batch_size": 2, "max_prompt_length": 1024}
    config["rollout"] |= {"n": 2, "max_response_length": 8}
    (example / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_of_the_readme_trains(workplace: Path) -> None:
    (code,) = [text for page, text in blocks("python") if page.name == "README.md" and "Trainer" in text]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=workplace, timeout=200)
    assert (workplace / "runs/from-python/metrics.jsonl").read_text().count("\n") == 6


def test_files_of_the_readme_are_plugins(workplace: Path) -> None:
    (code,) = [text for page, text in blocks("python") if page.name == "README.md" and "# mine.py" in text]
    (snippet,) = [text for page, text in blocks("yaml") if page.name == "README.md"]
    example = workplace / "examples/calculator"
    (example / "mine.py").write_text(code)
    (example / "mine.yaml").write_text("extends: config.yaml\n" + snippet)
    config = load_config(example / "mine.yaml")
    assert [slot.registered_name for slot in (*config.tools, *config.reward.functions)] == ["word_count", "score"]


def test_getting_started_trains(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the page, with a tiny model in place of the hub's."""
    page = (ROOT / "docs/getting-started.md").read_text(encoding="utf-8")
    files = {language: text for language, text in BLOCK.findall(page) if language}
    folder = workplace / "letters"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(files["json"])
    (folder / "mine.py").write_text(files["python"])
    (folder / "config.yaml").write_text(files["yaml"])
    overrides = [
        "model.path=examples/calculator/model",
        "trainer.steps=1",
        "rollout.max_response_length=8",
        "rollout.n=2",
    ]
    assert CliRunner().invoke(app, ["train", "letters/config.yaml", *overrides]).exit_code == 0
    assert (workplace / "runs/letters/metrics.jsonl").exists()


def test_the_environment_of_the_docs_trains(workplace: Path) -> None:
    """The first files of the page, with a tiny model in place of the hub's."""
    page = (ROOT / "docs/environments.md").read_text(encoding="utf-8")
    (environment, *_), (config, *_) = (
        [text for found, text in BLOCK.findall(page) if found == it] for it in ("python", "yaml")
    )
    (workplace / "environment.py").write_text(environment)
    (workplace / "config.yaml").write_text(config)
    overrides = ["model.path=examples/calculator/model", "trainer.steps=1", "data.max_prompt_length=2048"]
    overrides += [
        "rollout.max_response_length=8",
        "rollout.n=2",
        "data.batch_size=2",
        "trainer.validation.before=false",
    ]
    overrides += ["trainer.validation.max_prompts=1", "trainer.name=environment"]
    assert CliRunner().invoke(app, ["train", "config.yaml", *overrides]).exit_code == 0
    assert (workplace / "runs/environment/metrics.jsonl").exists()


SMALL = [
    "model.path=examples/calculator/model", "trainer.steps=1", "trainer.name=page", "data.max_prompt_length=2048",
    "rollout.max_response_length=32", "trainer.validation.before=false", "trainer.validation.max_prompts=1",
]  # fmt: skip


@pytest.fixture
def train_page(workplace: Path) -> Callable[..., tuple[Path, list[RolloutRecord]]]:
    """Trains one step with the file and the configuration of a page of docs/plugins."""

    def train(name: str, *overrides: str) -> tuple[Path, list[RolloutRecord]]:
        found = BLOCK.findall((ROOT / "docs/plugins" / name).read_text(encoding="utf-8"))
        texts = dict(found)
        (workplace / re.findall(r"^# (\w+\.py)", texts["python"])[0]).write_text(texts["python"])
        (workplace / "questions.csv").write_text(texts.get("csv", ""))
        (workplace / "examples/calculator/data/train.jsonl").write_text(texts.get("json", ROW) * 2)
        (workplace / "page.yaml").write_text("extends: examples/calculator/config.yaml\n" + texts["yaml"])
        result = CliRunner().invoke(app, ["train", "page.yaml", *SMALL, *overrides])
        assert result.exit_code == 0, result.output
        run = workplace / "runs/page"
        return run, list(read_rollouts(run / "rollouts/step-000001.jsonl"))

    return train


def test_the_interaction_of_the_docs_answers(train_page: Any) -> None:
    turns = [
        "rollout.max_response_length=256",
        "rollout.engine.name=scripted",
        'rollout.engine.config.turns=["no idea", "it is 42"]',
    ]
    _, records = train_page("interaction.md", *turns)
    for record in records:
        said = [message["content"] for message in record.messages]
        assert said == ["What is 6 * 7?", "no idea", "That is not right. Try again.", "it is 42"]
        assert record.turn_scores == [1.0]


def test_the_parser_of_the_docs_reads_calls(workplace: Path) -> None:
    texts = dict(BLOCK.findall((ROOT / "docs/plugins/tool-parser.md").read_text(encoding="utf-8")))
    (workplace / "slash.py").write_text(texts["python"])
    (workplace / "page.yaml").write_text("extends: examples/calculator/config.yaml\n" + texts["yaml"])
    load_config(workplace / "page.yaml")
    parser = resolve("tool_parser", "./slash.py:Slash", base_dir=workplace).build(None, ToolParserContext())
    found = parser.parse('Let me see.\n/calculator {"expression": "1 + 1"}\n/calculator [1]\n/calculator {"a')
    assert (found.content, len(found.errors)) == ("Let me see.", 2)
    assert found.calls == [ToolCall("calculator", {"expression": "1 + 1"})]
    assert parser.parse("/x " + "[" * 100_000).errors


def test_the_dataset_of_the_docs_reads_its_file(train_page: Any) -> None:
    _, records = train_page("dataset.md", "trainer.checkpoint.best_metric=null")
    assert {record.data_source for record in records} == {"questions"} and records[0].ground_truth == "42"
    # The sampler gives the shorter question first.
    assert "6 * 7" in records[0].prompt_text and "17 + 25" in records[-1].prompt_text


def test_hook_and_tracker_of_the_docs_write_their_files(train_page: Any) -> None:
    run, records = train_page("hook.md")
    (line,) = (run / "worst.jsonl").read_text().splitlines()
    assert json.loads(line)["reward"] == min(record.reward for record in records)
    step, reward = (run / "reward.csv").read_text().strip().split(",")
    assert step == "1" and float(reward) == pytest.approx(sum(r.reward for r in records) / len(records))


@pytest.mark.parametrize("snippet", [text for page, text in blocks("yaml") if page.name == "training-on-many-gpus.md"])
def test_configurations_for_many_gpus_are_accepted(workplace: Path, snippet: str) -> None:
    example = workplace / "examples/calculator"
    (example / "many.yaml").write_text("extends: config.yaml\n" + snippet)
    cluster = load_config(example / "many.yaml").cluster
    assert (cluster.runtime, cluster.nodes, cluster.processes_per_node) == ("ray", 1, 8)


LOADED = (
    "data.md", "engines.md", "environments.md", "openai-agents.md", "engine.md", "real-model.md", "renderers.md",
    "tracking.md",
)  # fmt: skip


@pytest.mark.parametrize("snippet", [text for page, text in blocks("yaml") if page.name in LOADED])
def test_configurations_of_other_pages_are_accepted(workplace: Path, snippet: str) -> None:
    """Keys, values and options; the interpreters and files that they name need not exist."""
    example = workplace / "examples/calculator"
    (environment, *_) = [text for page, text in blocks("python") if page.name == "environments.md"]
    (example / "environment.py").write_text(environment)
    (agent,) = [text for page, text in blocks("python") if page.name == "openai-agents.md"]
    (example / "my_agent.py").write_text(agent)
    # An agent of one's own brings its tools.
    own_tools = "tools: []\n" if "openai_agent" in snippet else ""
    (example / "one.yaml").write_text("extends: config.yaml\n" + own_tools + snippet)
    load_config(example / "one.yaml", check_files=False)


def test_rows_of_the_docs_are_json() -> None:
    rows = [line for _, text in blocks("json") for line in text.splitlines()]
    assert rows and all(isinstance(json.loads(row), dict) for row in rows)


@pytest.mark.parametrize("snippet", [text for page, text in blocks("yaml") if page.name == "algorithms.md"])
def test_configurations_of_algorithms_are_accepted(workplace: Path, snippet: str) -> None:
    example = workplace / "examples/calculator"
    (example / "algorithm.yaml").write_text("extends: config.yaml\n" + snippet)
    if "path: ./teacher" in snippet:
        (example / "teacher").symlink_to("model")
    load_config(example / "algorithm.yaml")


@pytest.mark.parametrize("snippet", [text for page, text in blocks("yaml") if page.name == "rewards.md"])
def test_configurations_of_rewards_are_accepted(workplace: Path, snippet: str) -> None:
    (code,) = [text for page, text in blocks("python") if page.name == "rewards.md"]
    example = workplace / "examples/calculator"
    (example / "mine.py").write_text(code)
    (example / "mine.yaml").write_text("extends: config.yaml\n" + snippet)
    config = load_config(example / "mine.yaml").reward
    RewardWorker(config)


@pytest.mark.parametrize("snippet", [text for page, text in blocks("yaml") if page.name == "judges.md"])
def test_configurations_of_judges_are_accepted(workplace: Path, snippet: str) -> None:
    example = workplace / "examples/calculator"
    save_tiny_model(example / "judge-model")
    (example / "judge.yaml").write_text("extends: config.yaml\n" + snippet)
    Trainer(load_config(example / "judge.yaml"))


@pytest.mark.parametrize("snippet", [text for page, text in blocks("yaml") if page.name == "tools.md"])
def test_configurations_of_tools_are_accepted(workplace: Path, snippet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    example = workplace / "examples/calculator"
    (server,) = [text for page, text in blocks("python") if page.name == "tools.md"]
    (workplace / "notes_server.py").write_text(server)
    (workplace / "corpus.jsonl").write_text('{"text": "The lynx is a wild cat"}\n')
    assert CliRunner().invoke(app, ["search-index", "corpus.jsonl", str(example / "corpus-index")]).exit_code == 0
    (example / "mine.yaml").write_text("extends: config.yaml\n" + snippet)
    config = load_config(example / "mine.yaml")
    assert [HostedTool(slot, seed=0).schemas for slot in config.tools]


@pytest.mark.parametrize(
    "code", [text for page, text in blocks("python") if page.name != "README.md"], ids=lambda text: text.split("\n")[0]
)
def test_python_of_the_docs_runs(code: str, tmp_path: Path) -> None:
    file = tmp_path / "snippet.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location("snippet", file)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_an_estimator_of_the_docs_chooses_by_source() -> None:
    """Each source gets what its own estimator gives it alone."""
    import numpy as np
    import torch

    from agentrl_core.api import AdvantageInput, AlgorithmContext

    (code,) = [text for page, text in blocks("python") if page.name == "algorithms.md"]
    made: dict[str, Any] = {}
    exec(code, made)
    rewards_BR = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 3.0], [0.0, 1.0]])
    mask_BR, ids = torch.ones(4, 2, dtype=torch.bool), np.array(["a", "b", "c", "d"], dtype=object)
    sources, groups = np.array(["game", "game", "math", "math"], dtype=object), np.array([0, 0, 1, 1], dtype=object)
    estimator = made["BySource"](None, AlgorithmContext(group_size=2))
    seen = AdvantageInput(rewards_BR, mask_BR, groups, ids, data_sources=sources)
    advantages_BR = estimator(seen).advantages
    for rows, own in ((slice(0, 2), estimator.games), (slice(2, 4), estimator.others)):
        alone = own(AdvantageInput(rewards_BR[rows], mask_BR[rows], groups[rows], ids[rows])).advantages
        assert torch.equal(advantages_BR[rows], alone) and alone.any()


CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


def commands() -> list[str]:
    """Each ``agentrl COMMAND`` in a code span or block of the pages."""
    code = [span for page in PAGES for span in CODE.findall(page.read_text(encoding="utf-8"))]
    command = re.compile(
        r"^`{0,3}\s*agentrl ((?:(?:plugins|rollouts|runs|engines|config|reward) )?[a-z-]+)", re.MULTILINE
    )
    return sorted({match for span in code for match in command.findall(span)})


def command_lines() -> list[list[str]]:
    """The words of each ``agentrl …`` in a code span or block, without the comment behind it."""
    code = [span for page in PAGES for span in CODE.findall(page.read_text(encoding="utf-8"))]
    found = {line for span in code for line in re.findall(r"^`{0,3}\s*agentrl ([a-z][^`#\n]*)", span, re.MULTILINE)}
    return sorted(line.split() for line in found if "--" in line)


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_docs_exist(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0, f"agentrl {command}: {result.output}"


@pytest.mark.parametrize("line", command_lines(), ids=lambda words: " ".join(words)[:60])
def test_options_of_the_docs_exist(line: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    context = command.make_context("agentrl", [], resilient_parsing=True)
    words = list(line)
    while words and hasattr(command, "get_command"):
        command = command.get_command(context, words.pop(0))
        command = command._load() if hasattr(command, "_load") else command
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    used = {word.partition("=")[0] for word in words if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)}
    assert used <= known | {"-h", "--help", "--debug"}


@pytest.mark.parametrize("name", ["cli.md", "config.md", "api.md", "plugins/catalogue.md", "formats.md"])
def test_generated_pages_are_current(name: str) -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == generate.PAGES[name](), (
        f"docs/{name} is not current: python docs/generate.py"
    )


SEAMS = (
    "agent_loop", "engine", "tool", "tool_parser", "renderer", "interaction", "environment", "reward", "algorithm",
    "dataset",
    "sampler", "batch_policy", "tracker", "hooks",
)  # fmt: skip


@pytest.mark.parametrize("seam", SEAMS)
def test_every_seam_shows_an_example_that_runs(seam: str) -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    contract = page.partition(f"\n## `{seam}`\n")[2].partition("\n### ")[0]
    assert "```python\nfrom agentrl_core.api import " in contract or "```python\ndef " in contract


def test_towncrier_finds_every_fragment() -> None:
    kinds = {
        kind["directory"] for kind in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
    }
    others = {"README.md", "template.md.jinja"}
    names = {file.name for file in (ROOT / "changelog.d").iterdir()} - others
    assert {name for name in names if name.split(".")[-2] not in kinds or not name.endswith(".md")} == set()


def test_links_of_the_docs_lead_somewhere() -> None:
    for page in [*PAGES, *sorted((ROOT / "docs/adr").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_command_is_on_the_page_of_the_command_line() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    root: Any = typer.main.get_command(app).make_context("agentrl", [], resilient_parsing=True)
    for name in [*COMMANDS, *(name for kind, name in OFFICIAL if kind == "command")]:
        found = root
        for word in name.split("."):
            command = found.command.get_command(found, word)
            found = command.make_context(word, [], parent=found, resilient_parsing=True)
        words = name.replace(".", " ")
        for each in [f"{words} {key}" for key in getattr(found.command, "commands", {})] or [words]:
            assert f"\n## `agentrl {each}`\n" in page


def test_every_field_of_a_public_record_is_on_the_page_of_the_api() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    for name in agentrl_core.api.__all__:
        record = getattr(agentrl_core.api, name)
        is_record = hasattr(record, "__dataclass_fields__") or hasattr(record, "_fields")
        heading = re.search(rf"\n### `{name}\b", page)
        if is_record and heading:
            section = page[heading.end() :].partition("\n### ")[0]
            own = [field for field in vars(record).get("__annotations__", {}) if not field.startswith("_")]
            absent = [field for field in own if not re.search(rf"\b{field}\b", section)]
            assert not absent, (name, absent)


MARKDOWN = [file for file in sorted(ROOT.rglob("*.md")) if not {".venv", ".engines", "changelog.d"} & set(file.parts)]


def test_an_install_command_of_our_packages_works_today() -> None:
    """They are on no index: pip needs the folder of wheels, or a path."""
    said = r"pip install (?:-c \S+ )?['\"]?agentrl-"
    wrong = [
        f"{file.relative_to(ROOT)}: {line}"
        for file in MARKDOWN
        if file.name != "CHANGELOG.md"
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(said, line)
    ]
    assert wrong == []


def sentences(page: Path) -> Iterator[str]:
    """Of the paragraphs and list items of a page, without code and the targets of links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "`", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|<]|\d+\.) ?)", text):
        if not paragraph.lstrip().startswith(("|", "#", "<")):
            yield from re.split(r"(?<=[.!?])\s+(?=[A-Z`\[*]|agentrl)", " ".join(paragraph.split()))


def test_no_sentence_is_longer_than_32_words() -> None:
    written = (page for page in PAGES if page.name not in GENERATED)
    long = [each for page in written for each in sentences(page) if len(re.findall(r"[\w'-]+", each)) > 32]
    assert long == []


def test_the_readme_says_what_others_have_and_what_a_newcomer_types() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "with `rollout.max_staleness` the next steps are sampled meanwhile" in text
    rows = [line for line in text.splitlines() if line.startswith(("| [verl]", "| [TRL]", "| [prime-rl]"))]
    assert len(rows) == 3
    for had in ("asynchronous training", "LoRA", "PEFT", "vision-language models"):
        assert not any(had in row.split("|")[3] for row in rows), "agentrl has it"
    commands = text.partition("The commands you need most:")[2].split("```")[1].strip().splitlines()
    assert len(commands) <= 8
