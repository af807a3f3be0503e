"""The frozen policy that the KL term measures the distance to."""

import torch

from agentrl_core.controller import Dispatch, register
from agentrl_core.protocol import DataProto
from agentrl_core.workers.log_probs import response_log_probs, response_logits, temperature_of
from agentrl_core.workers.micro_batching import columns_of, map_micro_batches
from agentrl_core.workers.model_worker import ModelWorker
from agentrl_core.workers.models import empty_causal_lm, load_causal_lm
from agentrl_core.workers.offload import Offload


class ReferenceWorker(ModelWorker):
    """Implements :class:`agentrl_core.workers.protocols.Reference` with ``reference.path``, or the initial policy."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        model, own = self.config.model, self.config.reference.path
        path, key = (own, "reference.path") if own else (model.path, "model.path")
        self._place_model(lambda: load_causal_lm(path, model, key), lambda: empty_causal_lm(path, model))
        self._pack_rows(self._model, lambda micro: response_logits(self._model, micro))
        self._model.requires_grad_(False)
        self._offload = Offload(self._model, None, self.config.reference.offload_parameters, False, self._device)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        temperature = temperature_of(batch, "compute_ref_log_prob")
        with torch.no_grad(), self._computing():
            columns = map_micro_batches(
                columns_of(batch, (), "compute_ref_log_prob"),
                self.config.reference.micro_batch_tokens,
                self._device,
                lambda micro: response_log_probs(self._model, micro, temperature),
                ("ref_log_prob",),
                "reference.micro_batch_tokens",
                self._parallel,
                by_prompt=self._packing.is_possible,
            )
        return DataProto.from_dict(tensors=columns)
