"""How much of a GPU's peak an update uses: an estimate, for GPUs whose peak is known."""

from torch import nn

_PEAKS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""Dense bfloat16 operations per second, from NVIDIA's data sheets, by a part of the device's name; first match."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations per second of a GPU; None if it is not listed."""
    return next((peak for name, peak in _PEAKS.items() if name in device_name), None)


def multiplied_parameters(model: nn.Module) -> int | None:
    """Parameters that each token is multiplied with: all, without input embeddings that are only looked up.

    None for mixtures of experts, of which a token sees a part.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    if any(getattr(config, name, None) for name in _EXPERTS):
        return None
    looked_up = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()  # type: ignore[operator]
    return sum(parameter.numel() for parameter in model.parameters()) - looked_up


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
