"""The lines of a run's rollout files, and the rows that they hold.

Since schema version 2 a line is a trajectory: ``nodes`` has its tree, each node once, and ``agents`` the rows and the
reward of each agent. In version 1 a line was a row. :func:`rows_of` reads both::

    for line in file:
        for row in rows_of(json.loads(line)):
            print(row["trajectory_id"], row["reward"], row["response_ids"])
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from agentrl_core.api.engine import PolicySpan
from agentrl_core.api.errors import DataError
from agentrl_core.api.tree import Call, Earned, Node, NodeKind, Request, Source, Span, Tree, TreePath, spans_of

SCHEMA_VERSION = 2
KINDS = get_args(NodeKind)
OF_TOKENS = (
    "prompt_ids", "prompt_text", "response_ids", "response_mask", "response_logprobs", "log_prob_settings",
    "policy_versions", "turn_ids", "segments",
)  # fmt: skip
_OF_CALL = ("name", "arguments", "response", "failed")
_OF_LINE = ("step", "split", "sample", "data_source", "ground_truth", "tool_schemas")
_OF_NODE = ("messages", "agent", "finish_reason", "settings", "stop", "images")


def nodes_of(tree: Tree, credit: Mapping[Node, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The nodes of a line.

    Args:
        credit: ``advantage`` or, where they differ, ``advantages`` of a turn's tokens, and ``old_log_probs``.
    """
    numbers = {node: number for number, node in enumerate(tree.nodes)}
    lines = []
    for node in tree.nodes:
        parent = None if node.parent is None else numbers[node.parent]
        content: dict[str, Any] = {"parent": parent, "kind": node.kind, "ids": list(node.ids), "text": node.text}
        content |= {name: value for name in _OF_NODE if (value := getattr(node, name))}
        if node.images:
            content["collapsed"] = list(node.collapsed)
        if node.kind == "turn":
            log_probs = None if node.log_probs is None else list(node.log_probs)
            content |= {"log_probs": log_probs, "spans": [[s.version, s.start, s.end] for s in node.spans]}
            content["request"] = None if node.request is None else asdict(node.request)
            content |= earned_of(node)
            content |= credit.get(node, {})
        lines.append(content)
    return lines


def earned_of(node: Node) -> dict[str, Any]:
    """The calls and the rewards of a turn."""
    return {"calls": [asdict(call) for call in node.calls], "rewards": [reward._asdict() for reward in node.rewards]}


