"""A model that a server trains: its requests in their order, and what it takes to build it again.

The server keeps a model in memory. Where it was restarted, or has ended the session, the model is gone, but the states
that were saved are not. So what was trained since the last saved state is kept here, and trained again on top of that
state: nothing is lost, and nothing counts twice, whether the server had done the last request or not.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np

from agentrl_backend_tinker.connection import Connection, LostError, RefusedError
from agentrl_backend_tinker.messages import Datum, Passed, passed, training_request
from agentrl_core.api.errors import WorkerError

logger = logging.getLogger(__name__)
T = TypeVar("T")

MOST_DATUMS, MOST_BYTES = 1024, 5_000_000
"""Of a request, as the API has them."""
LOSS = "loss:sum"
"""The metric of ``forward_backward`` that every server reports."""
REBUILDS = 5
"""Tries to build a model again for one request, in case the server is lost again meanwhile."""


@dataclass(frozen=True)
class Shape:
    """The adapter of a model."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False


@dataclass(frozen=True)
class Adam:
    """Settings of a step of AdamW; ``grad_clip_norm`` 0 does not clip."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


@dataclass(frozen=True)
class State:
    """What a model begins with: a path at the server, or nothing but the seed.

    Args:
        path: of ``save_weights``; empty: a new adapter.
        with_optimizer: its moments are taken over.
        temporary: nobody else needs it.
    """

    path: str = ""
    with_optimizer: bool = True
    temporary: bool = False


@dataclass
class Counts:
    """Tokens that the server has computed."""

    forward: int = 0
    trained: int = 0


@dataclass
class TrainedModel:
    """An adapter at the server. All methods are coroutines of the connection's loop.

    Args:
        base: name of the base model.
        seed: of a new adapter's matrices.
        state: what it begins with.
    """

    connection: Connection
    base: str
    shape: Shape
    seed: int
    state: State = field(default_factory=State)
    counts: Counts = field(default_factory=Counts)
    _model_id: str = ""
    """Empty: it must be made first."""
    _epoch: int = 0
    _sent: int = 0
    _since: list[tuple[Sequence[Datum], Adam]] = field(default_factory=list)
    """Steps since ``state``."""
    _exports: bool = True

    async def create(self) -> None:
        """Make it at the server.

        Raises:
            LostError: the server has no state of this path, or not this session.
        """
        connection = self.connection
        if not connection.epoch:
            await connection.open()
        self._model_id, self._epoch, self._sent = "", connection.epoch, 0
        body = {
            "session_id": connection.session_id, "model_seq_id": connection.next_number(), "base_model": self.base,
            "lora_config": {"seed": self.seed, **asdict(self.shape)}, "type": "create_model",
        }  # fmt: skip
        found = await connection.result(await connection.post("create_model", body))
        self._model_id = str(found["model_id"])
        try:
            if self.state.path:
                await self._ordered("load_weights", path=self.state.path, optimizer=self.state.with_optimizer)
        except BaseException:
            self._model_id = ""
            raise

    # What is done with it -----------------------------------------------------------------------------------------

    async def check_loss(self) -> None:
        """Compare the loss that the server reports with the sum of -weight * log-prob. Nothing is trained.

        Raises:
            RefusedError: they differ, so gradients would.
        """
        datum = Datum(np.array([1, 2, 3], np.int32), np.array([-1.0, -2.0], np.float32))
        found = await self._kept(lambda: self._pass([datum], forward_only=True))
        expected, reported = -float(datum.weights @ found.log_probs[0]), found.metrics.get(LOSS)
        if reported is None or not math.isclose(reported, expected, rel_tol=0.05, abs_tol=0.05):
            raise RefusedError(
                f"its loss cross_entropy must be a sum over tokens, here {expected:.4g}, but its {LOSS} is "
                f"{'missing' if reported is None else f'{reported:.4g}'}"
            )

    async def forward(self, data: Sequence[Datum]) -> Passed:
        """Log-probabilities of all targets, without gradients."""
        found = await self._kept(lambda: self._pass(data, forward_only=True))
        self.counts.forward += sum(each.tokens for each in data)
        return found

    async def step(self, data: Sequence[Datum], adam: Adam) -> Mapping[str, float]:
        """Add up the gradients of all data and make a step; returns the metrics of the server."""
        metrics = await self._kept(lambda: self._step(data, adam))
        self._since.append((data, adam))
        self.counts.trained += sum(each.tokens for each in data)
        return metrics

    async def save_state(self, name: str, ttl: int | None) -> str:
        """Save weights and moments; returns their path. From now on the model can be built again from there.

        Args:
            ttl: seconds, after which the server deletes it; None: never, and it is not this object's to delete.
        """
        found = await self._kept(lambda: self._ordered("save_weights", path=name, **_limit(ttl)))
        before, self.state = self.state, State(str(found["path"]), temporary=ttl is not None)
        self._since.clear()
        if before.temporary:
            await self.delete(before.path)
        return self.state.path

    async def save_for_sampler(self, name: str, ttl: int) -> str:
        """Save the weights alone, for samplers; returns their path."""
        found = await self._kept(lambda: self._ordered("save_weights_for_sampler", path=name, **_limit(ttl)))
        return str(found["path"])

    async def export(self, name: str, ttl: int) -> dict[str, str] | None:
        """Let the server write the adapter as files for others, right after :meth:`save_state`.

        Returns:
            Their addresses by name; None where the server does not do this.
        """
        if not self._exports:
            return None
        try:
            found = await self._ordered("save_weights_external", path=name, **_limit(ttl))
            run, checkpoint = _split(str(found["path"]))
            path = f"training_runs/{run}/checkpoints/{checkpoint}/external_weights_urls"
            return dict((await self.connection.get(path))["urls"])
        except (LostError, RefusedError) as error:
            # Whether the request has used up its number differs from server to server.
            logger.info("%s exports no adapters (%s): checkpoints name its saved states", self.connection.url, error)
            self._exports, self._model_id = False, ""
            await self.connection.open(self._epoch)
            return None

    async def load(self, path: str) -> None:
        """Take over a saved state.

        Raises:
            LostError: the server has none of this path.
        """
        before, since = self.state, self._since
        self.state, self._since = State(path), []
        try:
            await self._load()
        except BaseException:
            self.state, self._since, self._model_id = before, since, ""
            raise

    async def _load(self) -> None:
        try:
            if not self._model_id:
                return await self.create()
            await self._ordered("load_weights", path=self.state.path, optimizer=self.state.with_optimizer)
        except LostError:
            # It may have been the session.
            await self.connection.open(self._epoch)
            await self.create()
        except RefusedError as error:
            logger.info("%s: loading into a new model (%s)", self.connection.url, error)
            await self.create()

    async def delete(self, path: str) -> None:
        """Delete a saved path, if the server can: otherwise its time limit does."""
        run, checkpoint = _split(path)
        with suppress(WorkerError):
            await self.connection.delete(f"training_runs/{run}/checkpoints/{checkpoint}")

    # Requests -----------------------------------------------------------------------------------------------------

    async def _kept(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of requests that change nothing if they fail, on a model that is built again where it was lost."""
        lost: LostError | None = None
        for _ in range(REBUILDS):
            try:
                if lost is not None:
                    await self._reopen(lost)
                if not self._model_id:
                    await self._again()
                return await work()
            except LostError as error:
                lost = error
        state = self.state.path or "its seed"
        raise WorkerError(
            f"{self.connection.url} has lost the model, and it could not be built again from {state} ({lost}). If the "
            "server keeps its states elsewhere, restart it there; then continue the run with --resume"
        ) from lost

    async def _reopen(self, lost: LostError) -> None:
        logger.warning(
            "%s has lost the model (%s): building it again from %s and %d steps since",
            self.connection.url, lost, self.state.path or "its seed", len(self._since),
        )  # fmt: skip
        self._model_id = ""
        await self.connection.open(self._epoch)

    async def _again(self) -> None:
        """A new model at the server, in the state of this one."""
        await self.create()
        for data, adam in self._since:
            await self._step(data, adam)

    async def _pass(self, data: Sequence[Datum], forward_only: bool) -> Passed:
        promises = [await self._send_pass(chunk, forward_only) for chunk in chunks(data)]
        parts = [passed(await self.connection.result(promise)) for promise in promises]
        log_probs = [each for part in parts for each in part.log_probs]
        if [len(each) for each in log_probs] != [each.tokens for each in data]:
            raise WorkerError("the server's result of forward_backward has another number of log-probs than targets")
        return Passed(log_probs, {key: value for part in parts for key, value in part.metrics.items()})

    async def _step(self, data: Sequence[Datum], adam: Adam) -> Mapping[str, float]:
        # All are sent before the first is waited for: the server need not wait for us between them.
        promises = [await self._send_pass(chunk, forward_only=False) for chunk in chunks(data)]
        last = await self.connection.post("optim_step", self._numbered({"adam_params": asdict(adam)}))
        for promise in promises:
            passed(await self.connection.result(promise))
        return dict((await self.connection.result(last)).get("metrics") or {})

    async def _send_pass(self, data: Sequence[Datum], forward_only: bool) -> Mapping[str, Any]:
        self._sent += 1
        # In a thread: a large message takes a while, in which heartbeats go on.
        body = await asyncio.to_thread(training_request, self._model_id, self._sent, data, forward_only)
        promise: Mapping[str, Any] = await self.connection.post("forward_backward", body)
        return promise

    async def _ordered(self, route: str, **body: Any) -> Any:
        return await self.connection.result(await self.connection.post(route, self._numbered(body)))

    def _numbered(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self._sent += 1
        return {"model_id": self._model_id, "seq_id": self._sent, **body}


def chunks(data: Sequence[Datum]) -> Iterator[list[Datum]]:
    """The data in requests of a size that the API allows."""
    chunk: list[Datum] = []
    size = 0
    for datum in data:
        if chunk and (len(chunk) == MOST_DATUMS or size + datum.nbytes > MOST_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(datum)
        size += datum.nbytes
    if chunk:
        yield chunk


def _limit(ttl: int | None) -> dict[str, int]:
    return {} if ttl is None else {"ttl_seconds": ttl}


def _split(path: str) -> tuple[str, str]:
    """``run`` and ``weights/name`` of ``tinker://run/weights/name``."""
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    if not checkpoint:
        raise RefusedError(f"the server named a saved state {path!r}, which is not of the form tinker://RUN/KIND/NAME")
    return run, checkpoint
