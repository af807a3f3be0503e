"""What the prepare.py of the recipes promise: the prompts of the warm start are those of the run, and splits differ."""

import asyncio
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl_core.api import ToolContext
from agentrl_core.config import load_config
from agentrl_core.plugins.resolution import resolve

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_prepare", EXAMPLES / name / "prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES / name))
        spec.loader.exec_module(module)
    return module


python_math, search, simulated_user = load("python_math"), load("search"), load("simulated_user")
langgraph_react = load("langgraph_react")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = search.make_index(tmp_path_factory.mktemp("corpus"))
    return made


@pytest.fixture(scope="module", params=["langgraph_react", "python_math", "search", "simulated_user"])
def task(request: pytest.FixtureRequest, index: Path) -> Any:
    tasks = {
        "langgraph_react": langgraph_react.Shopping,
        "python_math": python_math.PythonMath,
        "simulated_user": simulated_user.Booking,
    }
    return search.Search(index) if request.param == "search" else tasks[request.param]()


def tool(name: str, example: str, **options: Any) -> Any:
    (slot,) = load_config(EXAMPLES / example / "config.yaml", check_files=False).tools
    for key, value in options.items():
        setattr(slot.config, key, value)
    return resolve("tool", name).build(slot.config, ToolContext(name))


def play(task: Any, problem: Any, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation, with what the task answers in place of what the demonstration shows."""
    warm_start = python_math.warm_start
    renderer = warm_start.wrap_tokenizer(warm_start.Tokenizer(warm_start.models.BPE()))
    seen = task.prompt(problem)
    for turn in turns:
        if turn["role"] == "assistant":
            text = warm_start.render(renderer, [turn]).split("assistant\n", 1)[1].removesuffix("<|im_end|>\n")
            seen += [turn, *task.answers(problem, text)]
    return seen


def test_a_good_conversation_is_what_the_task_answers_and_solves_it(task: Any) -> None:
    for problem in itertools.islice(task.problems(Random(0), held_out=False), 50):
        good = task.good(problem)
        assert play(task, problem, good) == good
        assert task.correct(problem, good[-1]["content"])
        assert sum(turn["role"] == "assistant" for turn in good) <= task.turns


def test_a_share_of_the_mixture_is_good(task: Any) -> None:
    rng = Random(0)
    for share in (0.0, 1.0):
        problems = list(itertools.islice(task.problems(Random(1), held_out=False), 100))
        ended = [task.unreliable(problem, rng, share)[-1]["content"] for problem in problems]
        solved = sum(task.correct(problem, said) for problem, said in zip(problems, ended, strict=True))
        assert solved == 100 if share else solved <= 10


def test_splits_share_no_problem(task: Any) -> None:
    train, held_out = (set(itertools.islice(task.problems(Random(0), held_out=split), 2000)) for split in (False, True))
    assert not train & held_out


@pytest.mark.parametrize(
    "module", [langgraph_react, python_math, search, simulated_user], ids=lambda module: module.__name__
)
def test_rows_are_as_many_as_promised_and_repeat_with_the_seed(module: Any, tmp_path: Path) -> None:
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        module.make_data(tmp_path / name, seed)
        texts.append((tmp_path / name / "train.jsonl").read_text())
    assert texts[0] == texts[1] != texts[2]
    rows = [json.loads(line) for line in texts[0].splitlines()]
    assert len(rows) == module.TRAIN_PROMPTS


def test_the_guest_tells_nothing_before_it_is_asked(tmp_path: Path) -> None:
    simulated_user.make_data(tmp_path, 0)
    for name in ("train", "real-train", "validation", "real-validation"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert all(row["prompt"] == rows[0]["prompt"] for row in rows)


def test_questions_of_search_r1_become_rows(tmp_path: Path) -> None:
    asked = {"question": "Who?", "golden_answers": ["Ann", "Anna"], "data_source": "nq", "prompt": "not used"}
    pq.write_table(pa.Table.from_pylist([asked]), tmp_path / "train.parquet")
    script = str(EXAMPLES / "search/convert.py")
    subprocess.run([sys.executable, script, str(tmp_path / "train.parquet"), str(tmp_path / "rows.jsonl")], check=True)
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert row["reward_model"] == {"ground_truth": ["Ann", "Anna"]} and row["data_source"] == "nq"
    assert row["prompt"][0]["content"].endswith("\n\nWho?")


def test_python_has_the_schema_of_the_warm_start_and_its_code_prints_the_answers() -> None:
    python = tool("python", "python_math", unsafe=True)
    assert json.dumps(python.schema) == json.dumps(python_math.PYTHON_SCHEMA)

    async def printed(problem: Any) -> str:
        return str((await python.execute("one", {"code": problem.code})).response.text)

    for kind in python_math.KINDS:
        problem = kind(Random(0))
        assert asyncio.run(printed(problem)) == problem.result


def test_search_has_the_schema_of_the_warm_start_and_shows_what_it_showed(index: Path) -> None:
    tool_ = tool("search", "search", index=str(index))
    assert json.dumps(tool_.schema) == json.dumps(search.SEARCH_SCHEMA)
    task = search.Search(index)
    for problem in itertools.islice(task.problems(Random(0), held_out=True), 10):
        for query in (*problem.queries, "nothing"):
            shown = asyncio.run(tool_.execute("one", {"query": query}))
            assert shown.response.text == task.found(query)["content"]
        assert problem.answer in task.found(problem.queries[-1])["content"].splitlines()[0]


def test_the_guest_is_asked_in_the_words_of_its_warm_start() -> None:
    config = load_config(EXAMPLES / "simulated_user/config.yaml", check_files=False).interactions[0].config
    assert (config.instructions, config.done) == (simulated_user.INSTRUCTIONS, simulated_user.DONE)
    guest = simulated_user.Guest("Friday", "19", "4")
    seen = simulated_user.Booking().good(guest)
    swapped = simulated_user.guest_side(guest, seen)
    assert [turn["content"] for turn in swapped[1:-1]] == [turn["content"] for turn in seen]
    assert [turn["role"] for turn in swapped] == ["system", *["assistant", "user"] * 4, "assistant"]
