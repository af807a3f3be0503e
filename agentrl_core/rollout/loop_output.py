"""The border to agent loops: what a loop returns becomes rows of its trajectory's tree, or an error that names it."""

from array import array
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields
from itertools import groupby
from typing import Any, Self

import numpy as np

from agentrl_core.api import (
    AgentLoopOutput,
    ConfigError,
    PluginError,
    PolicySpan,
    ProtocolError,
    Termination,
)
from agentrl_core.api.record_format import OF_TOKENS
from agentrl_core.api.tree import Node, Tree, TreePath, ids_of, paths_of
from agentrl_core.engine_kit.requests import all_known
from agentrl_core.hosting.tools import is_finite

COLUMNS = frozenset({
    "prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids", "rm_scores", "outcomes",
    "scores", "turn_ids", "turn_rewards", "policy_versions", "rollout_log_probs", "uid", "trajectory_id", "data_source",
    "num_turns", "termination", "reward_components", "baselines", "log_prob_settings", "images",
    "routed_experts",
})  # fmt: skip
"""What ``to_data_proto`` names itself; the extra fields of a row have other names."""

_OF_TOKENS = frozenset(OF_TOKENS)


class TreeRow(AgentLoopOutput):
    """A row of a tree: its tokens are read off the tree when they are used.

    Args:
        tokens: where they are.
    """

    def __new__(cls, tokens: TreePath | None = None, **given: Any) -> Any:
        # dataclasses.replace makes a copy with all fields, which then belong to the loop.
        return AgentLoopOutput(**given) if given else object.__new__(cls)

    def __init__(self, tokens: TreePath) -> None:
        # First: a pickle then has parents before their children.
        self.tokens = tokens
        super().__init__([], [], [], None, Termination.ABORTED)
        self.forget()

    def forget(self) -> None:
        """Read the tokens off the tree again."""
        own = self.__dict__
        for name in _OF_TOKENS.intersection(own):
            del own[name]

    @property
    def is_edited(self) -> bool:
        """Whether a loop has changed a list that it read."""
        read = _OF_TOKENS.intersection(self.__dict__)
        return bool(read) and not all([_is_same(self.__dict__[name], getattr(self.tokens, name)) for name in read])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_TOKENS}

    def __copy__(self) -> Self:
        copy: Self = super().__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Of the same tree: it is a row of the same trajectory.
        copy: Self = super().__new__(type(self))
        for name, value in self.__dict__.items():
            copy.__dict__[name] = value if name == "tokens" else deepcopy(value, memo)
        return copy


def _is_same(left: Any, right: Any) -> bool:
    """Whether two lists, which may be arrays, or None are the same."""
    return left is right or (left is not None and right is not None and list(left) == list(right))


