"""Gathering a batch from all ranks of a process group."""

from typing import Any

import torch.distributed as dist

from agentrl_core.protocol.dataproto import DataProto


def all_gather_data_proto(data: DataProto, process_group: Any = None) -> DataProto:
    """The batches of all ranks in rank order, on every rank, on the device of ``data``.

    Columns must agree between the ranks; lengths may differ. meta_info is merged as by `DataProto.concat`.
    """
    device = data.batch.device if data.batch is not None else None
    parts: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(parts, data, group=process_group)
    gathered = DataProto.concat(parts)
    return gathered.to(device) if device is not None else gathered
