"""The losses of the API: sums over tokens of a datum, as Tinker's documentation defines them.

Shapes: N tokens of a datum. ``log_probs`` are those of the targets under the model that is trained, ``logprobs`` those
under the policy that sampled them. Clip thresholds are absolute ratios: 0.8 and 1.2, not 0.2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl_tinker.refusals import Refusal

Inputs = Mapping[str, Tensor]
Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Loss:
    """One loss.

    Args:
        of: the loss of a datum, a scalar, of ``log_probs`` [N], the inputs [N] and the settings.
        inputs: names of the inputs [N] besides ``target_tokens``; all are needed.
        settings: keys of ``loss_fn_config`` with their defaults; None: the client must name it.
    """

    of: Callable[[Tensor, Inputs, Numbers], Tensor]
    inputs: tuple[str, ...]
    settings: Mapping[str, float | None] = field(default_factory=dict)


def _cross_entropy(log_probs: Tensor, inputs: Inputs, settings: Numbers) -> Tensor:
    return -(log_probs * inputs["weights"]).sum()


def _importance_sampling(log_probs: Tensor, inputs: Inputs, settings: Numbers) -> Tensor:
    return -(torch.exp(log_probs - inputs["logprobs"]) * inputs["advantages"]).sum()


def _clipped(ratio: Tensor, settings: Numbers) -> Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


def _ppo(log_probs: Tensor, inputs: Inputs, settings: Numbers) -> Tensor:
    ratio = torch.exp(log_probs - inputs["logprobs"])
    return -torch.minimum(ratio * inputs["advantages"], _clipped(ratio, settings) * inputs["advantages"]).sum()


def _cispo(log_probs: Tensor, inputs: Inputs, settings: Numbers) -> Tensor:
    ratio = torch.exp(log_probs - inputs["logprobs"])
    return -(_clipped(ratio, settings).detach() * log_probs * inputs["advantages"]).sum()


def _dro(log_probs: Tensor, inputs: Inputs, settings: Numbers) -> Tensor:
    penalty = 0.5 * settings["beta"] * (log_probs - inputs["logprobs"]) ** 2
    return -(log_probs * inputs["advantages"] - penalty).sum()


def _gspo(log_probs: Tensor, inputs: Inputs, settings: Numbers) -> Tensor:
    """GSPO-token (arXiv 2507.18071): every token has the value of the sequence's ratio and its own gradient."""
    counted = inputs["sequence_ratio_mask"] != 0
    mean = (log_probs.detach() - inputs["logprobs"])[counted].mean()
    ratio = torch.exp(mean + log_probs - log_probs.detach())
    return -torch.minimum(ratio * inputs["advantages"], _clipped(ratio, settings) * inputs["advantages"]).sum()


_SAMPLED = ("logprobs", "advantages")
_THRESHOLDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": Loss(_cross_entropy, ("weights",)),
    "importance_sampling": Loss(_importance_sampling, _SAMPLED),
    "ppo": Loss(_ppo, _SAMPLED, _THRESHOLDS),
    "cispo": Loss(_cispo, _SAMPLED, _THRESHOLDS),
    "dro": Loss(_dro, _SAMPLED, {"beta": None}),
    "gspo": Loss(_gspo, (*_SAMPLED, "sequence_ratio_mask"), dict.fromkeys(_THRESHOLDS)),
}
_MISSING = {
    "stable_reinforce": "its objective is not published. Train with one of those, or with forward_backward_custom",
    "custom": "it does not run losses that clients upload. forward_backward_custom computes them in the client",
}


def loss_named(name: str, settings: Numbers) -> tuple[Loss, dict[str, float]]:
    """A loss and all of its settings.

    Raises:
        Refusal: there is no such loss, or it has no such setting, or one is missing.
    """
    if name not in LOSSES:
        why = f"; {_MISSING[name]}" if name in _MISSING else ""
        raise Refusal(f"loss_fn: this server has no loss {name!r}, it has {', '.join(LOSSES)}{why}")
    loss = LOSSES[name]
    if unknown := settings.keys() - loss.settings.keys():
        allowed = f"it has {', '.join(loss.settings)}" if loss.settings else "it has none"
        raise Refusal(f"loss_fn_config: {name} has no setting {', '.join(sorted(unknown))}; {allowed}")
    found = {**loss.settings, **settings}
    if missing := [key for key, value in found.items() if value is None]:
        raise Refusal(f"loss_fn_config: {name} needs {' and '.join(missing)}, which has no default here")
    values = {key: float(value) for key, value in found.items() if value is not None}
    low, high = values.get("clip_low_threshold", 0.0), values.get("clip_high_threshold", 1.0)
    if not 0 <= low <= 1 <= high:
        raise Refusal(
            f"loss_fn_config: clip_low_threshold {low:g} and clip_high_threshold {high:g} are ratios, such as 0.8 and "
            "1.2: the first is at most 1, the second at least 1"
        )
    return loss, values
