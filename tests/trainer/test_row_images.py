"""The images of rows: where they stand in the prompt, what is refused before a run, and what is sampled."""

import asyncio
import base64
import functools
import io
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agentrl_core.api import DataError
from agentrl_core.config.schema import ImagesConfig
from agentrl_core.controller import LocalRuntime
from agentrl_core.data.rows import SOURCES, PromptBatch
from agentrl_core.engine_kit.images import read_image
from agentrl_core.engine_kit.media import images_in, size_of
from agentrl_core.runs.media import RowUploads, start_media
from agentrl_core.trainer.row_images import RowImages, obstacle

COLORS = ("red", "green", "blue")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for color in COLORS:
        Image.new("RGB", (28, 56), color).save(tmp_path / f"{color}.png")
    return tmp_path


def name(folder: Path, color: str) -> str:
    return read_image((folder / f"{color}.png").read_bytes()).name


def named(
    folder: Path, prompt: Any, limits: ImagesConfig | None = None, reason: str = "", **row: Any
) -> dict[str, Any]:
    is_whole = isinstance(prompt, list) and "role" in prompt[0]
    messages = prompt if is_whole else [{"role": "user", "content": prompt}]
    images = RowImages(limits or ImagesConfig(), reason, [folder])
    return images.named({"raw_prompt": messages, **row}, "data: train row 3")


def content(row: dict[str, Any]) -> list[Any]:
    """Texts, and names of images."""
    return [
        part.get("text", part.get("image"))
        for message in row["raw_prompt"]
        for part in ([message["content"]] if isinstance(message["content"], str) else message["content"])
        if isinstance(part, dict)
    ]


@pytest.mark.parametrize("in_notebook", [False, True])
def test_addresses_are_fetched_if_allowed_also_while_an_event_loop_runs(folder: Path, in_notebook: bool) -> None:
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"

        def read(file: str) -> dict[str, Any]:
            return named(folder, "<image>", ImagesConfig(urls=True), images=[f"{address}/{file}"])

        async def read_here(file: str) -> dict[str, Any]:
            return read(file)

        def get(file: str) -> dict[str, Any]:
            return asyncio.run(read_here(file)) if in_notebook else read(file)

        try:
            assert get("red.png")["images"] == [name(folder, "red")]
            with pytest.raises(DataError, match=r"train row 3, message 0, part 0: .*/gone\.png.*404"):
                get("gone.png")
        finally:
            server.shutdown()


@pytest.mark.parametrize("form", ["mark", "part", "url part", "nothing"])
def test_images_stand_where_the_prompt_says_or_before_the_first_user_message(folder: Path, form: str) -> None:
    red, blue = name(folder, "red"), name(folder, "blue")
    if form == "mark":
        row = named(folder, "First <image>, then <image>?", images=["red.png", "blue.png"])
        assert content(row) == ["First ", red, ", then ", blue, "?"]
    elif form == "part":
        prompt = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
        assert content(named(folder, prompt, images=["red.png", "blue.png"])) == [red, "and", blue]
    elif form == "url part":
        url = "data:image/png;base64," + base64.b64encode((folder / "red.png").read_bytes()).decode()
        prompt = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
        assert content(named(folder, prompt)) == [red, "?"]
    else:
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "what?"}]
        assert content(named(folder, messages, images=["red.png", "blue.png"])) == [red, blue, "what?"]


def test_a_row_without_images_is_left_as_it_is(folder: Path) -> None:
    for row in (
        {"raw_prompt": [{"role": "user", "content": "an <image> in words"}]},
        {"raw_prompt": [{"role": "user", "content": "an <image> in words"}], "images": None},
        {"raw_prompt": [{"role": "user", "content": "nothing to see"}], "images": []},
    ):
        assert RowImages(ImagesConfig(), "", [folder]).named(row, "") is row
    with pytest.raises(DataError, match="has 1 places of images .* and the column images has 0"):
        named(folder, "an <image> that is lost", images=[])


@pytest.mark.parametrize("form", ["bytes", "dict", "path", "base64", "single", "PIL"])
def test_every_form_of_an_image_has_the_same_name(folder: Path, form: str) -> None:
    data = (folder / "red.png").read_bytes()
    value: Any = {
        "bytes": [data], "dict": [{"bytes": data, "path": None}], "path": [str(folder / "red.png")],
        "base64": [base64.b64encode(data).decode()], "single": {"path": "red.png"},
        "PIL": [Image.open(io.BytesIO(data))],
    }[form]  # fmt: skip
    row = named(folder, "<image>", images=value)
    (shown,) = images_in(row["raw_prompt"])
    assert size_of(shown) == (28, 56) and row["images"] == [shown]
    assert form == "PIL" or shown == name(folder, "red")


