"""The policy and its updates.

Shapes: b rows and r response tokens of a micro-batch.
"""

import time
from typing import Any

import torch
from torch import Tensor

from agentrl_core.algorithms.aggregation import aggregate
from agentrl_core.algorithms.kl import kl_estimate
from agentrl_core.api.algorithm import AlgorithmContext, PolicyLoss, PolicyLossInput
from agentrl_core.api.weights import ArrayBucket, Broadcast
from agentrl_core.config.schema import ResolvedConfig
from agentrl_core.controller import Dispatch, register
from agentrl_core.engine_kit.ports import free_port, host_address
from agentrl_core.engine_kit.weight_group import WeightGroup
from agentrl_core.protocol import DataProto
from agentrl_core.workers.data_parallel import COLLECTIVE
from agentrl_core.workers.flops import utilisation
from agentrl_core.workers.log_probs import response_log_probs, temperature_of
from agentrl_core.workers.micro_batching import Columns, MicroBatch, columns_of
from agentrl_core.workers.model_worker import BALANCED, TrainingWorker
from agentrl_core.workers.offload import Offload
from agentrl_core.workers.update import MicroLoss, seed_of
from agentrl_core.workers.weights import ModelWeights


class ActorWorker(TrainingWorker):
    """Implements :class:`agentrl_core.workers.protocols.Actor` on ``AutoModelForCausalLM``.

        loss = policy loss + kl_coef * KL(policy || reference) - entropy_coef * entropy

    each term aggregated as ``algorithm.aggregation`` says.

    Args:
        config: the loaded configuration; ``algorithm.loss`` builds the policy loss.
        total_optimizer_steps: of the whole run, for the learning-rate schedule.
    """

    role = "actor"

    def __init__(self, config: ResolvedConfig, total_optimizer_steps: int) -> None:
        super().__init__(config, total_optimizer_steps)
        self._weight_group: WeightGroup | None = None

    @property
    def module(self) -> Any:
        """The model itself, for an engine in this process that generates with it. In eval mode between updates."""
        return self._model

    def _ready(self) -> Offload:
        self._policy_loss = _build_policy_loss(self.config)
        algorithm = self.config.algorithm
        self._needs_advantage = (
            algorithm.drop_zero_advantage
            and not algorithm.kl_coef
            and not algorithm.entropy_coef
            and vanishes_without_advantage(self._policy_loss)
        )
        self._weights = ModelWeights(self._model)
        return super()._ready()

    @register(dispatch_mode=BALANCED)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        temperature = temperature_of(batch, "compute_log_prob")
        with_entropy = bool(batch.meta_info.get("calculate_entropy", False))
        return self._map(
            batch,
            "compute_log_prob",
            ("old_log_probs", "entropys") if with_entropy else ("old_log_probs",),
            lambda micro: response_log_probs(self._model, micro, temperature, "value" if with_entropy else "none"),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update(self, batch: DataProto) -> dict[str, float]:
        algorithm, temperature = self.config.algorithm, temperature_of(batch, "update")
        reference = ("ref_log_prob",) if algorithm.kl_coef else ()
        columns = columns_of(batch, ("old_log_probs", "advantages", *reference), "update")
        trained_B = columns["response_mask"].any(-1)
        moving_B = (columns["advantages"] != 0).any(-1) if self._needs_advantage else trained_B

        def loss(micro: MicroBatch, divisor: float) -> MicroLoss:
            return self._loss(micro, divisor, temperature)

        with self._computing(optimizer=True):
            if batch.meta_info.get("measure_only", False):
                return {**self._update.measure(columns, loss), "actor/trained_rows_share": 0.0}
            start = time.perf_counter()
            metrics = self._update.run(columns, seed_of(batch), loss, moving_B)
            metrics |= self._utilisation(columns, moving_B, time.perf_counter() - start)
        return metrics | {"actor/trained_rows_share": float(moving_B.sum()) / max(int(trained_B.sum()), 1)}

    def _utilisation(self, columns: Columns, moving_B: Tensor, seconds: float) -> dict[str, float]:
        """``perf/mfu/actor`` on a GPU whose peak is known."""
        half = self.config.model.compute_dtype in (None, "bfloat16")
        if self._device.type != "cuda" or not half:
            return {}
        tokens_B = columns["attention_mask"].sum(-1) * columns["response_mask"].any(-1) * self.config.actor.epochs
        trained = int(tokens_B[moving_B].sum())
        name, devices = torch.cuda.get_device_name(self._device), self._parallel.size
        share = utilisation(self._model, name, devices, trained, int(tokens_B.sum()) - trained, seconds)
        return {} if share is None else {"perf/mfu/actor": share}

    def _loss(self, micro: MicroBatch, divisor: float, temperature: float) -> MicroLoss:
        algorithm, mask_br = self.config.algorithm, micro["response_mask"]
        log_probs_br, entropies_br = response_log_probs(
            self._model, micro, temperature, "gradient" if algorithm.entropy_coef else "value"
        )
        policy = self._policy_loss(PolicyLossInput(log_probs_br, micro["old_log_probs"], micro["advantages"], mask_br))

        def total(losses_br: Tensor) -> Tensor:
            return aggregate(losses_br, mask_br, algorithm.aggregation, divisor)

        loss = pg_loss = total(policy.losses)
        token_values = {**policy.metrics, "entropy": entropies_br}
        if algorithm.kl_coef:
            token_values["kl"] = kl_estimate(log_probs_br, micro["ref_log_prob"], algorithm.kl_estimator)
            loss = loss + algorithm.kl_coef * total(token_values["kl"])
        if algorithm.entropy_coef:
            loss = loss - algorithm.entropy_coef * total(entropies_br)
        return MicroLoss(loss, {"pg_loss": pg_loss}, token_values)

    @register(dispatch_mode=COLLECTIVE)
    def weight_buckets(self, bucket_bytes: int) -> list[ArrayBucket]:
        with self._offload.on_device():
            buckets = list(self._weights.array_buckets(bucket_bytes))
        return buckets if self._parallel.is_first else []

    @register(dispatch_mode=COLLECTIVE)
    def weight_files(self) -> tuple[str, ...]:
        with self._offload.on_device():
            return self._weights.write_file()

    @register(dispatch_mode=COLLECTIVE)
    def open_broadcast(self, host: str, backend: str, receivers: int, bucket_bytes: int) -> Broadcast:
        self._leave_weight_group()
        host = host or host_address()
        senders = self.world_size if backend == "ipc" else 1
        address, layout = f"{host}:{free_port(host=host)}", self._weights.layout(bucket_bytes)
        return Broadcast(address, backend, senders + receivers, senders, tuple(layout))

    @register(dispatch_mode=COLLECTIVE)
    def send_weights(self, broadcast: Broadcast, bucket_bytes: int) -> None:
        on_host = broadcast.backend == "gloo"
        if self._weight_group is None and self.rank < broadcast.first_rank:
            device = "cpu" if on_host else self._device
            self._weight_group = WeightGroup(broadcast.address, self.rank, broadcast.size, broadcast.backend, device)
        with self._offload.on_device():
            self._weights.send(bucket_bytes, self._weight_group, on_host)

    def _leave_weight_group(self) -> None:
        if self._weight_group is not None:
            self._weight_group.close()
            self._weight_group = None

    def close(self) -> None:
        """Forget the model and leave the other ranks; the weight file goes with it."""
        if self._model is not None:
            self._weights.close()
        self._leave_weight_group()
        super().close()


def _build_policy_loss(config: ResolvedConfig) -> PolicyLoss:
    loss: PolicyLoss = config.algorithm.loss.build(AlgorithmContext(group_size=config.rollout.n))
    return loss


def vanishes_without_advantage(loss: PolicyLoss) -> bool:
    """A row whose advantages are 0 has no gradient: tried with ratios from 1/20 to 20, since a plugin may add terms."""
    log_probs_bR = torch.linspace(-6, -3, 16).view(2, 8).requires_grad_()
    zeros_bR, mask_bR = torch.zeros(2, 8), torch.ones(2, 8, dtype=torch.bool)
    total = loss(PolicyLossInput(log_probs_bR, log_probs_bR.detach().flip(-1, -2), zeros_bR, mask_bR)).losses.sum()
    if not total.requires_grad:
        return True
    (gradient_bR,) = torch.autograd.grad(total, log_probs_bR)
    return not gradient_bR.any()
