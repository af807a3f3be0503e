"""The value function and its updates.

Shapes: b rows, r response tokens and l = p + r tokens of a micro-batch, n of its response tokens, H hidden size.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from agentrl_core.algorithms.aggregation import aggregate
from agentrl_core.algorithms.value import explained_variance, value_losses
from agentrl_core.api.errors import ConfigError
from agentrl_core.config.schema import ResolvedConfig
from agentrl_core.controller import Dispatch, register
from agentrl_core.protocol import DataProto
from agentrl_core.workers.checkpoints import load_training_state, save_training_state
from agentrl_core.workers.micro_batching import MicroBatch, columns_of, in_place, map_micro_batches
from agentrl_core.workers.model_worker import ModelWorker
from agentrl_core.workers.models import empty_backbone, enable_gradient_checkpointing, load_backbone
from agentrl_core.workers.offload import Offload
from agentrl_core.workers.optimizer import ScheduledAdamW
from agentrl_core.workers.packed_attention import ForwardPass
from agentrl_core.workers.update import MicroLoss, Update, seed_of
from agentrl_core.workers.weights import FILE_BYTES, ModelWeights, save_model

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
        rows = ForwardPass.of(self.backbone, micro)
        hidden_nH = rows.predicting_states(self.backbone(**rows.inputs, use_cache=False).last_hidden_state)
        return (self.value_head(hidden_nH.float()).squeeze(-1) if with_head else hidden_nH), rows.places


class CriticWorker(ModelWorker):
    """Implements :class:`agentrl_core.workers.protocols.Critic`.

    Starts from ``critic.path`` (with its value head, if it is a critic's checkpoint), or from ``model.path``.
    The loss is aggregated as token-mean.

    Args:
        config: the loaded configuration.
        total_optimizer_steps: of the whole run, for the learning-rate schedule.
    """

    def __init__(self, config: ResolvedConfig, total_optimizer_steps: int) -> None:
        super().__init__(config)
        self._total_optimizer_steps = total_optimizer_steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        own = self.config.critic.path
        path, key = (own, "critic.path") if own else (self.config.model.path, "model.path")
        self._place_model(lambda: self._load(path, key), lambda: self._empty(path))
        self._pack_rows(self._model.backbone, lambda micro: self._model(micro, with_head=False))
        if self.config.model.gradient_checkpointing:
            enable_gradient_checkpointing(self._model.backbone)
        critic = self.config.critic
        self._optimizer = ScheduledAdamW(
            self._model.named_parameters(), critic.optimizer, critic.grad_clip, self._total_optimizer_steps
        )
        self._update = Update(
            "critic",
            self._model,
            self._optimizer,
            critic,
            "token-mean",
            self.config.rollout.max_response_length,
            self._device,
            self._parallel,
            by_prompt=self._packing.is_possible,
        )
        self._offload = Offload(
            self._model, self._optimizer, critic.offload_parameters, critic.offload_optimizer, self._device
        )

    def _empty(self, path: str) -> ValueModel:
        with torch.device("meta"):
            return ValueModel(empty_backbone(path, self.config.model))

    def _load(self, path: str, key: str) -> ValueModel:
        model = ValueModel(load_backbone(path, self.config.model, key))
        head = Path(path) / VALUE_HEAD_FILE
        if head.exists():
            try:
                model.value_head.load_state_dict(load_file(head))
            except (OSError, RuntimeError, SafetensorError) as error:
                raise ConfigError(f"{key}: {head} is not the value head of this model: {error}") from error
        return model

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, batch: DataProto) -> DataProto:
        with torch.no_grad(), self._computing():
            columns = map_micro_batches(
                columns_of(batch, (), "compute_values"),
                self.config.critic.micro_batch_tokens,
                self._device,
                lambda micro: (in_place(*self._model(micro)),),
                ("values",),
                "critic.micro_batch_tokens",
                self._parallel,
                by_prompt=self._packing.is_possible,
            )
        return DataProto.from_dict(tensors=columns)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update(self, batch: DataProto) -> dict[str, float]:
        columns = columns_of(batch, ("values", "returns"), "update")
        with self._computing(optimizer=True):
            metrics = self._update.run(columns, seed_of(batch), self._loss)
        metrics["critic/explained_variance"] = explained_variance(
            columns["values"], columns["returns"], columns["response_mask"]
        )
        return metrics

    def _loss(self, micro: MicroBatch, divisor: float) -> MicroLoss:
        values_br, clip = in_place(*self._model(micro)), self.config.critic.value_clip
        losses_br = value_losses(values_br, micro["values"], micro["returns"], clip)
        loss = aggregate(losses_br, micro["response_mask"], "token-mean", divisor)
        return MicroLoss(loss, token_values={"value_mean": values_br})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        with self._offload.on_device(optimizer=True):
            save_model(self._model.backbone, path)
            head: dict[str, Tensor] = {}
            for tensors in ModelWeights(self._model.value_head).buckets(FILE_BYTES):
                head |= tensors
            if self._parallel.is_first:
                save_file(head, Path(path) / VALUE_HEAD_FILE)
            save_training_state(path, self._model, self._optimizer, self._parallel)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        with self._offload.on_device(optimizer=True):
            load_training_state(path, self._model, self._optimizer, self._parallel)
