"""Calls of several threads to the same ranks."""

import threading
from types import SimpleNamespace
from typing import Any

from agentrl_core.controller.ray_group import Processes, RayGroup


class Rank:
    """Notes the calls that it gets, and lets another thread begin a call in the middle of the first one."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.meanwhile: threading.Thread | None = None
        self.call = SimpleNamespace(remote=self._called)

    def _called(self, role: str, method: str) -> None:
        self.methods.append(method)
        if (other := self.meanwhile) is not None:
            self.meanwhile = None
            other.start()
            # It has returned, or waits for this call.
            other.join(0.2)


def test_all_ranks_get_calls_in_the_same_order_whichever_thread_makes_them() -> None:
    """A pass that is computed ahead runs beside the weights for a replica that comes back."""
    ranks: list[Any] = [Rank(), Rank(), Rank()]
    processes = Processes(ranks)
    actor, critic = (RayGroup(object, role, processes, {role: object}) for role in ("actor", "critic"))
    calls: list[Any] = [((), {})] * 3
    weights = threading.Thread(target=actor._submit, args=("send_weights", calls))
    ranks[0].meanwhile = weights
    critic._submit("compute_values", calls)
    weights.join()
    assert [rank.methods for rank in ranks] == [["compute_values", "send_weights"]] * 3
