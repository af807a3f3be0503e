"""Images in a trajectory: by name in messages and nodes, once for each server to engines, and never lost in silence."""

import asyncio
import base64
import io
import pickle
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer

from agentrl_core.api import (
    EngineError,
    ImageError,
    Interaction,
    InteractionContext,
    InteractionError,
    InteractionTurn,
    MultiModal,
    PolicySpan,
    ProtocolError,
    SamplingParams,
    TemplateError,
    Termination,
    TokenOutput,
    ToolCall,
    together,
)
from agentrl_core.config.schema import ImagesConfig, ModelConfig, ToolSlot
from agentrl_core.controller import LocalRuntime
from agentrl_core.data.chat_template import ChatTemplateRenderer, reserved_of
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.engine_kit.images import read_image
from agentrl_core.engine_kit.media import MediaProcessor, MissingImagesError, images_in
from agentrl_core.hosting.tools import HostedTool
from agentrl_core.rollout.identity import TrajectoryKey
from agentrl_core.rollout.loop_output import adopt
from agentrl_core.rollout.session import HostedInteraction, RolloutSession, SessionEnvironment
from agentrl_core.rollout.trajectory import TrajectoryLimits
from agentrl_core.runs.media import ImageStore, RunImages, start_media
from agentrl_core.serving.router import AsyncLLMServerManager
from agentrl_testing.tiny_vision import save_tiny_vision_model

KEY = TrajectoryKey(run_seed=0, split="train", step=1, prompt=2, sample=3)
TOOLS = """
from PIL import Image
from agentrl_core.api import Tool, ToolResponse, ToolResult, function_schema

class Camera(Tool):
    schema = function_schema("camera", "Takes a picture.", {"of": {"type": "string"}})

    async def execute(self, instance_id, parameters, **kwargs):
        of = parameters["of"]
        if of == "broken":
            return ToolResult(ToolResponse("here", images=[b"no image"]))
        if of == "file":
            return ToolResult(ToolResponse("here", images=["/etc/hostname"]))
        if of == "two":
            first, second = Image.new("RGB", (56, 56), "red"), Image.new("RGB", (56, 84), "blue")
            parts = ["before", {"type": "image", "image": first}, "between", {"type": "image", "image": second}]
            return ToolResult(ToolResponse("", parts=parts))
        return ToolResult(ToolResponse(f"a picture of {of}", images=[Image.new("RGB", (56, 56), of)]))
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def chat(model: str) -> ChatTemplateRenderer:
    return ChatTemplateRenderer.of(HFChatRenderer.from_config(ModelConfig(model)))


@pytest.fixture
def media(tmp_path: Path) -> RunImages:
    return start_media(LocalRuntime(), tmp_path)


class Servers:
    """Answers by script, and keeps what it was asked."""

    def __init__(self, renderer: ChatTemplateRenderer, turns: list[Any]) -> None:
        self.renderer, self.turns = renderer, turns
        self.requests: list[tuple[list[int], MultiModal | None]] = []

    async def generate(
        self, request_id: str, prompt_ids: Any, params: SamplingParams, multi_modal: MultiModal | None = None
    ) -> TokenOutput:
        self.requests.append((list(prompt_ids), multi_modal))
        turn = self.turns.pop(0)
        ids = self.renderer.chat.encode(turn) if isinstance(turn, str) else turn
        return TokenOutput(ids, [-0.1] * len(ids), "stop", [PolicySpan(0, 0, len(ids))])

    async def open_session(self, session_id: str) -> None: ...

    async def close_session(self, session_id: str) -> None: ...


@pytest.fixture
def make_session(chat: ChatTemplateRenderer, media: RunImages, make_slot: Any) -> Callable[..., RolloutSession]:
    def make(
        *turns: Any, images: ImagesConfig | None = None, renderer: Any = chat, shows: bool = True, **fields: Any
    ) -> RolloutSession:
        tool = HostedTool(make_slot(ToolSlot, TOOLS, "Camera"), seed=0)
        limits = images or ImagesConfig()
        environment = SessionEnvironment(
            renderer=renderer,
            limits=TrajectoryLimits(2000, 4000, max_images=limits.max_count, reserved=reserved_of(renderer), **fields),
            servers=Servers(chat, list(turns)),
            tools={"camera": tool},
            interactions={},
            media=media if shows else None,
            images=limits,
        )
        return RolloutSession(KEY, {}, environment)

    return make


def run(scenario: Awaitable[Any]) -> Any:
    async def main() -> Any:
        return await scenario

    return asyncio.run(main())


@pytest.mark.parametrize("who", ["tool", "interaction"])
def test_a_disk_that_keeps_no_image_is_nobodys_mistake(make_session: Any, tmp_path: Path, who: str) -> None:
    class Shows(Interaction):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> InteractionTurn:
            return InteractionTurn(False, "look", images=[picture()])

    (tmp_path / "media").write_text("in the way")
    session = make_session("a")
    session._interaction_asked = True
    session._interaction = HostedInteraction(Shows(None, InteractionContext("shows", 0)), 5.0)

    async def main() -> None:
        await session.open_tools()
        trajectory = session.trajectory([{"role": "user", "content": "q"}])
        await trajectory.generate({})
        if who == "tool":
            await session.call_tool(ToolCall("camera", {"of": "red"}, "1"))
        else:
            await session.interact(trajectory.messages)

    with pytest.raises(EngineError, match="cannot be kept"):
        run(main())
    assert not session.report.metrics.get("tool_failures")


def test_what_a_full_disk_has_of_an_image_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(OSError, match="No space"):
        ImageStore(str(tmp_path / "media")).put([read_image(picture())])
    assert not [*(tmp_path / "media").iterdir()]


def picture(color: str = "red", size: tuple[int, int] = (56, 56)) -> Image.Image:
    return Image.new("RGB", size, color)


def template_of(model: str, messages: list[dict[str, Any]]) -> str:
    tokenizer = AutoTokenizer.from_pretrained(model)
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def official(model: str, messages: list[dict[str, Any]], images: list[Image.Image]) -> list[int]:
    """The ids that transformers' own processor makes of a conversation."""
    loaded = MediaProcessor.load(model)
    assert loaded is not None
    text = AutoTokenizer.from_pretrained(model).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = loaded.processor(text=[text], images=images)["input_ids"][0]
    return ids


