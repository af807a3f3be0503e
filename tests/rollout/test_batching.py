"""The padded batch, against a plain row-by-row implementation."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl_core.algorithms.outcome import advantage_input
from agentrl_core.api import AgentLoopOutput, RewardResult, Termination
from agentrl_core.api.tree import Node, Tree, paths_of
from agentrl_core.protocol.ragged import Rows
from agentrl_core.rollout.batching import outcome_scores, to_data_proto
from agentrl_core.rollout.loop_output import TreeRow, adopt
from agentrl_core.rollout.results import TrajectoryResult

PAD = 99


def output(prompt: list[int], response: list[int], mask: list[int], log_probs: bool = True) -> AgentLoopOutput:
    values = [-float(token) * each for token, each in zip(response, mask, strict=True)]
    return AgentLoopOutput(prompt, response, mask, values if log_probs else None, Termination.COMPLETED, num_turns=2)


def result(*outputs: AgentLoopOutput, score: float | None = 1.0, uid: str = "u", **fields) -> TrajectoryResult:
    reward = None if score is None else RewardResult(score)
    fields = {"trajectory_id": "t", "termination": Termination.COMPLETED, "reward": reward, **fields}
    tree = Tree()
    rows = adopt("by hand", tree, list(outputs))
    return TrajectoryResult(row={"uid": uid, "data_source": "d"}, outputs=rows, tree=tree, **fields)


IDS = st.integers(0, 50)
ROWS = st.lists(
    st.tuples(st.lists(IDS, min_size=1, max_size=5), st.lists(st.tuples(IDS, st.integers(0, 1)), max_size=6)),
    min_size=1,
    max_size=6,
)


@given(rows=ROWS)
def test_padding_equals_a_row_by_row_implementation(rows) -> None:
    outputs = [output(p, [token for token, _ in r], [mask for _, mask in r]) for p, r in rows]
    batch = to_data_proto([result(each) for each in outputs], PAD, {})
    width_p = max(len(each.prompt_ids) for each in outputs)
    width_r = max(len(each.response_ids) for each in outputs)
    assert batch.batch["prompts"].shape == (len(rows), width_p)
    for index, each in enumerate(outputs):
        left, right = width_p - len(each.prompt_ids), width_r - len(each.response_ids)
        row = batch[index].batch
        ids = [PAD] * left + each.prompt_ids + each.response_ids + [PAD] * right
        attention = [0] * left + [1] * (len(ids) - left - right) + [0] * right
        assert row["input_ids"].tolist() == ids
        assert row["prompts"].tolist() + row["responses"].tolist() == ids
        assert row["attention_mask"].tolist() == attention
        assert row["response_mask"].tolist() == [bool(m) for m in each.response_mask] + [False] * right
        assert row["rollout_log_probs"].tolist() == (each.response_logprobs or []) + [0.0] * right
        last = len(each.prompt_ids) + len(each.response_ids) - 1
        positions = [0] * left + list(range(last + 1)) + [last] * right
        assert row["position_ids"].tolist() == positions
        ones = [at for at, m in enumerate(each.response_mask) if m]
        scores = [0.0] * width_r
        if ones:
            scores[ones[-1]] = 1.0
        assert row["rm_scores"].tolist() == scores


def test_dtypes_and_object_columns() -> None:
    results = [result(output([1], [2, 3], [1, 0]), uid="a"), result(output([1, 1], [2], [1]), uid="b")]
    batch = to_data_proto(results, PAD, {"step": 3})
    tensors = batch.batch
    for name in ("prompts", "responses", "input_ids", "position_ids", "turn_ids", "policy_versions"):
        assert tensors[name].dtype == torch.int32, name
    assert tensors["attention_mask"].dtype == torch.int8
    assert tensors["response_mask"].dtype == torch.bool
    assert tensors["rollout_log_probs"].dtype == tensors["rm_scores"].dtype == torch.float32
    columns = batch.non_tensor_batch
    assert columns["uid"].tolist() == ["a", "b"] and columns["num_turns"].tolist() == [2, 2]
    assert columns["termination"].tolist() == ["completed"] * 2
    assert batch.meta_info == {"step": 3}


def test_reward_is_on_the_last_sampled_token_not_on_a_trailing_tool_token() -> None:
    batch = to_data_proto([result(output([1], [2, 3, 4, 5], [1, 1, 0, 0]), score=0.5)], PAD, {})
    assert batch.batch["rm_scores"].tolist() == [[0.0, 0.5, 0.0, 0.0]]


def test_empty_response_does_not_write_reward_at_minus_one() -> None:
    rows = [
        result(output([1], [], []), score=5.0),
        result(output([1], [2, 3], [1, 1]), score=1.0),
        result(output([1], [4, 4], [0, 0]), score=7.0),
        result(output([1], [2, 3], [1, 1]), score=None),
    ]
    batch = to_data_proto(rows, PAD, {})
    assert batch.batch["rm_scores"].tolist() == [[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]


def test_only_empty_responses() -> None:
    batch = to_data_proto([result(output([1, 2], [], []))] * 2, PAD, {})
    assert batch.batch["responses"].shape == (2, 0) and batch.batch["input_ids"].tolist() == [[1, 2], [1, 2]]


def test_an_empty_list_of_results_is_an_empty_batch() -> None:
    batch = to_data_proto([], PAD, {"step": 1})
    assert len(batch) == 0


def test_failed_and_skipped_trajectories_are_excluded_and_rows_of_one_trajectory_stay_together() -> None:
    branches = [output([1], [2], [1]), output([1, 2], [3], [1])]
    results = [
        result(output([9], [9], [1]), termination=Termination.ENGINE_ERROR, trajectory_id="failed"),
        result(*branches, score=2.0, trajectory_id="two rows"),
        result(output([8], [8], [1]), termination=Termination.SKIPPED, trajectory_id="skipped"),
        result(output([7], [7], [1]), termination=Termination.TOOL_ERROR, score=0.0, trajectory_id="tool error"),
    ]
    batch = to_data_proto(results, PAD, {})
    assert batch.non_tensor_batch["trajectory_id"].tolist() == ["two rows", "two rows", "tool error"]
    assert batch.batch["rm_scores"].flatten().tolist() == [2.0, 2.0, 0.0]


def test_rows_without_log_probs_leave_the_column_out() -> None:
    """Rather than filling it with numbers that look like log-probs."""
    rows = [result(output([1], [2], [1])), result(output([1], [2], [1], log_probs=False))]
    assert "rollout_log_probs" not in to_data_proto(rows, PAD, {}).batch.keys()


def test_a_score_of_zero_and_a_negative_score_are_written() -> None:
    mask, rows = np.array([True, True, False, False]), Rows.of(np.array([0, 1, 2, 0, 1]), 2)
    places, scores = outcome_scores(mask, rows, np.array([9.0, 0.0, -1.5, 9.0, 9.0]))
    assert places == [0, 1] and scores.tolist() == [0.0, -1.5]


def test_a_reward_stands_on_the_token_that_earned_it() -> None:
    """Two turns with a tool result between them; the second turn and the outcome share the last sampled token."""
    row = AgentLoopOutput([1], [5, 6, 7, 8, 9, 7], [1, 1, 0, 1, 1, 0], None, Termination.COMPLETED,
                          turn_ids=[0, 0, -1, 1, 1, -1])  # fmt: skip
    reward = RewardResult(1.75, turn_rewards=[0.5, 0.25], token_rewards=[0.0, 0.0, 2.0, -2.0], components={"a": 1.0})
    batch = to_data_proto([result(row, reward=reward)], 0, {})
    # What is left for the outcome: 1.75 - 0.75 - 0.
    assert batch.batch["rm_scores"].tolist() == [[0.0, 0.5, 0.0, 2.0, 1.0 + 0.25 - 2.0, 0.0]]
    assert batch.batch["outcomes"].tolist() == [1.0] and batch.batch["scores"].tolist() == [1.75]
    assert batch.batch["turn_rewards"].tolist() == [[0.5, 0.25]]
    seen = advantage_input(batch)
    assert seen.data_sources is not None and seen.data_sources.shape == (1,)
    assert seen.components["a"].tolist() == [1.0] and seen.turn_ids.tolist() == [[0, 0, -1, 1, 1, -1]]


def test_what_a_row_earned_that_is_not_trained_adds_to_the_outcome() -> None:
    """Of a turn and of tokens alike: the rewards of the batch add up to what the trajectory earned, in every row."""
    first = AgentLoopOutput([1], [5, 6], [1, 1], None, Termination.COMPLETED, turn_ids=[0, 0], trained=False)
    second = AgentLoopOutput([1], [7, 8], [1, 1], None, Termination.COMPLETED, turn_ids=[1, 1])
    for rewards in ({"turn_rewards": [0.5, 0.25]}, {"token_rewards": [0.25, 0.25, 0.0, 0.25]}):
        batch = to_data_proto([result(first, second, reward=RewardResult(2.0, **rewards))], 0, {})
        assert batch.batch["rm_scores"].tolist() == [[0.0, 1.75 + 0.25]]
        assert batch.batch["outcomes"].tolist() == [1.75] and batch.batch["scores"].tolist() == [2.0]


def test_each_row_of_a_trajectory_has_the_turns_that_it_sampled() -> None:
    prompt, rewritten = Node(None, "prompt", [1]), Node(None, "prompt", [1, 5, 6])
    first, lost, third = Node(prompt, "turn", [5, 6]), Node(prompt, "turn", [9]), Node(rewritten, "turn", [7])
    last = Node(third, "context", [8])
    tree = Tree.of(prompt, first, lost, rewritten, third, last)
    reward = RewardResult(1.0, turn_rewards=[0.25, 0.125, 0.5], token_rewards=[0.0, 1.0, -1.0])
    rows = [TreeRow(path) for path in paths_of(tree, [first, last])]
    batch = to_data_proto([TrajectoryResult({"uid": "u"}, "t", Termination.COMPLETED, [*rows], reward)], 0, {})
    # Turn 1 is in no row: its reward adds to the outcome, 1.0 - 0.25 - 0.5.
    assert batch.batch["rm_scores"].tolist() == [[0.0, 0.25 + 1.0 + 0.25], [0.5 - 1.0 + 0.25, 0.0]]
    assert batch.batch["turn_rewards"].tolist() == [[0.25, 0.0, 0.5]] * 2