def animation() -> Image.Image:
    file, frames = io.BytesIO(), [Image.new("RGB", (28, 28), color) for color in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return Image.open(file)


def damaged() -> Image.Image:
    """Whose head can be read, and whose pixels cannot."""
    file = io.BytesIO()
    Image.effect_noise((56, 56), 50).save(file, "PNG")
    return Image.open(io.BytesIO(file.getvalue()[:400]))


@pytest.mark.parametrize(
    ("prompt", "images", "limits", "message"),
    [
        ("<image>", ["missing.png"], {}, r"row 3, message 0, part 0: missing\.png: no such file"),
        ("<image>", [b"no image"], {}, "row 3, message 0, part 0: not an image"),
        ("<image> <image>", ["red.png"], {}, "has 2 places of images .* and the column images has 1"),
        ("<image>", ["red.png", "blue.png"], {}, "has 1 places of images .* and the column images has 2"),
        ("<image>", ["https://example.com/a.png"], {}, r"model\.images\.urls=true"),
        ("<image><image>", ["red.png"] * 2, {"max_count": 1}, r"2 images, more than model\.images\.max_count=1"),
        ("<image>", ["red.png"], {"max_row_pixels": 100}, r"1,568 pixels together, more than model\.images\.max_row"),
        (
            "<image>",
            [Image.new("1", (1_000_000, 1))],
            {},
            "row 3, message 0, part 0: .*1000000x1 pixels; at most 999,999",
        ),
        ("<image>", [np.zeros((7072, 7072), np.uint8)], {}, "row 3, message 0, part 0: .*at most 50 million"),
        ("<image>", [animation()], {}, "row 3, message 0, part 0: the image has 2 frames"),
        ("<image>", [damaged()], {}, "row 3, message 0, part 0: not an image that can be shown"),
        ([{"type": "text", "text": {"a": 1}}], ["red.png"], {}, r"message 0, part 0: the text is \{'a': 1\}"),
        ([{"role": "system", "content": "s"}], ["red.png"], {}, "no user message that could show them"),
    ],
)
def test_what_cannot_be_shown_is_refused_by_row_and_place(
    folder: Path, prompt: Any, images: list[Any], limits: dict[str, int], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        named(folder, prompt, ImagesConfig(**limits), images=images)


def test_a_run_that_can_show_no_images_says_why(folder: Path) -> None:
    for reason in (obstacle("it takes text alone", "hf", ["hf"], True), obstacle("", "mine", ["hf", "vllm"], False)):
        with pytest.raises(DataError, match="it has images, but"):
            named(folder, "<image>", reason=reason, images=["red.png"])
    assert "engines with it: hf, vllm" in obstacle("", "mine", ["hf", "vllm"], False)
    assert not obstacle("", "hf", [], True)


def test_sampled_rows_have_names_and_their_images_are_files_of_the_run(folder: Path) -> None:
    images = RowImages(ImagesConfig(), "", [folder])
    rows = [
        images.named({"raw_prompt": [{"role": "user", "content": "<image>"}], "images": [f"{c}.png"]}, "")
        for c in COLORS
    ]
    media = RowUploads(start_media(LocalRuntime(), folder / "run"), images.read_again)
    batch = PromptBatch.sampled(rows, 1, "train", 2, {})
    kept = asyncio.run(media.kept(batch))
    assert len(kept) == 6 and not any(SOURCES in row for row in kept.rows) and SOURCES in rows[0]
    for color in COLORS:
        assert media.media.read(name(folder, color)) == (folder / f"{color}.png").read_bytes()
    assert len([*(folder / "run" / "media").iterdir()]) == 3
    # Nothing is read twice.
    (folder / "red.png").unlink()
    asyncio.run(media.kept(batch))


def test_a_file_that_changes_during_a_run_does_not_give_other_pixels_under_its_name(folder: Path) -> None:
    images = RowImages(ImagesConfig(), "", [folder])
    row = images.named({"raw_prompt": [{"role": "user", "content": "<image>"}], "images": ["red.png"]}, "")
    media = RowUploads(start_media(LocalRuntime(), folder / "run"), images.read_again)
    Image.new("RGB", (28, 56), "black").save(folder / "red.png")
    with pytest.raises(DataError, match=r"red\.png has changed since the run started"):
        asyncio.run(media.kept(PromptBatch.sampled([row], 1, "train", 1, {})))


def test_a_row_has_its_images_in_one_column(folder: Path) -> None:
    row = named(folder, "<image>", images=[], image="red.png")
    assert row["images"] == [name(folder, "red")]
    with pytest.raises(DataError, match="images in the columns images and image; use one"):
        named(folder, "<image>", images=["red.png"], image="blue.png")
