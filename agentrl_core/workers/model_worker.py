"""What actor, critic and reference have in common: a model, alone in this process or sharded over the ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from agentrl_core.config.schema import ResolvedConfig
from agentrl_core.controller import Worker
from agentrl_core.workers.data_parallel import DataParallel
from agentrl_core.workers.models import check_lengths, resolve_device
from agentrl_core.workers.offload import Offload
from agentrl_core.workers.packed_attention import Compute, Packing
from agentrl_core.workers.sharding import place, rest


class ModelWorker(Worker):
    """Base of the workers that compute with a model.

    Args:
        config: the loaded configuration.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__()
        self.config = config
        self._device = resolve_device(config.cluster.device)
        self._parallel = DataParallel()
        self._model: Any = None
        self._offload: Offload
        self._packing: Packing

    def _place_model(self, load: Callable[[], nn.Module], skeleton: Callable[[], nn.Module]) -> None:
        """Meet the other ranks and put the model in its place: see :func:`agentrl_core.workers.sharding.place`."""
        self._parallel = DataParallel.join(self, self._device)
        self._model = place(load, skeleton, self._parallel, self.config.model.compute_dtype, self._device)
        longest = self.config.data.max_prompt_length + self.config.rollout.max_response_length
        check_lengths(getattr(self._model, "backbone", self._model).config, longest, "model.path")

    def _pack_rows(self, model: Any, compute: Compute) -> None:
        """Let ``model``, the one of transformers, compute rows packed where it can: see :class:`Packing`."""
        self._packing = Packing(model, compute, self.config.model.packing, self._device)
        rest(self._model)

    @contextmanager
    def _computing(self, optimizer: bool = False) -> Iterator[None]:
        """A phase of forward passes, and with ``optimizer`` of updates: the model is on the device, and packs."""
        with self._offload.on_device(optimizer), self._packing.on():
            yield

    def close(self) -> None:
        """Forget the model and leave the other ranks."""
        self._model = None
        self._parallel.close()
