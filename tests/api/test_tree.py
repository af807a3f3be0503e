"""What is read off a tree; a tree whose trajectory has ended: packed, and sent to another process."""

import pickle
from array import array
from copy import deepcopy
from typing import Any

import pytest
from ray import cloudpickle

from agentrl_core.api import PolicySpan
from agentrl_core.api.record_format import nodes_of
from agentrl_core.api.tree import Call, Earned, Node, Request, Tree, TreePath, packed_ids, paths_of


def grown(turns: int = 3) -> Tree:
    """A prompt, and turns with answers; the last turn has a twin."""
    nodes = [Node(None, "prompt", [1, 2, 3], "who?", ({"role": "user", "content": "who?"},))]
    for number in range(turns):
        ids = [40_000 + number, number]
        nodes.append(
            Node(
                nodes[-1], "turn", ids, f"turn {number}|", ({"role": "assistant", "content": "turn"},), "planner",
                [-0.5, -float(number)], [PolicySpan(3, 0, 1), PolicySpan(4, 1, 2)], "stop", {"temperature": 1.0}, "|",
                Request(1, 0.25, 1e9, 2.0), [Call("look", {"x": [number]}, "seen", True, 0.5, "tool", 1e9, 1.0)],
                [Earned("judge", 0.25, "interaction")],
            )
        )  # fmt: skip
        nodes.append(Node(nodes[-1], "context", [7] * number, "answer"))
    twin = Node(nodes[-3].parent, "turn", [9], "twin", log_probs=None)
    return Tree.of(*nodes, twin)


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
@pytest.mark.parametrize("packs", [True, False])
def test_a_tree_arrives_as_it_was(pickler: Any, packs: bool) -> None:
    tree = grown()
    tree.tool_calls, tree.early.calls = 5, [Call("early", {})]
    if packs:
        tree.pack()
    # Something outside of the tree, such as a tool call of a loop, may hold a node.
    paths, held = list(paths_of(tree, [tree.nodes[-2], tree.nodes[-1]])), tree.nodes[2]
    other, others, found = pickler.loads(pickler.dumps((tree, paths, held)))
    assert nodes_of(other, {}) == nodes_of(tree, {}) == nodes_of(grown(), {})
    assert (other.tool_calls, other.early.calls[0].name) == (5, "early")
    for path, its in zip(paths, others, strict=True):
        assert its.tree is other and all(node in other.nodes for node in its.nodes)
        for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "policy_versions", "turn_ids"):
            assert getattr(its, name) == getattr(path, name), name
    assert found is other.nodes[2] and other.nodes[1].request == tree.nodes[1].request


def test_what_a_packed_tree_says_is_what_it_said() -> None:
    tree, packed = grown(), grown()
    packed.pack()
    assert all(isinstance(node.ids, array) for node in packed.nodes)
    for leaf in range(len(tree.nodes)):
        path, its = (TreePath(each, each.nodes[leaf].path) for each in (tree, packed))
        for name in ("prompt_ids", "response_ids", "response_logprobs", "policy_versions", "sampled_tokens"):
            assert getattr(path, name) == getattr(its, name)
        assert type(its.response_ids) is list
        assert (
            packed_ids(its.nodes) == packed_ids(path.nodes) == array("i", path.prompt_ids + path.response_ids).tobytes()
        )


def test_packing_rounds_nothing_and_keeps_what_fits_into_no_array() -> None:
    nodes = [
        Node(None, "turn", [1], log_probs=[0.1]), Node(None, "turn", [1], log_probs=[0.5]),
        Node(None, "prompt", [2**40]), Node(None, "prompt", ["no id"]),
    ]  # fmt: skip
    Tree.of(*nodes).pack()
    assert [list(node.log_probs or ()) for node in nodes[:2]] == [[0.1], [0.5]]
    assert [node.log_probs.typecode for node in nodes[:2]] == ["d", "f"]
    assert [node.ids for node in nodes[2:]] == [[2**40], ["no id"]]


def test_a_packed_tree_travels_in_a_few_bytes_for_each_token_however_deep_it_is() -> None:
    tree = grown(turns=3000)
    tree.pack()
    assert nodes_of(cloudpickle.loads(cloudpickle.dumps(tree)), {}) == nodes_of(tree, {})
    long = Tree.of(Node(None, "turn", list(range(100_000)), log_probs=[-0.5] * 100_000))
    long.pack()
    assert len(cloudpickle.dumps(long)) < 8 * 100_000 + 2_000


def node(parent: Node | None, kind: Any, *contents: str) -> Node:
    role = "assistant" if kind == "turn" else "user"
    return Node(parent, kind, [1], messages=tuple({"role": role, "content": text} for text in contents))


@pytest.mark.parametrize("change", [lambda messages: messages, list, deepcopy])
@pytest.mark.parametrize("branch", [0, 1])
def test_the_turn_of_a_conversation_is_found_in_its_branch_also_by_a_copy(change, branch) -> None:
    start = node(None, "prompt", "q")
    first = node(start, "turn", "hm")
    users = [node(first, "context", text) for text in ("left?", "right?")]
    ends = [node(user, "turn", "yes") for user in users]
    tree = Tree.of(start, first, *users, *ends)
    assert tree.turn_of(change(ends[branch].conversation)) is ends[branch]
    assert tree.turn_of(change(first.conversation)) is first


def test_a_conversation_that_the_loop_wrote_belongs_to_the_newest_turn() -> None:
    start = node(None, "prompt", "q")
    turn = node(start, "turn", "hm")
    tree = Tree.of(start, turn)
    assert tree.turn_of([{"role": "assistant", "content": "else"}]) is turn
    assert tree.turn_of([]) is turn
    assert Tree().turn_of([]) is not turn
