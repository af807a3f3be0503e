"""The seam of inference engines: token-level generation, and nothing else.

The core gives every engine its server actor, routing, retries, deadlines and metrics. All methods are coroutines and
run on one event loop; an engine that computes in Python moves the work to a separate thread. Nothing but
standard-library objects, numpy arrays and the dataclasses of this file crosses the border, because an engine may live
in an interpreter without torch, or with another torch. ``EngineContext.shared_module`` is the one exception, for an
engine in the actor's process.

An engine has the methods of :class:`InferenceEngine`. Capabilities that add methods have a protocol each:
:class:`SessionEngine`, :class:`PausableEngine`, :class:`SleepingEngine`. :class:`MeasuredEngine` and
:class:`ProgressingEngine` need none.

    class Echo(InferenceEngine):
        version = 0

        async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
            ids = prompt_ids[: sampling_params.max_tokens]
            return TokenOutput(ids, [0.0] * len(ids), "length", [PolicySpan(self.version, 0, len(ids))])
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from agentrl_core.api.weights import WeightUpdate

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "drain", "keep"]


RESHAPING: dict[str, Any] = {
    "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {},
}  # fmt: skip
"""Sampling parameters that an engine announces as a capability of the same name, with the values that mean off."""
_reshaping, _UNUSED = attrgetter(*RESHAPING), tuple(RESHAPING.values())


def truncation_is_chained(top_p: float, top_k: int, min_p: float) -> bool:
    """top_p follows another truncation: a request that needs an engine with the capability ``chained_truncation``."""
    return top_p < 1 and (top_k > 0 or min_p > 0)


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one request.

    Args:
        max_tokens: most tokens to sample; always >= 1 when an engine sees it.
        temperature: 0 means greedy.
        top_k: only so many of the likeliest tokens; 0 switches it off.
        min_p: only tokens at least this fraction as likely as the likeliest one; 0 switches it off.
        top_p: the smallest set of likeliest tokens that has at least this share of what top_k and min_p have left; 1.0
            switches it off.
        presence_penalty: subtracted from the logit of each token that this request has sampled already.
        frequency_penalty: the same, times how often it has been sampled.
        repetition_penalty: divides the positive logits of tokens of prompt and output and multiplies the negative ones
            (Keskar et al., 2019); 1.0 switches it off.
        logit_bias: added to the logits of these token ids.
        json_schema: JSON text of a schema, which is an object. The answer is JSON that fits it and then a stop token,
            unless ``max_tokens`` cuts it off. The tokenizer's end of sequence is a stop token too. None: any text.
        seed: for this request alone; the same seed and logits give the same tokens whatever else is in the batch.
        stop_token_ids: sampling ends after one of these, which is part of the output.
        adapter: sample with this LoRA adapter; only for engines with the capability ``adapters``. Empty: with the
            engine's own weights alone.
        version: of the adapter, one of those that :class:`AdapterSlots` keeps; None: the newest one.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    json_schema: str | None = None
    adapter: str = ""
    version: int | None = None

    @property
    def reshaping(self) -> dict[str, Any]:
        """Those of :data:`RESHAPING` that are in use, with their values."""
        values = _reshaping(self)
        if values == _UNUSED:
            return {}
        return {name: value for name, value in zip(RESHAPING, values, strict=True) if value != RESHAPING[name]}

    @property
    def log_prob_settings(self) -> dict[str, Any]:
        """What ``TokenOutput.log_probs`` depend on besides the logits: the temperature, and if they are in use the
        penalties, ``logit_bias`` and ``json_schema``. With the temperature alone they are the policy's own."""
        settings = {"temperature": self.temperature or 1.0, **self.reshaping}
        settings.pop("min_p", None)
        return settings if self.json_schema is None else settings | {"json_schema": self.json_schema}

    @property
    def capabilities(self) -> set[str]:
        """Those that an engine needs for this request."""
        chained = truncation_is_chained(self.top_p, self.top_k, self.min_p)
        used = {"json_schema": self.json_schema is not None, "chained_truncation": chained, "adapters": self.adapter}
        return {*self.reshaping, *(name for name, is_used in used.items() if is_used)}


