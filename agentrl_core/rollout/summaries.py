"""Trajectories that stay where they were made: the driver gets summaries, and whoever needs the texts fetches them.

A summary is a result without texts and messages: tokens, log-probs, times, rewards and terminations are there.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

from agentrl_core.api import WorkerError
from agentrl_core.api.tree import Call, Node, Tree, TreePath
from agentrl_core.controller.runtime import Kept
from agentrl_core.rollout.loop_output import TreeRow
from agentrl_core.rollout.results import TrajectoryResult

logger = logging.getLogger(__name__)
DECIDED = ("row", "termination", "error", "reward", "baseline", "replaced", "further")
"""What the driver may change in a summary."""


def summaries(results: Sequence[TrajectoryResult]) -> list[TrajectoryResult]:
    """The summary of each result."""
    trees: dict[Tree, tuple[Tree, dict[Node, Node]]] = {}
    return [_summary(result, trees) for result in results]


def _summary(result: TrajectoryResult, trees: dict[Tree, tuple[Tree, dict[Node, Node]]]) -> TrajectoryResult:
    if result.tree not in trees:
        trees[result.tree] = _without_texts(result.tree)
    tree, nodes = trees[result.tree]
    rows: list[TreeRow] = []
    for row in result.outputs:
        rows.append(copy(row))
        path = row.tokens
        rows[-1].tokens = TreePath(tree, [nodes[node] for node in path.nodes], path.shared)
        rows[-1].messages, rows[-1].turn_texts, rows[-1].full_text = [], [], ""
    seen = result.reward_input
    if seen is not None:
        # Votes are taken over the last texts.
        seen = replace(seen, messages=(), model_text="", full_text="", extra_info={}, row={})
    return replace(result, tree=tree, outputs=rows, reward_input=seen, tool_schemas=[], agents=[])


def _without_texts(tree: Tree) -> tuple[Tree, dict[Node, Node]]:
    nodes: dict[Node, Node] = {}
    for node in (tree.early, *tree.nodes):
        calls = [Call(each.name, {}, "", each.failed, each.reward, each.source, each.start, each.seconds)
                 for each in node.calls]  # fmt: skip
        parent = None if node.parent is None else nodes[node.parent]
        nodes[node] = Node(
            parent, node.kind, node.ids, "", (), node.agent, node.log_probs, node.spans, node.finish_reason,
            node.settings, "", node.request, calls, node.rewards, node.images,
            routed_experts=node.routed_experts,
        )  # fmt: skip
    summary = copy(tree)
    summary.nodes, summary.early = [nodes[node] for node in tree.nodes], nodes[tree.early]
    return summary, nodes


class Handed(NamedTuple):
    """A result on its way to another process, which fetches what is kept elsewhere.

    Args:
        result: the whole one, where nothing is kept elsewhere.
        kept: a list of results, one of which it is.
        place: in that list.
        trajectory_id: its name.
        decided: :data:`DECIDED` of its summary.
    """

    result: TrajectoryResult | None
    kept: Kept | None = None
    place: int = 0
    trajectory_id: str = ""
    decided: tuple[Any, ...] = ()


def handed(results: Iterable[TrajectoryResult]) -> list[Handed]:
    """The results as another process gets them."""
    return [
        Handed(result) if result.kept is None else
        Handed(None, result.kept, result.place, result.trajectory_id, tuple(getattr(result, name) for name in DECIDED))
        for result in results
    ]  # fmt: skip


def whole(results: Iterable[Handed], lost: list[str] | None = None) -> Iterator[TrajectoryResult]:
    """The whole results, each list of them fetched when it is reached.

    Args:
        lost: gets the ids of trajectories whose process or node died since; None: they are an error.

    Raises:
        WorkerError: a trajectory is lost.
    """
    last: Kept | None = None
    found: Sequence[TrajectoryResult] | None = None
    for each in results:
        if each.result is not None:
            yield each.result
            continue
        assert each.kept is not None
        if each.kept is not last:
            last, found = each.kept, None
            try:
                found = each.kept.get()
            except WorkerError as error:
                if lost is None:
                    raise WorkerError(f"trajectory {each.trajectory_id}: {error}") from error
        if found is not None:
            yield replace(found[each.place], **dict(zip(DECIDED, each.decided, strict=True)))
        elif lost is not None:
            lost.append(each.trajectory_id)
