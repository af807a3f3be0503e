"""The frozen policy that the KL term measures the distance to."""

from agentrl_core.controller import register
from agentrl_core.protocol import DataProto
from agentrl_core.workers.log_probs import response_log_probs, temperature_of
from agentrl_core.workers.model_worker import BALANCED, ModelWorker
from agentrl_core.workers.offload import Offload


class ReferenceWorker(ModelWorker):
    """Implements :class:`agentrl_core.workers.protocols.Reference` with ``reference.path``, or the initial policy."""

    role = "reference"

    def _ready(self) -> Offload:
        self._model.requires_grad_(False)
        return Offload(self._model, self._settings.offload_parameters, self._device)

    @register(dispatch_mode=BALANCED)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        temperature = temperature_of(batch, "compute_ref_log_prob")
        return self._map(
            batch,
            "compute_ref_log_prob",
            ("ref_log_prob",),
            lambda micro: response_log_probs(self._model, micro, temperature, in_chunks=self._in_chunks),
        )


class TeacherWorker(ReferenceWorker):
    """The same with ``teacher.path``."""

    role = "teacher"
