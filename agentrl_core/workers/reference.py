"""The frozen policy that the KL term measures the distance to."""

from typing import Any

import torch

from agentrl_core.config.schema import Config
from agentrl_core.controller import Dispatch, Worker, register
from agentrl_core.protocol import DataProto
from agentrl_core.workers.log_probs import response_log_probs, temperature_of
from agentrl_core.workers.micro_batching import columns_of, map_micro_batches
from agentrl_core.workers.models import load_causal_lm, resolve_device


class ReferenceWorker(Worker):
    """Implements :class:`agentrl_core.workers.protocols.Reference` with ``reference.path``, or the initial policy."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self._device = resolve_device(config.cluster.device)
        self._model: Any = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        own = self.config.reference.path
        path, key = (own, "reference.path") if own else (self.config.model.path, "model.path")
        self._model = load_causal_lm(path, self.config.model, key).to(self._device).requires_grad_(False)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        temperature = temperature_of(batch, "compute_ref_log_prob")
        with torch.no_grad():
            columns = map_micro_batches(
                columns_of(batch, (), "compute_ref_log_prob"),
                self.config.reference.micro_batch_tokens,
                self._device,
                lambda micro: response_log_probs(self._model, micro, temperature),
                ("ref_log_prob",),
                "reference.micro_batch_tokens",
            )
        return DataProto.from_dict(tensors=columns)
