"""What leaves a child process: images as data URLs, and scalars of numpy and torch as numbers."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from agentrl_core.api import ImageError, RewardResult, ToolResponse, ToolResult
from agentrl_core.api.message_parts import image_part
from agentrl_core.engine_kit.images import read_image
from agentrl_core.hosting.wire import decode, encode

RED = Image.new("RGB", (4, 3), "red")


def png() -> bytes:
    file = io.BytesIO()
    RED.save(file, "PNG")
    return file.getvalue()


def sent(value: Any) -> Any:
    return decode(encode(value))


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "red.png").write_bytes(png())
    return {"pil": RED, "bytes": png(), "array": np.asarray(RED), "path": tmp_path / "red.png"}


def test_images_of_every_form_arrive_as_data_urls(values: dict[str, Any]) -> None:
    for name, value in values.items():
        result = sent(ToolResult(ToolResponse("look", images=[value])))
        (url,) = result.response.images
        assert url.startswith("data:image/png;base64,"), name
        assert Image.open(io.BytesIO(read_image(url).data)).getpixel((3, 2)) == (255, 0, 0), name
    parts = ["before", image_part(RED), "after"]
    before, image, after = sent(ToolResult(ToolResponse("", parts=parts))).response.content
    assert (before["text"], read_image(image["image"]).name, after["text"]) == ("before", read_image(RED).name, "after")
    assert sent(ToolResponse("", parts=["before", RED])).content == sent(ToolResponse("before", images=[RED])).content
    assert sent(ToolResponse("x", images=["data:image/png;base64,AAAA"])).images == ["data:image/png;base64,AAAA"]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"nonsense", "not an image that can be read"),
        (np.zeros((2, 2, 3)), "an array that is no image"),
        (np.zeros((2, 2, 7), np.uint8), "an array that is no image"),
        (Path("/no/such/file.png"), "/no/such/file.png: cannot be read"),
        (Image.new("RGB", (0, 3)), "the image has 0x3 pixels"),
    ],
    ids=["bytes", "floats", "channels", "missing", "empty"],
)
def test_what_is_no_image_is_refused_with_the_reason(value: Any, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        encode(ToolResult(ToolResponse("look", images=[value])))


def test_arrays_of_one_number_are_numbers() -> None:
    scalars = [
        np.float32(0.5),
        np.array(0.5),
        np.array([0.5]),
        np.array([[0.5]]),
        torch.tensor(0.5),
        torch.tensor([0.5]),
    ]
    for value in scalars:
        assert sent(RewardResult(value)).score == 0.5
