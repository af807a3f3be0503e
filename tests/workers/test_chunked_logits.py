"""Logits in chunks of tokens, against whole ones in float64 of each row alone."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)

from agentrl_core.fsdp2 import log_probs
from agentrl_core.fsdp2.log_probs import chunks_logits, response_log_probs, response_logits
from agentrl_core.fsdp2.models import enable_gradient_checkpointing, training_mode
from agentrl_core.fsdp2.packed_attention import Packing, is_packing
from agentrl_core.fsdp2.sharding import compute_in, precision, shard
from agentrl_core.workers.actor import ActorWorker
from agentrl_core.workers.micro_batching import MicroBatch, columns_of, micro_batches

VOCAB, TEMPERATURE = 40, 0.7
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "a tied head": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "a head of its own": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "soft-capped logits": Gemma2Config(**SHAPE, final_logit_softcapping=2.0, attn_logit_softcapping=None),
    "scaled logits": CohereConfig(**SHAPE, logit_scale=0.3),
    "divided logits": GraniteConfig(**SHAPE, logits_scaling=3.0),
    "experts": Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}
PROMPTS = [3, 4, 5, 6], [3, 4]
ROWS = [
    (PROMPTS[0], [7, 8, 9, 2], [1, 0, 0, 1]), (PROMPTS[0], [9], [1]), (PROMPTS[0], [10, 11, 12], [1, 1, 1]),
    (PROMPTS[1], [5, 6, 7, 8, 9], [1, 1, 1, 1, 1]), (PROMPTS[1], [5, 31], [0, 1]),
]  # fmt: skip
SAMPLED = 12


def make_model(config: Any, **arguments: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa", **arguments).eval()


@pytest.fixture
def micro(make_batch: Callable[..., Any]) -> MicroBatch:
    (whole,) = micro_batches(columns_of(make_batch(ROWS), (), "test"), 10_000)
    return whole


def objective(log_probs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    return log_probs.square().sum() + 0.5 * entropies.sum()


def gradients_of(model: Any) -> list[torch.Tensor]:
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    return gradients


def exact(model: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs and entropies of each row's sampled tokens, and gradients: a full softmax of each row alone."""
    plain = copy.deepcopy(model).double()
    plain.config._attn_implementation = plain.config._experts_implementation = "eager"
    chosen, entropies = [], []
    for prompt, response, mask in ROWS:
        logits = plain(torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        probabilities = torch.softmax(logits.double() / TEMPERATURE, -1)[torch.tensor(mask).bool()]
        labels = torch.tensor(response)[torch.tensor(mask).bool()]
        chosen.append(probabilities.gather(-1, labels.unsqueeze(-1)).squeeze(-1).log())
        entropies.append(-(probabilities * probabilities.log()).sum(-1))
    objective(torch.cat(chosen), torch.cat(entropies)).backward()
    return chosen, entropies, gradients_of(plain)


def rows_of(micro: MicroBatch, values_br: torch.Tensor) -> list[torch.Tensor]:
    """Of the sampled tokens of each row, in the order of :data:`ROWS`."""
    places = micro.rows.argsort()
    return [values_br[place][micro["response_mask"][place]] for place in places]


def computed(model: Any, micro: MicroBatch) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    results = response_log_probs(model, micro, TEMPERATURE, "gradient", in_chunks=True)
    sampled = micro["response_mask"]
    objective(*(result[sampled] for result in results)).backward()
    return rows_of(micro, results[0].detach()), rows_of(micro, results[1].detach()), gradients_of(model)


def distance(gradients: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    pairs = zip(gradients, others, strict=True)
    return sum(float((one - other).square().sum()) for one, other in pairs) ** 0.5


@contextmanager
def packed(model: Any) -> Iterator[None]:
    packing = Packing(model, lambda micro: response_logits(model, micro), True, CPU)
    assert packing.is_possible
    with packing.on():
        assert is_packing(model)
        yield


CASES = [(name, layout) for name in FAMILIES for layout in ("padded", "packed")]
CASES.remove(("soft-capped logits", "packed"))  # Gemma 2 has windows.


@pytest.mark.parametrize(("name", "layout"), CASES)
@pytest.mark.parametrize("tokens", [1, 5, 11])
def test_chunks_are_what_a_full_softmax_gives(
    micro: MicroBatch, monkeypatch: pytest.MonkeyPatch, name: str, layout: str, tokens: int
) -> None:
    model, widths = make_model(FAMILIES[name], dtype=torch.float32), []
    expected = exact(model)
    monkeypatch.setattr(log_probs, "MOST_LOGITS", tokens * VOCAB)
    assert chunks_logits(model, VOCAB * 1000, CPU)
    hook = model.get_output_embeddings().register_forward_hook(lambda _, inputs, out: widths.append(out.shape[1]))
    with packed(model) if layout == "packed" else nullcontext():
        widths.clear()
        found = computed(model, micro)
    hook.remove()
    # Once for the hidden states alone; again in the backward pass.
    assert widths[0] == 0 and max(widths) <= tokens
    assert sum(widths) == 2 * (SAMPLED if layout == "packed" else micro["responses"].numel())
    for one, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, [each.float() for each in other], atol=2e-4, rtol=2e-4)
    # Gradients reach 400 here: float32 rounds where they cancel by a share of the largest, not of the element.
    for gradient, other in zip(found[2], expected[2], strict=True):
        torch.testing.assert_close(gradient.double(), other, atol=1e-5 * float(other.abs().max()), rtol=0)
    assert "forward" not in vars(model) and "forward" not in vars(model.base_model)


@pytest.mark.parametrize("entropies", ["none", "value"])
def test_without_gradients_nothing_is_computed_twice(
    micro: MicroBatch, monkeypatch: pytest.MonkeyPatch, entropies: Any
) -> None:
    model, widths = make_model(FAMILIES["a tied head"]), []
    with torch.no_grad():
        whole = response_log_probs(model, micro, 1.0, entropies)
        monkeypatch.setattr(log_probs, "MOST_LOGITS", 7 * VOCAB)
        model.lm_head.register_forward_hook(lambda _, inputs, output: widths.append(output.shape[1]))
        cut = response_log_probs(model, micro, 1.0, entropies, in_chunks=True)
    torch.testing.assert_close(cut, whole)
    assert sum(widths) == micro["responses"].numel()


@pytest.mark.parametrize("layers", ["kept", "recomputed"])
def test_float32_weights_that_compute_in_bfloat16(
    micro: MicroBatch, monkeypatch: pytest.MonkeyPatch, layers: str
) -> None:
    model = make_model(FAMILIES["a tied head"], dtype=torch.float32)
    compute_in(model, torch.bfloat16, CPU)
    if layers == "recomputed":
        enable_gradient_checkpointing(model)
    with training_mode(model):
        whole = computed(model, micro)
        monkeypatch.setattr(log_probs, "MOST_LOGITS", 5 * VOCAB)
        dtypes = []
        model.lm_head.register_forward_hook(lambda _, inputs, output: dtypes.append(output.dtype))
        cut = computed(model, micro)
    assert set(dtypes) == {torch.bfloat16}
    torch.testing.assert_close(cut[:2], whole[:2], atol=1e-6, rtol=1e-6)
    # Sums of chunks are rounded otherwise, not more.
    assert distance(cut[2], exact(model)[2]) < 1.1 * distance(whole[2], exact(model)[2])


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


@pytest.mark.parametrize("compute_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", ["a tied head", "a head of its own"])
def test_fsdp_gathers_once_and_sums_what_chunks_add(
    one_rank: DeviceMesh, micro: MicroBatch, monkeypatch: pytest.MonkeyPatch, name: str, compute_dtype: Any
) -> None:
    model = make_model(FAMILIES[name], dtype=torch.float32)
    expected = exact(model)
    shard(model, one_rank, precision(compute_dtype, CPU))
    enable_gradient_checkpointing(model)
    gathered: list[int] = []
    gather = FSDPParamGroup.unshard
    monkeypatch.setattr(FSDPParamGroup, "unshard", lambda self, *args: gathered.append(1) or gather(self, *args))
    found = {}
    for logits in (10_000, 5 * VOCAB):
        monkeypatch.setattr(log_probs, "MOST_LOGITS", logits)
        assert chunks_logits(model, 10_001, CPU)
        model.reshard()
        gathered.clear()
        with training_mode(model):
            *values, gradients = computed(model, micro)
        found[logits] = values, [gradient.full_tensor() for gradient in gradients], len(gathered)
    (whole, of_whole, gathers), (cut, of_cut, gathers_of_cut) = found.values()
    torch.testing.assert_close(cut, whole, atol=1e-5, rtol=1e-5)
    assert gathers_of_cut == gathers
    if compute_dtype is None:
        torch.testing.assert_close(of_cut, [each.float() for each in expected[2]], atol=2e-4, rtol=2e-4)
    assert distance(of_cut, expected[2]) < 1.1 * distance(of_whole, expected[2]) + 1e-4


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return result


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_no_tensor_of_tokens_times_vocabulary_exists(
    make_batch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    vocabulary = 2000
    model = make_model(Qwen3Config(**SHAPE | {"vocab_size": vocabulary, "hidden_size": 16}, tie_word_embeddings=True))
    rows = [([3, 4, 5 + row % 2], [6 + row] * (30 + row), [1] * (30 + row)) for row in range(4)]
    (micro,) = micro_batches(columns_of(make_batch(rows), (), "test"), 10_000)
    tokens = micro["response_mask"].sum().item()
    found = {}
    for in_chunks in (False, True):
        monkeypatch.setattr(log_probs, "MOST_LOGITS", 20 * vocabulary)
        with packed(model) if layout == "packed" else nullcontext(), Largest() as largest:
            results = response_log_probs(model, micro, 1.0, "gradient", in_chunks)
            objective(*results).backward()
        found[in_chunks] = largest.elements
    assert found[False] >= tokens * vocabulary
    # The head's weight and its gradient are of 16 times the vocabulary.
    assert found[True] <= 20 * vocabulary


def test_few_logits_are_computed_at_once(micro: MicroBatch) -> None:
    model, calls = make_model(FAMILIES["a tied head"]), []
    model.lm_head.register_forward_hook(lambda *_: calls.append(True))
    assert not chunks_logits(model, log_probs.MOST_LOGITS, CPU) and not calls
    response_log_probs(model, micro, 1.0, in_chunks=True)
    assert len(calls) == 1


class Places(Qwen3ForCausalLM):
    """Its logits depend on the place among the hidden states, which chunks change."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * torch.arange(1, output.logits.shape[1] + 1).view(-1, 1)
        return output


class Embedded(Qwen3ForCausalLM):
    """Its logits need more of the input than hidden states."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **kwargs)
        output.logits = output.logits + self.lm_head(self.model.embed_tokens(input_ids))[:, -output.logits.shape[1] :]
        return output


class Whole(Qwen3ForCausalLM):
    """Its head is no part that can be told from the rest."""

    def get_decoder(self) -> Any:
        return self


@pytest.mark.parametrize("kind", [Places, Embedded, Whole])
def test_a_model_that_would_compute_something_else_keeps_whole_logits(
    caplog: pytest.LogCaptureFixture, kind: type
) -> None:
    torch.manual_seed(0)
    model = kind(copy.deepcopy(FAMILIES["a tied head"])).eval()
    with caplog.at_level("INFO"):
        assert not chunks_logits(model, log_probs.MOST_LOGITS + 1, CPU)
    (record,) = [each for each in caplog.records if each.name == log_probs.__name__]
    assert f"{kind.__name__} computes all logits of a micro-batch at once: " in record.getMessage()
    assert "forward" not in vars(model) and "forward" not in vars(model.model)


def test_a_forward_pass_that_fails_leaves_the_model_as_it_was(
    micro: MicroBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(FAMILIES["a tied head"], dtype=torch.float32)
    compute_in(model, torch.bfloat16, CPU)
    before = model.forward
    monkeypatch.setattr(log_probs, "MOST_LOGITS", 5 * VOCAB)
    monkeypatch.setattr(log_probs, "token_log_probs", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        response_log_probs(model, micro, 1.0, in_chunks=True)
    assert model.forward is before and "forward" not in vars(model.model)


def test_an_actor_computes_large_micro_batches_in_chunks(
    make_config: Callable[..., Any], make_batch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    results, weights = [], []
    for most in (log_probs.MOST_LOGITS, 5 * VOCAB):
        monkeypatch.setattr(log_probs, "MOST_LOGITS", most)
        actor = ActorWorker(make_config(algorithm={"entropy_coef": 0.1}), 10)
        actor.init_model()
        assert actor._backend._in_chunks is (most == 5 * VOCAB)
        batch = make_batch(ROWS)
        batch.meta_info["calculate_entropy"] = True
        batch.union(actor.compute_log_prob(batch))
        batch.batch["advantages"] = batch.batch["response_mask"] * torch.arange(5.0).unsqueeze(-1)
        results.append(actor.update(batch) | {"entropy": float(batch.batch["entropys"].sum())})
        weights.append(dict(actor.module.state_dict()))
    assert results[1] == pytest.approx(results[0], rel=1e-5, abs=1e-6)
    assert results[0]["actor/grad_norm"] > 0
    torch.testing.assert_close(weights[1], weights[0], atol=1e-5, rtol=1e-5)
