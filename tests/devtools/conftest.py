from agentrl_core.testing.plugins import isolated_plugins

__all__ = ["isolated_plugins"]
