"""A training backend whose model is at a server of the Tinker API.

The server knows a few losses; the core has more, and plugins bring others. So a loss is computed here, from the
server's log-probabilities, and what goes back is its gradient: with the loss ``cross_entropy``, which is the sum of
-weight * log-probability, and the weights -dL/dlog-probability, the server's gradient is that of the loss.

    forward_backward    one forward pass of all rows; the loss and its gradients are computed here, and kept
    optimizer_step      cross_entropy over the kept rows, and optim_step: both are sent together

So gradients never wait at the server, and a step is done or not.
"""

import logging
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl_backend_tinker.checkpoints import Saved, read_saved, write_checkpoint
from agentrl_backend_tinker.config import TinkerBackendConfig
from agentrl_backend_tinker.connection import Connection, LostError, RefusedError, server_of
from agentrl_backend_tinker.loop import LoopThread
from agentrl_backend_tinker.messages import Datum
from agentrl_backend_tinker.model import Adam, Shape, State, TrainedModel
from agentrl_backend_tinker.paths import path_tensor
from agentrl_backend_tinker.rows import log_probs_of, rows_of
from agentrl_core.api.errors import CheckpointError, ConfigError, WorkerError
from agentrl_core.api.training_backend import (
    Columns,
    Loss,
    MicroBatch,
    Outputs,
    TrainingBackend,
    TrainingContext,
    Wanted,
    described,
)
from agentrl_core.api.weights import ArrayBucket

logger = logging.getLogger(__name__)

WHERE = "trainer.backend.config"
ALPHA = 32.0
"""The scale of adapters at servers of this API, whatever the rank is."""
EPS = 1e-8
"""That of torch's AdamW, which has no key."""


