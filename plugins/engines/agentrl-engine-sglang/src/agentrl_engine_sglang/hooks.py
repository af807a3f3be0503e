"""What runs inside SGLang's processes: no token of an image is sampled, and updates forget what images were.

SGLang calls :func:`register`, an entry point, in each of its processes.
"""

import os
from collections.abc import Callable
from typing import Any

RESERVED_VARIABLE = "AGENTRL_RESERVED_IDS"
"""Ids that are never sampled, with commas; set in the environment of a server that an engine of ours has started."""


def register() -> None:
    """Hook into the server, if it is one of ours that is shown images."""
    reserved = [int(token) for token in os.environ.get(RESERVED_VARIABLE, "").split(",") if token]
    if not reserved:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = "sglang.srt.layers.sampler.Sampler.forward", "sglang.srt.managers.scheduler.Scheduler.flush_cache"
    HookRegistry.register(hooks[0], without_reserved(reserved), HookType.AROUND)
    HookRegistry.register(hooks[1], forget_images, HookType.AFTER)


def without_reserved(reserved: list[int]) -> Callable[..., Any]:
    """Around the sampler: it samples other ids, whose log-probabilities are those among all."""

    def forward(sample: Callable[..., Any], sampler: Any, output: Any, sampling: Any, return_logprob: bool,
                *args: Any, **kwargs: Any) -> Any:  # fmt: skip
        logits = output.next_token_logits
        if return_logprob and kwargs.get("logprob_logits") is None:
            kwargs["logprob_logits"] = logits.clone()
        logits[:, reserved] = float("-inf")
        return sample(sampler, output, sampling, return_logprob, *args, **kwargs)

    return forward


def forget_images(flushed: Any, *args: Any, **kwargs: Any) -> None:
    """After the cache of prefixes was flushed: what the old weights have made of images outlives it otherwise."""
    from sglang.srt.managers import mm_schedule

    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()