def test_the_ids_of_a_conversation_are_those_of_the_models_own_processor(chat, model, make_session) -> None:
    async def scenario() -> None:
        session = make_session("a red one<|im_end|>", "yes<|im_end|>")
        parts = [
            {"type": "text", "text": "What?"},
            await session.image(picture()),
            await session.image(picture("blue", (84, 56))),
        ]
        trajectory = session.trajectory([{"role": "user", "content": parts}])
        await trajectory.generate({})
        more = [await session.image(picture("green", (56, 112))), {"type": "text", "text": "And this?"}]
        assert trajectory.add_messages([{"role": "user", "content": more}])
        await trajectory.generate({})
        (first, media_1), (second, media_2) = session._env.servers.requests
        plain = [
            {"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "image"}, {"type": "image"}]},
            {"role": "assistant", "content": "a red one"},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}]},
        ]
        pictures = [picture(), picture("blue", (84, 56)), picture("green", (56, 112))]
        assert first == official(model, plain[:1], pictures[:2])
        assert second == official(model, plain, pictures)
        names = images_in(trajectory.messages)
        assert media_1.images == names[:2] and media_2.images == names and not media_2.data
        # One placeholder for each image: what engines take that expand it by themselves.
        text = AutoTokenizer.from_pretrained(model).apply_chat_template(
            plain, tokenize=False, add_generation_prompt=True
        )
        assert media_2.collapsed_ids == chat.chat.encode(text)
        row = trajectory.finish(Termination.COMPLETED)
        assert row.tokens.images == names
        assert [*row.prompt_ids, *row.response_ids][: len(second)] == second

    run(scenario())


