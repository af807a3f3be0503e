"""Seeded requests whose prompt is computed in parts, on a CPU."""

from types import SimpleNamespace

import pytest
import torch

from agentrl_engine_vllm.generators import RewindableGenerator, Rewinder


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def runner(*generators: torch.Generator) -> SimpleNamespace:
    names = [f"r{index}" for index in range(len(generators))]
    requests = {name: SimpleNamespace(generator=each) for name, each in zip(names, generators, strict=True)}
    batch = SimpleNamespace(generators=dict(enumerate(generators)), req_ids=names)
    return SimpleNamespace(input_batch=batch, requests=requests)


def test_a_sampling_that_does_not_count_leaves_no_trace() -> None:
    expected = torch.rand(3, generator=seeded(5))
    host = runner(seeded(7), seeded(5))
    rewinder = Rewinder(host)
    found = []
    for counts in (False, False, True, True, False, True):
        rewinder.before_sampling()
        generator = host.input_batch.generators[1]
        sampled = torch.rand(1, generator=generator)
        if counts:
            found.append(sampled)
        else:
            generator.set_offset(generator.get_offset() - 4)
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(torch.rand(3, generator=host.input_batch.generators[0]), torch.rand(3, generator=seeded(7)))


def test_a_preempted_request_keeps_its_generator() -> None:
    host = runner(seeded(5))
    Rewinder(host).before_sampling()
    generator = host.input_batch.generators[0]
    assert isinstance(generator, RewindableGenerator)
    assert host.requests["r0"].generator is generator


def test_generators_of_a_cpu_cannot_do_this_themselves() -> None:
    with pytest.raises(RuntimeError, match="does not use offset"):
        seeded(1).get_offset()
