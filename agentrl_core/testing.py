"""Tells a plugin that imports the helpers of earlier versions where they are."""

raise ImportError(
    "agentrl_core.testing is a package of its own now: pip install agentrl-testing, and import agentrl_testing in its "
    "place (agentrl_testing.contracts for agentrl_core.testing.contracts)"
)