def test_a_tool_shows_its_text_and_then_its_images_or_both_in_its_own_order(make_session) -> None:
    async def scenario() -> None:
        session = make_session()
        await session.open_tools()
        one = await session.call_tool(ToolCall("camera", {"of": "red"}, "call00001"))
        two = await session.call_tool(ToolCall("camera", {"of": "two"}, "call00002"))
        assert [part["type"] for part in one.message["content"]] == ["text", "image"] and not one.failed
        assert [part.get("text", "") for part in two.message["content"]] == ["before", "", "between", ""]
        assert [part["image"][33:] for part in two.message["content"] if part["type"] == "image"] == [
            "56x56.png", "56x84.png",
        ]  # fmt: skip

    run(scenario())


@pytest.mark.parametrize(("of", "said"), [("broken", "not an image"), ("file", "no image")])
def test_a_broken_image_of_a_tool_is_an_observation_and_counted(make_session, of, said) -> None:
    async def scenario() -> None:
        session = make_session()
        await session.open_tools()
        outcome = await session.call_tool(ToolCall("camera", {"of": of}, "call00001"))
        assert outcome.failed and said in outcome.message["content"]
        assert session.report.metrics["tool_failures"] == 1

    run(scenario())


def test_more_images_than_a_conversation_may_have_are_refused_by_the_key_that_says_so(make_session) -> None:
    async def scenario() -> None:
        session = make_session("a<|im_end|>", images=ImagesConfig(max_count=2))
        await session.open_tools()
        trajectory = session.trajectory([{"role": "user", "content": [await session.image(picture())]}])
        await trajectory.generate({})
        first = await session.call_tool(ToolCall("camera", {"of": "blue"}, "call00001"))
        assert trajectory.add_messages([first.message])
        second = await session.call_tool(ToolCall("camera", {"of": "green"}, "call00002"))
        assert second.failed and "model.images.max_count" in second.message["content"]
        third = await session.call_tool(ToolCall("camera", {"of": "green"}, "call00003"))
        assert third.failed
        with pytest.raises(ImageError, match=r"has 3 images, more than model\.images\.max_count=2"):
            trajectory.add_messages([{"role": "user", "content": [await session.image(picture("white"))]}])

    run(scenario())


def test_the_calls_of_one_turn_are_counted_together(make_session) -> None:
    async def scenario() -> None:
        session = make_session("a<|im_end|>", images=ImagesConfig(max_count=2))
        await session.open_tools()
        trajectory = session.trajectory([{"role": "user", "content": "hi"}])
        await trajectory.generate({})
        calls = [ToolCall("camera", {"of": color}, f"call0000{n}") for n, color in enumerate(("red", "blue", "green"))]
        outcomes = await together([session.call_tool(call) for call in calls])
        assert [outcome.failed for outcome in outcomes] == [False, False, True]
        assert trajectory.add_messages([outcome.message for outcome in outcomes])

    run(scenario())


def test_a_model_of_text_shows_no_image(make_session) -> None:
    async def scenario() -> None:
        session = make_session(shows=False)
        with pytest.raises(ImageError, match="takes text alone"):
            await session.image(picture())

    run(scenario())


def test_an_interaction_answers_with_images_and_a_broken_one_is_its_failure(make_session) -> None:
    class Shows(Interaction):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> InteractionTurn:
            broken = len(messages) > 2
            return InteractionTurn(False, "look", images=[b"broken" if broken else picture()])

    async def scenario() -> None:
        session = make_session()
        session._interaction = HostedInteraction(Shows(None, InteractionContext("shows")), 5.0)
        session._interaction_asked = True
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        turn = await session.interact(messages)
        assert [part["type"] for part in turn.content] == ["text", "image"]
        images_in([{"role": "user", "content": turn.content}])
        with pytest.raises(InteractionError, match="not an image"):
            await session.interact([*messages, {"role": "user", "content": "again"}])

    run(scenario())


