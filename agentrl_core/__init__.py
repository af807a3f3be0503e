"""agentrl: reinforcement learning for tool-using language-model agents.

from agentrl_core import Trainer, load_config

Trainer(load_config("config.yaml")).fit()
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Trainer", "__version__", "load_config"]

if TYPE_CHECKING:
    from agentrl_core.config import load_config
    from agentrl_core.trainer import Trainer


def __getattr__(name: str) -> Any:
    # Importing agentrl_core must not need torch; the trainer does.
    if name == "Trainer":
        from agentrl_core.trainer import Trainer

        return Trainer
    if name == "load_config":
        from agentrl_core.config import load_config

        return load_config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