class _OfTokens:
    """A field of :class:`TreeRow`; what was read or written stands in the object until :meth:`TreeRow.forget`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, row: TreeRow, owner: type[TreeRow]) -> Any:
        value = row.__dict__[self._name] = getattr(row.tokens, self._name)
        return value


for _name in _OF_TOKENS:
    setattr(TreeRow, _name, _OfTokens(_name))


def adopt(
    loop: str,
    tree: Tree,
    returned: Any,
    vocab_size: int | None = None,
    max_model_len: int | None = None,
    reserved: frozenset[int] = frozenset(),
) -> list[TreeRow]:
    """The rows of a tree that a loop returned, without those that train nothing. A row that the loop filled by hand
    becomes a separate path.

    Args:
        reserved: ids that stand for images.

    Raises:
        PluginError: the loop returned something else, or lists whose lengths differ.
        ProtocolError: a row of another trajectory, a row that is longer than the context, or an id that the model does
            not have; the trajectory fails.
        ConfigError: the loop did not tell the agents apart.
    """
    flat = returned if isinstance(returned, list) else [returned]
    outputs = [output for item in flat for output in (item if isinstance(item, list) else [item])]
    if not outputs or not all([isinstance(output, AgentLoopOutput) for output in outputs]):
        kinds = sorted({type(output).__name__ for output in outputs}) or ["an empty list"]
        raise PluginError(f"agent loop {loop!r} returned {', '.join(kinds)}; allowed are one AgentLoopOutput or a list")
    # A row that is returned twice is one row.
    outputs = list({id(output): output for output in outputs}.values())
    leaves = {output.tokens.leaf for output in outputs if isinstance(output, TreeRow)}
    paths: list[TreePath | None] = []
    for number, output in enumerate(outputs, 1):
        where = f"agent loop {loop!r}, row {number} of {len(outputs)}"
        if isinstance(output, TreeRow) and output.tokens.tree is not tree:
            raise ProtocolError(
                f"{where}: it belongs to another trajectory, {output.trajectory_id}. Return the rows that this run's "
                "own Trajectory.finish() gave, and keep none"
            )
        if isinstance(output, TreeRow) and not output.is_edited:
            # Its lists fit together, and within the context.
            paths.append(output.tokens)
            check_tokens(where, output.tokens, vocab_size)
        else:
            check_lists(where, output, max_model_len)
            check_tokens(where, output, vocab_size)
            path = None if isinstance(output, TreeRow) else _path_of(tree, output, leaves)
            if path is None and reserved.intersection([*output.prompt_ids, *output.response_ids]):
                raise ProtocolError(
                    f"{where}: it has tokens that stand for images, which a row that a loop fills by hand cannot have. "
                    "Return the rows of Trajectory.finish()"
                )
            paths.append(path)
        if wrong := {name: value for name, value in output.metrics.items() if not is_finite(value)}:
            raise PluginError(f"{where} has the metrics {wrong}; allowed are finite numbers")
        if taken := sorted(COLUMNS.intersection(output.extra_fields)):
            raise PluginError(f"{where}: extra_fields {', '.join(taken)}: the batch uses these names")
    before = tree.turns() if None in paths else []
    rows, ends, by_hand = list[TreeRow](), list[Node](), list[Node]()
    for output, found in zip(outputs, paths, strict=True):
        leaf = _grown(tree, output) if found is None else found.leaf
        by_hand += [node for node in leaf.path if node.sampled] if found is None else []
        row = output if isinstance(output, TreeRow) else TreeRow(TreePath(tree, ()))
        if row is not output:
            for item in fields(AgentLoopOutput):
                if item.name not in _OF_TOKENS:
                    setattr(row, item.name, getattr(output, item.name))
        rows.append(row)
        ends.append(leaf)
    for row, found, path in zip(rows, paths, paths_of(tree, ends), strict=True):
        # What one row shared with one that the loop then changed stays prompt: the loop may have masked it there.
        least = found.shared if found is not None and by_hand else 1
        row.tokens = path._replace(shared=max(path.shared, least))
        row.forget()
    _move_what_was_earned(tree, rows, before, by_hand)
    rows = [row for row in rows if row.tokens.sampled_tokens] or rows[-1:]
    _name_agents(loop, tree, rows)
    return rows


def _path_of(tree: Tree, output: AgentLoopOutput, taken: set[Node]) -> TreePath | None:
    """The path of a copy of a row, as ``dataclasses.replace`` makes it; None: a loop filled it by hand.

    Args:
        taken: where other rows end. Branches can have equal tokens: a copy is first of one that no row has yet.
    """
    whole, lengths, known = [*output.prompt_ids, *output.response_ids], tree.lengths, None
    names = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "log_prob_settings")
    for leaf in tree.nodes:
        if lengths[leaf] != len(whole) or whole[len(whole) - len(leaf.ids) :] != leaf.ids or (leaf in taken and known):
            continue
        path = leaf.path
        ends = [at for at, node in enumerate(path, 1) if lengths[node] == len(output.prompt_ids)]
        for found in (TreePath(tree, path, shared) for shared in ends):
            if all(_is_same(getattr(found, name), getattr(output, name)) for name in names):
                if leaf not in taken:
                    taken.add(leaf)
                    return found
                known = known or found
    return known


def _grown(tree: Tree, output: AgentLoopOutput) -> Node:
    """The last node of a path that says what the lists of a row say."""
    node = Node(None, "prompt", list(output.prompt_ids), output.prompt_text, tuple(output.messages))
    tree.nodes.append(node)
    turns = output.turn_ids or turns_of(output.response_mask)
    runs = [(bool(bit), len(list(run))) for (bit, _), run in groupby(zip(output.response_mask, turns, strict=True))]
    texts = [text for _, text in output.segments] if len(output.segments) == len(runs) else [""] * len(runs)
    settings: list[dict[str, Any] | None] = list(output.log_prob_settings)
    if len(settings) != 1 and len(settings) != sum(bit for bit, _ in runs):
        settings = [None]
    number = end = 0
    for (sampled, length), text in zip(runs, texts, strict=True):
        part = slice(end, end := end + length)
        ids = list(output.response_ids[part])
        node = Node(node, "turn" if sampled else "context", ids, text)
        tree.nodes.append(node)
        if sampled:
            node.log_probs = None if output.response_logprobs is None else list(output.response_logprobs[part])
            node.spans = _spans(output.policy_versions[part])
            node.settings = settings[min(number, len(settings) - 1)]
            number += 1
    return node


def turns_of(response_mask: Sequence[int]) -> list[int]:
    """``AgentLoopOutput.turn_ids`` of a row whose turns begin where the mask rises."""
    turn, before, turns = -1, 0, list[int]()
    for sampled in response_mask:
        turn += sampled > before
        turns.append(turn if sampled else -1)
        before = sampled
    return turns


def _spans(versions: Sequence[int]) -> list[PolicySpan]:
    spans, end = list[PolicySpan](), 0
    for version, run in groupby(versions):
        spans.append(PolicySpan(version, end, end := end + len(list(run))))
    return spans


def _move_what_was_earned(tree: Tree, rows: Sequence[TreeRow], before: Sequence[Node], by_hand: Sequence[Node]) -> None:
    """Give calls and rewards to the turns that are left: those before the first turn to the first one, those of turns
    that a loop replaced by its own lists, in order, to the turns of these lists."""
    moves = []
    if by_hand:
        kept = {node for row in rows for node in row.tokens.leaf.line}
        tree.nodes = [node for node in tree.nodes if node in kept]
        lost = [node for node in before if node not in kept]
        moves = [(node, by_hand[min(number, len(by_hand) - 1)]) for number, node in enumerate(lost)]
    if tree.early.calls or tree.early.rewards:
        moves += [(tree.early, turn) for turn in tree.turns()[:1]]
    for node, turn in moves:
        # What was before the first turn stands before what that earned.
        first, then = (node, turn) if node is tree.early else (turn, node)
        turn.calls, turn.rewards = first.calls + then.calls, first.rewards + then.rewards
        turn.request = turn.request or node.request
        node.calls, node.rewards = [], []


def _name_agents(loop: str, tree: Tree, rows: Sequence[TreeRow]) -> None:
    """Say whose each turn was: the agent of its row, or nobody's where the rows name none.

    Raises:
        ConfigError: the loop makes one conversation of several agents.
    """
    if any([row.agent for row in rows]):
        for row in rows:
            for node in row.tokens.response:
                node.agent = row.agent
        return
    agents = sorted({node.agent for node in tree.nodes if node.kind == "turn"})
    if len(agents) > 1:
        raise ConfigError(
            f"rollout.agent.loops: {loop!r} plays one agent, and the environment lets {', '.join(agents)} act; "
            "use the loop multi_agent"
        )
    if agents != [""]:
        for node in tree.nodes:
            node.agent = ""


def check_tokens(where: str, lists: AgentLoopOutput | TreePath, vocab_size: int | None) -> None:
    """Refuse token ids that the model does not have: an embedding would fail on them, for all rows of the step.

    Raises:
        ProtocolError: naming the id. The trajectory fails, no other one.
    """
    if vocab_size is None:
        return
    if isinstance(lists, TreePath):
        # The engine has refused prompts with such ids: left are its own, and what nobody sampled after.
        unseen = ids_of([node for node in lists.nodes if node.sampled or node is lists.leaf])
    else:
        unseen = [*lists.prompt_ids, *lists.response_ids]
    with suppress(TypeError):
        if all_known(unseen, vocab_size):
            return
    for name, ids in (("prompt_ids", lists.prompt_ids), ("response_ids", lists.response_ids)):
        for place, token in enumerate(ids):
            if not isinstance(token, (int, np.integer)) or not 0 <= token < vocab_size:
                raise ProtocolError(
                    f"{where}: {name}[{place}] is {token!r}; allowed are the token ids 0 to {vocab_size - 1} of the "
                    "model"
                )


def check_lists(where: str, output: AgentLoopOutput, max_model_len: int | None) -> None:
    """Refuse a row that a loop filled by hand, if its lists do not fit together or into the context.

    Raises:
        PluginError, ProtocolError: with the lengths.
    """
    names = ["response_ids", "response_mask"]
    names += ["response_logprobs"] if output.response_logprobs is not None else []
    names += [name for name in ("policy_versions", "turn_ids") if getattr(output, name)]
    lengths = {name: len(getattr(output, name)) for name in names}
    if len(set(lengths.values())) > 1:
        raise PluginError(f"{where} has lists of different lengths: {lengths}")
    if not len(output.prompt_ids):
        raise PluginError(f"{where} is a row without prompt_ids")
    if max_model_len is not None and (n := len(output.prompt_ids) + len(output.response_ids)) > max_model_len:
        raise ProtocolError(
            f"{where}: it has {n} tokens, more than the context of {max_model_len}. Return shorter rows, or raise "
            "data.max_prompt_length or rollout.max_response_length"
        )
    # Batches hold them in arrays of these types.
    given = [0.0] * len(output.response_mask) if output.response_logprobs is None else output.response_logprobs
    log_probs = [value if bit else 0.0 for value, bit in zip(given, output.response_mask, strict=True)]
    columns: list[tuple[str, Sequence[Any], str, str]] = [
        ("response_logprobs", log_probs, "f", "numbers, or None in place of the whole list"),
        ("policy_versions", output.policy_versions, "i", "integers of 32 bits"),
    ]
    for name, values, typecode, allowed in columns:
        with suppress(TypeError, OverflowError):
            array(typecode, values)
            continue
        place = next(place for place, value in enumerate(values) if not _fits(typecode, value))
        raise ProtocolError(f"{where}: {name}[{place}] is {values[place]!r}; allowed are {allowed}")


def _fits(typecode: str, value: Any) -> bool:
    with suppress(TypeError, OverflowError):
        array(typecode, [value])
        return True
    return False
