"""The model and tokenizer for tests."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.data.template_check import check_template
from agentrl_testing.tiny_model import save_tiny_model, tiny_tokenizer


def test_a_saved_model_loads_and_its_weights_follow_the_seed(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    paths = [save_tiny_model(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    assert torch.equal(torch.random.get_rng_state(), state)
    a, b, c = (AutoModelForCausalLM.from_pretrained(path).get_input_embeddings().weight for path in paths)
    assert torch.equal(a, b) and not torch.equal(a, c)
    tokenizer = AutoTokenizer.from_pretrained(paths[0])
    assert tokenizer.eos_token == "<|im_end|>" and len(tokenizer) == a.shape[0]


def test_fields_of_the_config_can_be_given(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path, hidden_size=64, num_hidden_layers=1))
    assert model.config.hidden_size == 64 and len(model.model.layers) == 1


def test_its_template_is_append_only_and_takes_tools() -> None:
    report = check_template(HFChatRenderer(tiny_tokenizer()))
    assert report.append_only and report.tools and report.tool_role and report.system and not report.errors
