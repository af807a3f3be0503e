"""Which device a worker computes on, and in which data type."""

import socket

import torch

from agentrl_core.api.errors import ConfigError
from agentrl_core.config.schema import Config, DeviceName, ModelConfig


def resolve_device(device: DeviceName) -> torch.device:
    """The device that ``cluster.device`` means on this machine. Raises ConfigError where CUDA is asked for in vain."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError(
            f"cluster.device is 'cuda', or Ray gave this process a GPU, and torch {torch.__version__} sees no CUDA "
            f"device on {socket.gethostname()}: set cluster.device=cpu, or see `agentrl doctor` for what is installed"
        )
    return torch.device("cuda" if available and device != "cpu" else "cpu")


def compute_dtype(config: ModelConfig, device: torch.device) -> str:
    """Data type of forward and backward passes on a device: bfloat16 on CUDA, else that of the stored weights, unless
    ``model.compute_dtype`` says another."""
    return config.compute_dtype or ("bfloat16" if device.type == "cuda" else config.dtype)


def engine_dtype(config: Config, device: torch.device) -> str:
    """Data type of the policy's engine and of the weights that it is sent: ``rollout.engine.dtype``."""
    return config.rollout.engine.dtype or compute_dtype(config.model, device)
