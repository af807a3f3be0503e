"""With classes that have OpenEnv's interface: the package itself does not fit into the tested set of versions."""

import base64
import io
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import BaseModel, Field

from agentrl_core.api import ConfigError, EnvironmentContext
from agentrl_core.engine_kit.images import read_image
from agentrl_env_openenv.config import OpenEnvConfig
from agentrl_env_openenv.environment import OpenEnv, _mcp_parts
from agentrl_env_openenv.plugin import ENVIRONMENT
from agentrl_testing.contracts import EnvironmentCase, EnvironmentContract
from agentrl_testing.contracts.case import run

HERE = "agentrl_env_openenv_worlds"


class Guess(BaseModel):
    """Guesses the number."""

    metadata: dict[str, Any] = Field(default_factory=dict)
    number: str


class Hint(BaseModel):
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    text: str


class Numbers:
    closed: list[int] = []

    def __init__(self, largest: int = 9) -> None:
        self.largest = largest

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self.secret, self.left = random.Random(seed).randint(1, self.largest), 3
        return Hint(text=f"Guess a number from 1 to {self.largest}. {kwargs or ''}".strip())

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self.left -= 1
        if action.number == str(self.secret):
            return Hint(text="Right.", done=True, reward=1.0)
        return Hint(text="No.", done=self.left == 0, reward=0.0)

    @property
    def state(self) -> dict[str, Any]:
        return {"left": self.left}

    def close(self) -> None:
        self.closed.append(self.secret)


class AsyncNumbers(Numbers):
    async def step_async(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        return super().step(action)


class Click(BaseModel):
    x: int


class Screen(BaseModel):
    model_config = {"arbitrary_types_allowed": True}
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    text: str
    screenshot: Any = None


class Screens:
    """Each observation shows its image in another form."""

    def reset(self, seed: int | None = None, **kwargs: Any) -> Screen:
        return Screen(text="Click.", screenshot=[[[255, 0, 0]] * 4] * 3)

    def step(self, action: Click, **kwargs: Any) -> Screen:
        file = io.BytesIO()
        RED.save(file, "PNG")
        encoded = base64.b64encode(file.getvalue()).decode()
        forms = [RED, np.asarray(RED), encoded, [f"data:image/png;base64,{encoded}", encoded], None, [[0.5]]]
        return Screen(text="ok", screenshot=forms[action.x], done=action.x == 4)


RED = Image.new("RGB", (4, 3), "red")


@pytest.fixture(autouse=True)
def worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    module = ModuleType(HERE)
    module.__dict__.update(
        Screens=Screens, Click=Click, Numbers=Numbers, AsyncNumbers=AsyncNumbers, Guess=Guess, Hint=Hint
    )
    monkeypatch.setitem(sys.modules, HERE, module)


def made(**options: Any) -> OpenEnv:
    config = OpenEnvConfig(**{"environment": f"{HERE}:Numbers", **options})
    return OpenEnv(config, EnvironmentContext("openenv", shows_images=True))


def secret(seed: int) -> str:
    return str(random.Random(seed % 2**32).randint(1, 9))


class TestByText(EnvironmentContract):
    @pytest.fixture(params=["Numbers", "AsyncNumbers"])
    def plugin(self, request: pytest.FixtureRequest) -> EnvironmentCase:
        config = OpenEnvConfig(environment=f"{HERE}:{request.param}", text_field="number")
        return EnvironmentCase(ENVIRONMENT, config=config, oracle=lambda task, seed, messages: [secret(seed)])


class TestByTool(EnvironmentContract):
    @pytest.fixture
    def plugin(self) -> EnvironmentCase:
        config = OpenEnvConfig(environment=f"{HERE}:Numbers")
        return EnvironmentCase(
            ENVIRONMENT, config=config, oracle=lambda task, seed, messages: [("act", {"number": secret(seed)})]
        )


def test_the_action_is_the_schema_of_the_tool() -> None:
    episode = run(made().open({"extra_info": {"split": "train", "index": 0}}, 1))
    function = episode.tools[0]["function"]
    assert (function["name"], function["description"]) == ("act", "Guesses the number.")
    assert (list(function["parameters"]["properties"]), function["parameters"]["required"]) == (["number"], ["number"])


def test_reset_gets_options_and_the_place_of_the_task() -> None:
    environment = made(
        prompt="Play.", arguments={"largest": 5}, reset={"hard": True}, send_index=True, validation_tasks=3
    )
    task = environment.tasks("validation")[2]
    text = run(environment.open(task, 1)).messages[0]["content"]
    assert text == "Play.\n\nGuess a number from 1 to 5. {'hard': True, 'split': 'test', 'index': 2}"


def test_a_wrong_action_is_an_error_and_no_step() -> None:
    async def main() -> dict[str, float]:
        episode = await made().open({"extra_info": {}}, 1)
        with pytest.raises(ValueError, match="number"):
            await episode.call("act", {"nmber": 1})
        scored: Any = await episode.score(None)  # type: ignore[arg-type]
        await episode.close()
        return dict(scored.components)

    closed = len(Numbers.closed)
    assert run(main()) == {"steps": 0.0, "finished": 0.0}
    assert len(Numbers.closed) == closed + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"environment": "Numbers"}, "environment is 'Numbers'; write it as package.module:Class"),
        ({"environment": "no_such.module:World"}, "cannot be imported: No module named 'no_such'"),
        ({"environment": f"{HERE}:Nothing"}, "cannot be imported: .*Nothing"),
        ({"environment": f"{HERE}:Hint"}, "has no method reset and no step"),
        ({"action": "builtins:dict"}, "no pydantic model. Set action"),
        ({"text_field": "word"}, "text_field is 'word', but Guess has the fields number"),
    ],
)
def test_classes_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**options)