def rows_of(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a line, each with the keys that a line of version 1 has; of version 2 also ``leaf`` and ``shared``.
    A trajectory that failed before it had a row has one without tokens.

    Raises:
        DataError: a schema version that this agentrl does not know, or a line that is damaged.
    """
    version = content.get("schema_version")
    if version == 1:
        return [dict(content)]
    if version != SCHEMA_VERSION:
        raise DataError(
            f"a rollout record of schema version {version!r}; this agentrl reads 1 and {SCHEMA_VERSION}. Read it with "
            "the agentrl that wrote it"
        )
    try:
        tree = _tree(content["nodes"], content.get("early") or {})
        return [row for number, agent in enumerate(content["agents"]) for row in _rows(content, tree, agent, number)]
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"a rollout record that is damaged: {type(error).__name__}: {error}") from error


def _tree(nodes: list[dict[str, Any]], early: Mapping[str, Any]) -> Tree:
    tree = Tree()
    tree.early.calls, tree.early.rewards = _earned(early)
    for number, each in enumerate(nodes):
        parent = each["parent"]
        if parent is not None and not 0 <= parent < number:
            raise ValueError(f"node {number} has the parent {parent}; a parent stands before its children")
        if each["kind"] not in KINDS:
            raise ValueError(f"node {number} is of the kind {each['kind']!r}; allowed are {', '.join(KINDS)}")
        spans = [PolicySpan(*span) for span in each.get("spans", ())]
        lengths = [span.end - span.start for span in spans]
        if lengths and (min(lengths) < 0 or sum(lengths) != len(each["ids"])):
            raise ValueError(f"the spans of node {number} do not cover its {len(each['ids'])} ids")
        request = each.get("request")
        tree.nodes.append(Node(
            None if parent is None else tree.nodes[parent], each["kind"], each["ids"], each["text"],
            each.get("messages", ()), each.get("agent", ""), each.get("log_probs"), spans, each.get("finish_reason"),
            each.get("settings"), each.get("stop", ""), None if request is None else Request(**request),
            *_earned(each), tuple(each.get("images", ())), each.get("collapsed", ()),
        ))  # fmt: skip
    return tree


def _earned(node: Mapping[str, Any]) -> tuple[list[Call], list[Earned]]:
    return [Call(**call) for call in node.get("calls", ())], [Earned(**each) for each in node.get("rewards", ())]


def _rows(line: Mapping[str, Any], tree: Tree, agent: Mapping[str, Any], number: int) -> Iterator[dict[str, Any]]:
    turns = tree.turns(agent["agent"] if len(line["agents"]) > 1 else agent["agent"] or None)
    turns = turns or [tree.early]
    known = {name: line[name] for name in _OF_LINE if name in line}
    known |= {"schema_version": 1, **_collected(turns, "tool", "interaction", "environment")}
    known["tool_calls"] = [{key: getattr(call, key) for key in _OF_CALL} for node in turns for call in node.calls]
    if number == 0:
        spans = spans_of(tree, [Span(*wait) for wait in line["waits"]])
        requests = [node.request if node else None for span, node in spans if span.kind == "generate"]
        known |= {"timings": line["timings"], "spans": [list(span) for span, _ in spans]}
        known["served"] = [[each.replica, each.wait] if each else [-1, 0.0] for each in requests]
    known |= {name: value for name, value in agent.items() if name not in ("rows", "reward_input")}
    rows = agent["rows"] or [{"prompt_ids": [], "response_ids": [], "response_mask": [], "response_logprobs": None}]
    for row in rows:
        found = known | row
        if "leaf" in row:
            path = TreePath(tree, tree.nodes[row["leaf"]].path, row["shared"])
            found = {name: getattr(path, name) for name in OF_TOKENS} | _credit(path, line["nodes"]) | found
            found["segments"] = [list(segment) for segment in path.segments]
            found.setdefault("messages", path.leaf.conversation)
        if row.get("tool_rewards"):
            found["tool_reward_turns"] = []
        if row.get("turn_scores"):
            found["turn_score_turns"] = []
        seen = agent.get("reward_input")
        if row is rows[-1] and seen is not None:
            # What an environment's calls earned is in its own result only.
            given = _collected(turns, "tool", "interaction") if seen.get("environment") is not None else {}
            found["reward_input"] = seen | given
        yield found


def _collected(turns: Sequence[Node], *sources: Source) -> dict[str, Any]:
    tools, scores = list[tuple[int, str, float]](), list[tuple[int, float]]()
    for number, node in enumerate(turns):
        calls = (call for call in node.calls if call.source in sources)
        tools += [(number, call.name, call.reward) for call in calls if call.reward is not None]
        rewards = [each for each in node.rewards if each.source in sources]
        tools += [(number, each.name, each.value) for each in rewards if each.source == "tool"]
        scores += [(number, each.value) for each in rewards if each.source != "tool"]
    return {
        "tool_reward_turns": [turn for turn, _, _ in tools],
        "tool_reward_names": [name for _, name, _ in tools],
        "tool_rewards": [value for _, _, value in tools],
        "turn_score_turns": [turn for turn, _ in scores],
        "turn_scores": [value for _, value in scores],
    }


def _credit(path: TreePath, nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``advantage``, ``advantages`` and ``old_log_probs`` of a row."""
    numbers = {node: number for number, node in enumerate(path.tree.nodes)}
    advantages, old, sampled = list[float](), list[float](), list[float]()
    credited = False
    for node in path.response:
        content, zeros = nodes[numbers[node]], [0.0] * len(node.ids)
        given = content.get("advantages") or [content.get("advantage", 0.0)] * len(node.ids)
        credited |= "advantage" in content or "advantages" in content
        sampled += given if node.kind == "turn" else []
        advantages += given if node.kind == "turn" else zeros
        old += content.get("old_log_probs") or zeros
    if not credited:
        return {"advantage": None}
    differ = any(value != sampled[0] for value in sampled)
    return {
        # None stands for NaN.
        "advantage": None if None in sampled else sum(sampled) / max(len(sampled), 1),
        "advantages": advantages if differ else [],
        "old_log_probs": old if any("old_log_probs" in nodes[numbers[node]] for node in path.response) else [],
    }
