"""The optimizer steps of one batch: epochs, mini-batches, micro-batches.

The gradient of a mini-batch does not depend on how it is cut: each micro-batch's loss is a sum divided by the
denominator of the mini-batch (see :mod:`agentrl_core.algorithms.aggregation`). Nor does it depend on the number of
ranks: each of them cuts the same mini-batches, by the numbers of their rows, and works on its share of these; gradients
and metrics are sums over the ranks.

Shapes: B rows of a batch, n of them on this rank, M with a sampled token; b and r rows and response tokens of a
micro-batch; E epochs.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from agentrl_core.algorithms.aggregation import denominator
from agentrl_core.api.errors import ProtocolError, WorkerError
from agentrl_core.api.training_backend import Columns, MicroBatch, Outputs, TrainingBackend, Wanted
from agentrl_core.config.schema import Aggregation, UpdateConfig
from agentrl_core.protocol import DataProto
from agentrl_core.workers.micro_batching import (
    ALONE,
    check_shape,
    empty_micro_batch,
    in_step,
    micro_batches,
    share_of_rows,
    take,
)
from agentrl_core.workers.ranks import TrainingRanks
from agentrl_core.workers.schedule import learning_rate


@dataclass(frozen=True)
class MicroLoss:
    """What one micro-batch contributes.

    Args:
        loss: [] with a gradient; already divided by the mini-batch's denominator.
        parts: [] each, terms of the loss; added up like the loss and averaged over mini-batches.
        token_values: [b, r] each; averaged over all sampled tokens.
    """

    loss: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    token_values: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Share:
    """The rows that a rank has of a batch, and what it must know of the others.

    Args:
        rows: [n], numbers of those that it has.
        ranks_EB: the rank that works on each row in each epoch, -1: none does; None: this rank has all rows, and
            chooses.
        sampled_B, lengths_B: sampled tokens, and all.
        moving_B: whether a row has a backward pass.
        groups_B: number of its prompt.
    """

    rows: Tensor
    ranks_EB: Tensor | None
    sampled_B: Tensor
    lengths_B: Tensor
    moving_B: Tensor
    groups_B: Tensor | None

    def take(self, columns: Columns, rows: Tensor) -> Columns:
        """The columns of these rows; of rows that the rank does not have, those of another one."""
        return take(columns, torch.searchsorted(self.rows, rows).clamp(max=max(len(self.rows) - 1, 0)))


LossFunction = Callable[[MicroBatch, Outputs, float], MicroLoss]
"""Loss of a micro-batch, given what the model says of it, and the denominator of the mini-batch that it belongs to."""

Prepare = Callable[[Columns, Tensor], tuple[Columns, Mapping[str, float]]]
"""More columns [M, R] of a mini-batch, and metrics, given its columns and the numbers [M] of its rows."""


class Update:
    """Runs the optimizer steps of batches for one model.

    Args:
        name: the config section of ``config``, and the prefix of the metrics.
        total_steps: optimizer steps of the whole run, for the learning rate.
    """

    def __init__(
        self,
        name: str,
        backend: TrainingBackend,
        config: UpdateConfig,
        total_steps: int,
        aggregation: Aggregation,
        max_response_length: int,
        device: torch.device,
        ranks: TrainingRanks = ALONE,
    ) -> None:
        self._name = name
        self._backend = backend
        self._config = config
        self._total_steps = total_steps
        self._aggregation = aggregation
        self._max_response_length = max_response_length
        self._device = device
        self._ranks = ranks
        self._by_prefix = backend.packs_prefixes

    def run(
        self,
        columns: Columns,
        share: Share,
        seed: int,
        wanted: Wanted,
        loss_function: LossFunction,
        prepare: Prepare | None = None,
    ) -> dict[str, float]:
        """All steps of a batch: ``epochs`` passes of ``mini_batches`` steps each, fewer where rows are fewer.

        Rows without a sampled token are left out. ``seed`` decides the order of rows, and an adapter's dropout.

        ``share.moving_B`` says which rows have a gradient. The others have a forward pass only, and count in all
        denominators and metrics: the result is the same as with their backward pass. Where no row has a gradient there
        is no step, and the result is that of :meth:`measure`.

        ``prepare`` is called for each mini-batch, on every rank with the same rows, which each rank must have; the
        micro-batches have its columns.

        Returns ``loss``, ``grad_norm`` (before clipping, over the steps that were made, if any), ``lr`` (of the last
        step), ``skipped_steps``, on CUDA ``peak_memory_gib`` of this process so far, and all parts and token values of
        ``loss_function``, under ``name/``.

        Over several ranks all of them must call this with their shares of the same batch, and all return the same
        metrics but for their own memory.

        Raises WorkerError where a loss is not finite, on every rank, if it is so on one, naming the micro-batch.
        """
        trained_M, moving_B = share.sampled_B.nonzero().squeeze(-1), share.moving_B
        if not moving_B[trained_M].any():
            return self.measure(columns, share, wanted, loss_function, prepare)
        totals, settings = _Totals(), self._config
        with self._backend.updating(seed):
            for epoch, rows in mini_batches(trained_M, settings.epochs, settings.mini_batches, seed):
                divisor = denominator(share.sampled_B[rows].unsqueeze(-1), self._aggregation, self._max_response_length)
                self._backend.zero_grad()
                more = self._prepared(columns, share, rows, prepare, totals)
                # In this order: a backward pass gives back the gathered parameters, which the step changes.
                for backward in (False, True):
                    chosen = (moving_B[rows] == backward).nonzero().squeeze(-1)
                    part = rows[chosen], take(more, chosen), epoch
                    self._pass(columns, share, part, divisor, wanted, loss_function, totals, backward=backward)
                totals.add_step(*self._step())
        metrics = {**totals.token_means(self._ranks), **totals.prepared_means(), **totals.of_steps(self._ranks)}
        if self._device.type == "cuda":
            metrics["peak_memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        return self._named(metrics)

    def _step(self) -> tuple[float, float]:
        """One optimizer step; the norm of its gradients, and its learning rate. One that is not finite changes nothing,
        but counts in the schedule, whose length was fixed beforehand."""
        lr = learning_rate(self._config.optimizer, self._backend.steps, self._total_steps)
        grad_norm = self._backend.optimizer_step(lr, self._config.grad_clip)
        self._backend.steps += 1
        return grad_norm, lr

    def measure(
        self,
        columns: Columns,
        share: Share,
        wanted: Wanted,
        loss_function: LossFunction,
        prepare: Prepare | None = None,
    ) -> dict[str, float]:
        """The token values of ``loss_function`` over a batch, under ``name/``, without a step."""
        totals = _Totals()
        rows = torch.arange(len(share.sampled_B))
        part = rows, self._prepared(columns, share, rows, prepare, totals), 0
        self._pass(columns, share, part, 1.0, wanted, loss_function, totals, backward=False)
        return self._named(totals.token_means(self._ranks) | totals.prepared_means())

    def _prepared(
        self, columns: Columns, share: Share, rows: Tensor, prepare: Prepare | None, totals: "_Totals"
    ) -> Columns:
        if prepare is None:
            return {}
        more, metrics = prepare(share.take(columns, rows), rows)
        totals.add_prepared(metrics)
        return more

    def _named(self, metrics: dict[str, float]) -> dict[str, float]:
        return {f"{self._name}/{key}": value for key, value in metrics.items()}

    def _pass(
        self,
        columns: Columns,
        share: Share,
        part_of_epoch: tuple[Tensor, Columns, int],
        divisor: float,
        wanted: Wanted,
        loss_function: LossFunction,
        totals: "_Totals",
        backward: bool,
    ) -> None:
        """Forward passes over some rows, with their backward passes or without.

        Args:
            part_of_epoch: numbers of the rows, their prepared columns, and the epoch.
        """
        rows, more, epoch = part_of_epoch
        if self._ranks.share.count > 1:
            if share.ranks_EB is not None:
                mine = (share.ranks_EB[epoch, rows] == self._ranks.share.index).nonzero().squeeze(-1)
            else:
                mine = share_of_rows(share.take(columns, rows), self._ranks, self._by_prefix)
            rows, more = rows[mine], take(more, mine)
        part = share.take(columns, rows) | more
        micros = in_step(micro_batches(part, self._config.micro_batch_tokens, self._by_prefix), part, self._ranks)
        if backward and not micros:
            # Gradients of 0: a step without gradients would leave the moments as they are.
            micros = [empty_micro_batch(part)]
        micros = [replace(micro, rows=rows[micro.rows]).to(self._device) for micro in micros]
        problems: list[str] = []

        def loss(number: int, outputs: Outputs) -> Tensor:
            is_policy = outputs.values is None
            check_shape(
                "log_probs" if is_policy else "values", outputs.log_probs if is_policy else outputs.values,
                micros[number],
            )  # fmt: skip
            result = loss_function(micros[number], outputs, divisor)
            problems.extend(self._not_finite(result, micros[number]))
            totals.add_micro_batch(result, micros[number]["response_mask"])
            return result.loss

        if backward:
            self._backend.forward_backward(micros, wanted, loss)
        else:
            with torch.no_grad():
                for number, outputs in enumerate(self._backend.forward(micros, wanted)):
                    if self._ranks.share.counts:
                        loss(number, outputs)
        # Of all ranks at once: one that stopped alone would leave the others waiting.
        problem = self._ranks.first_problem(problems[0] if problems else None)
        if problem is not None:
            self._backend.zero_grad()
            raise WorkerError(
                f"{problem}: look for NaN or infinite rewards, advantages or log-probabilities in these rows, or lower "
                f"{self._name}.optimizer.lr"
            )

    def _not_finite(self, result: MicroLoss, micro: MicroBatch) -> Iterator[str]:
        if not math.isfinite(result.loss.item()):
            values = {"loss": result.loss, **result.parts}
            shown = ", ".join(f"{key} {value.item()}" for key, value in values.items())
            yield f"the {self._name}'s loss is not finite ({shown}) in a {micro}"


def seed_of(batch: DataProto) -> int:
    """``meta_info["seed"]``, from which the order of an update's rows and dropout follow."""
    if "seed" not in batch.meta_info:
        raise ProtocolError("update needs meta_info['seed'], which decides the order of the rows; the batch has none")
    return int(batch.meta_info["seed"])


