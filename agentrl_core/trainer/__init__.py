"""The PPO loop and what it needs: preparation, roles, records, checkpoints."""

from agentrl_core.trainer.trainer import Trainer

__all__ = ["Trainer"]
