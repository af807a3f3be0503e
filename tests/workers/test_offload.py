"""What waits on the host. The meta device stands for the one that computes: a name with nothing behind it."""

import pytest
import torch
from torch import nn

from agentrl_core.fsdp2.offload import Offload

AWAY = torch.device("meta")


def where(model: nn.Module) -> str:
    (device,) = {parameter.device.type for parameter in model.parameters()}
    return device


@pytest.fixture
def homeward(monkeypatch) -> list[bool]:
    """Meta tensors cannot come back, so the way home is only watched."""
    home: list[bool] = []
    monkeypatch.setattr(Offload, "offload", lambda self: home.append(True))
    return home


@pytest.mark.parametrize("parameters", [True, False])
def test_each_phase_brings_the_weights_and_takes_them_back(homeward, parameters):
    model = nn.Linear(2, 2)
    offload = Offload(model, parameters, AWAY)
    assert (where(model), len(homeward)) == ("cpu", 1)
    with offload.on_device():
        assert where(model) == ("meta" if parameters else "cpu")
    assert len(homeward) == 2


def test_a_phase_that_fails_gives_the_device_back(homeward):
    with pytest.raises(ValueError), Offload(nn.Linear(2, 2), True, AWAY).on_device():
        raise ValueError
    assert len(homeward) == 2


def test_the_way_home_goes_to_the_host(monkeypatch):
    model, moved = nn.Linear(2, 2), []
    monkeypatch.setattr(model, "to", moved.append)
    Offload(model, True, AWAY).offload()
    assert moved == [torch.device("cpu")] * 2


def test_on_the_host_nothing_moves(monkeypatch):
    model = nn.Linear(2, 2)
    monkeypatch.setattr(model, "to", pytest.fail)
    with Offload(model, True, torch.device("cpu")).on_device():
        pass


def test_cached_memory_of_a_gpu_is_given_back_when_a_model_is_ready_and_after_every_phase(monkeypatch):
    """Whether weights wait on the host or not: engines that wake on this GPU need what activations have left."""
    emptied: list[bool] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: emptied.append(True))
    offload = Offload(nn.Linear(2, 2), False, torch.device("cuda"))
    assert len(emptied) == 1
    with offload.on_device():
        assert len(emptied) == 1
    assert len(emptied) == 2
