"""Arguments for images, and the sampler that leaves their tokens out."""

from types import SimpleNamespace

import pytest
import torch

from agentrl_core.api import EngineContext
from agentrl_engine_vllm.images import image_arguments
from agentrl_engine_vllm.sampler import without_reserved


def test_limits_are_those_of_the_run() -> None:
    assert image_arguments(EngineContext("m")) == {}
    limits = image_arguments(EngineContext("m", max_images=2))["limit_mm_per_prompt"]
    assert limits == {"image": 2, "video": 0, "audio": 0}


@pytest.mark.parametrize("temperature", [None, torch.tensor([2.0, 0.0])], ids=["greedy", "mixed"])
def test_reserved_ids_are_never_sampled_and_count_in_log_probs(temperature: torch.Tensor | None) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 4.0]])

    def sample(logits: torch.Tensor, metadata: object) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.argmax(-1), logits

    metadata = SimpleNamespace(temperature=temperature)
    ids, log_probs = without_reserved(sample, [2])(logits.clone(), metadata)
    assert ids.tolist() == [1, 0]
    divisors = torch.ones(2) if temperature is None else torch.tensor([2.0, 1.0])
    assert torch.allclose(log_probs, torch.log_softmax(logits / divisors[:, None], -1))
