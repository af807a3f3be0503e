import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from agentrl_core.config.schema import OptimizerConfig
from agentrl_core.fsdp2.optimizer import AdamW
from agentrl_core.workers.schedule import learning_rate


def rates(steps: int, **config) -> list[float]:
    return [learning_rate(OptimizerConfig(lr=1.0, **config), step, steps) for step in range(steps + 2)]


def test_schedules():
    assert rates(4, schedule="constant") == [1.0] * 6
    assert rates(4, schedule="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert rates(4, schedule="linear", warmup_steps=2, min_lr_ratio=0.2) == pytest.approx([0.5, 1, 1, 0.6, 0.2, 0.2])
    assert rates(4, schedule="cosine", min_lr_ratio=0.1) == pytest.approx([1, 0.868198, 0.55, 0.231802, 0.1, 0.1])


def test_more_warmup_than_steps_does_not_divide_by_zero():
    assert rates(2, schedule="cosine", warmup_steps=5)[:2] == [0.2, 0.4]


def test_reports_the_norm_before_clipping_and_forgets_the_gradient():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert AdamW([("weight", parameter)], OptimizerConfig()).step(0.1, 1.0) == 5.0
    assert parameter.grad is None and parameter.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_no_weight(value):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = AdamW([("weight", parameter)], OptimizerConfig())
    parameter.grad = torch.tensor([1.0, value])
    assert not math.isfinite(optimizer.step(0.1, 1.0))
    assert parameter.tolist() == [1.0, 1.0] and parameter.grad is None
    parameter.grad = torch.ones(2)
    assert math.isfinite(optimizer.step(0.1, 1.0))
    assert torch.isfinite(parameter).all()


def test_frozen_parameters_are_left_alone():
    frozen, trained = nn.Parameter(torch.ones(1), requires_grad=False), nn.Parameter(torch.ones(1))
    optimizer = AdamW([("frozen", frozen), ("trained", trained)], OptimizerConfig(weight_decay=0.5))
    trained.grad = torch.ones(1)
    optimizer.step(0.1, 1.0)
    assert frozen.item() == 1.0 and trained.item() < 1.0


def trained(model: nn.Module, steps: int, on_host: bool) -> AdamW:
    optimizer = AdamW(model.named_parameters(), OptimizerConfig(weight_decay=0.1), on_host=on_host)
    for step in range(steps):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(inputs).square().sum().backward()
        optimizer.step(0.01, 1.0)
    return optimizer


def models(count: int) -> list[nn.Module]:
    first = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 7), nn.Linear(7, 2))
    return [first, *(copy.deepcopy(first) for _ in range(count - 1))]


@pytest.mark.parametrize("limit", [0, 900, 2**30])
def test_moments_that_wait_on_the_host_give_the_same_bits(monkeypatch, limit):
    monkeypatch.setattr("agentrl_core.fsdp2.optimizer.STREAMED_BYTES", limit)
    plain, streamed = models(2)
    expected, found = trained(plain, 4, on_host=False), trained(streamed, 4, on_host=True)
    assert all(map(torch.equal, plain.parameters(), streamed.parameters()))
    for name, moment in expected.moments().items():
        assert torch.equal(found.moments()[name], moment), name


def test_moments_taken_from_a_checkpoint_go_on_with_the_same_bits(monkeypatch):
    monkeypatch.setattr("agentrl_core.fsdp2.optimizer.STREAMED_BYTES", 500)
    plain, streamed = models(2)
    expected = trained(plain, 2, on_host=False)
    streamed.load_state_dict(plain.state_dict())
    found = AdamW(streamed.named_parameters(), OptimizerConfig(weight_decay=0.1), True)
    for name, moment in found.moments().items():
        moment.copy_(expected.moments()[name])
    for model, optimizer in ((plain, expected), (streamed, found)):
        model(torch.ones(4, 6)).square().sum().backward()
        optimizer.step(0.01, 1.0)
    assert all(map(torch.equal, plain.parameters(), streamed.parameters()))


def test_on_a_gpu_a_step_is_fused_and_has_few_moments_there_at_a_time(monkeypatch):
    """Fake tensors of a GPU: shapes and devices are real, values are not."""
    monkeypatch.setattr("agentrl_core.fsdp2.optimizer.STREAMED_BYTES", 1000)
    # Values that fake tensors do not have.
    monkeypatch.setattr("agentrl_core.fsdp2.optimizer._clip", lambda parameters, limit: 1.0)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr("agentrl_core.fsdp2.optimizer._on_host", lambda tensor: tensor.to("cpu"))
    with FakeTensorMode():
        shapes = {"a": (33, 6), "b": (33,), "c": (7, 33), "d": (2, 7)}
        named = {name: nn.Parameter(torch.empty(shape, device="cuda")) for name, shape in shapes.items()}
        optimizer = AdamW(named.items(), OptimizerConfig(), on_host=True)
        state, most = optimizer._adamw.state, []
        step = type(optimizer._adamw).step

        def watched(adamw, *args):
            (group,) = adamw.param_groups
            assert group["fused"]
            step(adamw, *args)
            most.append(sum(
                each[key].nbytes for each in state.values() for key in ("exp_avg", "exp_avg_sq")
                if each[key].device.type == "cuda"
            ))  # fmt: skip

        monkeypatch.setattr(type(optimizer._adamw), "step", watched)
        for _ in range(2):
            for parameter in named.values():
                parameter.grad = torch.empty_like(parameter)
            optimizer.step(0.01, 1.0)
        moments = optimizer.moments()
        assert {tensor.device.type for name, tensor in moments.items() if "exp_avg" in name} == {"cpu"}
        assert {tensor.device.type for name, tensor in moments.items() if name.endswith("step")} == {"cuda"}
    assert max(most) <= 2 * 1000 and len(most) == 4


def test_what_moments_will_take_is_known_before_the_first_step():
    first, second = models(2)
    size = sum(parameter.nbytes for parameter in first.parameters())
    optimizer = AdamW(first.named_parameters(), OptimizerConfig())
    assert optimizer.bytes_to_come == 2 * size
    optimizer.moments()
    assert optimizer.bytes_to_come == 0
    assert AdamW(second.named_parameters(), OptimizerConfig(), on_host=True).bytes_to_come == 0


def test_moments_of_shards_wait_on_the_host_too() -> None:
    """A mesh of GPUs needs none as long as nothing is sent; ``DTensor.from_local`` would bring a shard back to them."""
    mesh = DeviceMesh("cuda", [0], _init_backend=False, _rank=0)
    meta = TensorMeta(torch.Size([4, 3]), (3, 1), torch.float32)
    shard = DTensor(torch.ones(4, 3), DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)
    moments = AdamW([("weight", nn.Parameter(shard))], OptimizerConfig(), on_host=True).moments()
    for name in ("weight.exp_avg", "weight.exp_avg_sq"):
        assert isinstance(moments[name], DTensor) and moments[name].device_mesh is mesh
        assert torch.equal(moments[name].to_local(), torch.zeros(4, 3))
