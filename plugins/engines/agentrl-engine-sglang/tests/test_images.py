"""Prompts with images, and what runs in SGLang's processes for them."""

from types import SimpleNamespace

import pytest
import torch

from agentrl_core.api import EngineContext, EngineError, MultiModal
from agentrl_engine_sglang.config import SGLangConfig
from agentrl_engine_sglang.hooks import RESERVED_VARIABLE, without_reserved
from agentrl_engine_sglang.launch import server_arguments, server_environment
from agentrl_engine_sglang.requests import check_expansion, shown

NAME = "0123456789abcdef0123456789abcdef-56x84.png"


def test_a_prompt_has_one_placeholder_for_each_image() -> None:
    body = shown(MultiModal((NAME, NAME), [1, 9, 9, 2], {NAME: b"\x89PNG"}))
    assert body["input_ids"] == [1, 9, 9, 2]
    assert body["image_data"] == ["data:image/png;base64,iVBORw=="] * 2
    assert body["mm_hashes"] == ["0123456789abcdef"] * 2


def test_another_expansion_is_an_error_that_names_the_token() -> None:
    check_expansion({"prompt_token_ids": [1, 9, 9, 2]}, [1, 9, 9, 2], "r")
    with pytest.raises(EngineError, match="request 'r': .* token 2 of the prompt is 9, and not 2"):
        check_expansion({"prompt_token_ids": [1, 9, 9, 2]}, [1, 9, 2, 2], "r")
    with pytest.raises(EngineError, match="there are 3 tokens, and not 4"):
        check_expansion({"prompt_token_ids": [1, 9, 9]}, [1, 9, 9, 2], "r")


def test_reserved_ids_are_hidden_from_the_sampler_and_count_in_log_probs() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    output = SimpleNamespace(next_token_logits=logits.clone())

    def sample(sampler, output, sampling, return_logprob, logprob_logits=None):
        return output.next_token_logits, logprob_logits

    hidden, scored = without_reserved([2])(sample, None, output, None, True)
    assert hidden.tolist() == [[0.0, 1.0, -torch.inf]]
    assert torch.equal(scored, logits)


def test_the_server_is_told_of_images_where_there_are_some() -> None:
    text, images = EngineContext("m"), EngineContext("m", max_images=2, reserved_ids=(7, 9))
    config = SGLangConfig()
    assert "limit_mm_data_per_request" not in server_arguments(config, text, "m", 1)
    assert server_arguments(config, images, "m", 1)["limit_mm_data_per_request"] == {"image": 2}
    assert server_environment(config, text)[RESERVED_VARIABLE] == ""
    assert server_environment(config, images)[RESERVED_VARIABLE] == "7,9"
