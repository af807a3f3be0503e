"""The roles as the trainer uses them: through a worker group."""

import torch

from agentrl_core.controller import ClassWithInitArgs, LocalWorkerGroup
