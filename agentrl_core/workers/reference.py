"""The frozen policy that the KL term measures the distance to."""

from agentrl_core.api.training_backend import Wanted
from agentrl_core.controller import register
from agentrl_core.protocol import DataProto
from agentrl_core.workers.model_worker import BALANCED, ModelWorker
from agentrl_core.workers.update import temperature_of


class ReferenceWorker(ModelWorker):
    """Implements :class:`agentrl_core.workers.protocols.Reference` with ``reference.path``, or the initial policy."""

    role = "reference"

    @register(dispatch_mode=BALANCED)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        wanted = Wanted(temperature_of(batch, "compute_ref_log_prob"))
        return self._map(batch, "compute_ref_log_prob", wanted, {"ref_log_prob": "log_probs"})


class TeacherWorker(ReferenceWorker):
    """The same with ``teacher.path``."""

    role = "teacher"