@dataclass(frozen=True)
class MultiModal:
    """The images of a prompt, for an engine with the capability ``images``.

    Args:
        images: their names in the order in which they stand in the prompt. One may stand there twice; the same name is
            the same image.
        collapsed_ids: the prompt with one placeholder for each image, for an engine that expands it by itself. What it
            makes of them must be ``prompt_ids``, or the request fails: the trainer computes ``prompt_ids``.
        data: of each name the bytes of a PNG or JPEG file, in RGB.
    """

    images: tuple[str, ...]
    collapsed_ids: Sequence[int]
    data: Mapping[str, bytes] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class PolicySpan:
    """Tokens ``start..end`` (end excluded) of an output were sampled by weights number ``version``."""

    version: int
    start: int
    end: int


@dataclass
class TokenOutput:
    """What one request produced.

    Args:
        token_ids: the sampled ids, the stop token included.
        log_probs: natural log-probability of each sampled id under the softmax of logits / temperature (1 where
            sampling is greedy), after penalties and ``logit_bias``, before min-p, top-p and top-k; with
            ``json_schema`` among the tokens that it allows; None without the capability ``logprobs``.
        finish_reason: ``stop`` (a stop token), ``length`` (max_tokens), ``abort``.
        spans: which weights sampled which tokens; they cover ``token_ids`` without a gap.
        queued: seconds that the request waited in its replica before it was served, as far as the engine knows. The
            core adds those in which it waited for ``max_in_flight``.
        replica: number of the replica that answered last. Set by the core.
        routed_experts: [p + n - 1, N, k] integers, the experts that each token but the last was sent to, of the
            p of the prompt and the n sampled ones, in each of the model's N layers; 0 in layers without experts. None
            unless ``EngineContext.routed_experts``.
    """

    token_ids: list[int]
    log_probs: list[float] | None
    finish_reason: FinishReason
    spans: list[PolicySpan] = field(default_factory=list)
    queued: float = field(default=0.0, compare=False)
    replica: int = field(default=-1, compare=False)
    routed_experts: "np.ndarray[Any, Any] | None" = field(default=None, compare=False)


@dataclass(frozen=True)
class AdapterSlots:
    """The LoRA adapters that an engine must be able to serve at the same time, in one batch.

    An adapter exists once its first version has come (``WeightUpdate.adapter``). Its newest ``versions`` versions can
    be asked for. An older one is dropped as soon as no request samples with it; a request for it fails, and its message
    names those that there are. What a version or an adapter has cached is never read by another one.

    Args:
        names: of the adapters.
        versions: of each adapter.
        rank: the highest one.
        targets: the last parts of the names of the modules that they change: ``q_proj``, ``down_proj``.
    """

    names: tuple[str, ...]
    versions: int
    rank: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class EngineContext:
    """What the core knows about an engine's place.

    Args:
        model_path: directory with weights, config and tokenizer.
        dtype: torch name without the prefix.
        max_model_len: tokens of prompt and response together.
        device: ``cpu`` or ``cuda``.
        replica: number of this replica, from 0.
        seed: of the run.
        deterministic: ``rollout.deterministic``.
        vocab_size: size of the embedding; ids at or above it never reach the engine.
        tensor_parallel, pipeline_parallel, data_parallel: devices of this replica along each axis; more than one in
            all only for engines with the capability ``parallel``.
        nodes: hosts that these devices are spread over evenly, each with an engine object of this class; more than
            one only for engines with the capability ``multi_node``.
        node_rank: of this host among them. The engine object on host 0 gets requests and weights; the others compute
            for it, and are only started, asked for their health, and closed. All are started at the same time.
        rendezvous: ``address:port`` on host 0 where they find each other; empty with one host.
        shared_module: the actor's module, for an engine with the capability ``shared_module`` in its process. With
            adapters it is in the form that PEFT gives it, with an adapter of each name, always of the newest version.
        memory_share: share of the memory of each of its GPUs that this engine may hold while it is awake; 0: the GPUs
            are its own, and the engine decides.
        memory_free: share that is free on each as the run starts, where ``memory_share`` is set.
        adapters: that the engine serves; only for engines with the capability ``adapters``. None: none. Their updates
            leave the model's own weights alone, so those must survive ``sleep``.
        reserved_ids: tokens that stand for images and are never sampled: in a history they would be taken for images.
            Log-probabilities are those of all tokens, these among them.
        max_images: of a prompt, at most; 0: the model takes text alone.
        routed_experts: outputs shall have them; only for engines with the capability ``routed_experts``.
    """

    model_path: str
    dtype: str = "float32"
    max_model_len: int = 2048
    device: str = "cpu"
    replica: int = 0
    seed: int = 0
    deterministic: bool = False
    vocab_size: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    nodes: int = 1
    node_rank: int = 0
    rendezvous: str = ""
    shared_module: Any = None
    memory_share: float = 0.0
    memory_free: float = 1.0
    adapters: AdapterSlots | None = None
    reserved_ids: tuple[int, ...] = ()
    max_images: int = 0
    routed_experts: bool = False