def test_an_unknown_field_of_the_observation_says_which_there_are() -> None:
    with pytest.raises(ValueError, match="no field board; .* choose from text"):
        run(made(observation=["board"]).open({"extra_info": {}}, 1))


def shown(content: Any) -> list[str]:
    """Texts, and for each image its size."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [part["text"] if part["type"] == "text" else read_image(part["image"]).name[33:] for part in parts]


def test_observations_show_images() -> None:
    async def main() -> None:
        environment = made(environment=f"{HERE}:Screens", images=["screenshot"], prompt="Play.")
        episode = await environment.open({"extra_info": {}}, 1)
        assert shown(episode.messages[0]["content"]) == ["Play.\n\nClick.", "4x3.png"]
        for number, images in enumerate([1, 1, 1, 2]):
            result = await episode.call("act", {"x": number})
            assert shown(result.response.content) == ["ok", *["4x3.png"] * images] and result.response.text == "ok"
        with pytest.raises(ValueError, match="pixels of the shape"):
            await episode.call("act", {"x": 5})
        result = await episode.call("act", {"x": 4})
        assert (result.response.content, result.done) == ("ok", True)

    run(main())


def test_a_turn_in_text_is_answered_with_images() -> None:
    async def main() -> None:
        environment = made(environment=f"{HERE}:Screens", images=["screenshot"], text_field="x")
        episode = await environment.open({"extra_info": {}}, 1)
        turn = await episode.reply([{"role": "assistant", "content": "3"}])
        assert shown(turn.content) == ["ok", "4x3.png", "4x3.png"]

    run(main())


def test_an_unknown_field_of_images_says_which_there_are() -> None:
    with pytest.raises(ValueError, match="no field frame; in the option images, choose from text"):
        run(made(images=["frame"]).open({"extra_info": {}}, 1))


def test_images_of_an_mcp_tool_stand_in_their_places() -> None:
    blocks = [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
        {"type": "image", "data": "AAAA", "mimeType": "image/png"},
        {"type": "text", "text": "c"},
    ]
    assert _mcp_parts({"result": {"content": blocks}}) == ["a\nb", {"type": "image", "image": "AAAA"}, "c"]
