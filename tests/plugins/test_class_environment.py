"""Environment classes of a file, as TRL and OpenEnv users write them."""

import asyncio
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import EnvironmentContext, RewardTrajectory, ToolError
from agentrl_core.engine_kit.images import read_image
from agentrl_core.plugins.class_environment import ClassConfig
from agentrl_core.plugins.resolution import resolve
from agentrl_core.runs.records import read_rollouts

COUNTER = '''
import threading


class Counter:
    """Counts."""

    def __init__(self, step: int = 1):
        self.step = step

    def reset(self, **kwargs) -> str | None:
        self.kwargs, self.count, self.done = kwargs, 0, False
        self.thread = threading.get_ident()
        return kwargs.get("say", "Count to 2.")

    def add(self, number: int) -> str:
        """Adds a number.

        Args:
            number: what is added.
        """
        self.count += number * self.step
        self.done = self.count >= 2
        return f"it is {self.count}"

    async def state(self) -> dict[str, int]:
        """Shows the count."""
        return {"count": self.count}

    def fail(self) -> str:
        """Fails."""
        raise ValueError("stuck")

    def _hidden(self): ...

    @property
    def trap(self):
        raise RuntimeError("a property was run")

    def get_reward(self) -> float:
        return self.count / 2


class Named:
    def reset(self, question, seed):
        return f" {question} {seed}"


class Silent:
    def reset(self):
        return None

    def get_reward(self):
        return 1.0


class Busy:
    entered, go_on = [], threading.Event()

    def reset(self):
        return "Wait."

    def wait(self) -> str:
        """Waits until it may go on."""
        self.entered.append("wait")
        self.go_on.wait()
        return "done"

    def look(self) -> str:
        """Looks."""
        self.entered.append("look")
        return "seen"

    def get_reward(self) -> float:
        self.entered.append("get_reward")
        return 1.0


class Undescribed(Silent):
    def act(self, force: int) -> str:
        return ""


class Untyped(Silent):
    def act(self, force):
        """Acts."""


class Number(Silent):
    def reset(self):
        return 3


class Pictures:
    """As TRL's users write it, and with bare images."""

    def __init__(self, bare: bool = False):
        self.bare = bare

    def _shown(self, color, text):
        from PIL import Image

        image = Image.new("RGB", (8, 6), color)
        if self.bare:
            return [image, text]
        return [{"type": "image", "image": image}, {"type": "text", "text": text}]

    def reset(self, **kwargs):
        return self._shown("red", "the board")

    def move(self) -> list[dict]:
        """Moves."""
        return self._shown("blue", "moved")

    def picture(self) -> object:
        """Only the picture."""
        return self._shown("green", "")[0] if self.bare else self._shown("green", "")[:1]
'''


@pytest.fixture
def make(tmp_path: Path) -> Any:
    (tmp_path / "env.py").write_text(textwrap.dedent(COUNTER))

    def build(name: str, **config: Any) -> Any:
        plugin = resolve("environment", f"./env.py:{name}", base_dir=tmp_path)
        assert plugin.spec.config is ClassConfig
        return plugin.build(ClassConfig(**config), EnvironmentContext(name))

    return build


def run(environment: Any, task: dict[str, Any], *calls: tuple[str, dict[str, Any]]) -> tuple[Any, list[Any], float]:
    async def main() -> tuple[Any, list[Any], float]:
        episode = await environment.open(task, 7)
        results = [await episode.call(name, arguments) for name, arguments in calls]
        return episode, results, await episode.score(RewardTrajectory([], "", "", ""))

    return asyncio.run(main())


def test_methods_are_tools_and_get_reward_scores(make: Any) -> None:
    episode, results, score = run(make("Counter"), {}, ("add", {"number": "1"}), ("state", {}), ("add", {"number": 1}))
    assert [schema["function"]["name"] for schema in episode.tools] == ["add", "fail", "state"]
    assert episode.tools[0]["function"]["parameters"]["properties"]["number"]["description"] == "what is added."
    assert [result.response.text for result in results] == ["it is 1", '{"count":1}', "it is 2"]
    assert [result.done for result in results] == [False, False, True]
    assert score == 1.0
    assert episode.messages == [{"role": "user", "content": "Count to 2."}]


def test_reset_gets_the_row_and_its_text_follows_the_prompt(make: Any) -> None:
    row = {"raw_prompt": [{"role": "user", "content": "Please:"}], "question": "1 + 1?", "data_source": "x"}
    episode, _, score = run(make("Named"), row)
    assert episode.messages == [{"role": "user", "content": "Please: 1 + 1? 7"}]
    assert (score, make("Named").scores, make("Counter").scores) == (0.0, False, True)
    assert row["raw_prompt"][0]["content"] == "Please:", "the row's own prompt was changed"
    episode, _, _ = run(make("Counter"), {**row, "say": None})
    assert episode._instance.kwargs == {
        "seed": 7, "prompt": [{"role": "user", "content": "Please:"}], "say": None, **row,
    }  # fmt: skip