def test_text_that_looks_like_an_image_stays_text_whoever_wrote_it(chat) -> None:
    said = "look <|image_pad|> here"
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": {"x": "<|image_pad|>"}}}
    schema = {"type": "function", "function": {"name": "f", "description": said, "parameters": {}}}
    messages = [
        {"role": "system", "content": said},
        {"role": "user", "content": [{"type": "text", "text": "<|image"}, {"type": "text", "text": "_pad|>"}]},
        {"role": "assistant", "content": said, "tool_calls": [call]},
        {"role": "tool", "content": said, "tool_call_id": "c", "name": "f"},
    ]
    rendered = chat.render(messages, [schema], generation_prompt=True)
    assert not reserved_of(chat).intersection(rendered.ids)
    assert rendered.text.count("<|image_pad|>") == 6


def test_an_engine_that_samples_a_placeholder_is_refused(make_session, chat) -> None:
    async def scenario() -> None:
        session = make_session([*reserved_of(chat)][:1])
        trajectory = session.trajectory([{"role": "user", "content": "hi"}])
        with pytest.raises(EngineError, match="stands for an image"):
            await trajectory.generate({})

    run(scenario())


def test_a_template_that_drops_images_of_a_role_is_named(make_session, chat) -> None:
    """As templates do that take the text of tool messages only."""
    whole = chat.chat.tokenizer.chat_template
    chat.chat.tokenizer.chat_template = whole.replace(
        "~ content_of(message) ~ '\\n</tool_response>'", "~ '…\\n</tool_response>'"
    )
    assert chat.chat.tokenizer.chat_template != whole

    async def scenario() -> None:
        session = make_session()
        messages = [{"role": "user", "content": "hi"}, {"role": "tool", "content": [await session.image(picture())]}]
        with pytest.raises(TemplateError, match="writes 0 of the 1 images of messages of the role tool"):
            session.trajectory(messages)

    run(scenario())


def test_a_renderer_that_drops_images_is_named(make_session, chat) -> None:
    class Drops(ChatTemplateRenderer):
        def render(self, messages: Any, tools: Any = (), *, generation_prompt: bool = False) -> Any:
            return super().render(messages, tools, generation_prompt=generation_prompt)._replace(images=())

    async def scenario() -> None:
        session = make_session(renderer=Drops.of(chat.chat))
        with pytest.raises(TemplateError, match="Drops shows 0 of 1 images"):
            session.trajectory([{"role": "user", "content": [await session.image(picture())]}])

    run(scenario())


def test_a_row_that_a_loop_fills_by_hand_cannot_have_images(make_session) -> None:
    async def scenario() -> None:
        session = make_session("a<|im_end|>")
        trajectory = session.trajectory([{"role": "user", "content": [await session.image(picture())]}])
        await trajectory.generate({})
        row = trajectory.finish(Termination.COMPLETED)
        reserved = session._env.limits.reserved
        # A copy is known by its tokens; another row is not.
        assert adopt("mine", session.tree, replace(row), reserved=reserved)[0].tokens.images
        changed = replace(row, prompt_ids=[*row.prompt_ids, 5])
        with pytest.raises(ProtocolError, match="stand for images"):
            adopt("mine", session.tree, changed, reserved=reserved)

    run(scenario())


def test_a_fork_and_a_rewritten_history_keep_their_images(make_session) -> None:
    async def scenario() -> None:
        session = make_session("a<|im_end|>", "b<|im_end|>", "c<|im_end|>")
        trajectory = session.trajectory([{"role": "user", "content": [await session.image(picture())]}])
        await trajectory.generate({})
        twin = trajectory.fork()
        for branch, color in ((trajectory, "blue"), (twin, "green")):
            assert branch.add_messages([{"role": "user", "content": [await session.image(picture(color))]}])
            await branch.generate({})
        requests = session._env.servers.requests
        assert requests[1][0] == requests[2][0] and requests[1][1].images != requests[2][1].images
        rows = [branch.finish(Termination.COMPLETED) for branch in (trajectory, twin)]
        assert [len(row.tokens.images) for row in rows] == [2, 2]
        restored = pickle.loads(pickle.dumps(session.tree))
        restored.pack()
        assert [node.images for node in restored.nodes] == [node.images for node in session.tree.nodes]
        assert [list(node.collapsed) for node in restored.nodes] == [
            list(node.collapsed) for node in session.tree.nodes
        ]

    run(scenario())


