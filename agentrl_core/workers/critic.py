"""The value function and its updates.

Shapes: b rows, r response tokens and l = p + r tokens of a micro-batch, n of its response tokens, H hidden size.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from agentrl_core.algorithms.aggregation import aggregate
from agentrl_core.algorithms.value import value_losses
from agentrl_core.api.errors import ConfigError
from agentrl_core.controller import register
from agentrl_core.protocol import DataProto
from agentrl_core.workers.micro_batching import MicroBatch, columns_of, scattered
from agentrl_core.workers.model_files import FILE_BYTES
from agentrl_core.workers.model_worker import BALANCED, TrainingWorker
from agentrl_core.workers.models import empty_backbone, load_backbone
from agentrl_core.workers.packed_attention import forward_pass
from agentrl_core.workers.shares import SHARED, share_of
from agentrl_core.workers.update import MicroLoss, seed_of
from agentrl_core.workers.weights import ModelWeights

UPDATE_COLUMNS = ("values", "returns")
VALUE_HEAD_FILE = "value_head.safetensors"


class ValueModel(nn.Module):
    """A language model's backbone with a linear value head, which starts at 0: a new critic has no opinion."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(backbone.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, micro: MicroBatch, with_head: bool = True) -> tuple[Tensor, Tensor]:
        """Values [n] float32, or hidden states [n, H], and the places [b, r] of these n response tokens.

        The value at token t is read where t is predicted, before it is sampled. Where rows are packed the n tokens are
        the sampled ones, else all.
        """
        rows = forward_pass(self.backbone, micro)
        hidden_nH = rows.predicting_states(self.backbone(**rows.inputs, use_cache=False).last_hidden_state)
        return (self.value_head(hidden_nH.float()).squeeze(-1) if with_head else hidden_nH), rows.places


class CriticWorker(TrainingWorker):
    """Implements :class:`agentrl_core.workers.protocols.Critic`.

    Starts from ``critic.path`` (with its value head, if it is a critic's checkpoint), or from ``model.path``.
    The loss is aggregated as token-mean.
    """

    role = "critic"

    @property
    def _language_model(self) -> Any:
        return self._model.backbone

    def _predict(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self._model(micro, with_head=False)
        return result

    def _most_logits(self, longest: int) -> int:
        return 0

    def _empty(self, path: str) -> ValueModel:
        with torch.device("meta"):
            return ValueModel(self._adapted(empty_backbone(path, self.config.model)))

    def _load(self, path: str, key: str) -> ValueModel:
        model = ValueModel(self._adapted(load_backbone(path, self.config.model, key, self._device)))
        head = Path(path) / VALUE_HEAD_FILE
        if head.exists():
            try:
                model.value_head.load_state_dict(load_file(head))
            except (OSError, RuntimeError, SafetensorError) as error:
                raise ConfigError(f"{key}: {head} is not the value head of this model: {error}") from error
        return model

    @register(dispatch_mode=BALANCED)
    def compute_values(self, batch: DataProto) -> DataProto:
        return self._map(batch, "compute_values", ("values",), lambda micro: (scattered(*self._model(micro)),))

    @register(dispatch_mode=SHARED)
    def update(self, batch: DataProto) -> dict[str, float]:
        columns = columns_of(batch, UPDATE_COLUMNS, "update")
        with self._computing():
            return self._update.run(columns, share_of(batch, columns), seed_of(batch), self._loss)

    def _loss(self, micro: MicroBatch, divisor: float) -> MicroLoss:
        values_br, clip = scattered(*self._model(micro)), self.config.critic.value_clip
        losses_br = value_losses(values_br, micro["values"], micro["returns"], clip)
        loss = aggregate(losses_br, micro["response_mask"], "token-mean", divisor)
        token_values = {"value_mean": values_br}
        if clip is not None:
            unclipped_br = value_losses(values_br, micro["values"], micro["returns"], None)
            token_values["clip_fraction"] = (losses_br > unclipped_br).float()
        return MicroLoss(loss, token_values=token_values)

    def _save(self, path: str, weights: Mapping[str, Tensor]) -> None:
        self._save_language_model(path, _below("backbone.", weights))
        head, below = dict[str, Tensor](), _below("value_head.", weights)
        for tensors in ModelWeights(self._model.value_head, tensors=lambda: below).buckets(FILE_BYTES):
            head |= tensors
        if self._parallel.is_first:
            save_file(head, Path(path) / VALUE_HEAD_FILE)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
