"""The model, its adapters and their optimizers. Everything here runs in one thread.

Shapes: b rows and l tokens of a micro-batch, N tokens of a row, n of a micro-batch, V vocabulary.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from agentrl_core.algorithms.token_log_probs import token_log_probs
from agentrl_core.config.schema import ModelConfig
from agentrl_core.fsdp2.adapters import WEIGHTS_FILE
from agentrl_core.fsdp2.models import enable_gradient_checkpointing, load_causal_lm, training_mode, vocabulary_of
from agentrl_tinker.adapters import Adapters, Shape
from agentrl_tinker.losses import Loss
from agentrl_tinker.refusals import Refusal

SCORED = 4
"""Adapters of samplers that stay loaded to compute log-probabilities of prompts."""


@dataclass(frozen=True)
class Row:
    """A datum: ids [N], targets [N], and inputs of the loss [N]."""

    ids: "np.ndarray[Any, Any]"
    targets: "np.ndarray[Any, Any]"
    inputs: Mapping[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class AdamParams:
    """Of one step of torch's AdamW; ``grad_clip_norm`` 0 does not clip."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


@dataclass
class Scores:
    """Log-probabilities of a prompt [N], the first of which is nan; the likeliest tokens and theirs [N, k]."""

    log_probs: "np.ndarray[Any, Any]"
    top_ids: "np.ndarray[Any, Any]"
    top_log_probs: "np.ndarray[Any, Any]"


@dataclass
class _Trained:
    shape: Shape
    optimizer: torch.optim.AdamW
    names: list[str] = field(default_factory=list)


