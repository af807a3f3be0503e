import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from agentrl_core.fsdp2 import packed_attention
from agentrl_core.fsdp2.log_probs import response_log_probs, response_logits
from agentrl_core.fsdp2.models import enable_gradient_checkpointing, training_mode
from agentrl_core.fsdp2.packed_attention import PACKED, VARLEN, Packing, is_packing, varlen_attention
from agentrl_core.fsdp2.packing import VarlenLayout, pack
from agentrl_core.workers.micro_batching import MicroBatch, columns_of, micro_batches

VOCAB = 40
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA4 = {**SHAPE, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "moe_layers": []}
PACKABLE = {
    "qwen3": Qwen3Config(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "llama": LlamaConfig(**SHAPE),
    "experts": Qwen3MoeConfig(**SHAPE, **EXPERTS),
    "llama 4 without chunks": Llama4TextConfig(**LLAMA4, layer_types=["full_attention"] * 2, no_rope_layers=[1, 1],
                                               attn_temperature_tuning=False),
    "learned positions": GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64,
                                    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
}  # fmt: skip
OTHERS = {
    # Chunks that are longer than the rows of the trial, but not than the model's context.
    "chunks": Llama4TextConfig(**LLAMA4, attention_chunk_size=64, attn_temperature_tuning=False),
    "temperature tuning": Llama4TextConfig(**LLAMA4, layer_types=["full_attention"] * 2, no_rope_layers=[0, 0],
                                           attn_temperature_tuning=True, floor_scale=64),
    "long sliding window": Gemma3TextConfig(**SHAPE, sliding_window=64),
    "sliding window": MistralConfig(**SHAPE, sliding_window=64),
    "soft cap": Gemma2Config(**SHAPE),
    "linear attention": Qwen3NextConfig(**SHAPE | {"num_hidden_layers": 4}, **EXPERTS, linear_num_value_heads=4,
                                        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
                                        shared_expert_intermediate_size=16),
}  # fmt: skip


def make_model(config: Any, **arguments: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **{"attn_implementation": "sdpa", **arguments}).eval()


def packing_of(model: Any, wanted: bool = True) -> Packing:
    return Packing(model, lambda micro: response_logits(model, micro), wanted, torch.device("cpu"))


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(PACKABLE["qwen3"])


@pytest.fixture(scope="module")
def packing(model) -> Packing:
    return packing_of(model)


def results_of(model: Any, micro: MicroBatch) -> tuple[torch.Tensor, ...]:
    """Log-probabilities and entropies of sampled tokens, and the gradients of all parameters."""
    model.zero_grad()
    log_probs_br, entropies_br = response_log_probs(model, micro, 0.7, "gradient")
    sampled = micro["response_mask"]
    (log_probs_br[sampled].square().sum() + entropies_br[sampled].sum()).backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return log_probs_br[sampled].detach(), entropies_br[sampled].detach(), *gradients


def group(prompt: list[int], *responses: list[int]) -> list[tuple[list[int], list[int], list[int]]]:
    return [(prompt, response, [1] * len(response)) for response in responses]


ROWS = [*group([3, 4, 5, 6], [7, 8], [9], [10, 11, 12]), *group([3, 4], [5, 6, 7, 8, 9], [5])]


@pytest.mark.parametrize("name", PACKABLE)
def test_packed_rows_have_the_log_probs_and_gradients_of_padded_ones(make_batch, name):
    model = make_model(PACKABLE[name])
    packing = packing_of(model)
    assert packing.is_possible
    (micro,) = micro_batches(columns_of(make_batch(ROWS), (), "test"), 10_000)
    padded = results_of(model, micro)
    with packing.on():
        packed = results_of(model, micro)
    for one, other in zip(padded, packed, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_would_compute_something_else_stays_padded(caplog, name):
    model = make_model(OTHERS[name])
    with caplog.at_level("INFO"):
        packing = packing_of(model)
    assert not packing.is_possible
    assert f"{type(model).__name__} computes padded rows: " in caplog.text
    with packing.on():
        assert not is_packing(model)


@pytest.mark.parametrize("change", ["eager attention", "not wanted"])
def test_packing_is_left_out_where_it_is_not_asked_for(change):
    model = make_model(PACKABLE["qwen3"], attn_implementation="eager" if change == "eager attention" else "sdpa")
    assert not packing_of(model, wanted=change != "not wanted").is_possible


def test_a_shared_prompt_stands_once_and_padding_not_at_all(make_batch):
    (micro,) = micro_batches(columns_of(make_batch(ROWS), (), "test"), 10_000)
    packed = pack(micro)
    rows = [prompt + response for prompt, response, _ in ROWS]
    prefixes = {tuple(ids[:end]) for ids in rows for end in range(1, len(ids) + 1)}
    assert sorted(packed.inputs["input_ids"][0].tolist()) == sorted(prefix[-1] for prefix in prefixes)
    assert len(prefixes) < sum(map(len, rows)) < micro.tokens
    assert len(packed.predicting) == sum(len(response) for _, response, _ in ROWS)


def test_logits_are_computed_for_sampled_tokens_only(model, packing, make_batch):
    rows = [([3, 4, 5], [6, 7, 8, 9], [1, 0, 0, 1]), ([3, 4, 5], [6], [0])]
    (micro,) = micro_batches(columns_of(make_batch(rows), (), "test"), 10_000)
    with packing.on():
        logits, places = response_logits(model, micro)
    assert logits.shape == (2, VOCAB)
    assert places.nonzero().tolist() == [[0, 0], [0, 3]]


def test_rows_that_share_nothing_and_have_no_padding_are_not_packed(make_batch):
    rows = [([3, 4, 5], [6, 7], [1, 1]), ([8, 9, 10], [11, 12], [1, 1])]
    (micro,) = micro_batches(columns_of(make_batch(rows, extra_padding=0), (), "test"), 10_000)
    assert pack(micro) is None


def test_the_same_ids_at_other_positions_are_another_prompt(make_batch):
    columns = columns_of(make_batch(group([3, 4, 5, 6], [7, 8], [9, 10]), extra_padding=0), (), "test")
    (micro,) = micro_batches(columns, 10_000)
    assert pack(micro).inputs["input_ids"].numel() == 8
    columns["position_ids"] = columns["position_ids"] + torch.tensor([[0], [5]])
    (micro,) = micro_batches(columns, 10_000)
    assert pack(micro) is None


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_every_row_is_computed_as_if_it_were_alone(model, packing, make_batch, data):
    prompts = data.draw(st.lists(st.lists(st.integers(2, 5), min_size=1, max_size=6), min_size=1, max_size=3))
    rows = []
    for prompt in prompts:
        for _ in range(data.draw(st.integers(1, 3))):
            response = data.draw(st.lists(st.integers(2, VOCAB - 1), max_size=7))
            rows.append((prompt, response, [data.draw(st.integers(0, 1)) for _ in response]))
    (micro,) = micro_batches(columns_of(make_batch(rows), (), "test"), 10_000, by_prefix=True)
    with torch.no_grad():
        with packing.on():
            (together,) = response_log_probs(model, micro, 1.0)
        for place, row in enumerate(micro.rows.tolist()):
            prompt, response, mask = rows[row]
            sampled = [number for number, is_sampled in enumerate(mask) if is_sampled]
            logits = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
            alone = [float(logits[len(prompt) + number - 1, response[number]]) for number in sampled]
            assert together[place, sampled].tolist() == pytest.approx(alone, abs=1e-4)


def test_a_gap_in_the_attention_mask_is_nobodys_neighbour(model, packing, make_batch):
    columns = columns_of(make_batch([*group([3, 4, 5, 6], [7, 8, 9, 10], [9, 12, 13])]), (), "test")
    columns["attention_mask"][0, -5] = 0
    # Neither it nor the token after it, which it would predict.
    columns["response_mask"][0, 1:3] = False
    (micro,) = micro_batches(columns, 10_000)
    padded = results_of(model, micro)
    with packing.on():
        packed = results_of(model, micro)
    for one, other in zip(padded, packed, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_gradient_checkpointing_recomputes_packed_rows(make_batch):
    model = make_model(PACKABLE["qwen3"])
    packing = packing_of(model)
    (micro,) = micro_batches(columns_of(make_batch(ROWS), (), "test"), 10_000)
    plain = results_of(model, micro)
    enable_gradient_checkpointing(model)
    with training_mode(model), packing.on():
        packed = results_of(model, micro)
    for one, other in zip(plain, packed, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_outside_of_a_phase_the_model_is_as_it_was(model, packing, tmp_path):
    with packing.on():
        assert is_packing(model)
        model.save_pretrained(tmp_path)
    assert model.config._attn_implementation == "sdpa"
    assert "agentrl" not in (tmp_path / "config.json").read_text()


def test_bfloat16_is_precise_enough():
    assert packing_of(make_model(PACKABLE["qwen3"], dtype=torch.bfloat16)).is_possible


def plain_varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa,
                      aligned_right=True):  # fmt: skip
    """What ``torch.nn.attention.varlen.varlen_attn`` promises, in plain torch: sequence by sequence, causal, with
    FlashAttention's alignment: the last query sees the last key."""
    assert window_size == (-1, 0) and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (cu_seq_q.diff().max(), cu_seq_k.diff().max()) == (max_q, max_k)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    results = []
    for row in range(len(cu_seq_q) - 1):
        queries = query[cu_seq_q[row] : cu_seq_q[row + 1]]
        keys, values = (states[cu_seq_k[row] : cu_seq_k[row + 1]].repeat_interleave(
            query.shape[1] // key.shape[1], 1) for states in (key, value))  # fmt: skip
        scores_HQK = torch.einsum("qhd,khd->hqk", queries, keys) * (scale or query.shape[-1] ** -0.5)
        offset = len(keys) - len(queries) if aligned_right else 0
        seen_QK = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(offset)
        results.append(torch.einsum("hqk,khd->qhd", scores_HQK.masked_fill(~seen_QK, -torch.inf).softmax(-1), values))
    return torch.cat(results)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """As if the CPU were a GPU, with the kernel's promise in place of the kernel. It computes in float32 here."""
    monkeypatch.setattr(packed_attention, "has_varlen", lambda device: True)
    monkeypatch.setattr(packed_attention, "_varlen_attn", lambda: plain_varlen_attn)
    monkeypatch.setattr(packed_attention, "VARLEN_DTYPES", (torch.float32,))


@pytest.mark.parametrize("name", PACKABLE)
def test_sequences_of_any_length_have_the_log_probs_and_gradients_of_padded_rows(on_a_gpu, make_batch, name):
    model = make_model(copy.deepcopy(PACKABLE[name]), dtype=torch.float32)
    packing = packing_of(model)
    (micro,) = micro_batches(columns_of(make_batch(ROWS), (), "test"), 10_000)
    padded = results_of(model, micro)
    with packing.on():
        assert model.config._attn_implementation == VARLEN
        packed = results_of(model, micro)
    for one, other in zip(padded, packed, strict=True):
        torch.testing.assert_close(one, other, atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("fault", ["aligns masks to the left", "is not in this build"])
def test_a_kernel_that_computes_something_else_or_nothing_is_not_used(on_a_gpu, monkeypatch, caplog, fault):
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no kernel image is available")

    def misaligned(*args: Any, **kwargs: Any) -> Any:
        return plain_varlen_attn(*args, **kwargs, aligned_right=False)

    kernel = misaligned if fault == "aligns masks to the left" else fails
    monkeypatch.setattr(packed_attention, "_varlen_attn", lambda: kernel)
    model = make_model(copy.deepcopy(PACKABLE["qwen3"]), dtype=torch.float32)
    with caplog.at_level("INFO"):
        packing = packing_of(model)
    assert packing.is_possible and "cannot use agentrl_varlen" in caplog.text
    with packing.on():
        assert model.config._attn_implementation == PACKED


@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
def test_the_real_operator_takes_what_it_is_given_on_a_gpu(heads):
    """Fake tensors of a GPU: names and types of arguments, shapes and devices are the real ones, values are not."""
    with torch.no_grad(), FakeTensorMode():

        def states(count: int) -> torch.Tensor:
            return torch.empty(1, 12, count, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)

        starts = torch.empty(4, dtype=torch.int32, device="cuda")
        layout = VarlenLayout(starts, starts, (4, 7), torch.empty(18, dtype=torch.long, device="cuda"))
        result, _ = varlen_attention(
            torch.nn.Identity(), states(heads[0]), states(heads[1]), states(heads[1]), None, layout, scaling=0.1
        )
        assert (result.shape, result.dtype, result.device.type) == ((1, 12, 4, 64), torch.bfloat16, "cuda")


def test_on_the_cpu_there_is_no_such_kernel(model, packing):
    with packing.on():
        assert model.config._attn_implementation == PACKED
