"""What a worker returns for one trajectory: its tree, its rows and its reward."""

from dataclasses import dataclass, field, replace
from typing import Any

from agentrl_core.api import RewardResult, RewardTrajectory, Termination
from agentrl_core.api.agent_loop import Status
from agentrl_core.api.tree import Call, Earned, Node, Source, Span, Tree
from agentrl_core.controller.runtime import Kept
from agentrl_core.rollout.loop_output import TreeRow

AGENT = "@"
"""Stands before the name of an agent in ``trajectory_id`` and ``uid``."""


@dataclass
class TrajectoryResult:
    """One trajectory, finished or failed; where several agents act, the part of one of them.

    Args:
        row: the dataset row, with ``uid``, ``prompt_index`` and ``sample_index``.
        trajectory_id: unique within the run.
        termination: of the last attempt.
        outputs: its rows; empty if it failed before there was one.
        reward: None where there was nothing to score, or scoring failed.
        reward_input: what the reward manager saw; after :meth:`pack` without :attr:`token_rows`.
        error: why the last attempt failed; the traceback where there is one.
        attempts: how often it was started, or scored again.
        tree: what happened in the last attempt; the parts of several agents share it, as they share all that follows.
        timings: seconds by kind: generate, tools, interaction, reward, total.
        waits: when those of them were that no node has.
        metrics: counters of the session.
        tool_schemas: of the tools that the policy was shown.
        baseline: score of a greedy answer to the same prompt, where the advantage estimator needs it.
        replaced: another prompt is trained in its place, see ``rollout.resample_rounds``. Use :attr:`status`.
        further: its prompt was added by these rounds; the sampler did not choose it for this step.
        agent: whose part it is; None: the whole trajectory.
        policy: that played the agent, where a run has several; empty too where it failed before that was known.
        other_agent: another result is of the same trajectory, and stands for it where trajectories are counted.
        agents: see :func:`by_agent`; empty where only one agent acts.
        kept: where the whole result is, in a list, if this is its summary: see :mod:`agentrl_core.rollout.summaries`.
        place: in that list.
    """

    row: dict[str, Any]
    trajectory_id: str
    termination: Termination
    outputs: list[TreeRow] = field(default_factory=list)
    reward: RewardResult | None = None
    reward_input: RewardTrajectory | None = None
    error: str | None = None
    attempts: int = 1
    tree: Tree = field(default_factory=Tree)
    timings: dict[str, float] = field(default_factory=dict)
    waits: list[Span] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    tool_schemas: list[dict[str, Any]] = field(default_factory=list)
    baseline: float | None = None
    replaced: bool = False
    further: bool = False
    agent: str | None = None
    policy: str = ""
    other_agent: bool = False
    agents: list["TrajectoryResult"] = field(default_factory=list)
    kept: Kept | None = None
    place: int = 0

    def pack(self) -> None:
        """Keep each token once, in the arrays of the tree: many finished trajectories wait, and leave the process."""
        self.tree.pack()
        for part in (self, *self.agents):
            for row in part.outputs:
                row.forget()
            if part.reward_input is not None:
                part.reward_input = replace(part.reward_input, token_rows=())

    @property
    def token_rows(self) -> list[tuple[list[int], list[int], list[int]]]:
        """``RewardTrajectory.token_rows``."""
        return [
            (path.prompt_ids, path.response_ids, path.response_mask) for path in (row.tokens for row in self.outputs)
        ]

    def count(self, name: str, value: float = 1.0) -> None:
        """Add to a counter of ``metrics``."""
        self.metrics[name] = self.metrics.get(name, 0.0) + value

    @property
    def status(self) -> Status:
        """What becomes of it."""
        status = self.termination.status
        if status is not Status.TRAINED:
            return status
        if self.outputs and not any([row.trained for row in self.outputs]):
            return Status.EXCLUDED
        return Status.REPLACED if self.replaced else status

    @property
    def reason(self) -> str:
        """Why it has its status."""
        if self.termination.status is Status.TRAINED and self.status is not Status.TRAINED:
            return "no sample of its prompt had another reward" if self.replaced else "its agent is not trained"
        return f"it ended with {self.termination.value}"

    @property
    def prompt(self) -> str:
        """The uid of its prompt; ``uid`` of the row names the agent too."""
        return str(self.row["uid"]).partition(AGENT)[0]

    @property
    def turns(self) -> list[Node]:
        """The policy's turns, by number."""
        return self.tree.turns(self.agent)

    @property
    def calls(self) -> list[Call]:
        """All calls that were run, turn by turn."""
        return [call for node in (*self.turns, self.tree.early) for call in node.calls]

    def earned(self, *sources: Source) -> list[tuple[int, Earned]]:
        """What turns earned from these sources, with the number of each turn."""
        return [
            (number, each)
            for number, node in enumerate(self.turns or [self.tree.early])
            if node.calls or node.rewards
            for each in node.earned
            if each.source in sources
        ]

    @property
    def sampled_tokens(self) -> int:
        """Tokens that its rows train."""
        return sum([row.tokens.sampled_tokens for row in self.outputs])

    @property
    def path_lengths(self) -> list[int]:
        """Tokens after the first prompt of each of its paths. Each has a budget: branches and compacted parts are
        separate paths. Where a rewritten history splits a path into rows, they count as one path."""
        leaves = [row.tokens.leaf for row in self.outputs]
        rewritten = {node.parent for leaf in leaves for node in leaf.line if node.kind == "prompt"}
        return [leaf.used for leaf in leaves if leaf not in rewritten]


