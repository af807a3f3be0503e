"""The protobuf messages of the API that a client needs, described in place: neither the SDK nor a compiler is needed.

The package ``tinker_public``, as SDK 0.38.0 speaks it. A field is ``name=number:type``; ``*`` repeats it, and ``|``
puts it into the message's only oneof. A map travels as repeated entries with the fields ``key`` and ``value``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.message import DecodeError

from agentrl_core.api.errors import WorkerError

Array = np.ndarray[Any, Any]

_PACKAGE = "tinker_public"
_MESSAGES = """
Tensor                  dense=1:bytes| dtype=3:DType shape=4:int64*
EncodedTextChunk        tokens=1:bytes
Chunk                   encoded_text=1:EncodedTextChunk|
NamedTensor             key=1:string value=2:Tensor
Datum                   model_input=1:Chunk* loss_fn_inputs=2:NamedTensor*
NamedNumber             key=1:string value=2:double
ForwardBackwardRequest  model_id=1:string seq_id=2:int32 data=3:Datum* loss_fn=4:string forward_only=6:bool
BatchedTensor           data=1:bytes offsets=2:bytes dtype=3:DType
NamedBatch              key=1:string value=2:BatchedTensor
ArrayRecord             type_tag=1:string fields=2:NamedBatch* num_datums=3:int64
ForwardBackwardOutput   loss_fn_output_type=1:string loss_fn_outputs=2:ArrayRecord* metrics=3:NamedNumber*
SampledSequence         stop_reason=1:StopReason tokens=2:bytes logprobs=3:bytes
SampleResponse          sequences=1:SampledSequence*
"""
_ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
_TYPES = {name: getattr(Field, f"TYPE_{name.upper()}") for name in
          ("bytes", "string", "double", "bool", "int32", "int64")}  # fmt: skip
_STOP, _FLOAT32, _INT64 = 0, 1, 2


def _described() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="agentrl_backend_tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for index, value in enumerate(values):
            enum.value.add(name=value, number=index)
    for line in _MESSAGES.strip().splitlines():
        name, *fields = line.split()
        message = file.message_type.add(name=name)
        for text in fields:
            field_name, _, rest = text.partition("=")
            number, _, kind = rest.partition(":")
            plain = kind.rstrip("*|")
            field = message.field.add(name=field_name, number=int(number))
            field.label = Field.LABEL_REPEATED if kind.endswith("*") else Field.LABEL_OPTIONAL
            if plain in _TYPES:
                field.type = _TYPES[plain]
            else:
                field.type = Field.TYPE_ENUM if plain in _ENUMS else Field.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{plain}"
            if kind.endswith("|"):
                field.oneof_index = 0
                if not message.oneof_decl:
                    message.oneof_decl.add(name="one")
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_described())
_classes: dict[str, Any] = {
    name: message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
    for name in (line.split()[0] for line in _MESSAGES.strip().splitlines())
}


@dataclass(frozen=True)
class Datum:
    """A row of N+1 ids, and how much each of the N predictions counts.

    Args:
        ids: [N+1] int32.
        weights: [N] float32, by which the log-probability of each of ``ids[1:]`` is multiplied in the loss.
    """

    ids: Array
    weights: Array

    @property
    def tokens(self) -> int:
        """Those that are computed."""
        return len(self.ids) - 1

    @property
    def nbytes(self) -> int:
        """About as many as it takes in a request: 4 for each id, 8 for each target and 4 for each weight."""
        return 16 * self.tokens + 100


@dataclass(frozen=True)
class Passed:
    """What ``forward_backward`` returned.

    Args:
        log_probs: [N] float32 of each datum.
        metrics: of the server.
    """

    log_probs: list[Array]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Sampled:
    """A sequence that was sampled."""

    tokens: list[int]
    log_probs: list[float]
    stopped: bool


def training_request(model_id: str, seq_id: int, data: Sequence[Datum], forward_only: bool) -> bytes:
    """``forward_backward`` with the loss ``cross_entropy``: the sum of -weight * log-probability."""
    message = _classes["ForwardBackwardRequest"](
        model_id=model_id, seq_id=seq_id, data=[_datum(each) for each in data], loss_fn="cross_entropy",
        forward_only=forward_only,
    )  # fmt: skip
    return bytes(message.SerializeToString())


def _datum(datum: Datum) -> Any:
    inputs = {
        "target_tokens": (datum.ids[1:].astype("<i8"), _INT64),
        "weights": (datum.weights.astype("<f4"), _FLOAT32),
    }
    text = _classes["EncodedTextChunk"](tokens=datum.ids[:-1].astype("<i4").tobytes())
    named = [
        _classes["NamedTensor"](
            key=key, value=_classes["Tensor"](dense=values.tobytes(), dtype=kind, shape=[len(values)])
        )
        for key, (values, kind) in inputs.items()
    ]
    return _classes["Datum"](model_input=[_classes["Chunk"](encoded_text=text)], loss_fn_inputs=named)


def passed(content: bytes) -> Passed:
    """``ForwardBackwardOutput``.

    Raises:
        WorkerError: it is none, or has no log-probabilities.
    """
    message = _parsed("ForwardBackwardOutput", content)
    found: list[Array] = []
    for record in message.loss_fn_outputs:
        tensors = [entry.value for entry in record.fields if entry.key == "logprobs"]
        if not tensors:
            raise WorkerError("the server's result of forward_backward has no 'logprobs'")
        offsets = np.frombuffer(tensors[0].offsets, "<i8")
        data = tensors[0].data
        found += [
            np.frombuffer(data[start:end], "<f4") for start, end in zip(offsets, offsets[1:], strict=False)
        ]  # fmt: skip
    return Passed(found, {entry.key: entry.value for entry in message.metrics})


def sampled(content: bytes) -> Sampled:
    """The first sequence of a ``SampleResponse``.

    Raises:
        WorkerError: it is none.
    """
    message = _parsed("SampleResponse", content)
    if not message.sequences:
        raise WorkerError("the server's result of asample has no sequence")
    first = message.sequences[0]
    return Sampled(
        np.frombuffer(first.tokens, "<i4").tolist(),
        np.frombuffer(first.logprobs, "<f4").tolist(),
        first.stop_reason == _STOP,
    )


def _parsed(name: str, content: bytes) -> Any:
    message = _classes[name]()
    try:
        message.ParseFromString(content)
    except DecodeError as error:
        raise WorkerError(f"the server's result is no {name} of the Tinker API: {error}") from error
    return message
