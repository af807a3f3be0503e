"""The vision-language models for tests."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from agentrl_core.engine_kit.media import MediaProcessor
from agentrl_testing.tiny_vision import FAMILIES, missing, save_tiny_vision_model


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_model_says_depends_on_the_image(tmp_path: Path, family: str) -> None:
    if missing(family):
        pytest.skip(f"its processor needs {missing(family)}")
    path = save_tiny_vision_model(tmp_path, family=family, initializer_range=0.1)
    model, processor = AutoModelForImageTextToText.from_pretrained(path).eval(), MediaProcessor.load(path)
    assert processor is not None
    with torch.no_grad():
        images = Image.new("RGB", (64, 64), "white"), Image.effect_noise((64, 64), 90).convert("RGB")
        one, other = (model(**processor.whole(f"a{processor.placeholder}b", [image])).logits[0, -1] for image in images)
    assert (one - other).abs().max() > 1e-2