def temperature_of(batch: DataProto, method: str) -> float:
    """``meta_info["temperature"]`` of the rollout; greedy decoding (0) reports log-probabilities at temperature 1."""
    if "temperature" not in batch.meta_info:
        raise ProtocolError(f"{method} needs meta_info['temperature'], that of the rollout; the batch has none")
    return float(batch.meta_info["temperature"]) or 1.0


def mini_batches(rows_M: Tensor, epochs: int, count: int, seed: int) -> Iterator[tuple[int, Tensor]]:
    """The number of each epoch with its mini-batches: a new random order of ``rows_M``, cut into at most ``count``
    parts of nearly equal size, none of them empty."""
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs if len(rows_M) else 0):
        order = torch.randperm(len(rows_M), generator=generator)
        yield from ((epoch, rows) for rows in rows_M[order].tensor_split(min(count, len(rows_M))))


class _Totals:
    """Sums over an update, from which its metrics follow."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = defaultdict(float)
        self._token_sums: dict[str, float] = defaultdict(float)
        self._tokens = 0
        self._prepared: dict[str, list[float]] = defaultdict(list)
        self._steps: list[tuple[float, float]] = []

    def add_micro_batch(self, result: MicroLoss, mask_br: Tensor) -> None:
        for key, part in {"loss": result.loss, **result.parts}.items():
            self._parts[key] += part.item()
        for key, values_br in result.token_values.items():
            self._token_sums[key] += torch.where(mask_br.to(values_br.device), values_br.detach(), 0.0).sum().item()
        self._tokens += int(mask_br.sum())

    def add_prepared(self, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._prepared[key].append(value)

    def prepared_means(self) -> dict[str, float]:
        """The same on every rank, for each has seen whole mini-batches."""
        return {key: sum(values) / len(values) for key, values in self._prepared.items()}

    def add_step(self, grad_norm: float, lr: float) -> None:
        self._steps.append((grad_norm, lr))

    def token_means(self, ranks: TrainingRanks) -> dict[str, float]:
        sums = ranks.summed(self._token_sums)
        tokens = ranks.summed({"tokens": self._tokens})["tokens"]
        return {key: total / max(tokens, 1) for key, total in sums.items()}

    def of_steps(self, ranks: TrainingRanks) -> dict[str, float]:
        made = [grad_norm for grad_norm, _ in self._steps if math.isfinite(grad_norm)]
        return {
            **{key: total / len(self._steps) for key, total in ranks.summed(self._parts).items()},
            **({"grad_norm": sum(made) / len(made)} if made else {}),
            "lr": self._steps[-1][1],
            "skipped_steps": float(len(self._steps) - len(made)),
        }
