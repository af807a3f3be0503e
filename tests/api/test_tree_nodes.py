"""What is read off a tree of nodes."""

from copy import deepcopy
from typing import Any

import pytest

from agentrl_core.api.tree import Node, Tree


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
