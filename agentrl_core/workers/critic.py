"""The value function and its updates.

Shapes: b rows, r response tokens of a micro-batch.
"""

from agentrl_core.algorithms.aggregation import aggregate
from agentrl_core.algorithms.value import value_losses
from agentrl_core.api.training_backend import MicroBatch, Outputs, Wanted
from agentrl_core.controller import register
from agentrl_core.protocol import DataProto
from agentrl_core.workers.model_worker import BALANCED, TrainingWorker
from agentrl_core.workers.shares import SHARED, share_of
from agentrl_core.workers.update import MicroLoss, seed_of

UPDATE_COLUMNS = ("values", "returns")


class CriticWorker(TrainingWorker):
    """Implements :class:`agentrl_core.workers.protocols.Critic`.

    Starts from ``critic.path`` (with its value head, if it is a critic's checkpoint), or from ``model.path``.
    The loss is aggregated as token-mean.
    """

    role = "critic"
    head = "values"

    @register(dispatch_mode=BALANCED)
    def compute_values(self, batch: DataProto) -> DataProto:
        return self._map(batch, "compute_values", Wanted(), {"values": "values"})

    @register(dispatch_mode=SHARED)
    def update(self, batch: DataProto) -> dict[str, float]:
        columns = self._columns_of(batch, UPDATE_COLUMNS, "update")
        with self._computing():
            return self._update.run(columns, share_of(batch, columns), seed_of(batch), Wanted(), self._loss)

    def _loss(self, micro: MicroBatch, outputs: Outputs, divisor: float) -> MicroLoss:
        assert outputs.values is not None, "a critic has values"
        values_br, clip = outputs.values, self.config.critic.value_clip
        losses_br = value_losses(values_br, micro["values"], micro["returns"], clip)
        loss = aggregate(losses_br, micro["response_mask"], "token-mean", divisor)
        token_values = {"value_mean": values_br}
        if clip is not None:
            unclipped_br = value_losses(values_br, micro["values"], micro["returns"], None)
            token_values["clip_fraction"] = (losses_br > unclipped_br).float()
        return MicroLoss(loss, token_values=token_values)