def by_agent(result: TrajectoryResult) -> list[TrajectoryResult]:
    """One result for each agent of a trajectory, or the result itself where its rows name none.

    Each has its agent's rows, and its own ``uid`` and ``trajectory_id``: it is compared with the same agent in the
    other samples of its prompt.
    """
    agents = dict.fromkeys(output.agent for output in result.outputs)
    if not any(agents):
        return [result]
    return [
        replace(
            result,
            row={**result.row, "uid": result.row["uid"] + (f"{AGENT}{agent}" if agent else "")},
            trajectory_id=result.trajectory_id + (f"{AGENT}{agent}" if agent else ""),
            outputs=[output for output in result.outputs if output.agent == agent],
            agent=agent,
            other_agent=number > 0,
        )
        for number, agent in enumerate(agents)
    ]


def reward_trajectory(result: TrajectoryResult) -> RewardTrajectory:
    """The view of a trajectory that rewards get; the last output is the end of the conversation."""
    row, last = result.row, result.outputs[-1]
    texts = last.turn_texts or [""]
    reward_model = row.get("reward_model") or {}
    named = {"raw_prompt", "reward_model", "data_source", "extra_info", "uid"}
    tools, names, scores = [*last.tool_rewards], [*last.tool_reward_names], [*last.turn_scores]
    tool_turns: list[int] = []
    score_turns: list[int] = []
    for turn, reward in result.earned("tool", "interaction"):
        # What a loop collected itself stands in place of what the session did.
        if reward.source == "tool" and not last.tool_rewards:
            tools.append(reward.value)
            names.append(reward.name)
            tool_turns.append(turn)
        elif reward.source == "interaction" and not last.turn_scores:
            scores.append(reward.value)
            score_turns.append(turn)
    return RewardTrajectory(
        messages=last.messages,
        model_text="\n".join(texts),
        last_text=texts[-1],
        full_text=last.full_text,
        ground_truth=reward_model.get("ground_truth"),
        data_source=row.get("data_source", ""),
        extra_info=row.get("extra_info") or {},
        tool_rewards=tools,
        tool_reward_names=names,
        tool_reward_turns=tool_turns,
        turn_scores=scores,
        turn_score_turns=score_turns,
        num_turns=last.num_turns,
        sampled_tokens=result.sampled_tokens,
        termination=result.termination.value,
        agent=last.agent,
        row={key: value for key, value in row.items() if key not in named},
        token_rows=result.token_rows,
    )
