"""What waits on the host. The meta device stands for the one that computes: a name with nothing behind it."""

import pytest
import torch
from torch import nn

from agentrl_core.config.schema import OptimizerConfig
from agentrl_core.workers.offload import Offload
from agentrl_core.workers.optimizer import ScheduledAdamW

AWAY = torch.device("meta")


@pytest.fixture
def trained() -> tuple[nn.Module, ScheduledAdamW]:
    model = nn.Linear(2, 2)
    optimizer = ScheduledAdamW(model.named_parameters(), OptimizerConfig(), 1.0, 10)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


def where(model: nn.Module, optimizer: ScheduledAdamW) -> tuple[str, str]:
    (weights,) = {parameter.device.type for parameter in model.parameters()}
    (moments,) = {tensor.device.type for name, tensor in optimizer.moments().items() if "exp_avg" in name}
    return weights, moments


@pytest.mark.parametrize(("parameters", "optimizer_state"), [(True, True), (True, False), (False, True)])
def test_each_phase_brings_what_it_needs_and_takes_it_back(trained, monkeypatch, parameters, optimizer_state):
    model, optimizer = trained
    # Meta tensors cannot come back, so the way home is only watched.
    home = []
    monkeypatch.setattr(Offload, "offload", lambda self: home.append(True))
    offload = Offload(model, optimizer, parameters, optimizer_state, AWAY)
    assert where(model, optimizer) == ("cpu", "cpu") and len(home) == 1
    weights = "meta" if parameters else "cpu"
    with offload.on_device():
        assert where(model, optimizer) == (weights, "cpu")
    assert len(home) == 2
    with offload.on_device(optimizer=True):
        assert where(model, optimizer) == (weights, "meta" if optimizer_state else "cpu")
    assert len(home) == 3


def test_a_phase_that_fails_gives_the_device_back(trained, monkeypatch):
    home = []
    monkeypatch.setattr(Offload, "offload", lambda self: home.append(True))
    with pytest.raises(ValueError), Offload(*trained, True, True, AWAY).on_device():
        raise ValueError
    assert len(home) == 2


def test_the_way_home_goes_to_the_host(trained, monkeypatch):
    model, optimizer = trained
    moved = []
    monkeypatch.setattr(model, "to", moved.append)
    monkeypatch.setattr(optimizer, "move_moments", moved.append)
    Offload(model, optimizer, True, True, AWAY).offload()
    assert moved == [torch.device("cpu")] * 4


def test_on_the_host_nothing_moves(trained, monkeypatch):
    model, optimizer = trained
    monkeypatch.setattr(model, "to", pytest.fail)
    monkeypatch.setattr(optimizer, "move_moments", pytest.fail)
    offload = Offload(model, optimizer, True, True, torch.device("cpu"))
    with offload.on_device(optimizer=True):
        pass


def test_training_goes_on_after_the_moments_have_moved(trained):
    model, optimizer = trained
    before = {name: tensor.clone() for name, tensor in optimizer.moments().items()}
    optimizer.move_moments(torch.device("cpu"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.moments().items())
    model(torch.ones(2)).sum().backward()
    assert not optimizer.step().skipped
