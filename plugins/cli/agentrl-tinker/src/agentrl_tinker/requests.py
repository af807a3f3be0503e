"""Bodies of requests, as SDK 0.38.0 sends them. A field that is not here is refused."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl_tinker import messages
from agentrl_tinker.adapters import Shape
from agentrl_tinker.losses import Loss, loss_named
from agentrl_tinker.refusals import Refusal
from agentrl_tinker.trainer import AdamParams, Row

MOST_ROWS = 16_384


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    type: str | None = None


Metadata = dict[str, Any] | None


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: Metadata = None
    sdk_version: str = ""
    project_id: None = None
    display_name: str | None = None


class Session(Body):
    session_id: str


class LoraConfig(Body):
    rank: int = Field(ge=1, le=512)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def shape(self) -> Shape:
        return Shape(self.rank, self.train_attn, self.train_mlp, self.train_unembed)


class OptimizerConfig(Body):
    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: Metadata = None
    lora_config: LoraConfig
    optimizer_config: OptimizerConfig = OptimizerConfig()


class Model(Body):
    model_id: str


class Ordered(Body):
    model_id: str
    seq_id: int = Field(ge=1)


class Adam(Body):
    learning_rate: float = Field(0.0001, ge=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, ge=0, allow_inf_nan=False)

    @property
    def params(self) -> AdamParams:
        return AdamParams(**self.model_dump(exclude={"type"}))


class OptimStep(Ordered):
    adam_params: Adam


Ttl = Annotated[int, Field(ge=1, le=100 * 366 * 24 * 3600)] | None


class SaveWeights(Ordered):
    path: str
    ttl_seconds: Ttl = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(Ordered):
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl = None
    user_metadata: dict[str, str] | None = None


class SaveExternal(Ordered):
    path: str
    ttl_seconds: Ttl = None
    age_encryption_recipients: None = None


class LoadWeights(Body):
    model_id: str | None = None
    seq_id: int | None = Field(None, ge=1)
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0)
    base_model: str | None = None
    user_metadata: Metadata = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: None = None


class WeightsInfo(Body):
    tinker_path: str


class Page(Body):
    """The query of a list."""

    limit: int | None = Field(None, ge=0)
    offset: int = Field(0, ge=0)
    access_scope: Literal["owned"] = "owned"
    project_id: None = None


class CreateSampler(Body):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Retrieve(Body):
    request_id: str
    allow_metadata_only: bool = False


class TextChunk(Body):
    type: Literal["encoded_text"]
    tokens: list[int]


class Prompt(Body):
    chunks: list[TextChunk]


class Sampling(Body):
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = Field(-1, ge=-1)
    top_p: float = 1.0


class Sample(Body):
    sampling_session_id: str
    seq_id: int = Field(ge=0)
    num_samples: int = Field(1, ge=1, le=1024)
    prompt: Prompt
    sampling_params: Sampling
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=64)
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None
    base_model: None = None
    model_path: None = None


MISSING = {
    "adam_params": "this server has the optimizer adamw alone: pass AdamParams",
    "optimizer_params": "this server has the optimizer adamw alone: pass AdamParams",
    "optimizer_config": "this server has the optimizer adamw alone",
    "lora_config": "this server trains LoRA adapters alone, so it needs lora_config",
    "age_encryption_recipients": "this server does not encrypt the files of an adapter",
    "project_id": "this server has no projects",
    "access_scope": "a key sees what it has made itself",
    "weights_access_token": "a key loads the checkpoints that it has saved itself, and no others",
    "chunks": "this server takes text alone, as chunks of the type encoded_text",
    "topk_sample_logprobs": "this server computes no likeliest tokens of sampled positions",
    "target_prompt_logprobs": "this server scores the tokens of the prompt alone; ask with a prompt for each",
    "prompt_alt_tokens_k": "this server draws no alternatives to tokens of the prompt",
    "record_stability_info": "this server does not have the loss stable_reinforce, whose objective is not published",
    "base_model": "name the model when you create the sampling client",
    "model_path": "name the weights when you create the sampling client",
}
"""What is missing, by the field that asks for it."""


def problems(error: ValidationError) -> str:
    """What is wrong with a body, in one sentence for each field."""
    found = []
    for each in error.errors():
        names = [str(part) for part in each["loc"]]
        why = each["msg"]
        if each["type"] == "extra_forbidden":
            why = "this server does not know this field"
        # Of these two all is known, so that a wrong value inside is nothing that is missing.
        named = [name for name in names[:-1] if name not in ("adam_params", "lora_config")] + names[-1:]
        is_missing = each["type"] == "missing" and names[-1] not in ("adam_params", "lora_config")
        hint = "" if is_missing else next((MISSING[name] for name in named if name in MISSING), "")
        found.append(f"{'.'.join(names) or 'the body'}: {why}" + (f"; {hint}" if hint else ""))
    return ". ".join(dict.fromkeys(found))


class Training:
    """A request for ``forward_backward``.

    Raises:
        Refusal: it asks for something that the server does not do. The rest of the message is read in ``read``, so that
            ``model_id`` and ``seq_id`` of a request that is refused are known.
    """

    def __init__(self, body: bytes) -> None:
        self._message = messages.new("ForwardBackwardRequest")
        try:
            self._message.ParseFromString(body)
        except DecodeError as error:
            raise Refusal(f"the body is no ForwardBackwardRequest: {error}") from error
        self.model_id = str(self._message.model_id)
        self.seq_id = int(self._message.seq_id)
        self.forward_only = bool(self._message.forward_only)

    def read(self, vocabulary: int, longest: int) -> tuple[list[Row], Loss, dict[str, float]]:
        message = self._message
        if messages.has_unknown_fields(message):
            raise Refusal("the request has fields that this server does not know; it speaks the API of SDK 0.38")
        loss, settings = loss_named(message.loss_fn, _settings(message))
        if not 1 <= len(message.data) <= MOST_ROWS:
            raise Refusal(f"data: {len(message.data)} datums; allowed are 1 to {MOST_ROWS} in a request")
        names = {"target_tokens", *loss.inputs}
        return (
            [_row(f"data[{i}]", datum, names, vocabulary, longest) for i, datum in enumerate(message.data)],
            loss,
            settings,
        )


def _settings(message: Any) -> dict[str, float]:
    texts = [entry.key for entry in message.loss_fn_config_v2 if entry.value.WhichOneof("one") == "text"]
    if texts and message.loss_fn != "custom":
        raise Refusal(f"loss_fn_config: {', '.join(texts)} is a text, no loss of this server has such a setting")
    newer = {entry.key: entry.value.number for entry in message.loss_fn_config_v2}
    return newer or {entry.key: entry.value for entry in message.loss_fn_config}


def _row(where: str, datum: Any, names: set[str], vocabulary: int, longest: int) -> Row:
    # Its spans say where tokens come from, which only stable_reinforce reads.
    kinds = {chunk.WhichOneof("one") for chunk in datum.model_input}
    if kinds - {"encoded_text"}:
        raise Refusal(
            f"{where}: model_input has a chunk of the type {', '.join(sorted(map(str, kinds)))}; {MISSING['chunks']}"
        )
    ids = np.concatenate(
        [_array(where, chunk.encoded_text.tokens, "<i4") for chunk in datum.model_input] or [np.empty(0, "<i4")]
    ).astype(np.int64)
    if not 1 <= len(ids) <= longest:
        raise Refusal(f"{where}: model_input has {len(ids)} tokens; allowed are 1 to {longest} (--max-model-len)")
    found = {entry.key: entry.value for entry in datum.loss_fn_inputs}
    if missing := names - found.keys():
        raise Refusal(f"{where}: loss_fn_inputs lacks {', '.join(sorted(missing))}")
    if unused := found.keys() - names:
        raise Refusal(
            f"{where}: this loss does not read loss_fn_inputs {', '.join(sorted(unused))}. Leave it out; what would be "
            "weights of tokens belongs into the advantages"
        )
    arrays = {key: _tensor(f"{where}: {key}", value, len(ids)) for key, value in found.items()}
    targets = arrays.pop("target_tokens")
    for name, values in (("model_input", ids), ("target_tokens", targets)):
        outside = values[(values < 0) | (values >= vocabulary)]
        if len(outside):
            raise Refusal(
                f"{where}: {name} has the id {outside[0]}, which is outside the vocabulary 0..{vocabulary - 1}"
            )
    if "sequence_ratio_mask" in arrays and not arrays["sequence_ratio_mask"].any():
        raise Refusal(f"{where}: sequence_ratio_mask marks no token")
    return Row(ids, targets, arrays)


def _tensor(where: str, tensor: Any, length: int) -> "np.ndarray[Any, Any]":
    key = where.rpartition(" ")[2]
    wanted, dtype = (messages.INT64, "<i8") if key == "target_tokens" else (messages.FLOAT32, "<f4")
    if tensor.WhichOneof("one") == "sparse_csr" or len(tensor.shape) > 1:
        raise Refusal(f"{where} has {len(tensor.shape)} dimensions; this server takes one target for each position")
    if tensor.dtype != wanted:
        raise Refusal(f"{where} is not {'int64' if wanted == messages.INT64 else 'float32'}")
    values = _array(where, tensor.dense, dtype)
    if len(values) != length or list(tensor.shape) not in ([], [length]):
        shape = f" and the shape {list(tensor.shape)}" if tensor.shape else ""
        raise Refusal(f"{where} has {len(values)} values{shape} for {length} tokens of model_input")
    if not np.isfinite(values).all():
        raise Refusal(f"{where} holds values that are not finite")
    return values


def _array(where: str, data: bytes, dtype: str) -> "np.ndarray[Any, Any]":
    if len(data) % np.dtype(dtype).itemsize:
        raise Refusal(f"{where}: {len(data)} bytes are no whole number of {dtype}")
    return np.frombuffer(data, dtype).copy()


def training_result(total: float, log_probs: list["np.ndarray[Any, Any]"]) -> bytes:
    """``ForwardBackwardOutput`` with the sum of the losses and the targets' log-probabilities of each datum."""
    offsets = np.cumsum([0, *(4 * len(each) for each in log_probs)], dtype="<i8")
    tensor = messages.new(
        "BatchedTensor",
        data=np.concatenate(log_probs).astype("<f4").tobytes(), offsets=offsets.tobytes(), dtype=messages.FLOAT32,
    )  # fmt: skip
    record = messages.new(
        "ArrayRecord", fields=[messages.new("NamedBatch", key="logprobs", value=tensor)], num_datums=len(log_probs)
    )
    metrics: Mapping[str, float] = {"loss:sum": total if math.isfinite(total) else math.nan}
    return bytes(
        messages.new(
            "ForwardBackwardOutput", loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record],
            metrics=[messages.new("NamedNumber", key=key, value=value) for key, value in metrics.items()],
        ).SerializeToString()
    )  # fmt: skip
