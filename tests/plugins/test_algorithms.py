import pytest

from agentrl_core.api import AlgorithmContext
from agentrl_core.plugins.resolution import resolve


@pytest.mark.parametrize(
    ("kind", "name", "capabilities"),
    [
        ("advantage_estimator", "grpo", {"groups", "separate_groups"}),
        ("advantage_estimator", "gae", {"values"}),
        ("policy_loss", "ppo", set()),
    ],
)
def test_the_algorithms_are_found_through_entry_points(kind, name, capabilities):
    plugin = resolve(kind, name)
    assert plugin.spec.capabilities == capabilities
    built = plugin.build(plugin.spec.config(), AlgorithmContext(group_size=2))
    assert type(built).__name__ == name.upper()
