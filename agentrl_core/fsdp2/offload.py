"""Parameters that wait in host memory while others need the device's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from agentrl_core.fsdp2.sharding import rest

HOST = torch.device("cpu")


class Offload:
    """Brings a model to the device for a phase, and gives memory back after it.

    What the allocator caches is given back too: engines on the same GPU could not use it. AdamW's moments are the
    optimizer's own business (``ScheduledAdamW``).

    Args:
        parameters: the model's weights wait on the host.
        device: where phases compute; on the host itself nothing ever moves.
    """

    def __init__(self, model: nn.Module, parameters: bool, device: torch.device) -> None:
        self._model = model
        self._moves_parameters = parameters and device != HOST
        self._device = device
        self.offload()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A phase: inside, the model is on the device."""
        if self._moves_parameters:
            self._model.to(self._device, non_blocking=True)
        try:
            yield
        finally:
            rest(self._model)
            self.offload()

    def offload(self) -> None:
        """Bring the parameters to the host if they wait there, and give the device's memory back."""
        if self._moves_parameters:
            self._model.to(HOST)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
