"""The contract of prompt samplers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_core.api import PromptOutcome, PromptSampler, SamplerContext
from agentrl_testing.contracts.case import PluginCase, PluginContract

ROWS = tuple(
    {
        "raw_prompt": [{"role": "user", "content": f"say {number}"}],
        "data_source": ("a", "b")[number % 2],
        "extra_info": {"index": number},
    }
    for number in range(10)
)
STEPS = 6


@dataclass(kw_only=True)
class SamplerCase(PluginCase):
    """A sampler under test.

    Args:
        rows: of the training data; by default ten, of the sources ``a`` and ``b``.
        batch_size: prompts of a step.
    """

    rows: Sequence[Mapping[str, Any]] = ROWS
    batch_size: int = 4

    def make(self, *, batch_size: int | None = None) -> PromptSampler:
        """The sampler as the trainer builds it."""
        sampler: PromptSampler = self.build(SamplerContext(self.rows, batch_size or self.batch_size, 7))
        return sampler


class SamplerContract(PluginContract):
    """What every sampler must do."""

    kind = "sampler"

    def test_batches_are_row_numbers(self, plugin: SamplerCase) -> None:
        """As many as a step has prompts, also where there are fewer rows than that."""
        for size in (1, plugin.batch_size, 2 * len(plugin.rows) + 1):
            sampler = plugin.make(batch_size=size)
            for step in range(1, STEPS + 1):
                numbers = _trained(sampler, step)
                assert len(numbers) == size, f"step {step}: {len(numbers)} rows for batch_size={size}"
                wrong = [number for number in numbers if number not in range(len(plugin.rows))]
                assert not wrong, f"step {step}: {wrong} are no numbers of {len(plugin.rows)} rows"

    def test_a_step_can_be_asked_for_again(self, plugin: SamplerCase) -> None:
        """The trainer asks again when the step is finished."""
        sampler = plugin.make()
        for step in range(1, STEPS + 1):
            first = list(sampler.batch(step))
            assert list(sampler.batch(step)) == first, f"step {step} has other rows when it is asked for again"
            _trained(sampler, step)

    def test_a_resumed_run_gets_the_prompts_of_an_uninterrupted_one(self, plugin: SamplerCase) -> None:
        """From the state of a checkpoint, which is JSON, whatever the step at which it was written."""
        whole = plugin.make()
        batches, states = [], []
        for step in range(1, STEPS + 1):
            batches.append(_trained(whole, step))
            states.append(json.dumps(whole.state_dict()))
        for stopped in range(1, STEPS):
            resumed = plugin.make()
            resumed.load_state_dict(json.loads(states[stopped - 1]))
            rest = [_trained(resumed, step) for step in range(stopped + 1, STEPS + 1)]
            assert rest == batches[stopped:], f"a run that is resumed after step {stopped} gets other prompts"


def _trained(sampler: PromptSampler, step: int) -> list[int]:
    """The rows of a step, after the sampler has seen how it ended; one prompt has no rewards."""
    numbers = list(sampler.batch(step))
    outcomes = [PromptOutcome(number, [float(number % 3 == 0), float(step % 2)][: number % 7]) for number in numbers]
    sampler.update(step, outcomes)
    return numbers
