"""What is said of idle time."""

import pytest

from agentrl_core.api.tree import Span
from agentrl_core.trainer.idle import IdleTime


@pytest.mark.parametrize("size", [1, 2, 8, 10, 20])
def test_the_wait_for_the_slowest_trajectory_is_its_own_in_batches_of_any_size(size: int) -> None:
    idle = IdleTime()
    others = [(20.0, [Span("generate", 10.0, 10.0)])] * (size - 1)
    idle.trainer_waited(10.0, 30.0, [*others, (30.0, [Span("generate", 5.0, 15.0), Span("tool search", 20.0, 9.0)])])
    waited = idle.take(30.0)
    assert waited["idle/trainer/tool_search"] == 9.0
    assert waited["idle/trainer/engines"] == (0.0 if size == 1 else 10.0)
    assert sum(waited.values()) == pytest.approx(20.0)


def test_what_the_trainer_computed_while_it_waited_is_no_idle_time() -> None:
    idle = IdleTime()
    groups = [(20.0, [Span("generate", 0.0, 20.0)])] * 9 + [(30.0, [Span("tool search", 20.0, 10.0)])]
    idle.trainer_waited(10.0, 30.0, groups, [(12.0, 15.0), (19.0, 22.0), (29.5, 30.0)])
    waited = idle.take(30.0)
    assert waited["idle/trainer/engines"] == 10.0 - 3.0 - 1.0
    assert waited["idle/trainer/tool_search"] == 10.0 - 2.0 - 0.5
    assert sum(waited.values()) == pytest.approx(20.0 - 6.5)


def test_a_wait_that_goes_on_is_part_of_each_step_in_which_it_does() -> None:
    idle = IdleTime()
    idle.running(False, 10.0)
    assert [idle.take(now)["idle/rollout/trainer"] for now in (15.0, 17.0)] == [5.0, 2.0]
    idle.running(True, 20.0)
    assert idle.take(30.0)["idle/rollout/trainer"] == 3.0


def test_the_report_is_a_table_and_what_would_help_most() -> None:
    idle = IdleTime()
    idle.running(True, 0.0)
    idle.trainer_waited(0.0, 30.0, [(10.0, []), (30.0, [Span("tool search", 9.0, 21.0)])])
    idle.running(False, 90.0)
    idle.running(True, 100.0)
    *table, help_most = idle.report(1, 4)
    assert table == [
        "waited, of 100.0 s:",
        "  trainer      20.0 s  20.0%  for the slowest trajectory, in tool search",
        "  trainer      10.0 s  10.0%  for the engines",
        "  rollout      10.0 s  10.0%  for the trainer",
    ]
    assert help_most.startswith("what would help most: a faster tool search, or rollout.pipeline_depth=2: ")