class Server:
    """An engine server that may forget."""

    def __init__(self) -> None:
        self.known: dict[str, bytes] = {}
        self.sent: list[list[str]] = []

    async def keep_images(self, data: dict[str, bytes]) -> None:
        await asyncio.sleep(0)
        self.sent.append(list(data))
        self.known |= data

    async def generate(
        self, prompt_ids: Any, params: SamplingParams, request_id: str, multi_modal: MultiModal
    ) -> TokenOutput:
        if missing := [name for name in multi_modal.images if name not in self.known]:
            raise MissingImagesError(*missing)
        return TokenOutput([1], [-0.1], "stop", [PolicySpan(0, 0, 1)])


def test_an_image_goes_to_a_server_once_and_again_if_it_has_forgotten_it(media) -> None:
    server, runtime = Server(), LocalRuntime()
    handle = runtime.actor(lambda: server, name="engine-0")  # type: ignore[arg-type]
    router = AsyncLLMServerManager(
        [handle], turn_timeout=5, max_model_len=100, vocab_size=300, capabilities=["images"], max_images=4, media=media
    )
    images = [read_image(picture(color)) for color in ("red", "blue")]

    async def scenario() -> None:
        await media.put(images)
        one, both = MultiModal((images[0].name,), [1]), MultiModal(tuple(each.name for each in images), [1])
        for asked in (one, both):
            # Samples of a group ask at the same time.
            await together([router.generate(f"r{n}", [1, 2], SamplingParams(1), asked) for n in range(3)])
        assert server.sent == [[images[0].name], [images[1].name]]
        server.known.clear()
        await router.generate("r", [1, 2], SamplingParams(1), both)
        assert server.sent[2:] == [[each.name for each in images]]
        assert (counts := router.image_metrics())["sent"] == 4 and counts["shown"] == 11
        with pytest.raises(ImageError, match="there is no image"):
            await router.generate("r", [1, 2], SamplingParams(1), MultiModal(("0" * 32 + "-1x1.png",), [1]))

    run(scenario())


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"", "not an image"),
        (b"GIF89a", "not an image"),
        ("nonsense!", "is no image"),
        ("http://example.com/a.png", "model.images.urls=true"),
        ({"type": "image"}, "allowed:"),
        (7, "found a int"),
    ],
)
def test_what_is_no_image_is_refused_with_the_reason(value: Any, why: str) -> None:
    with pytest.raises(ImageError, match=why):
        read_image(value)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_an_upright_rgb_file_is_kept_and_everything_else_becomes_one() -> None:
    jpeg, png = encoded(picture(), "JPEG"), encoded(picture(), "PNG")
    assert read_image(jpeg).data == jpeg and read_image(jpeg).kind == "jpeg"
    assert read_image(png).data == png
    for form in (
        png,
        base64.b64encode(png).decode(),
        {"bytes": png},
        f"data:image/png;base64,{base64.b64encode(png).decode()}",
    ):
        assert read_image(form).name == read_image(png).name
    turned = Image.new("RGB", (40, 20))
    exif = turned.getexif()
    exif[0x0112] = 6
    upright = read_image(encoded(turned, "JPEG", exif=exif))
    assert upright.name.endswith("-20x40.png")
    glass = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert Image.open(io.BytesIO(read_image(glass).data)).getpixel((0, 0)) == (255, 255, 255)
    assert read_image(picture(size=(100, 100)), max_pixels=2500).name.endswith("-50x50.png")


def test_animations_huge_images_and_cut_files_are_refused() -> None:
    frames = encoded(picture(), "GIF", save_all=True, append_images=[picture("blue")])
    with pytest.raises(ImageError, match="2 frames"):
        read_image(frames)
    with pytest.raises(ImageError, match="at most 50 million"):
        read_image(encoded(Image.new("1", (10_000, 10_000)), "PNG"))
    with pytest.raises(ImageError, match="not an image"):
        read_image(encoded(picture(size=(500, 500)), "JPEG")[:-200])
