"""Operations of worker groups that only code for verl calls."""

import pytest
import torch

from agentrl_compat_verl.dispatch import Dispatch, register
from agentrl_compat_verl.groups import LocalWorkerGroup, Worker
from agentrl_compat_verl.protocol import DataProto
from agentrl_core.api import ProtocolError
from agentrl_core.controller import ClassWithInitArgs


class Rank(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def add(self, a: int, b: int = 0) -> int:
        return a + b + self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count(self, batch: DataProto) -> int:
        return len(batch)

    def name(self, prefix: str) -> str:
        return f"{prefix}{self.rank}"


def test_every_rank_gets_the_same_arguments_or_its_own() -> None:
    with LocalWorkerGroup(ClassWithInitArgs(Rank), 2) as group:
        assert group.execute_all_sync("name", "r") == ["r0", "r1"]
        assert group.add([10, 20], b=[1, 2]) == [11, 23]
        with pytest.raises(ProtocolError, match="an entry for each of 2 ranks"):
            group.add([10])


@pytest.mark.parametrize(("pads", "rows"), [(True, [2, 2]), (False, [2, 1])])
def test_a_batch_with_padding_gives_every_rank_as_many_rows(pads: bool, rows: list[int]) -> None:
    batch = DataProto.from_dict(tensors={"x": torch.arange(3)}, auto_padding=pads)
    assert batch.is_padding_enabled() is pads
    with LocalWorkerGroup(ClassWithInitArgs(Rank), 2) as group:
        assert group.count(batch) == rows
