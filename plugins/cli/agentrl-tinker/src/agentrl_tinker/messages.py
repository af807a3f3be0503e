"""The protobuf messages of the API, described in place, so that neither the SDK nor a compiler is needed.

The package ``tinker_public``, as SDK 0.38.0 speaks it. A field is ``name=number:type``; ``*`` repeats it, and ``|``
puts it into the message's only oneof.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.unknown_fields import UnknownFieldSet

_PACKAGE = "tinker_public"
_MESSAGES = """
Tensor                  dense=1:bytes| sparse_csr=2:SparseCsr| dtype=3:DType shape=4:int64*
SparseCsr               values=1:bytes crow_indices=2:bytes col_indices=3:bytes
EncodedTextChunk        tokens=1:bytes
ImageChunk              data=1:bytes format=2:string
DmelChunk               dmel=1:bytes
Chunk                   encoded_text=1:EncodedTextChunk| image=2:ImageChunk| dmel=3:DmelChunk|
PromptProvenanceSpan    sequence_id=1:string offset=2:int64 length=3:int64
SampledProvenanceSpan   sequence_id=1:string offset=2:int64 length=3:int64
ProvenanceSpan          prompt_tokens=1:PromptProvenanceSpan| sampled_tokens=2:SampledProvenanceSpan|
NamedTensor             key=1:string value=2:Tensor
Datum                   model_input=1:Chunk* loss_fn_inputs=2:NamedTensor* \
                        model_input_spans=3:ProvenanceSpan* loss_fn_input_spans=4:ProvenanceSpan*
LossConfigValue         number=1:double| text=2:string|
NamedNumber             key=1:string value=2:double
NamedValue              key=1:string value=2:LossConfigValue
ForwardBackwardRequest  model_id=1:string seq_id=2:int32 data=3:Datum* loss_fn=4:string \
                        loss_fn_config=5:NamedNumber* forward_only=6:bool loss_fn_config_v2=7:NamedValue*
BatchedTensor           data=1:bytes offsets=2:bytes dtype=3:DType trailing_shape=4:int64*
NamedBatch              key=1:string value=2:BatchedTensor
ArrayRecord             type_tag=1:string fields=2:NamedBatch* num_datums=3:int64
ForwardBackwardOutput   loss_fn_output_type=1:string loss_fn_outputs=2:ArrayRecord* metrics=3:NamedNumber*
TopkLogprobs            token_ids=1:bytes logprobs=2:bytes k=3:uint32 length=4:uint32
SampledSequence         stop_reason=1:StopReason tokens=2:bytes logprobs=3:bytes
SampleResponse          sequences=1:SampledSequence* prompt_logprobs=2:bytes topk_prompt_logprobs=3:TopkLogprobs \
                        prompt_cache_hit_tokens=4:int32
"""
"""A map travels as repeated entries with the fields ``key`` and ``value``; here they are spelled out."""
_ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
_TYPES = {name: getattr(Field, f"TYPE_{name.upper()}") for name in
          ("bytes", "string", "double", "bool", "int32", "int64", "uint32")}  # fmt: skip

STOP, LENGTH = 0, 1
FLOAT32, INT64 = 1, 2
NO_LOG_PROB = -99999.0
"""With the id 0: there are no likeliest tokens of this position."""


def _described() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="agentrl_tinker.proto", package=_PACKAGE, syntax="proto3")
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


def new(name: str, **fields: Any) -> Any:
    """An empty message, or one with these fields."""
    return _classes[name](**fields)


def has_unknown_fields(message: Any) -> bool:
    """Whether a message, or one inside it, has fields that this server does not know."""
    if len(UnknownFieldSet(message)):
        return True
    for field, value in message.ListFields():
        if field.message_type is not None:
            parts = [value] if hasattr(value, "ListFields") else value
            if any(has_unknown_fields(part) for part in parts):
                return True
    return False
