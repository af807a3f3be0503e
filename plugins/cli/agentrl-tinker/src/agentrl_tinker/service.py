"""What the API does: sessions of keys, models that train, samplers."""

import asyncio
import json
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from agentrl_core.api.concurrency import together
from agentrl_core.fsdp2.adapters import CONFIG_FILE, WEIGHTS_FILE
from agentrl_tinker import requests, samples
from agentrl_tinker.adapters import Shape
from agentrl_tinker.losses import Loss
from agentrl_tinker.queues import Ordered, Result, Results, Work, failed, finish
from agentrl_tinker.refusals import Refusal
from agentrl_tinker.sampler import Sampler, Weights
from agentrl_tinker.store import Checkpoint, Store, check_name, write_files
from agentrl_tinker.trainer import Row, Trainer

logger = logging.getLogger(__name__)
T = TypeVar("T")

MOMENTS = "optimizer.safetensors"
LENT = 3600.0
"""Seconds for which files can be downloaded from an address."""
NO_MODEL = "there is no model {!r} of this API key; its session may have ended. Load a checkpoint to continue"


@dataclass
class Session:
    owner: str
    metadata: dict[str, Any] | None
    seen: float
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass
class TrainedModel:
    model_id: str
    owner: str
    session_id: str
    shape: Shape
    queue: Ordered
    metadata: dict[str, Any] | None = None
    published: Weights | None = None
    """What the samplers of kind inflight use."""


@dataclass
class SamplingSession:
    sampler_id: str
    owner: str
    session_id: str
    weights: Callable[[], Weights | None]
    asked: requests.CreateSampler | None = None
    """None for one that a model has made."""


def adapter_files(trainer: Trainer, name: str, shape: Shape, with_optimizer: bool) -> dict[str, bytes]:
    """The content of a folder with an adapter, as PEFT reads it, and with its optimizer's moments."""
    weights, moments = trainer.state(name, with_optimizer)
    files = {
        WEIGHTS_FILE: save_tensors(weights),
        CONFIG_FILE: json.dumps(trainer.adapters.config(shape), indent=2).encode(),
    }
    return files | ({MOMENTS: save_tensors(moments)} if with_optimizer else {})


