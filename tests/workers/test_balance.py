import random
from typing import Any

import torch

from agentrl_core.api.training_backend import DataShare
from agentrl_core.controller.decorator import registrations
from agentrl_core.protocol import DataProto
from agentrl_core.workers.actor import ActorWorker
from agentrl_core.workers.critic import CriticWorker
from agentrl_core.workers.model_worker import BALANCED
from agentrl_core.workers.reference import ReferenceWorker
from agentrl_core.workers.shares import Sharing


class Ranks:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def sharing(self) -> list[Sharing]:
        return [Sharing(DataShare(rank, self.world_size)) for rank in range(self.world_size)]


def tokens(call: Any) -> int:
    return int(call[0][0].batch["attention_mask"].sum())


def test_a_batch_sorted_by_length_gives_every_rank_as_many_tokens(make_batch: Any) -> None:
    rng = random.Random(1)
    lengths = sorted((rng.randint(1, 60) for _ in range(24)), reverse=True)
    rows = [([2, 3 + number % 3], [number] + [4] * (length - 1), [1] * length) for number, length in enumerate(lengths)]
    batch = make_batch(rows)
    batch.batch["number"] = torch.arange(24)
    plan = BALANCED.plan(Ranks(4), (batch,), {})
    of_ranks = [tokens(call) for call in plan.calls]
    assert max(of_ranks) - min(of_ranks) <= max(lengths) + 2
    consecutive = [int(part.batch["attention_mask"].sum()) for part in batch.chunk(4)]
    assert max(consecutive) > 2 * min(consecutive)
    result = plan.collect([DataProto.from_dict(tensors={"number": args[0].batch["number"]}) for args, _ in plan.calls])
    assert result.batch["number"].tolist() == list(range(24))


def test_fewer_rows_than_ranks_give_every_rank_one(make_batch: Any) -> None:
    batch = make_batch([([2], [3], [1]), ([2], [4], [1])])
    batch.batch["number"] = torch.arange(2)
    plan = BALANCED.plan(Ranks(4), (batch,), {})
    parts = [DataProto.from_dict(tensors={"number": args[0].batch["number"]}) for args, _ in plan.calls]
    assert [len(part) for part in parts] == [1] * 4
    assert plan.collect(parts).batch["number"].tolist() == [0, 1]


def test_all_passes_over_a_batch_are_balanced() -> None:
    for worker, method in ((ActorWorker, "compute_log_prob"), (CriticWorker, "compute_values"),
                           (ReferenceWorker, "compute_ref_log_prob")):  # fmt: skip
        assert registrations(worker)[method] is BALANCED