class TinkerBackend(TrainingBackend):
    """An adapter on the server's base model."""

    def __init__(self, config: TinkerBackendConfig, context: TrainingContext) -> None:
        super().__init__(config, context)
        self.config: TinkerBackendConfig = config
        self._loop: LoopThread | None = None
        self._connection: Connection
        self._model: TrainedModel
        self._reference: TrainedModel | None = None
        self._shown: TrainedModel
        """That forward passes compute with."""
        self._plan = context.adapters.get(context.policy)
        self._data: list[Datum] = []
        """Of the step that comes, with their gradients."""
        self._samplers: list[str] = []
        self._newest: str | None = None
        self._told = (0, 0, 0)
        self._warned = False

    @classmethod
    def check(cls, config: TinkerBackendConfig, model: Any, adapted: bool, ranks: int, key: str) -> None:
        server_of(config, WHERE)

    def load(self) -> None:
        self._check()
        config, context = self.config, self.context
        self._connection = Connection(config, WHERE)
        self._loop = LoopThread(f"agentrl-tinker-{context.role}")
        self._run(self._connection.open())
        self._base = self._run(self._connection.base_model(config.base_model, context.model.path, WHERE))
        rank = 1 if self._plan is None else self._plan.settings.rank
        self._shape = Shape(rank, config.train_attn, config.train_mlp, config.train_unembed)
        self._seed = context.seed if self._plan is None else self._plan.seed
        self._begins = State()
        if self._plan is not None and self._plan.path is not None:
            self._begins = State(self._saved(self._plan.path, "model.adapter.path").state, with_optimizer=False)
        self._model = self._shown = self._new()
        try:
            self._run(self._model.create())
        except LostError as error:
            path = self._begins.path
            raise ConfigError(
                f"model.adapter.path: {self._connection.url} lacks {path}, which the adapter begins with ({error})"
                if path
                else f"{WHERE}.url: {self._connection.url} is no server of the Tinker API ({error})"
            ) from error
        try:
            self._run(self._model.check_loss())
        except RefusedError as error:
            url = self._connection.url
            raise ConfigError(
                f"{WHERE}.url: {url} cannot be used: {error}. Gradients would be wrong. Choose another server; "
                f"`agentrl tinker check {url}` says what differs"
            ) from error

    def _new(self) -> TrainedModel:
        return TrainedModel(self._connection, self._base, self._shape, self._seed, self._begins)

    def _run(self, work: Any) -> Any:
        assert self._loop is not None, "it is loaded first"
        return self._loop.run(work)

    def _check(self) -> None:
        """Raises ConfigError for what a server of this API does not do."""
        context, model, plan = self.context, self.context.model, self._plan
        problem = None
        if context.head != "tokens":
            problem = "critic: a server of the Tinker API trains no value function. Choose an estimator without one"
        elif context.world_size > 1:
            problem = f"cluster: found {context.world_size} ranks, but the server computes; one is enough"
        elif context.trains and plan is None:
            problem = "model.adapter: found null, but a server of the Tinker API trains adapters alone. Set it"
        elif not context.trains and context.path != model.path:
            problem = f"{context.key}: found {context.path}, but the server has the base model alone"
        elif context.trains and not context.sends_adapter:
            problem = (
                "rollout.engine.name: the weights stay at the server, so its own sampler must be used. Set it to tinker"
            )
        elif plan is not None:
            settings = plan.settings
            if settings.alpha != ALPHA:
                problem = f"model.adapter.alpha: found {settings.alpha:g}, but servers of the Tinker API use {ALPHA:g}"
            elif settings.dropout:
                problem = f"model.adapter.dropout: found {settings.dropout:g}, but the Tinker API has none. Set it to 0"
            elif settings.targets != "all-linear":
                problem = (
                    f"model.adapter.targets: found {settings.targets}, but the Tinker API chooses layers by kind. "
                    f"Leave it at all-linear, and set {WHERE}.train_attn, train_mlp and train_unembed"
                )
        if problem is not None:
            raise ConfigError(problem)

    # Passes -------------------------------------------------------------------------------------------------------

    def forward(self, micros: Sequence[MicroBatch], wanted: Wanted) -> Iterator[Outputs]:
        for log_probs_br in self._log_probs(micros, wanted):
            yield Outputs(log_probs=log_probs_br)

    def forward_backward(self, micros: Sequence[MicroBatch], wanted: Wanted, loss: Loss) -> None:
        rows = rows_of(micros)
        leaves = [each.requires_grad_() for each in self._log_probs(micros, wanted)]
        for number, log_probs_br in enumerate(leaves):
            loss(number, Outputs(log_probs=log_probs_br)).backward()  # type: ignore[no-untyped-call]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in leaves]
        self._data += [row.datum(-gradients[row.micro][row.row].numpy()) for row in rows]

    def _log_probs(self, micros: Sequence[MicroBatch], wanted: Wanted) -> list[Tensor]:
        if wanted.temperature != 1.0:
            raise WorkerError(
                f"rollout.sampling.temperature: found {wanted.temperature:g}, but a server of the Tinker API computes "
                "log-probabilities at temperature 1 (capability 'temperature'). Set it to 1"
            )
        if wanted.entropies != "none":
            raise WorkerError(
                "entropies: a server of the Tinker API computes none (capability 'entropies'). Set "
                "algorithm.entropy_coef=0, and choose a loss and an estimator that do not read them"
            )
        rows = rows_of(micros)
        found = self._run(self._shown.forward([row.datum() for row in rows])).log_probs if rows else []
        return log_probs_of(micros, rows, found)

    def optimizer_step(self, lr: float, max_norm: float) -> float:
        data, self._data = self._data, []
        if not all(np.isfinite(each.weights).all() for each in data):
            # The server would refuse the gradients, or take them.
            return math.nan
        # Rows without a gradient would be paid for. One stays: servers need not step without a pass.
        data = [each for each in data if each.weights.any()] or data[:1]
        options = self.context.settings.optimizer
        beta1, beta2 = options.betas
        metrics = self._run(self._model.step(data, Adam(lr, beta1, beta2, EPS, options.weight_decay, max_norm)))
        self._newest = None
        return self._norm(metrics)

    def _norm(self, metrics: Mapping[str, float]) -> float:
        found = next((value for key, value in metrics.items() if "grad_norm" in key), None)
        if found is None and not self._warned:
            self._warned = True
            logger.warning(
                "%s reports no norm of the gradients: actor/grad_norm is 0, whatever it is", self._connection.url
            )
        return 0.0 if found is None else float(found)

    def zero_grad(self) -> None:
        self._data = []

    def metrics(self) -> dict[str, float]:
        counts = [each.counts for each in (self._model, self._reference) if each is not None]
        now = (
            sum(each.forward for each in counts), sum(each.trained for each in counts), self._connection.requests
        )  # fmt: skip
        before, self._told = self._told, now
        names = ("forward_tokens", "trained_tokens", "requests")
        return {name: float(new - old) for name, new, old in zip(names, now, before, strict=True)}

    # Weights ------------------------------------------------------------------------------------------------------

    def weights(self, bucket_bytes: int, on_host: bool = True, everywhere: bool = False) -> Iterator[Columns]:
        yield path_tensor(self._sampler_path())

    def weight_layout(self, bucket_bytes: int) -> list[ArrayBucket]:
        return [described(path_tensor(""))]

    def _sampler_path(self) -> str:
        """Weights for sampling, saved at the server once for each step. The state goes with them, so that a model that
        is lost can be built again."""
        if self._newest is None:
            name, ttl = self._name(), self.config.ttl
            self._newest = self._run(self._model.save_for_sampler(name, ttl))
            self._samplers.append(self._newest)
            if self.steps:
                self._run(self._model.save_state(name, ttl))
            while len(self._samplers) > self.config.keep_samplers:
                self._run(self._model.delete(self._samplers.pop(0)))
        return self._newest

    def _name(self) -> str:
        """Of what is saved. Never used twice, so that a run that is resumed meets nothing of its predecessor."""
        return f"agentrl-{self.context.policy}-{self.steps}-{uuid.uuid4().hex[:12]}"

    @property
    def adapter_config(self) -> Mapping[str, Any] | None:
        if self._plan is None:
            return None
        return {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": self._shape.rank, "lora_alpha": ALPHA,
            "lora_dropout": 0.0, "bias": "none", "target_modules": ["all-linear"],
        }  # fmt: skip

    @contextmanager
    def reference(self) -> Iterator[None]:
        if self._reference is None:
            # A new adapter adds nothing, so it is the base.
            self._reference = self._new()
            self._run(self._reference.create())
        self._shown = self._reference
        try:
            yield
        finally:
            self._shown = self._model

    # Checkpoints --------------------------------------------------------------------------------------------------

    def snapshot(self) -> Callable[[str], Sequence[str]]:
        name = self._name()
        state = self._run(self._model.save_state(name, None))
        urls = self._run(self._model.export(name, self.config.ttl))
        saved = Saved(state, self._connection.url, self._base, self._shape, self.steps)

        def write(path: str) -> Sequence[str]:
            files = {key: self._run(self._connection.download(url)) for key, url in (urls or {}).items()}
            return write_checkpoint(path, saved, files)

        return write

    def restore(self, path: str) -> None:
        saved = read_saved(path)
        if (saved.base, saved.shape) != (self._base, self._shape):
            raise CheckpointError(
                f"{path} is an adapter {saved.shape} of {saved.base!r}, but this run trains {self._shape} of "
                f"{self._base!r}"
            )
        try:
            self._run(self._model.load(saved.state))
        except LostError as error:
            raise CheckpointError(
                f"{path} is {saved.state} at {saved.url}, which {self._connection.url} does not have for this API key "
                f"({error}). Resume from another checkpoint: trainer.resume=PATH"
            ) from error
        self.steps, self._newest, self._data = saved.steps, None, []

    def _saved(self, path: str, key: str) -> Saved:
        try:
            return read_saved(path)
        except CheckpointError as error:
            raise ConfigError(
                f"{key}: {error}. An adapter cannot be sent to a server of the Tinker API; begin with a checkpoint "
                "of a run with this server"
            ) from error

    def close(self) -> None:
        if self._loop is not None:
            self._run(self._connection.close())
            self._loop.close()
            self._loop = None
