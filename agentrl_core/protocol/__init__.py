"""The batch protocol: every phase of the loop talks in `DataProto`."""

from agentrl_core.protocol.combine import merge_meta_info
from agentrl_core.protocol.dataproto import DataProto, DataProtoItem, checked_methods
from agentrl_core.protocol.functions import pad_dataproto_to_divisor, unpad_dataproto
from agentrl_core.protocol.futures import DataProtoFuture, GroupFuture

__all__ = [
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "GroupFuture",
    "checked_methods",
    "merge_meta_info",
    "pad_dataproto_to_divisor",
    "unpad_dataproto",
]