class Service:
    """One base model for many clients.

    Args:
        name: of the base model, for clients.
        tokenizer: what clients load it from.
        decode: text of token ids, for stop texts.
        eos: ids that end a sequence where a client names no stop.
    """

    def __init__(
        self,
        trainer: Trainer,
        sampler: Sampler,
        store: Store,
        *,
        name: str,
        tokenizer: str,
        decode: Callable[[Sequence[int]], str],
        eos: tuple[int, ...],
        max_adapters: int,
        max_rank: int,
        unembed: bool,
        max_model_len: int,
        session_timeout: float,
    ) -> None:
        self.trainer, self.sampler, self.store = trainer, sampler, store
        self.name, self.tokenizer, self.max_model_len = name, tokenizer, max_model_len
        self.results = Results(self._alive)
        self._decode, self._eos = decode, eos
        self._max_adapters, self._max_rank, self._session_timeout = max_adapters, max_rank, session_timeout
        self._unembed = unembed
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, TrainedModel] = {}
        self._samplers: dict[str, SamplingSession] = {}
        self._sampling: dict[str, asyncio.Task[None]] = {}
        self._lent: dict[str, tuple[Path, float]] = {}
        self._thread = ThreadPoolExecutor(1, "agentrl-tinker-trainer")

    # Sessions -----------------------------------------------------------------------------------------------------

    def create_session(self, owner: str, body: requests.CreateSession) -> str:
        session_id = secrets.token_hex(12)
        self._sessions[session_id] = Session(owner, body.user_metadata, time.monotonic())
        return session_id

    def session(self, owner: str, session_id: str, gone: int = 404) -> Session:
        """A session of this key, which is alive from now on for another while.

        Raises:
            Refusal: there is none, with the status ``gone``.
        """
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise Refusal(f"there is no session {session_id!r} of this API key; it may have ended", gone)
        self._alive(session_id)
        return session

    def _alive(self, session_id: str) -> None:
        if session_id in self._sessions:
            self._sessions[session_id].seen = time.monotonic()

    async def end_session(self, session_id: str) -> None:
        """Release what a session holds; its checkpoints stay."""
        session = self._sessions.pop(session_id)
        for sampler_id in session.samplers:
            del self._samplers[sampler_id]
        models = [self._models.pop(model_id) for model_id in session.models]
        for request_id in [each for each in self._sampling if each.startswith(f"{session_id}:")]:
            self._sampling[request_id].cancel()
        for model in models:
            await model.queue.close()
            await self._compute(self.trainer.remove, model.model_id)
        self.results.drop_session(session_id)
        shutil.rmtree(self.store.scratch / session_id, ignore_errors=True)

    async def end_idle_sessions(self) -> None:
        """Of clients from which nothing has been heard."""
        for session_id in list(self._sessions):
            # While another one ends, this one may have ended too, or its client may be back.
            session = self._sessions.get(session_id)
            if session is None or session.seen >= time.monotonic() - self._session_timeout:
                continue
            logger.info(
                "session %s has sent no heartbeat for %g s; its adapters are released",
                session_id,
                self._session_timeout,
            )
            await self.end_session(session_id)

    async def close(self) -> None:
        while self._sessions:
            await self.end_session(next(iter(self._sessions)))
        await self.sampler.close()
        self._thread.shutdown()
        self.store.close()

    # Models -------------------------------------------------------------------------------------------------------

    def model(self, owner: str, model_id: str) -> TrainedModel:
        model = self._models.get(model_id)
        if model is None or model.owner != owner:
            raise Refusal(NO_MODEL.format(model_id), 404)
        self._alive(model.session_id)
        return model

    def create_model(self, owner: str, body: requests.CreateModel) -> str:
        self._check_base(body.base_model)
        shape, seed = body.lora_config.shape, body.lora_config.seed

        def create(model: TrainedModel) -> Result:
            self.trainer.create(model.model_id, shape, seed)
            return {"model_id": model.model_id, "type": "create_model"}

        return self._new_model(owner, body.session_id, body.model_seq_id, shape, body, create)

    def load_new_model(self, owner: str, body: requests.LoadWeights) -> str:
        """A model whose first request is a checkpoint."""
        if body.session_id is None or body.model_seq_id is None or body.model_id or body.seq_id:
            raise Refusal("load_weights needs model_id and seq_id, or session_id and model_seq_id")
        if body.base_model is not None:
            self._check_base(body.base_model)
        if body.optimizer and body.optimizer_config is not None:
            raise Refusal("optimizer_config cannot replace the optimizer that is loaded. Leave it out")
        checkpoint, folder = self._checkpoint(owner, body.path)

        def create(model: TrainedModel) -> Result:
            self.trainer.create(model.model_id, model.shape)
            try:
                return self._load(model, checkpoint, folder, body.optimizer)
            except BaseException:
                self.trainer.remove(model.model_id)
                raise

        shape = checkpoint.adapter_shape
        return self._new_model(owner, body.session_id, body.model_seq_id, shape, body, create)

    def _new_model(
        self, owner: str, session_id: str, number: int, shape: Shape,
        body: requests.CreateModel | requests.LoadWeights, create: Callable[[TrainedModel], Result],
    ) -> str:  # fmt: skip
        session = self.session(owner, session_id)
        model_id = f"{session_id}:train:{number}"
        request_id = f"{model_id}:0"
        if self.results.known(request_id, body):
            return request_id
        if model_id in self._models:
            raise Refusal(f"model_seq_id: session {session_id!r} has a model with the number {number}")
        if shape.rank > self._max_rank:
            raise Refusal(f"lora_config.rank: {shape.rank} is more than this server's --max-rank {self._max_rank}")
        if shape.train_unembed and not self._unembed:
            raise Refusal(
                "lora_config.train_unembed: this server was started with --no-unembed, because its engine serves no "
                "adapters of the output layer. Set train_unembed=False"
            )
        if len(self._models) >= self._max_adapters:
            raise Refusal(
                f"this server trains {self._max_adapters} adapters already (--max-adapters). Close a client, or wait "
                f"until one has been silent for {self._session_timeout:g} s"
            )
        self.trainer.adapters.targets(shape)
        model = TrainedModel(model_id, owner, session_id, shape, Ordered(f"model {model_id}"), body.user_metadata)
        self._models[model_id] = model
        session.models.append(model_id)

        async def work() -> Result:
            try:
                return await self._compute(create, model)
            except BaseException:
                self._models.pop(model_id, None)
                session.models.remove(model_id)
                raise

        # Numbers of the client begin at 1: the adapter is made before.
        model.queue.start(self.results.add(request_id, owner, session_id, body), work)
        return request_id

    def _check_base(self, name: str) -> None:
        if name != self.name:
            raise Refusal(f"base_model: this server has {self.name!r}, not {name!r}")

    # Training -----------------------------------------------------------------------------------------------------

    def submit(self, owner: str, model_id: str, seq_id: int, body: bytes, read: Callable[[TrainedModel], Work]) -> str:
        """Put a request into its model's order.

        Args:
            body: as it came: the same again is the same request.
            read: returns what shall be done, or raises Refusal; then the number is used up.
        """
        model = self.model(owner, model_id)
        request_id = f"{model_id}:{seq_id}"
        is_known = model.queue.known(seq_id, body)
        if is_known and request_id in self.results:
            return request_id
        try:
            work = read(model)
            if is_known:
                raise Refusal(f"seq_id: request {seq_id} has been done, and its result was fetched long ago", 410)
        except Exception:
            # Those that come later wait for this number.
            if not is_known:
                model.queue.add(seq_id, None, None)
            raise
        model.queue.add(seq_id, self.results.add(request_id, owner, model.session_id), work)
        return request_id

    def train(
        self, model: TrainedModel, rows: list[Row], loss: Loss, settings: dict[str, float], backward: bool
    ) -> Work:
        async def work() -> Result:
            before = await self._compute(self.trainer.gradients, model.model_id) if backward else []
            try:
                return requests.training_result(*await compute())
            except Exception:
                # A client that catches the error must not step with the gradients of half a request.
                if backward:
                    await self._compute(self.trainer.set_gradients, model.model_id, before)
                raise

        async def compute() -> "tuple[float, list[np.ndarray[Any, Any]]]":
            total, log_probs = 0.0, [np.empty(0)] * len(rows)
            # Other models compute between two micro-batches.
            for batch in self.trainer.micro_batches(rows):
                part, found = await self._compute(
                    self.trainer.forward, model.model_id, [rows[index] for index in batch], loss, settings, backward
                )
                total += part
                for index, values in zip(batch, found, strict=True):
                    log_probs[index] = values
            return total, log_probs

        return work

    def optim_step(self, model: TrainedModel, body: requests.OptimStep) -> Work:
        async def work() -> Result:
            return {"metrics": await self._compute(self.trainer.optim_step, model.model_id, body.adam_params.params)}

        return work

    # Checkpoints --------------------------------------------------------------------------------------------------

    def save(self, model: TrainedModel, body: requests.SaveWeights) -> Work:
        checkpoint = self._described(model, "weights", body.path, body.ttl_seconds, body.user_metadata)

        async def work() -> Result:
            files = await self._compute(adapter_files, self.trainer, model.model_id, model.shape, True)
            saved = await asyncio.to_thread(self.store.save, model.owner, checkpoint, files, body.overwrite)
            return {"path": saved.path, "type": "save_weights"}

        return work

    def save_for_sampler(self, model: TrainedModel, body: requests.SaveForSampler) -> Work:
        if (body.path is None) == (body.sampling_session_seq_id is None):
            raise Refusal("save_weights_for_sampler needs path or sampling_session_seq_id")
        if body.path is not None:
            checkpoint = self._described(model, "sampler_weights", body.path, body.ttl_seconds, body.user_metadata)

            async def save() -> Result:
                files = await self._compute(adapter_files, self.trainer, model.model_id, model.shape, False)
                saved = await asyncio.to_thread(self.store.save, model.owner, checkpoint, files)
                return {"path": saved.path, "type": "save_weights_for_sampler"}

            return save

        async def publish() -> Result:
            files = await self._compute(adapter_files, self.trainer, model.model_id, model.shape, False)
            folder = self.store.scratch / model.session_id / secrets.token_hex(12)
            await asyncio.to_thread(write_files, folder, files)
            weights = Weights(folder, model.shape)
            sampler_id = self._new_sampler(
                model.owner, model.session_id, body.sampling_session_seq_id or 0,
                (lambda: model.published) if body.kind == "inflight" else (lambda: weights),
            )  # fmt: skip
            if body.kind == "inflight":
                model.published = weights
            return {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}

        return publish

    def save_external(self, model: TrainedModel, body: requests.SaveExternal) -> Work:
        """An adapter whose files can be downloaded."""
        checkpoint = self._described(model, "external_weights", body.path, body.ttl_seconds, None)

        async def work() -> Result:
            files = await self._compute(adapter_files, self.trainer, model.model_id, model.shape, False)
            saved = await asyncio.to_thread(self.store.save, model.owner, checkpoint, files)
            return {"path": saved.path, "size_bytes": saved.bytes, "type": "save_weights_external"}

        return work

    def lend(self, owner: str, path: str) -> tuple[str, list[str], float]:
        """A secret with which the files of an external checkpoint can be downloaded for a while, their names, and the
        end of that while in seconds since 1970."""
        _, folder = self.store.find(owner, path)
        now = time.time()
        self._lent = {token: lent for token, lent in self._lent.items() if lent[1] > now}
        token, expires = secrets.token_urlsafe(32), now + LENT
        self._lent[token] = folder, expires
        return token, sorted(file.name for file in folder.iterdir()), expires

    def lent(self, token: str, name: str) -> Path:
        """A file of what is lent.

        Raises:
            Refusal: the secret is none, or not any more, or there is no such file.
        """
        folder, expires = self._lent.get(token, (Path(), 0.0))
        if expires < time.time() or name not in (WEIGHTS_FILE, CONFIG_FILE) or not (folder / name).is_file():
            raise Refusal("there is no such download (any more)", 404)
        return folder / name

    def load(self, model: TrainedModel, body: requests.LoadWeights) -> Work:
        if body.session_id or body.model_seq_id is not None or body.base_model or body.optimizer_config:
            raise Refusal("load_weights: session_id, model_seq_id, base_model and optimizer_config are for a new model")
        checkpoint, folder = self._checkpoint(model.owner, body.path)
        if checkpoint.adapter_shape != model.shape:
            raise Refusal(
                f"path: {body.path} is an adapter of {checkpoint.shape}, this model has {model.shape.as_dict()}"
            )
        return lambda: self._compute(self._load, model, checkpoint, folder, body.optimizer)

    def _load(self, model: TrainedModel, checkpoint: Checkpoint, folder: Path, optimizer: bool) -> Result:
        weights = load_tensors((folder / WEIGHTS_FILE).read_bytes())
        moments = load_tensors((folder / MOMENTS).read_bytes()) if optimizer else None
        self.trainer.load(model.model_id, weights, moments)
        return {"path": checkpoint.path, "model_id": model.model_id, "type": "load_weights"}

    def _checkpoint(self, owner: str, path: str) -> tuple[Checkpoint, Path]:
        checkpoint, folder = self.store.find(owner, path)
        if checkpoint.kind != "weights":
            raise Refusal(f"path: {path} is for samplers, without the state of training. Load one of save_state")
        self._check_base(checkpoint.base_model)
        return checkpoint, folder

    def _described(
        self, model: TrainedModel, kind: str, name: str, ttl: int | None, metadata: dict[str, str] | None
    ) -> Checkpoint:
        # save() checks it too, but a request that cannot be carried out shall be refused right away.
        check_name(name)
        expires = None if ttl is None else time.time() + ttl
        return Checkpoint(model.model_id, kind, name, self.name, model.shape.as_dict(), "", 0, 0.0, expires, metadata)

    # Samplers -----------------------------------------------------------------------------------------------------

    def create_sampler(self, owner: str, body: requests.CreateSampler) -> str:
        self.session(owner, body.session_id)
        if body.model_path is None:
            self._check_base(body.base_model or "")
            return self._new_sampler(owner, body.session_id, body.sampling_session_seq_id, lambda: None, body)
        checkpoint, folder = self.store.find(owner, body.model_path)
        for name in (checkpoint.base_model, body.base_model or self.name):
            self._check_base(name)
        weights = Weights(folder, checkpoint.adapter_shape)
        number = body.sampling_session_seq_id
        return self._new_sampler(owner, body.session_id, number, lambda: weights, body)

    def _new_sampler(
        self, owner: str, session_id: str, number: int, weights: Callable[[], Weights | None],
        asked: requests.CreateSampler | None = None,
    ) -> str:  # fmt: skip
        session = self.session(owner, session_id)
        sampler_id = f"{session_id}:sample:{number}"
        before = self._samplers.get(sampler_id)
        if before is None:
            self._samplers[sampler_id] = SamplingSession(sampler_id, owner, session_id, weights, asked)
            session.samplers.append(sampler_id)
        elif asked is None or before.asked != asked:
            raise Refusal(
                f"sampling_session_seq_id: session {session_id!r} has another sampler with the number {number}"
            )
        return sampler_id

    def sampler_of(self, owner: str, sampler_id: str) -> SamplingSession:
        sampler = self._samplers.get(sampler_id)
        if sampler is None or sampler.owner != owner:
            raise Refusal(f"there is no sampler {sampler_id!r} of this API key; its session may have ended", 404)
        self._alive(sampler.session_id)
        return sampler

    def sample(self, owner: str, body: requests.Sample) -> tuple[str, list[str]]:
        """The request's id, and those of its sequences."""
        sampler = self.sampler_of(owner, body.sampling_session_id)
        request_id = f"{sampler.sampler_id}:{body.seq_id}"
        sequence_ids = [f"{request_id}:{index}" for index in range(body.num_samples)]
        if self.results.known(request_id, body):
            return request_id, sequence_ids
        prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
        params, texts = samples.params_of(body.sampling_params, self._eos, self.max_model_len - len(prompt))
        if body.prompt_logprobs_last_n is not None and not (
            body.prompt_logprobs and body.prompt_logprobs_last_n < len(prompt)
        ):
            raise Refusal("prompt_logprobs_last_n needs prompt_logprobs, and is less than the length of the prompt")
        try:
            self.sampler.check(prompt, params)
        except ValueError as error:
            raise Refusal(str(error).removeprefix("request 'of asample': ")) from error

        async def work() -> Result:
            weights = sampler.weights()
            outputs = await together(
                self.sampler.generate(weights, prompt, samples.numbered(params, index))
                for index in range(body.num_samples)
            )
            scores = None
            if body.prompt_logprobs or body.topk_prompt_logprobs:
                where = (None, None) if weights is None else (weights.folder, weights.shape)
                scores = await self._compute(self.trainer.scores, *where, prompt, body.topk_prompt_logprobs)
            return samples.response(body, [samples.cut(each, texts, self._decode) for each in outputs], scores)

        future = self.results.add(request_id, owner, sampler.session_id, body)
        task = asyncio.get_running_loop().create_task(finish(future, work))
        self._sampling[request_id] = task

        def forget(_: object) -> None:
            self._sampling.pop(request_id, None)
            if not future.done():
                future.set_result(failed(Refusal("the request was cancelled")))

        task.add_done_callback(forget)
        return request_id, sequence_ids

    def cancel(self, owner: str, request_id: str) -> None:
        """Stop sampling for a client that does not wait any more."""
        sampler_id = request_id.rpartition(":")[0]
        self.sampler_of(owner, sampler_id)
        if request_id in self._sampling:
            self._sampling[request_id].cancel()

    async def _compute(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
