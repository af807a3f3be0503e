"""The batch protocol: every phase of the loop talks in `DataProto`."""

from agentrl_core.protocol.combine import merge_meta_info
from agentrl_core.protocol.dataproto import DataProto, DataProtoItem, checked_methods

__all__ = ["DataProto", "DataProtoItem", "checked_methods", "merge_meta_info"]
