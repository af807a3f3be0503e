"""Prompts with images, as vLLM takes them: it expands them by itself, into what the trainer computes or not at all."""

import asyncio
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from agentrl_core.api.engine import EngineContext, MultiModal
from agentrl_core.api.errors import EngineError
from agentrl_core.engine_kit.media import first_difference, opened

_decoded = lru_cache(maxsize=64)(opened)


def image_arguments(context: EngineContext) -> dict[str, Any]:
    """Arguments of ``AsyncEngineArgs`` for a model that is shown images."""
    if not context.max_images:
        return {}
    return {"limit_mm_per_prompt": {"image": context.max_images, "video": 0, "audio": 0}}


async def image_prompt(
    llm: Any, request_id: str, prompt_ids: Sequence[int], multi_modal: MultiModal, updates: int
) -> Any:
    """A prompt that ``AsyncLLM.generate`` takes, with its images processed.

    Args:
        updates: of the weights so far. What vLLM's encoder makes of an image is kept under its name and this number.

    Raises:
        EngineError: vLLM expands the prompt to other ids than ``prompt_ids``.
    """
    from vllm import TokensPrompt

    images = await asyncio.to_thread(lambda: [_decoded(multi_modal.data[name]) for name in multi_modal.images])
    prompt = TokensPrompt(
        prompt_token_ids=[int(token) for token in multi_modal.collapsed_ids],
        multi_modal_data={"image": images},
        multi_modal_uuids={"image": [f"{name}#{updates}" for name in multi_modal.images]},
        cache_salt=str(updates),
    )
    # Not with the cache that leaves out what vLLM's core has already: an update of the weights empties the core's.
    processed = await llm.renderer.process_for_engine_async(prompt, time.time(), skip_mm_cache=True)
    if problem := first_difference(processed["prompt_token_ids"], prompt_ids):
        raise EngineError(f"request {request_id!r}: vLLM expands its images to other tokens: {problem}")
    return processed
