"""The estimate of model FLOPs utilisation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from agentrl_core.config.schema import Config
from agentrl_core.fsdp2 import flops
from agentrl_core.fsdp2.flops import peak_flops, utilisation
from agentrl_core.protocol import DataProto
from agentrl_core.workers.actor import ActorWorker

SIZES = {
    "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 10,
}  # fmt: skip
LAYER = 4 * 8 * 8 + 3 * 8 * 16
"""Four square projections and three of the MLP; norms have 3 * 8."""


@pytest.mark.parametrize("tied", [False, True])
def test_utilisation_counts_each_multiplied_parameter(tied: bool) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    parameters = LAYER + 3 * 8 + 10 * 8
    share = utilisation(model, "NVIDIA H200", devices=2, trained_tokens=100, other_tokens=30, seconds=0.5)
    assert share == pytest.approx((6 * 100 + 2 * 30) * parameters / (2 * 989e12 * 0.5))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Tesla T4", None),
    ],
)
def test_peaks_by_the_name_of_the_device(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_of_a_mixture_of_experts_those_count_that_a_token_chooses() -> None:
    experts: nn.Module = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=6, num_experts_per_tok=2))
    attention, router, expert, norms, head = 4 * 8 * 8, 6 * 8, 3 * 8 * 16, 3 * 8, 10 * 8
    parameters = attention + router + 2 * expert + norms + head
    assert utilisation(experts, "NVIDIA H200", 1, 1, 0, 1.0) == pytest.approx(6 * parameters / 989e12)


def test_an_unknown_gpu_and_unknown_choices_of_experts_have_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    experts: nn.Module = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2))
    monkeypatch.setattr(flops, "_CHOSEN", ())
    assert utilisation(experts, "NVIDIA H200", 1, 1, 1, 1.0) is None
    assert utilisation(LlamaForCausalLM(LlamaConfig(**SIZES)), "Tesla T4", 1, 1, 1, 1.0) is None


def test_the_actors_utilisation_is_the_work_that_torch_counts(
    make_config: Callable[..., Config], make_batch: Callable[..., DataProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows are trained, a third has no advantage: for it the metric counts a forward pass."""
    actor = ActorWorker(make_config(), total_optimizer_steps=10)
    actor.init_model()
    batch = make_batch([([3, 4, 5], [6, 7, 8, 9], [1, 1, 0, 1]), ([3], [9, 8], [1, 1]), ([5, 6], [7, 7, 7], [1, 1, 1])])
    mask = batch.batch["response_mask"]
    batch.batch["old_log_probs"] = actor.compute_log_prob(batch).batch["old_log_probs"]
    batch.batch["advantages"] = torch.tensor([[1.0], [-1.0], [0.0]]) * mask
    counted = 0
    for row, trained in zip(range(3), (True, True, False), strict=True):
        ids = batch.batch["input_ids"][row][batch.batch["attention_mask"][row].bool()]
        with FlopCounterMode(display=False) as counter:
            logits = actor.module(ids[None]).logits
            if trained:
                logits.sum().backward()
        counted += counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    actor.module.zero_grad()

    seconds: list[float] = []
    measured = actor._utilisation

    def on_an_h100(share: Any, took: float) -> dict[str, float]:
        seconds.append(took)
        with monkeypatch.context() as patch:
            patch.setattr(actor._backend, "_device", torch.device("cuda"))
            patch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
            return measured(share, took)

    monkeypatch.setattr(actor, "_utilisation", on_an_h100)
    share = actor.update(batch)["perf/mfu/actor"]
    # The metric counts the few parameters of the norms, too.
    assert share == pytest.approx(counted / (989e12 * seconds[0]), rel=0.02)
