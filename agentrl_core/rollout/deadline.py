"""The batch policy ``deadline``: groups are trained as they end, and none of them too late."""

from collections.abc import Sequence

from agentrl_core.api import BatchPolicy, BatchPolicyContext, NoConfig, PipelineState, PluginSpec


class Deadline(BatchPolicy):
    """Takes groups that have ended, those with the earliest deadline first, if the others can still be in time.

    A group that started at version v is due in batch v + ``max_staleness``. Slow groups do not hold up fast ones, and
    are not dropped: the batch that they are due in waits for them.
    """

    def __init__(self, config: NoConfig, context: BatchPolicyContext) -> None:
        pass

    def admit(self, state: PipelineState) -> int:
        """As many as allowed."""
        return state.allowed

    def select(self, state: PipelineState) -> Sequence[int] | None:
        """The earliest deadlines of those that have ended, if for every later deadline d at most so many others are due
        by d as the batches up to d have room for."""
        order = sorted(state.groups, key=lambda group: (group.version, group.position))
        chosen = [group.position for group in order if group.ended][: state.batch_size]
        if len(chosen) < state.batch_size:
            return None
        taken = set(chosen)
        others = [group for group in order if group.position not in taken]
        for number, group in enumerate(others, 1):
            batches_left = group.version + state.max_staleness - state.next_batch
            if number > batches_left * state.batch_size:
                return None
        return chosen


DEADLINE = PluginSpec(
    kind="batch_policy",
    name="deadline",
    api_version=1,
    summary="trains groups as they end, the earliest deadline first; slow ones are waited for, never dropped",
    factory="agentrl_core.rollout.deadline:Deadline",
)