class Trainer:
    """Trains adapters on one frozen model."""

    def __init__(self, path: str, config: ModelConfig, device: torch.device, micro_batch_tokens: int) -> None:
        model = load_causal_lm(path, config, "--model").to(device)
        self.adapters = Adapters(model)
        self.vocabulary = vocabulary_of(model)
        self.architecture = type(model).__name__
        self.model = model
        self._device = device
        self._tokens = micro_batch_tokens
        self._checkpointing = config.gradient_checkpointing
        if self._checkpointing:
            enable_gradient_checkpointing(model)
        self._trained: dict[str, _Trained] = {}
        self._scored: OrderedDict[Path, str] = OrderedDict()

    # Adapters -----------------------------------------------------------------------------------------------------

    def create(self, name: str, shape: Shape, seed: int | None = None) -> None:
        self.adapters.add(name, shape, seed)
        parameters = self.adapters.parameters(name)
        self._trained[name] = _Trained(shape, torch.optim.AdamW(parameters.values()), list(parameters))

    def remove(self, name: str) -> None:
        if self._trained.pop(name, None) is not None:
            self.adapters.remove(name)

    def state(self, name: str, with_optimizer: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies of an adapter's weights, and of its optimizer's moments."""
        trained = self._trained[name]
        parameters = self.adapters.parameters(name)
        weights = {key: value.detach().cpu().clone() for key, value in parameters.items()}
        moments = {
            f"{key}.{moment}": value.detach().cpu().clone()
            for key, parameter in parameters.items()
            for moment, value in (trained.optimizer.state[parameter].items() if with_optimizer else ())
        }
        return weights, moments

    def load(self, name: str, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor] | None) -> None:
        """Take over weights; the optimizer takes over the moments, or begins anew. Gradients so far are dropped."""
        self.adapters.load(name, weights)
        trained = self._trained[name]
        trained.optimizer = torch.optim.AdamW(self.adapters.parameters(name).values())
        for key, parameter in self.adapters.parameters(name).items():
            parameter.grad = None
            if moments:
                trained.optimizer.state[parameter] = {
                    # torch keeps the number of steps on the CPU.
                    moment: value.clone() if moment == "step" else value.to(parameter.device, copy=True)
                    for moment in ("step", "exp_avg", "exp_avg_sq")
                    if (value := moments.get(f"{key}.{moment}")) is not None
                }

    # Steps --------------------------------------------------------------------------------------------------------

    def micro_batches(self, rows: Sequence[Row]) -> Iterator[list[int]]:
        """Numbers of rows that are computed together, of similar lengths."""
        batch: list[int] = []
        for index in sorted(range(len(rows)), key=lambda index: -len(rows[index].ids)):
            longest = len(rows[batch[0] if batch else index].ids)
            if batch and (len(batch) + 1) * longest > self._tokens:
                yield batch
                batch = []
            batch.append(index)
        yield batch

    def forward(
        self, name: str, rows: Sequence[Row], loss: Loss, settings: Mapping[str, float], backward: bool
    ) -> tuple[float, list["np.ndarray[Any, Any]"]]:
        """The sum of the rows' losses, and the log-probabilities of their targets [N] each.

        With ``backward`` the loss's gradients are added to those of the adapter.
        """
        self.adapters.activate(name, training=backward)
        lengths = [len(row.ids) for row in rows]
        labels_n = torch.from_numpy(np.concatenate([row.targets for row in rows])).to(self._device)
        with torch.set_grad_enabled(backward), self._mode(backward):
            (log_probs_n,) = token_log_probs(self._logits([row.ids for row in rows]), labels_n)
            parts = torch.split(log_probs_n, lengths)
            total = torch.zeros((), device=self._device)
            for row, log_probs_N in zip(rows, parts, strict=True):
                inputs = {key: torch.from_numpy(value).to(self._device) for key, value in row.inputs.items()}
                total = total + loss.of(log_probs_N, inputs, settings)
            if backward:
                torch.autograd.backward(total)
        return float(total.detach()), [part.detach().cpu().numpy() for part in parts]

    def gradients(self, name: str) -> list[Tensor | None]:
        """Copies of what has been added up since the last step."""
        parameters = self.adapters.parameters(name).values()
        return [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]

    def set_gradients(self, name: str, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.adapters.parameters(name).values(), gradients, strict=True):
            parameter.grad = gradient

    def optim_step(self, name: str, params: AdamParams) -> dict[str, float]:
        """A step with the gradients since the last one, which are dropped; the norm of these before clipping.

        Raises:
            Refusal: they are not finite. No step is made: it would leave nothing of the weights.
        """
        trained = self._trained[name]
        parameters = list(self.adapters.parameters(name).values())
        for parameter in parameters:
            # Without a gradient torch would leave the moments as they are.
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        most = params.grad_clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(parameters, most)
        if not torch.isfinite(norm):
            trained.optimizer.zero_grad(set_to_none=True)
            raise Refusal(
                f"the norm of the gradients is {float(norm)}: a loss since the last step was not finite, see loss:sum "
                "of forward_backward. The weights are as they were, and these gradients are dropped"
            )
        trained.optimizer.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        trained.optimizer.step()
        trained.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": float(norm)}

    # Prompts ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def scores(self, folder: Path | None, shape: Shape | None, ids: Sequence[int], top: int) -> Scores:
        """Log-probabilities of a prompt under the adapter in a folder, or under the base, at temperature 1."""
        self.adapters.activate(None if folder is None or shape is None else self._loaded(folder, shape))
        logits_NV = self._logits([np.array(ids)])
        labels_n = torch.tensor(ids[1:], device=self._device)
        (log_probs_n,) = token_log_probs(logits_NV[:-1], labels_n)
        top_values, top_ids = torch.log_softmax(logits_NV[:-1].float(), -1).topk(top) if top else (labels_n,) * 2
        padded = [np.full((1, *part.shape[1:]), fill, dtype) for part, fill, dtype in
                  ((log_probs_n, np.nan, "f4"), (top_ids, 0, "i4"), (top_values, np.nan, "f4"))]  # fmt: skip
        arrays = [part.cpu().numpy().astype(first.dtype) for part, first in
                  zip((log_probs_n, top_ids, top_values), padded, strict=True)]  # fmt: skip
        return Scores(*(np.concatenate([first, part]) for first, part in zip(padded, arrays, strict=True)))

    def _loaded(self, folder: Path, shape: Shape) -> str:
        if folder not in self._scored:
            if len(self._scored) == SCORED:
                self.adapters.remove(self._scored.popitem(last=False)[1])
            # First, because it can fail.
            weights = load_file(folder / WEIGHTS_FILE)
            name = f"scored-{folder.name}".replace(".", "_")
            self.adapters.add(name, shape)
            self.adapters.load(name, weights)
            self._scored[folder] = name
        self._scored.move_to_end(folder)
        return self._scored[folder]

    # The model ----------------------------------------------------------------------------------------------------

    def _logits(self, rows: Sequence["np.ndarray[Any, Any]"]) -> Tensor:
        """Logits [n, V] of all tokens. What stands on the right of a row cannot change it."""
        lengths = [len(row) for row in rows]
        ids_bl = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        for index, row in enumerate(rows):
            ids_bl[index, : len(row)] = torch.from_numpy(row)
        logits_blV = self.model(input_ids=ids_bl.to(self._device), use_cache=False).logits
        return torch.cat([logits_blV[index, :length] for index, length in enumerate(lengths)])

    def _mode(self, backward: bool) -> Any:
        return training_mode(self.model) if backward and self._checkpointing else nullcontext()