class InferenceEngine(ABC):
    """Samples tokens. Errors of any type may be raised; the server maps them to ``EngineError``.

    ``request_id`` names a session: the turns of one trajectory share it, so that an engine can keep their KV cache.
    There is at most one request per session at a time.
    """

    async def start(self) -> None:
        """Load what is needed. Called once, before anything else."""
        return None

    async def close(self) -> None:
        """Release everything. May be called after a failed ``start``, and twice."""
        return None

    async def health(self) -> None:
        """Raise if the engine cannot serve. Asked every few seconds and after a failed request: a replica that raises
        here, or does not answer, is replaced by a new one with the current weights. Must be cheap, also under load."""
        return None

    @abstractmethod
    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        request_id: str,
        multi_modal: MultiModal | None = None,
    ) -> TokenOutput:
        """Continue ``prompt_ids``. Cancelling the coroutine ends the request.

        Args:
            multi_modal: images whose tokens are among ``prompt_ids``; None: there are none.
        """

    async def abort(self, request_id: str) -> TokenOutput | None:
        """End a request: its ``generate`` returns what it has (``finish_reason`` abort), and so does this call.

        None where no such request runs.
        """
        return None

    async def update_weights(self, update: WeightUpdate, version: int) -> None:
        """Take new weights, and reset every cache that was computed with the old ones.

        Requests may run, if the engine has the capability ``live_update``: ``update.running`` says what becomes of
        them. A token that is sampled after this belongs to ``version``, and every other one to the version before. With
        ``update.adapter`` a request that runs keeps its version, and one that begins after this has the new one.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no capability 'weight_update'")


@runtime_checkable
class SessionEngine(Protocol):
    """The methods behind the capability ``sessions``."""

    async def open_session(self, session_id: str) -> None:
        """A trajectory begins; its requests will carry ``request_id == session_id``."""

    async def close_session(self, session_id: str) -> None:
        """The trajectory has ended: release what was kept for it. Ignore unknown ids."""


@runtime_checkable
class PausableEngine(Protocol):
    """The methods behind the capability ``pause``."""

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Halt generation: ``abort`` ends running requests, ``drain`` waits for them, ``keep`` freezes them."""

    async def resume(self) -> None:
        """Continue after :meth:`pause`."""


@runtime_checkable
class SleepingEngine(Protocol):
    """The methods behind the capability ``sleep``."""

    async def sleep(self, level: int = 1) -> None:
        """Release memory: level 1 the caches, level 2 the weights too."""

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back: ``weights``, ``kv_cache``, or both (None)."""


@runtime_checkable
class MeasuredEngine(Protocol):
    """An engine with counters; it needs no capability."""

    def metrics(self) -> dict[str, float]:
        """Counters since the last call; keys without a prefix, e.g. ``cached_tokens``."""


@runtime_checkable
class ProgressingEngine(Protocol):
    """An engine that says whether it computes; it needs no capability."""

    async def progress(self) -> float:
        """A number that changes while requests are computed, such as the tokens so far. Must be cheap, also under load.

        A replica whose number stays the same for ``health_timeout``, although it has requests, is replaced. One whose
        engine has no such method is judged by the requests that it answers.
        """
