import pytest
import torch
from torch import nn

from agentrl_core.config.schema import OptimizerConfig
from agentrl_core.workers.optimizer import ScheduledAdamW, learning_rate


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


def optimizer_of(parameter: nn.Parameter, grad_clip: float = 1.0) -> ScheduledAdamW:
    return ScheduledAdamW(
        [("weight", parameter)], OptimizerConfig(lr=0.1, schedule="linear"), grad_clip, total_steps=10
    )


def test_reports_the_norm_before_clipping_and_forgets_the_gradient():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    optimizer = optimizer_of(parameter)
    report = optimizer.step()
    assert (report.grad_norm, report.lr, report.skipped) == (5.0, 0.1, False)
    assert parameter.grad is None and parameter.any()
    assert optimizer.lr == pytest.approx(0.09)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_no_weight_but_counts_in_the_schedule(value):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optimizer_of(parameter)
    parameter.grad = torch.tensor([1.0, value])
    assert optimizer.step().skipped
    assert parameter.tolist() == [1.0, 1.0] and parameter.grad is None
    assert optimizer.lr == pytest.approx(0.09)
    parameter.grad = torch.ones(2)
    assert not optimizer.step().skipped
    assert torch.isfinite(parameter).all()


def test_frozen_parameters_are_left_alone():
    frozen, trained = nn.Parameter(torch.ones(1), requires_grad=False), nn.Parameter(torch.ones(1))
    optimizer = ScheduledAdamW(
        [("frozen", frozen), ("trained", trained)], OptimizerConfig(lr=0.1, weight_decay=0.5), 1.0, 10
    )
    trained.grad = torch.ones(1)
    optimizer.step()
    assert frozen.item() == 1.0 and trained.item() < 1.0
