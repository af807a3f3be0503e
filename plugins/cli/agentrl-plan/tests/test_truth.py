"""Predicted peaks against what torch's allocator reports of a real update."""

import pytest
import torch

from benchmarks._plan_cases import Case, config_of, measured_peak, predicted_peak

CASES = {
    "padded": Case(width=128, layers=3, packing=False, checkpointing=False),
    "padded, checkpointing": Case(width=128, layers=3, packing=False, checkpointing=True),
    "adapter": Case(width=128, layers=3, packing=True, checkpointing=False, adapter={"rank": 8}),
    "packed": Case(width=128, layers=3, packing=True, checkpointing=False),
    "packed, checkpointing": Case(width=128, layers=3, packing=True, checkpointing=True),
}


MESHES = {
    "tensor": Case(width=128, layers=3, packing=False, checkpointing=True, mesh={"tensor_parallel": 2}),
    "copies": Case(width=128, layers=3, packing=False, checkpointing=True, mesh={"replicas": 2}),
    "experts": Case(
        width=128,
        layers=3,
        packing=False,
        checkpointing=True,
        mesh={"expert_parallel": 2},
        experts=8,
    ),
    "sequence": Case(width=128, layers=3, packing=True, checkpointing=False, mesh={"sequence_parallel": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MESHES.values(), ids=MESHES.keys())
def test_the_predicted_peak_is_within_a_tenth_of_a_real_update_on_two_ranks(case: Case) -> None:
    with config_of(case) as config:
        assert predicted_peak(config, 2) == pytest.approx(measured_peak(config, 2), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_predicted_peak_is_within_a_tenth_of_a_real_update(case: Case) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with config_of(case) as config:
            assert predicted_peak(config, 1) == pytest.approx(measured_peak(config, 1), rel=0.1)
    finally:
        torch.set_num_threads(threads)
