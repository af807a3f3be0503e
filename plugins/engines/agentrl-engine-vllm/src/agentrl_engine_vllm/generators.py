"""Generators of seeded requests that vLLM can take back on a CPU, too."""

from typing import Any

import torch


class RewindableGenerator(torch.Generator):
    """A CPU generator that goes back by one sampling where vLLM sets its offset.

    vLLM samples for every request of a batch, also for one whose prompt is computed in part only, and then takes the
    generators of these back: ``generator.set_offset(generator.get_offset() - 4)``. Generators of a CPU have no offset;
    vLLM's worker would end.
    """

    def __new__(cls, generator: torch.Generator) -> "RewindableGenerator":  # noqa: ARG004 - as __init__
        return super().__new__(cls, device="cpu")

    def __init__(self, generator: torch.Generator) -> None:
        self.set_state(generator.get_state())
        self.remember()

    def remember(self) -> None:
        """Sampling begins here."""
        self._before = self.get_state()

    def get_offset(self) -> int:
        """Of one sampling, as vLLM counts."""
        return 4

    def set_offset(self, offset: int) -> None:  # noqa: ARG002 - vLLM goes back by one sampling only
        """Back to where the last sampling began."""
        self.set_state(self._before)


class Rewinder:
    """Makes the generators of a model runner's batch rewindable.

    Args:
        model_runner: vLLM's, on a CPU.
    """

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner

    def before_sampling(self) -> None:
        """To be called each time."""
        batch = self._runner.input_batch
        for index, generator in batch.generators.items():
            if not isinstance(generator, RewindableGenerator):
                # A request that is preempted takes its generator along, and brings it back.
                state = self._runner.requests[batch.req_ids[index]]
                state.generator = batch.generators[index] = generator = RewindableGenerator(generator)
            generator.remember()
