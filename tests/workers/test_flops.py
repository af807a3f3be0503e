"""The estimate of model FLOPs utilisation."""

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from agentrl_core.workers.flops import peak_flops, utilisation

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


def test_a_mixture_of_experts_and_an_unknown_gpu_have_no_estimate() -> None:
    experts: nn.Module = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2))
    assert utilisation(experts, "NVIDIA H200", 1, 1, 1, 1.0) is None
    assert utilisation(LlamaForCausalLM(LlamaConfig(**SIZES)), "Tesla T4", 1, 1, 1, 1.0) is None
