"""Parameters and optimizer state that wait in host memory while others need the device's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from agentrl_core.workers.optimizer import ScheduledAdamW
from agentrl_core.workers.sharding import rest

HOST = torch.device("cpu")


class Offload:
    """Brings a model, and where there is one its optimizer, to the device for a phase and back to the host after it.

    Args:
        parameters: the model's weights wait on the host.
        optimizer_state: AdamW's moments do.
        device: where phases compute; on the host itself nothing ever moves.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: ScheduledAdamW | None,
        parameters: bool,
        optimizer_state: bool,
        device: torch.device,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._moves_parameters = parameters and device != HOST
        self._moves_optimizer = optimizer_state and optimizer is not None and device != HOST
        self._device = device
        self.offload()

    @contextmanager
    def on_device(self, optimizer: bool = False) -> Iterator[None]:
        """A phase: inside, the model is on the device, and with ``optimizer`` the moments too."""
        self.reload(optimizer)
        try:
            yield
        finally:
            rest(self._model)
            self.offload()

    def reload(self, optimizer: bool = False) -> None:
        """Bring parameters, and with ``optimizer`` the moments, to the device."""
        if self._moves_parameters:
            self._model.to(self._device, non_blocking=True)
        if self._moves_optimizer and optimizer and self._optimizer is not None:
            self._optimizer.move_moments(self._device)

    def offload(self) -> None:
        """Bring what is configured to the host, and give the device's memory back."""
        if self._moves_parameters:
            self._model.to(HOST)
        if self._moves_optimizer and self._optimizer is not None:
            self._optimizer.move_moments(HOST)
        if (self._moves_parameters or self._moves_optimizer) and self._device.type == "cuda":
            torch.cuda.empty_cache()
