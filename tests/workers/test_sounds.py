"""What training on sounds lacks: names and a processor. Rows, packing and gradients take their features as images'."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GlmAsrConfig, GlmAsrForConditionalGeneration

from agentrl_core.fsdp2.log_probs import response_log_probs, response_logits
from agentrl_core.fsdp2.media import Media
from agentrl_core.fsdp2.packed_attention import Packing
from agentrl_core.protocol import DataProto
from agentrl_core.workers.micro_batching import columns_of, micro_batches

VOCAB, SOUND, FRAMES = 40, 39, 24
NAMES = [f"{number}" * 32 + f"-{FRAMES}x1.png" for number in range(3)]
"""A sound has as many tokens as its frames give, in place of a size."""


class Sounds(Media):
    """Takes a sound for an image."""

    def _tokens(self, size: Any) -> int:
        return ((size.width - 1) // 2 + 1 - 4) // 4 + 1

    def _made(self, name: str) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(int(name[0]))
        features = torch.randn(1, 8, FRAMES, generator=generator)
        return {"input_features": features, "input_features_mask": torch.ones(1, FRAMES, dtype=torch.long)}


@pytest.fixture(scope="module")
def model() -> Any:
    text = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
        "initializer_range": 0.2,
    }  # fmt: skip
    audio = {
        "model_type": "glmasr_encoder", "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_mel_bins": 8,
    }  # fmt: skip
    torch.manual_seed(0)
    model = GlmAsrForConditionalGeneration(GlmAsrConfig(text_config=text, audio_config=audio, audio_token_id=SOUND))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.config.image_token_id = SOUND
    return model.eval()


@pytest.mark.parametrize("packed", [False, True])
def test_rows_with_sounds_are_computed_as_each_row_alone(model: Any, make_batch: Any, packed: bool) -> None:
    sounds = Sounds(model, SimpleNamespace(processor=None), SimpleNamespace())
    heard = [SOUND] * sounds._tokens(SimpleNamespace(width=FRAMES))
    rows = [([3, *heard, 4], [5, 6, 7], [0]), ([3, *heard, 4], [5, 6], [1]), ([3, *heard, 4], [5, 8], [0]),
            ([9, 10], [11, *heard, 12], [2]), ([9, 10, 11], [12], [])]  # fmt: skip
    masks = [[int(each != SOUND) for each in response] for _, response, _ in rows]
    batch = make_batch([(prompt, response, mask) for (prompt, response, _), mask in zip(rows, masks, strict=True)])
    names = [tuple(NAMES[number] for number in shown) for _, _, shown in rows]
    batch = DataProto.from_dict(dict(batch.batch.items()), {"images": names}, batch.meta_info)
    columns = columns_of(batch, (), "test")
    (micro,) = micro_batches(columns | sounds.column(names, columns, "test"), 10_000, by_prefix=packed)
    packing = Packing(model, lambda each: response_logits(model, each), packed, torch.device("cpu"))
    assert packing.is_possible is packed
    with packing.on():
        (ours,) = response_log_probs(model, micro, 1.0, media=sounds)
    sampled = micro["response_mask"]
    gradients = torch.autograd.grad(ours[sampled].square().sum(), list(model.parameters()), allow_unused=True)
    total, theirs = torch.zeros(()), torch.zeros(ours.shape)
    for place, row in enumerate(micro.rows.tolist()):
        prompt, response, shown = rows[row]
        inputs = [sounds._made(NAMES[number]) for number in shown]
        given = {name: torch.cat([each[name] for each in inputs]) for name in inputs[0]} if inputs else {}
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False, **given).logits[0]
        found = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(response).unsqueeze(-1))[:, 0]
        mask = sampled[place, : len(response)]
        total = total + found[mask].square().sum()
        theirs[place, : len(response)] = found.detach() * mask
    torch.testing.assert_close((ours * sampled).detach(), theirs, atol=1e-5, rtol=0)
    expected = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    largest = max(float(each.abs().max()) for each in expected if each is not None)
    for one, other in zip(gradients, expected, strict=True):
        assert (one is None) is (other is None)
        assert one is None or float((one - other).abs().max()) <= 1e-5 * largest
