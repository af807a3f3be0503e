"""The policy and its updates.

Shapes: b rows and r response tokens of a micro-batch.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agentrl_core.algorithms.aggregation import aggregate
from agentrl_core.algorithms.kl import kl_estimate
from agentrl_core.api.algorithm import AlgorithmContext, PolicyLoss, PolicyLossInput
from agentrl_core.api.errors import ProtocolError, WorkerError
from agentrl_core.api.training_backend import (
    EXPERTS,
    AdapterPlan,
    Columns,
    MicroBatch,
    Outputs,
    TrainingContext,
    Wanted,
)
from agentrl_core.api.weights import Adapter, ArrayBucket, Broadcast, WeightUpdate
from agentrl_core.config.schema import ResolvedConfig
from agentrl_core.controller import Dispatch, register
from agentrl_core.engine_kit.media import MediaSource
from agentrl_core.engine_kit.ports import free_port, host_address
from agentrl_core.engine_kit.weight_group import WeightGroup
from agentrl_core.plugins.boundary import hang_reported
from agentrl_core.protocol import DataProto
from agentrl_core.workers.far_files import FarFiles
from agentrl_core.workers.micro_batching import expert_column, share_of_rows, take
from agentrl_core.workers.model_worker import BALANCED, TrainingWorker
from agentrl_core.workers.outgoing import OutgoingWeights
from agentrl_core.workers.ranks import COLLECTIVE
from agentrl_core.workers.shares import SHARED, Sharing, has_advantage, share_of
from agentrl_core.workers.update import MicroLoss, Share, seed_of, temperature_of

CORRECTION = "correction_weights"
"""[B, R] column of the batch with what ``algorithm.correction`` multiplies the losses by."""
OPTIONAL_COLUMNS = ("policy_versions", "turn_ids", EXPERTS)
"""That an update reads where a batch has them."""
GROUPS, PREPARED = "group number", "prepared "
"""Names of columns that the actor adds to a batch."""


class ActorWorker(FarFiles, TrainingWorker):
    """Implements :class:`agentrl_core.workers.protocols.Actor`.

        loss = policy loss + kl_coef * KL(policy || reference) - entropy_coef * entropy

    each term aggregated as ``algorithm.aggregation`` says.

    Args:
        config: the loaded configuration; ``algorithm.loss`` builds the policy loss.
        total_optimizer_steps: of the whole run, for the learning-rate schedule.
        policy: whose worker it is; None: of the first one of ``config.policies``, or of the only one.
        shared: a name that no other run has, under which the policies of a process find the model whose adapters they
            are; empty: the model is this worker's own.
        media: see :class:`agentrl_core.workers.model_worker.ModelWorker`.
    """

    role = "actor"

    def __init__(
        self,
        config: ResolvedConfig,
        total_optimizer_steps: int,
        policy: str | None = None,
        shared: str = "",
        media: MediaSource | None = None,
    ) -> None:
        self._policies = config.trained
        name = next(iter(self._policies)) if policy is None else policy
        super().__init__(self._policies[name], total_optimizer_steps, media)
        self._policy, self._shared = name, shared
        self._weight_group: WeightGroup | None = None

    @property
    def module(self) -> Any:
        """The model itself, for an engine in this process that generates with it. In eval mode between updates."""
        return self._backend.module

    def _training_context(self, path: str, key: str) -> TrainingContext:
        return replace(
            super()._training_context(path, key),
            policy=self._policy,
            shared=self._shared,
            sends_adapter=self._sends_adapter,
        )

    @property
    def _sends_adapter(self) -> bool:
        """Engines serve the adapter; else they get the model with the adapter merged into it."""
        return self.config.model.adapter is not None and self.config.serves_adapters

    def _adapter_plans(self) -> Mapping[str, AdapterPlan]:
        """The adapters of all policies."""
        settings = {name: own.model.adapter for name, own in self._policies.items() if own.model.adapter is not None}
        plans = {}
        for number, (name, each) in enumerate(settings.items()):
            own = self._policies[name]
            keeps = each.path is not None and own.needs_reference and own.reference_is_adapted
            plans[name] = AdapterPlan(each, each.path, self.config.trainer.seed + number, keeps)
        return plans

    def _ready(self) -> None:
        super()._ready()
        self._policy_loss = _build_policy_loss(self.config)
        algorithm = self.config.algorithm
        self._kl_coef = 0.0 if algorithm.kl_placement == "reward" else algorithm.kl_coef
        with hang_reported(f"policy loss {algorithm.loss.name!r}"):
            self._needs_advantage = (
                algorithm.drop_zero_advantage
                and not self._kl_coef
                and not algorithm.entropy_coef
                and vanishes_without_advantage(self._policy_loss)
            )
        self._weights = OutgoingWeights(self._backend)

    @register(dispatch_mode=BALANCED)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        with_entropy = bool(batch.meta_info.get("calculate_entropy", False))
        wanted = Wanted(temperature_of(batch, "compute_log_prob"), "value" if with_entropy else "none")
        results = {"old_log_probs": "log_probs"} | ({"entropys": "entropies"} if with_entropy else {})
        return self._map(batch, "compute_log_prob", wanted, results)

    @register(dispatch_mode=BALANCED)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        wanted = Wanted(temperature_of(batch, "compute_ref_log_prob"))
        with self._backend.reference():
            return self._map(batch, "compute_ref_log_prob", wanted, {"ref_log_prob": "log_probs"})

    def _columns_of(self, batch: DataProto, names: tuple[str, ...], method: str) -> Columns:
        """With the experts that the engine chose, where the batch has them."""
        columns, experts = super()._columns_of(batch, names, method), batch.non_tensor_batch.get(EXPERTS)
        if experts is not None and len(experts):
            columns[EXPERTS] = expert_column(list(experts), columns["attention_mask"], method)
        elif self.config.actor.router_replay and method == "update":
            raise ProtocolError(f"{method}: actor.router_replay is true, and the batch has no {EXPERTS}")
        return columns

    @property
    def _prepares(self) -> bool:
        """The loss looks at whole mini-batches, which every rank must have."""
        return type(self._policy_loss).prepare is not PolicyLoss.prepare

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sharing(self) -> Sharing:
        return super().sharing()._replace(leaves_out=self._needs_advantage, all_rows=self._prepares)

    @register(dispatch_mode=SHARED)
    def update(self, batch: DataProto) -> dict[str, float]:
        temperature = temperature_of(batch, "update")
        columns = self._columns(batch)
        share = share_of(batch, columns)
        if self._needs_advantage and share.ranks_EB is None:
            share = replace(share, moving_B=has_advantage(columns["response_mask"], columns["advantages"]))
        if share.groups_B is not None:
            columns[GROUPS] = share.groups_B[share.rows].unsqueeze(-1)

        entropy_coef = float(batch.meta_info.get("entropy_coef", self.config.algorithm.entropy_coef))
        needs_entropies = bool(entropy_coef) or self.config.algorithm.loss.has("entropies")
        can = self.config.trainer.backend.has("entropies")
        wanted = Wanted(temperature, "gradient" if needs_entropies else "value" if can else "none")

        def loss(micro: MicroBatch, outputs: Outputs, divisor: float) -> MicroLoss:
            return self._loss(micro, outputs, divisor, entropy_coef)

        def prepare(part: Columns, rows: Tensor) -> tuple[Columns, Mapping[str, float]]:
            return self._prepare(part, rows, temperature)

        prepares = prepare if self._prepares else None
        with self._computing():
            if batch.meta_info.get("measure_only", False):
                measured = self._update.measure(columns, share, wanted, loss, prepares)
                return {**measured, **self._counted(), "actor/trained_rows_share": 0.0}
            start = time.perf_counter()
            metrics = self._update.run(columns, share, seed_of(batch), wanted, loss, prepares)
            metrics |= self._utilisation(share, time.perf_counter() - start) | self._counted()
        trained = max(int((share.sampled_B > 0).sum()), 1)
        return metrics | {"actor/trained_rows_share": float(share.moving_B.sum()) / trained}

    def _utilisation(self, share: Share, seconds: float) -> dict[str, float]:
        """``perf/mfu/actor`` on a GPU whose peak is known."""
        tokens_B = share.lengths_B * (share.sampled_B > 0) * self.config.actor.epochs
        trained = int(tokens_B[share.moving_B].sum())
        found = self._backend.utilisation(trained, int(tokens_B.sum()) - trained, seconds)
        return {} if found is None else {"perf/mfu/actor": found}

    def _counted(self) -> dict[str, float]:
        """Counters of the backend."""
        return {f"actor/{name}": value for name, value in self._backend.metrics().items()}

    def _columns(self, batch: DataProto) -> Columns:
        """What the update reads: the columns that the loss and its KL term need, and the optional ones that it has."""
        present = set(batch.batch.keys()) if batch.batch is not None else set()
        optional = [name for name in OPTIONAL_COLUMNS if name in present]
        return self._columns_of(batch, (*update_columns(self.config), *optional), "update")

    def _prepare(self, part: Columns, rows: Tensor, temperature: float) -> tuple[Columns, Mapping[str, float]]:
        """What the loss finds out about a whole mini-batch: its columns under :data:`PREPARED` names."""
        log_probs_MR = torch.full(part["response_mask"].shape, torch.nan)
        if self.config.algorithm.loss.has("mini_batch_log_probs"):
            log_probs_MR = self._mini_batch_log_probs(part, temperature)
        with hang_reported(f"policy loss {self.config.algorithm.loss.name!r}"):
            prepared = self._policy_loss.prepare(_loss_input(part, rows, log_probs_MR))
        for name, column in prepared.columns.items():
            if column.shape != log_probs_MR.shape:
                raise WorkerError(
                    f"algorithm.loss: prepare() returned the column {name!r} of shape {list(column.shape)}, expected "
                    f"{list(log_probs_MR.shape)}"
                )
        return {PREPARED + name: column for name, column in prepared.columns.items()}, prepared.metrics

    def _mini_batch_log_probs(self, part: Columns, temperature: float) -> Tensor:
        """[M, R] of the present policy without gradient; each rank computes its share of the rows."""
        share = share_of_rows(part, self._ranks, self._backend.packs_prefixes)
        with torch.no_grad():
            computed = self._computed(take(part, share), Wanted(temperature), {"log_probs": "log_probs"})
        log_probs_MR = torch.zeros(part["response_mask"].shape)
        log_probs_MR[share] = computed["log_probs"]
        return self._ranks.summed_rows(log_probs_MR)

    def _loss(self, micro: MicroBatch, outputs: Outputs, divisor: float, entropy_coef: float) -> MicroLoss:
        algorithm, mask_br = self.config.algorithm, micro["response_mask"]
        log_probs_br, entropies_br = outputs.log_probs, outputs.entropies
        assert log_probs_br is not None, "a policy has log-probs"
        needs_entropies = algorithm.loss.has("entropies")
        seen = _loss_input(micro.columns, micro.rows, log_probs_br, entropies_br if needs_entropies else None)
        with hang_reported(f"policy loss {algorithm.loss.name!r}"):
            policy = self._policy_loss(seen)

        def total(losses_br: Tensor) -> Tensor:
            return aggregate(losses_br, mask_br, algorithm.aggregation, divisor)

        losses_br = policy.losses
        if algorithm.correction is not None:
            losses_br = torch.where(mask_br, losses_br, 0.0) * micro[CORRECTION]
        loss = pg_loss = total(losses_br)
        token_values = dict(policy.metrics)
        if entropies_br is not None:
            token_values["entropy"] = entropies_br
        if self._kl_coef:
            token_values["kl"] = kl_estimate(log_probs_br, micro["ref_log_prob"], algorithm.kl_estimator)
            loss = loss + self._kl_coef * total(token_values["kl"])
        if entropy_coef and entropies_br is not None:
            loss = loss - entropy_coef * total(entropies_br)
        return MicroLoss(loss, {"pg_loss": pg_loss}, token_values)

    def _sending(self) -> AbstractContextManager[None]:
        self._backend.use()
        return self._backend.sending()

    @register(dispatch_mode=COLLECTIVE)
    def weight_buckets(self, bucket_bytes: int) -> list[ArrayBucket]:
        with self._sending():
            buckets = list(self._weights.buckets(bucket_bytes))
        return buckets if self._ranks.is_first else []

    def weight_update(self, bucket_bytes: int) -> WeightUpdate:
        """:meth:`weight_buckets` as engines take them."""
        return WeightUpdate(buckets=self.weight_buckets(bucket_bytes), adapter=self.adapter())

    @register(dispatch_mode=COLLECTIVE)
    def adapter(self) -> Adapter | None:
        described = self._backend.adapter_config if self._sends_adapter else None
        return None if described is None else Adapter(self._policy, dict(described))

    @register(dispatch_mode=COLLECTIVE)
    def weight_files(self) -> tuple[str, ...]:
        with self._sending():
            return self._weights.files()

    @register(dispatch_mode=COLLECTIVE)
    def open_broadcast(self, host: str, backend: str, receivers: int, bucket_bytes: int) -> Broadcast:
        self._leave_weight_group()
        host = host or host_address()
        senders = self.world_size if backend == "ipc" else 1
        address, layout = f"{host}:{free_port(host=host)}", self._backend.weight_layout(bucket_bytes)
        return Broadcast(address, backend, senders + receivers, senders, tuple(layout))

    @register(dispatch_mode=COLLECTIVE)
    def send_weights(self, broadcast: Broadcast, bucket_bytes: int) -> None:
        on_host = broadcast.backend == "gloo"
        if self._weight_group is None and self.rank < broadcast.first_rank:
            device = "cpu" if on_host else self._device
            self._weight_group = WeightGroup(broadcast.address, self.rank, broadcast.size, broadcast.backend, device)
        with self._sending():
            self._weights.send(bucket_bytes, self._weight_group, on_host)

    def _leave_weight_group(self) -> None:
        if self._weight_group is not None:
            self._weight_group.close()
            self._weight_group = None

    def close(self) -> None:
        """Forget the model and leave the other ranks; the weight file goes with it."""
        if hasattr(self, "_weights"):
            self._weights.close()
        self._leave_weight_group()
        super().close()


def update_columns(config: ResolvedConfig) -> tuple[str, ...]:
    """Columns that an update of the policy needs, other than those of every batch and :data:`OPTIONAL_COLUMNS`."""
    algorithm = config.algorithm
    in_loss = algorithm.kl_coef and algorithm.kl_placement != "reward"
    needed = {
        "ref_log_prob": bool(in_loss) or algorithm.loss.has("ref_log_probs"),
        "rollout_log_probs": algorithm.loss.has("rollout_log_probs"),
        CORRECTION: algorithm.correction is not None,
    }
    return ("old_log_probs", "advantages", *(name for name, is_needed in needed.items() if is_needed))


def _build_policy_loss(config: ResolvedConfig) -> PolicyLoss:
    loss: PolicyLoss = config.algorithm.loss.build(AlgorithmContext(group_size=config.rollout.n))
    return loss


def _loss_input(
    columns: Columns, rows: Tensor, log_probs_br: Tensor, entropies_br: Tensor | None = None
) -> PolicyLossInput:
    mask_br = columns["response_mask"]
    device = mask_br.device

    def numbers(name: str) -> Tensor | None:
        return torch.where(mask_br, columns[name].long(), -1) if name in columns else None

    return PolicyLossInput(
        log_probs_br,
        columns["old_log_probs"],
        columns["advantages"],
        mask_br,
        rollout_log_probs=columns.get("rollout_log_probs"),
        ref_log_probs=columns.get("ref_log_prob"),
        entropies=entropies_br,
        policy_versions=numbers("policy_versions"),
        turn_ids=numbers("turn_ids"),
        group_ids=columns[GROUPS].squeeze(-1) if GROUPS in columns else None,
        row_ids=rows.to(device),
        columns={name.removeprefix(PREPARED): column for name, column in columns.items() if name.startswith(PREPARED)},
    )


def vanishes_without_advantage(loss: PolicyLoss) -> bool:
    """A row whose advantages are 0 has no gradient: tried with ratios from 1/20 to 20, since a plugin may add terms."""
    return not any(bool(gradient_bR.any()) for gradient_bR in _tried_gradients(loss, 0.0))


def reads_advantages(loss: PolicyLoss) -> bool:
    """Whether the gradient depends on the advantages, tried with the same ratios."""
    without, with_them = _tried_gradients(loss, 0.0), _tried_gradients(loss, 1.0)
    return any(not torch.equal(one_bR, other_bR) for one_bR, other_bR in zip(without, with_them, strict=True))


def _tried_gradients(loss: PolicyLoss, advantage: float) -> list[Tensor]:
    """The gradients [b, R] of the losses by log-probs and entropies, where all tokens have this advantage."""
    log_probs_bR = torch.linspace(-6, -3, 16).view(2, 8).requires_grad_()
    zeros_bR, mask_bR = torch.zeros(2, 8), torch.ones(2, 8, dtype=torch.bool)
    old_bR = log_probs_bR.detach().flip(-1, -2)
    batch = PolicyLossInput(
        log_probs_bR.detach(), old_bR, zeros_bR + advantage, mask_bR, rollout_log_probs=old_bR, ref_log_probs=old_bR,
        policy_versions=zeros_bR.long(), turn_ids=zeros_bR.long(), group_ids=torch.zeros(2, dtype=torch.long),
        row_ids=torch.arange(2),
    )  # fmt: skip
    columns = loss.prepare(batch).columns
    entropies_bR = torch.ones_like(log_probs_bR, requires_grad=True)
    total = loss(replace(batch, log_probs=log_probs_bR, entropies=entropies_bR, columns=columns)).losses.sum()
    if not total.requires_grad:
        return [zeros_bR, zeros_bR]
    gradients = torch.autograd.grad(total, (log_probs_bR, entropies_bR), allow_unused=True)
    return [zeros_bR if gradient_bR is None else gradient_bR for gradient_bR in gradients]
