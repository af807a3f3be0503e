"""What the page draws of a trajectory's tree: its nodes, and where each row ends."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

Json = dict[str, Any]
SHOWN_CHARS = 600
"""Of a node's text."""


def drawn(line: Mapping[str, Any], rows: Sequence[Json]) -> list[Json]:
    """The nodes of the line that holds ``rows``, which get a ``leaf`` where they have none.

    A node is ``parent``, ``kind``, ``agent``, ``text`` (its beginning), ``tokens``, and of a turn its number,
    ``calls``, ``rewards``, ``turn_reward``, ``advantage`` and ``policy``, where a run has several.
    """
    if "nodes" not in line:
        return _of_rows(rows)
    by_agent = {agent["agent"]: agent.get("turn_rewards") or [] for agent in line["agents"]}
    policies = {agent["agent"]: str(agent.get("policy", "")) for agent in line["agents"]}
    counts: Counter[str] = Counter()
    nodes = []
    for node in line["nodes"]:
        shown = _node(node.get("parent"), str(node["kind"]), str(node.get("text", "")), len(node["ids"]))
        shown["agent"] = str(node.get("agent", ""))
        if node["kind"] == "turn":
            # A line without names counts all turns as those of one agent.
            agent = "" if list(by_agent) == [""] else shown["agent"]
            shown["policy"] = policies.get(agent, "")
            shown["turn"], counts[agent] = counts[agent], counts[agent] + 1
            shown["calls"], shown["rewards"] = node.get("calls") or [], node.get("rewards") or []
            shown["turn_reward"] = _at(by_agent.get(agent, []), shown["turn"])
            given = node.get("advantages") or [node.get("advantage")]
            shown["advantage"] = None if None in given else sum(given) / len(given)
            shown["seconds"] = (node.get("request") or {}).get("seconds")
        nodes.append(shown)
    return nodes


def _node(parent: int | None, kind: str, text: str, tokens: int) -> Json:
    cut = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]} … {len(text) - SHOWN_CHARS:,} more characters"
    return {"parent": parent, "kind": kind, "agent": "", "text": cut, "tokens": tokens}


def _at(values: Sequence[float], place: int) -> float | None:
    return values[place] if place < len(values) else None


def _of_rows(rows: Sequence[Json]) -> list[Json]:
    """The tree of rows of schema version 1: a row continues the longest earlier one that its prompt begins with."""
    nodes: list[Json] = []
    ends: list[tuple[list[int], int]] = []
    for row in rows:
        prompt, mask = list(row.get("prompt_ids") or []), row.get("response_mask") or []
        known = [(ids, node) for ids, node in ends if prompt[: len(ids)] == ids]
        so_far, parent = max(known, key=lambda end: len(end[0]), default=([], None))
        pieces = (
            [] if len(so_far) == len(prompt) else [(0, len(prompt) - len(so_far), row.get("prompt_text") or "", -1)]
        )
        turns = row.get("turn_ids") or mask
        runs = [(bit, turn, len(list(run))) for (bit, turn), run in groupby(zip(mask, turns, strict=False))]
        texts = [str(text) for _, text in row.get("segments") or []]
        texts += [""] * (len(runs) - len(texts))
        pieces += [(bit, length, text, turn) for (bit, turn, length), text in zip(runs, texts, strict=False)]
        ids, end = [*prompt, *(row.get("response_ids") or [])], len(so_far)
        for number, (bit, length, text, turn) in enumerate(pieces):
            kind = "turn" if bit else "prompt" if parent is None and number == 0 else "context"
            node = _node(parent, kind, text, length)
            if bit:
                node |= {"turn": turn, "calls": [], "rewards": _earned(row, turn), "advantage": row.get("advantage")}
                node["turn_reward"] = _at(row.get("turn_rewards") or [], turn) if row.get("turn_ids") else None
            nodes.append(node)
            parent, end = len(nodes) - 1, end + length
            ends.append((ids[:end], parent))
        row["leaf"] = parent
    return nodes


def _earned(row: Json, turn: int) -> list[Json]:
    tools = zip(row.get("tool_reward_turns") or [], row.get("tool_reward_names") or [], row.get("tool_rewards") or [],
                strict=False)  # fmt: skip
    scores = zip(row.get("turn_score_turns") or [], row.get("turn_scores") or [], strict=False)
    return [{"name": name, "value": value} for at, name, value in tools if at == turn] + [
        {"name": "score", "value": value} for at, value in scores if at == turn
    ]