def test_plain_methods_run_in_a_thread_and_a_hung_one_is_left(make: Any) -> None:
    episode, _, _ = run(make("Counter"), {})
    assert episode._instance.thread != threading.get_ident()


def test_what_a_method_raises_and_wrong_arguments_come_through(make: Any) -> None:
    with pytest.raises(ValueError, match="stuck"):
        run(make("Counter"), {}, ("fail", {}))
    with pytest.raises(ToolError, match="number: Input should be a valid integer"):
        run(make("Counter"), {}, ("add", {"number": "many"}))


def test_tasks_come_from_the_config_or_from_data_files(make: Any) -> None:
    assert make("Counter").tasks("train") is None
    environment = make("Counter", tasks=3, validation_tasks=1, arguments={"step": 2})
    assert environment.tasks("train") == [{"index": 0}, {"index": 1}, {"index": 2}]
    assert environment.tasks("validation") == [{"index": 0}]
    _, [result], _ = run(environment, {}, ("add", {"number": 1}))
    assert result.response.text == "it is 2"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Undescribed", "the method 'act' is a tool, but has no docstring"),
        ("Untyped", "parameter force needs a type annotation"),
    ],
)
def test_methods_that_cannot_be_tools_are_refused(make: Any, name: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        make(name)


def test_an_object_is_not_entered_again_after_a_call_passed_its_limit(make: Any) -> None:
    """The thread of that call may still be in it. A limit cancels the call, as this does."""
    environment = make("Busy")

    async def scenario() -> None:
        episode = await environment.open({}, seed=1)
        busy = episode._instance
        assert (await episode.call("look", {})).response.text == "seen"
        waiting = asyncio.ensure_future(episode.call("wait", {}))
        while "wait" not in busy.entered:
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for _ in range(2):
            with pytest.raises(ToolError, match="an earlier call passed its limit"):
                await episode.call("look", {})
        with pytest.raises(ToolError, match="an earlier call passed its limit"):
            await episode.score(RewardTrajectory((), "", "", ""))
        assert busy.entered == ["look", "wait"]
        busy.go_on.set()
        again = await environment.open({}, seed=1)
        assert (await again.call("look", {})).response.text == "seen", "another episode has its own object"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("name", "message"), [("Silent", "returned None, and the task has no prompt"), ("Number", "allowed are a text")]
)
def test_observations_that_are_no_prompt_are_refused(make: Any, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(make(name), {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own_tasks", "runtime"),
    [(True, "local"), (False, "local"), pytest.param(True, "ray", marks=pytest.mark.ray)],
)
def test_a_run_trains_on_a_class(fit: Any, tiny_run: Any, own_tasks: bool, runtime: str) -> None:
    (tiny_run.folder / "env.py").write_text(textwrap.dedent(COUNTER))
    call = '<tool_call>\n{"name": "add", "arguments": {"number": 1}}\n</tool_call>'
    run = fit({
        "environments": [{"name": "./env.py:Counter", "config": {"tasks": 4} if own_tasks else {}}],
        **({"data.train_files": None} if own_tasks else {}),
        "data.max_prompt_length": 2048,
        "rollout.agent.loops": ["tool_agent"],
        "rollout.engine": {"name": "scripted", "config": {"turns": [call, call, "never"]}},
        "rollout.max_response_length": 500,
        "reward.functions": [],
        "cluster.runtime": runtime,
        "trainer.steps": 1,
    })  # fmt: skip
    records = list(read_rollouts(run.rollout_file(1, "train")))
    assert [record.reward for record in records] == [1.0] * 4
    first = "Count to 2." if own_tasks else "say"
    assert all(record.messages[0]["content"].startswith(first) for record in records)
    assert all(record.messages[-1]["content"] == "it is 2" for record in records)


def shown(content: Any) -> list[str]:
    """Texts, and for each image the size that its name says."""
    return [part["text"] if part["type"] == "text" else read_image(part["image"]).name[33:] for part in content]


@pytest.mark.parametrize("bare", [False, True])
def test_observations_show_images(make: Any, bare: bool) -> None:
    environment = make("Pictures", arguments={"bare": bare})
    image = {"type": "image", "image": "0" * 32 + "-1x1.png"}
    for content, before in (("Play:", ["Play:"]), ([image, {"type": "text", "text": "Play:"}], None), (None, [])):
        task = {} if content is None else {"raw_prompt": [{"role": "user", "content": content}]}
        episode, results, _ = run(environment, task, ("move", {}), ("picture", {}))
        (message,) = episode.messages
        if before is None:
            assert message["content"][:2] == content
            message["content"] = message["content"][2:]
        assert shown(message["content"]) == [*(before or []), "8x6.png", "the board"]
        assert [shown(result.response.content) for result in results] == [["8x6.png", "moved"], ["8x6.png"]]


def test_text_follows_a_prompt_of_parts(make: Any) -> None:
    row = {"raw_prompt": [{"role": "user", "content": [{"type": "text", "text": "Please:"}]}], "question": "why?"}
    episode, _, _ = run(make("Named"), row)
    assert [part["text"] for part in episode.messages[0]["content"]] == ["Please:", " why? 7"]
