"""What a worker returns for one trajectory: everything that happened, tokens unpadded."""

from dataclasses import dataclass, field
from typing import Any

from agentrl_core.api import AgentLoopOutput, RewardResult, RewardTrajectory, Termination


@dataclass
class TrajectoryResult:
    """One trajectory, finished or failed.

    Args:
        row: the dataset row, with ``uid``, ``prompt_index`` and ``sample_index``.
        trajectory_id: unique within the run.
        termination: of the last attempt.
        outputs: its rows; empty if it failed before there was one.
        reward: None where there was nothing to score, or scoring failed.
        reward_input: what the reward manager saw, for managers that look at whole groups.
        error: why the last attempt failed; the traceback where there is one.
        attempts: how often it was started, or scored again.
        timings: seconds by kind: generate, tools, interaction, reward, total.
        spans: when each of them was: kind, start as Unix time, seconds; in the order of their ends.
        turn_tokens: of the prompt, and sampled, in the order of the ``generate`` spans.
        tool_spans: start as Unix time and seconds of each of ``tool_calls``.
        metrics: counters of the session.
        tool_calls: ``name``, ``arguments``, ``response`` and ``failed`` of each call that was run.
        tool_rewards, tool_reward_names, turn_scores: what tools and the interaction returned, in order.
        tool_reward_turns, turn_score_turns: the policy's turn before each of them, from 0.
        tool_schemas: of the tools that the policy was shown.
        baseline: score of a greedy answer to the same prompt, where the advantage estimator needs it.
        replaced: another prompt is trained in its place, see ``rollout.resample_rounds``.
        further: its prompt was added by these rounds; the sampler did not choose it for this step.
    """

    row: dict[str, Any]
    trajectory_id: str
    termination: Termination
    outputs: list[AgentLoopOutput] = field(default_factory=list)
    reward: RewardResult | None = None
    reward_input: RewardTrajectory | None = None
    error: str | None = None
    attempts: int = 1
    timings: dict[str, float] = field(default_factory=dict)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    turn_tokens: list[tuple[int, int]] = field(default_factory=list)
    tool_spans: list[tuple[float, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)
    tool_reward_names: list[str] = field(default_factory=list)
    tool_reward_turns: list[int] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    turn_score_turns: list[int] = field(default_factory=list)
    tool_schemas: list[dict[str, Any]] = field(default_factory=list)
    baseline: float | None = None
    replaced: bool = False
    further: bool = False

    def count(self, name: str, value: float = 1.0) -> None:
        """Add to a counter of ``metrics``."""
        self.metrics[name] = self.metrics.get(name, 0.0) + value

    @property
    def trained(self) -> bool:
        """The update uses it."""
        return self.termination.trained and not self.replaced

    @property
    def failed(self) -> bool:
        """Infrastructure failed, and the retries did too."""
        return self.termination.retried

    @property
    def sampled_tokens(self) -> int:
        return _sampled_tokens(self.outputs)


def reward_trajectory(
    row: dict[str, Any], outputs: list[AgentLoopOutput], termination: Termination
) -> RewardTrajectory:
    """The view of a trajectory that rewards get; the last output is the end of the conversation."""
    last = outputs[-1]
    texts = last.turn_texts or [""]
    reward_model = row.get("reward_model") or {}
    named = {"raw_prompt", "reward_model", "data_source", "extra_info", "uid"}
    return RewardTrajectory(
        messages=last.messages,
        model_text="\n".join(texts),
        last_text=texts[-1],
        full_text=last.full_text,
        ground_truth=reward_model.get("ground_truth"),
        data_source=row.get("data_source", ""),
        extra_info=row.get("extra_info") or {},
        tool_rewards=last.tool_rewards,
        tool_reward_names=last.tool_reward_names,
        tool_reward_turns=last.tool_reward_turns,
        turn_scores=last.turn_scores,
        turn_score_turns=last.turn_score_turns,
        num_turns=last.num_turns,
        sampled_tokens=_sampled_tokens(outputs),
        termination=termination.value,
        row={key: value for key, value in row.items() if key not in named},
        token_rows=[(output.prompt_ids, output.response_ids, output.response_mask) for output in outputs],
    )


def _sampled_tokens(outputs: list[AgentLoopOutput]) -> int:
    return sum(sum(output.response_mask) for output in outputs)
