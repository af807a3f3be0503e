from agentrl_testing.plugins import isolated_plugins

__all__ = ["isolated_plugins"]
