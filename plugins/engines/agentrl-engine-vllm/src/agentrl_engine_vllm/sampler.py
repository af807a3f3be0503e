"""Log-probabilities of the whole distribution, where min-p, top-p and top-k choose from a part of it."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch


class WholeDistribution(torch.nn.Module):
    """Samples as the sampler inside does; its log-probabilities are those before truncation.

    They are those that a trainer computes. vLLM's own (``processed_logprobs``) are renormalised over what is left.

    Args:
        inside: vLLM's ``TopKTopPSampler``, with ``processed_logprobs``.
        before: is called each time before it samples.
    """

    def __init__(self, inside: Any, before: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.inside = inside
        self._before = before

    def forward(self, logits: torch.Tensor, generators: Any, k: Any, p: Any) -> tuple[torch.Tensor, Any]:
        """Ids [batch] and log-probabilities [batch, vocabulary] float32 of logits that temperature has divided."""
        self._before()
        if k is None and p is None:
            token_ids, log_probs = self.inside(logits, generators, k, p)
            return token_ids, log_probs
        # Sampling may write to the logits.
        whole = logits.log_softmax(dim=-1, dtype=torch.float32)
        token_ids, log_probs = self.inside(logits, generators, k, p)
        return token_ids, None if log_probs is None else whole


def before_min_p(sample: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's ``Sampler.sample`` with log-probabilities before min-p, which it applies ahead of top-k and top-p."""

    def sample_whole(logits: torch.Tensor, metadata: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        if not any(getattr(each, "min_p_count", 0) for each in metadata.logitsprocs.argmax_invariant):
            return cast(tuple[torch.Tensor, Any], sample(logits, metadata, *args, **kwargs))
        whole = _whole(logits, metadata)
        token_ids, log_probs = sample(logits, metadata, *args, **kwargs)
        return token_ids, None if log_probs is None else whole

    return sample_whole


def without_reserved(sample: Callable[..., Any], reserved_ids: Sequence[int]) -> Callable[..., Any]:
    """vLLM's ``Sampler.sample`` that never samples these ids; their probabilities count in those of others."""

    def sample_others(logits: torch.Tensor, metadata: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        whole = _whole(logits, metadata)
        logits[:, reserved_ids] = -torch.inf
        token_ids, log_probs = sample(logits, metadata, *args, **kwargs)
        return token_ids, None if log_probs is None else whole

    return sample_others


def _whole(logits: torch.Tensor, metadata: Any) -> torch.Tensor:
    """Log-probabilities of what sampling may write to."""
    if metadata.temperature is None:
        temperatures = torch.ones(len(logits), device=logits.device)
    else:
        # The same threshold as vLLM's for greedy sampling, whose log-probabilities are those at 1.
        temperatures = torch.where(metadata.temperature < 1e-5, 1.0, metadata.temperature)
    return (logits / temperatures.unsqueeze(1)).log_softmax(dim=-1, dtype=torch.float32)
