"""What a worker returns for one trajectory: everything that happened, tokens unpadded."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl_core.api import AgentLoopOutput, RewardResult, RewardTrajectory, Termination

AGENT = "@"
"""Stands before the name of an agent in ``trajectory_id`` and ``uid``."""


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
        served: in the same order, the number of the replica that answered, -1 where none did, and the seconds that the
            request waited there.
        tool_spans: start as Unix time and seconds of each of ``tool_calls``.
        metrics: counters of the session.
        tool_calls: ``name``, ``arguments``, ``response`` and ``failed`` of each call that was run.
        tool_call_turns: the policy's turn before each of ``tool_calls``, from 0.
        tool_rewards, tool_reward_names, turn_scores: what tools and the interaction returned, in order.
        tool_reward_turns, turn_score_turns: the policy's turn before each of them, from 0.
        tool_schemas: of the tools that the policy was shown.
        baseline: score of a greedy answer to the same prompt, where the advantage estimator needs it.
        replaced: another prompt is trained in its place, see ``rollout.resample_rounds``.
        further: its prompt was added by these rounds; the sampler did not choose it for this step.
        other_agent: another result is of the same trajectory, and has the timings and counters of both.
        agents: see :func:`by_agent`; empty where only one agent acts.
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
    served: list[tuple[int, float]] = field(default_factory=list)
    tool_spans: list[tuple[float, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    tool_call_turns: list[int] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)
    tool_reward_names: list[str] = field(default_factory=list)
    tool_reward_turns: list[int] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    turn_score_turns: list[int] = field(default_factory=list)
    tool_schemas: list[dict[str, Any]] = field(default_factory=list)
    baseline: float | None = None
    replaced: bool = False
    further: bool = False
    other_agent: bool = False
    agents: list["TrajectoryResult"] = field(default_factory=list)

    def count(self, name: str, value: float = 1.0) -> None:
        """Add to a counter of ``metrics``."""
        self.metrics[name] = self.metrics.get(name, 0.0) + value

    @property
    def counts(self) -> bool:
        """It takes part in the statistics: it ended as a trained one does, and an agent that is trained acted."""
        return self.termination.trained and (not self.outputs or any(output.trained for output in self.outputs))

    @property
    def trained(self) -> bool:
        """The update uses it."""
        return self.counts and not self.replaced

    @property
    def prompt(self) -> str:
        """The uid of its prompt; ``uid`` of the row names the agent too."""
        return str(self.row["uid"]).partition(AGENT)[0]

    @property
    def failed(self) -> bool:
        """Infrastructure failed, and the retries did too."""
        return self.termination.retried

    @property
    def sampled_tokens(self) -> int:
        return _sampled_tokens(self.outputs)


def by_agent(result: TrajectoryResult, turn_agents: Mapping[int, str]) -> list[TrajectoryResult]:
    """One result for each agent of a trajectory, or the result itself where its rows name none.

    Each has its agent's rows and what that agent earned, with the agent's turns numbered from 0, and a ``uid`` and a
    ``trajectory_id`` of its own: it is compared with the same agent in the other samples of its prompt.

    Args:
        result: with all rows, their ``turn_ids`` set.
        turn_agents: who had each turn that was answered.
    """
    agents = dict.fromkeys(output.agent for output in result.outputs)
    if not any(agents):
        return [result]
    owners = {**turn_agents, **{turn: row.agent for row in result.outputs for turn in row.turn_ids if turn >= 0}}
    return [
        _of_agent(result, agent, sorted(turn for turn, owner in owners.items() if owner == agent), other=number > 0)
        for number, agent in enumerate(agents)
    ]


def _of_agent(whole: TrajectoryResult, agent: str, turns: list[int], *, other: bool) -> TrajectoryResult:
    place = {turn: index for index, turn in enumerate(turns)}
    names, at, rewards = whole.tool_reward_names, whole.tool_reward_turns, whole.tool_rewards
    calls = [call for call in zip(names, at, rewards, strict=True) if call[1] in place]
    scores = [each for each in zip(whole.turn_score_turns, whole.turn_scores, strict=True) if each[0] in place]
    run = [n for n, turn in enumerate(whole.tool_call_turns) if turn in place]
    suffix = f"{AGENT}{agent}" if agent else ""
    rows = [output for output in whole.outputs if output.agent == agent]
    for row in rows:
        row.turn_ids = [place.get(turn, -1) for turn in row.turn_ids]
    own = replace(
        whole,
        row={**whole.row, "uid": whole.row["uid"] + suffix},
        trajectory_id=whole.trajectory_id + suffix,
        outputs=rows,
        tool_calls=[whole.tool_calls[n] for n in run],
        tool_call_turns=[place[whole.tool_call_turns[n]] for n in run],
        tool_spans=[whole.tool_spans[n] for n in run],
        tool_reward_names=[name for name, _, _ in calls],
        tool_reward_turns=[place[turn] for _, turn, _ in calls],
        tool_rewards=[reward for _, _, reward in calls],
        turn_score_turns=[place[turn] for turn, _ in scores],
        turn_scores=[score for _, score in scores],
        other_agent=other,
    )
    if other:
        own.timings, own.metrics, own.spans, own.turn_tokens, own.served = {}, {}, [], [], []
    return own


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
        agent=last.agent,
        row={key: value for key, value in row.items() if key not in named},
        token_rows=[(output.prompt_ids, output.response_ids, output.response_mask) for output in outputs],
    )


def _sampled_tokens(outputs: list[AgentLoopOutput]) -> int:
    return sum(sum(output.response_mask) for output in outputs)
