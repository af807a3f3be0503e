"""How much of a GPU's peak an update uses: an estimate, for GPUs whose peak is known."""

from torch import nn

from agentrl_core.fsdp2.models import experts_of, first_of, vision_parameters

_PEAKS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""Dense bfloat16 operations per second, from NVIDIA's data sheets, by a part of the device's name; first match."""
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")
"""Keys of a model's config with the number of experts that a token chooses."""


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations per second of a GPU; None if it is not listed."""
    return next((peak for name, peak in _PEAKS.items() if name in device_name), None)


def routed_experts(model: nn.Module) -> tuple[int, float]:
    """Parameters of the experts among which a router chooses, and the share of them that a token is multiplied with.

    Shared experts are not among them. The share is 0 where the config does not say it.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    experts, chosen = experts_of(config), first_of(config, _CHOSEN)
    if not experts:
        return 0, 1.0
    return sum(each.numel() for name, each in model.named_parameters() if ".experts." in name), chosen / experts


def multiplied_parameters(model: nn.Module) -> int | None:
    """Parameters that each token is multiplied with: all, without input embeddings that are only looked up and what
    sees images, and of a mixture of experts those that it chooses; None where the config does not say how many these
    are.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    experts, chosen = routed_experts(model)
    if not chosen:
        return None
    looked_up = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()  # type: ignore[operator]
    looked_up += sum(parameter.numel() for parameter in vision_parameters(model).values())
    return sum(parameter.numel() for parameter in model.parameters()) - looked_up - round(experts * (1 - chosen))


def utilisation(
    model: nn.Module, device_name: str, devices: int, trained_tokens: int, other_tokens: int, seconds: float
) -> float | None:
    """Model FLOPs utilisation of an update: 6 N operations per trained token and 2 N per token of a forward pass only
    (Kaplan et al. 2020, arXiv 2001.08361, section 2.1), N parameters; attention scores and recomputation do not count.

    Args:
        devices: that share the work.

    Returns:
        A share in 0..1; None where peak or parameters are not known.
    """
    peak, parameters = peak_flops(device_name), multiplied_parameters(model)
    if peak is None or parameters is None:
        return None
    return parameters * (6 * trained_tokens + 2 * other_tokens) / (peak * devices * seconds)
