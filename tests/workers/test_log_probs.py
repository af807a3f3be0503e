from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl_core.algorithms import token_log_probs
from agentrl_core.api import ProtocolError, WorkerError
from agentrl_core.fsdp2.log_probs import response_log_probs
from agentrl_core.protocol import DataProto
from agentrl_core.workers.micro_batching import columns_of, map_micro_batches, micro_batches
from agentrl_core.workers.update import temperature_of


@pytest.fixture(scope="module")
def model(model_path):
    return AutoModelForCausalLM.from_pretrained(model_path).eval()


@torch.no_grad()
def unpadded(model, prompt: list[int], response: list[int], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of a plain forward pass over one sequence without padding."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float() / temperature
    distribution = torch.distributions.Categorical(logits=logits)
    return distribution.log_prob(torch.tensor(response)), distribution.entropy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_equal_a_plain_forward_on_unpadded_sequences(model, rows, make_batch, temperature, max_tokens):
    columns = columns_of(make_batch(rows), (), "test")
    with torch.no_grad():
        result = map_micro_batches(
            columns,
            max_tokens,
            torch.device("cpu"),
            lambda micros: [response_log_probs(model, micro, temperature, "value") for micro in micros],
            ("log_probs", "entropys"),
        )
    for row, (prompt, response, mask) in enumerate(rows):
        sampled = torch.tensor(mask).bool()
        for name, plain in zip(("log_probs", "entropys"), unpadded(model, prompt, response, temperature), strict=True):
            ours = result[name][row, : len(response)]
            torch.testing.assert_close(ours[sampled], plain[sampled], atol=1e-5, rtol=0)
            assert not ours[~sampled].any() and not result[name][row, len(response) :].any()


@pytest.mark.parametrize("entropies", ["none", "value", "gradient"])
def test_blocks_change_neither_values_nor_gradients(model, rows, make_batch, monkeypatch, entropies):
    (micro,) = micro_batches(columns_of(make_batch(rows), (), "test"), 10_000)

    def run() -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        model.zero_grad()
        results = response_log_probs(model, micro, 0.7, entropies)
        sum(result.square().sum() for result in results).backward()
        return results, model.get_input_embeddings().weight.grad.clone()

    whole, whole_gradient = run()
    monkeypatch.setattr(token_log_probs, "CPU_BLOCK", 7 * model.config.vocab_size)
    cut, cut_gradient = run()
    torch.testing.assert_close(whole, cut)
    torch.testing.assert_close(whole_gradient, cut_gradient, atol=1e-4, rtol=1e-5)


def test_rows_that_begin_together_are_computed_without_a_mask(model, make_batch):
    rows = [([3, 4, 5], [6, 7], [1, 1]), ([8, 9, 10], [11, 12, 13, 14], [1, 0, 1, 1])]
    columns = columns_of(make_batch(rows), (), "test")
    (micro,) = micro_batches(columns, 10_000)
    assert micro.is_plain and set(micro.model_inputs) == {"input_ids"}
    masked = replace(micro, is_plain=False)
    assert set(masked.model_inputs) == {"input_ids", "attention_mask", "position_ids"}
    sampled = micro["response_mask"]
    for plain, other in zip(*(response_log_probs(model, m, 0.7, "value") for m in (micro, masked)), strict=True):
        torch.testing.assert_close(plain[sampled], other[sampled])


@pytest.mark.parametrize("change", ["a shorter prompt", "a gap", "other positions"])
def test_other_rows_have_a_mask(make_batch, change):
    rows = [([3, 4, 5], [6, 7], [1, 1]), ([8, 9, 10], [11, 12, 13, 14], [1, 0, 1, 1])]
    if change == "a shorter prompt":
        rows[0] = ([3, 4], *rows[0][1:])
    columns = columns_of(make_batch(rows), (), "test")
    start = columns["input_ids"].shape[1] - columns["responses"].shape[1]
    if change == "a gap":
        columns["attention_mask"][1, start + 1] = 0
    if change == "other positions":
        columns["position_ids"][1, start + 2 :] += 1
    assert not any(micro.is_plain for micro in micro_batches(columns, 10_000))


def test_only_positions_that_predict_a_response_get_logits(model, rows, make_batch):
    (micro,) = micro_batches(columns_of(make_batch(rows), (), "test"), 10_000)
    widths = []
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: widths.append(output.shape[1]))
    response_log_probs(model, micro, 1.0)
    handle.remove()
    assert widths == [micro["responses"].shape[1]]


def test_a_model_that_ignores_logits_to_keep_is_named(model, rows, make_batch):
    (micro,) = micro_batches(columns_of(make_batch(rows), (), "test"), 10_000)

    def ignorant(logits_to_keep, **inputs):
        return model(**inputs)

    ignorant.config = model.config
    with pytest.raises(WorkerError, match="must take logits_to_keep"):
        response_log_probs(ignorant, micro, 1.0)


def test_greedy_counts_as_temperature_one_and_a_missing_one_is_an_error():
    assert temperature_of(DataProto(meta_info={"temperature": 0}), "update") == 1.0
    with pytest.raises(ProtocolError, match=r"update needs meta_info\['temperature'\]"):
        temperature_of(DataProto(), "update")
