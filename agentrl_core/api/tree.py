"""What an agent did, as a tree of nodes: from the agent loop to rewards, batches, records and the viewer.

A node is what was added in one go: a prompt, a turn that the policy sampled, or what tools, users and the template
wrote between two turns. A row that is trained is a path from a prompt to a node. Rows share nodes: what they share is
kept once and trained once. Everything else is read off the tree: turns, agents, lengths, and who earned which reward.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Self

from agentrl_core.api.engine import FinishReason, PolicySpan

NodeKind = Literal["prompt", "turn", "context"]
Source = Literal["tool", "interaction", "environment"]


@dataclass(slots=True)
class Request:
    """The request that sampled a turn.

    Args:
        replica: number of the engine replica that answered.
        wait: seconds that it waited there.
        start: Unix time.
        seconds: until the answer.
    """

    replica: int
    wait: float
    start: float
    seconds: float


@dataclass(slots=True, eq=False)
class Call:
    """A tool call that was run.

    Args:
        name: of the function.
        arguments: what the model wrote, decoded.
        response: what the model saw, its first 2,000 characters.
        failed: the response is an error.
        reward: what the tool returned; None: nothing.
        source: who ran it.
        start: Unix time.
        seconds: until the response.
    """

    name: str
    arguments: dict[str, Any]
    response: str = ""
    failed: bool = False
    reward: float | None = None
    source: Source = "tool"
    start: float = 0.0
    seconds: float = 0.0


class Earned(NamedTuple):
    """A reward that belongs to a turn, other than those of its calls.

    Args:
        name: of the tool, the interaction or the environment.
        value: a finite number.
        source: who gave it.
    """

    name: str
    value: float
    source: Source


class Span(NamedTuple):
    """When something took its time: kind, start as Unix time, seconds."""

    kind: str
    start: float
    seconds: float


@dataclass(slots=True, eq=False)
class Node:
    """What was added in one go.

    Args:
        parent: what it follows; None: it begins the trajectory, or a branch that starts with another prompt.
        kind: ``prompt`` (with a parent: the history before it was rewritten, and its ids hold all of it), ``turn``
            (the policy sampled it) or ``context`` (tools, users, the template).
        ids: its tokens; a list, and an array once the trajectory has ended: see :meth:`Tree.pack`.
        text: of the tokens, decoded; a turn's with the token that ended it.
        messages: those that it added to the conversation.
        agent: whose turn it was; empty where only one agent acts.
        log_probs: of a turn's tokens, a list or an array; None if the engine has none.
        spans: which weights sampled which of a turn's tokens.
        finish_reason: of a turn.
        settings: ``SamplingParams.log_prob_settings`` of a turn; None: not known.
        stop: text of the token that ended a turn; empty without one.
        request: that sampled the turn.
        calls: that the turn made, in order.
        rewards: that the turn earned in other ways.
        images: names of those whose tokens are among ``ids``, in order.
        collapsed: ``ids`` with one placeholder for each image; empty without images.
        routed_experts: [tokens, layers, k] of a turn, see ``TokenOutput.routed_experts``: of the tokens of its path
            from where the turn before it ends, without its own last one; None if the engine was not asked.
    """

    parent: "Node | None"
    kind: NodeKind
    ids: Sequence[int]
    text: str = ""
    messages: Sequence[dict[str, Any]] = ()
    agent: str = ""
    log_probs: Sequence[float] | None = None
    spans: Sequence[PolicySpan] = ()
    finish_reason: FinishReason | None = None
    settings: dict[str, Any] | None = None
    stop: str = ""
    request: Request | None = None
    calls: list[Call] = field(default_factory=list)
    rewards: list[Earned] = field(default_factory=list)
    images: Sequence[str] = ()
    collapsed: Sequence[int] = ()
    routed_experts: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # What a copied tool call earns belongs to the same turn.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Flat: a class by its name, and each of its fields by theirs, cost more than what a node holds.
        request = None if self.request is None else _REQUEST(self.request)
        return _restored, (
            self.parent, self.kind, _flat(self.ids), self.text, self.messages, self.agent, _flat(self.log_probs),
            [(each.version, each.start, each.end) for each in self.spans], self.finish_reason, self.settings, self.stop,
            request, [_CALL(call) for call in self.calls], [tuple(each) for each in self.rewards], self.images,
            _flat(self.collapsed), self.routed_experts,
        )  # fmt: skip

    @property
    def sampled(self) -> bool:
        """Whether the policy sampled it."""
        return self.kind == "turn"

    @property
    def said(self) -> str:
        """A turn's text without the token that ended it."""
        return self.text.removesuffix(self.stop)

    @property
    def line(self) -> "list[Node]":
        """All nodes from the first prompt to this one."""
        nodes, node = [self], self
        while node.parent is not None:
            node = node.parent
            nodes.append(node)
        return nodes[::-1]

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages up to this one."""
        return [message for node in self.line for message in node.messages]

    @property
    def path(self) -> "list[Node]":
        """The nodes whose tokens the model sees: :attr:`line` from its last prompt on."""
        nodes, node = [self], self
        while node.kind != "prompt" and node.parent is not None:
            node = node.parent
            nodes.append(node)
        return nodes[::-1]

    @property
    def used(self) -> int:
        """Tokens of :attr:`line` that count against ``rollout.max_response_length``."""
        return sum(len(node.ids) for node in self.line if node.kind != "prompt")

    @property
    def earned(self) -> list[Earned]:
        """All that a turn earned, the rewards of its calls first."""
        calls = [Earned(call.name, call.reward, call.source) for call in self.calls if call.reward is not None]
        return calls + self.rewards

    @property
    def versions(self) -> list[int]:
        """The version of the weights that sampled each token; 0 where that is not known, -1 where the policy did not
        sample."""
        if not self.sampled:
            return [-1] * len(self.ids)
        if not self.spans:
            return [0] * len(self.ids)
        versions: list[int] = []
        for span in self.spans:
            versions += [span.version] * (span.end - span.start)
        return versions


_REQUEST, _CALL = (attrgetter(*(each.name for each in fields(kind))) for kind in (Request, Call))


def _flat(values: Any) -> Any:
    return (values.typecode, values.tobytes()) if isinstance(values, array) else values


def _unflat(values: Any) -> Any:
    match values:
        case (str(typecode), bytes(data)):
            return array(typecode, data)
    return values


def _restored(
    parent: Node | None, kind: NodeKind, ids: Any, text: str, messages: Any, agent: str, log_probs: Any, spans: Any,
    finish_reason: FinishReason | None, settings: Any, stop: str, request: Any, calls: Any, rewards: Any,
    images: Any, collapsed: Any, routed_experts: Any,
) -> Node:  # fmt: skip
    return Node(
        parent, kind, _unflat(ids), text, messages, agent, _unflat(log_probs), [PolicySpan(*each) for each in spans],
        finish_reason, settings, stop, None if request is None else Request(*request), [Call(*each) for each in calls],
        [Earned(*each) for each in rewards], images, _unflat(collapsed), routed_experts,
    )  # fmt: skip


class Tree:
    """The nodes of a trajectory, in the order in which they were added.

    Attributes:
        nodes: a parent stands before its children.
        early: stands for a turn: it has what calls earned before the first one.
        agent: whose turn it is now.
        branches: token records that were begun or forked after the first one.
        tool_calls: calls that the policy wrote and that could be read.
        parse_errors: calls that could not.
        template_breaks: how often the template rewrote history.
        template_mismatches: records of which the template renders the whole in other words than turn by turn.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.early = Node(None, "turn", [])
        self.agent = ""
        self.branches = 0
        self.tool_calls = 0
        self.parse_errors = 0
        self.template_breaks = 0
        self.template_mismatches = 0

    @classmethod
    def of(cls, *nodes: Node) -> Self:
        """The tree of these nodes."""
        tree = cls()
        tree.nodes = list(nodes)
        return tree

    def pack(self) -> None:
        """Keep ids as integers of 32 bits, and log-probs as floats of 32 bits where these say the same, else of 64.

        In arrays they take a tenth of the memory of lists, and travel as bytes. What fits into no array stays a list.
        """
        for node in self.nodes:
            try:
                node.ids = array("i", node.ids)
                node.collapsed = array("i", node.collapsed) if node.collapsed else ()
                if (values := node.log_probs) is not None:
                    short = array("f", values)
                    node.log_probs = short if short.tolist() == list(values) else array("d", values)
            except (TypeError, OverflowError):
                continue

    def turns(self, agent: str | None = None) -> list[Node]:
        """The policy's turns in the order in which they were sampled; those of one agent, or all."""
        return [node for node in self.nodes if node.kind == "turn" and agent in (None, node.agent)]

    @property
    def numbers(self) -> dict[Node, int]:
        """The number of each turn among those of its agent, from 0: rewards and estimators know turns by it."""
        counts: dict[str, int] = {}
        numbers: dict[Node, int] = {}
        for node in self.turns():
            numbers[node] = counts[node.agent] = counts.get(node.agent, -1) + 1
        return numbers

    @property
    def lengths(self) -> dict[Node, int]:
        """The number of tokens of each node's :attr:`Node.path`."""
        lengths: dict[Node, int] = {}
        for node in self.nodes:
            before = 0 if node.kind == "prompt" or node.parent is None else lengths[node.parent]
            lengths[node] = before + len(node.ids)
        return lengths

    @property
    def newest(self) -> Node:
        """The turn that was sampled last."""
        return next((node for node in reversed(self.nodes) if node.kind == "turn"), self.early)

    def turn_of(self, messages: Sequence[Mapping[str, Any]]) -> Node:
        """The turn that ends a conversation, which may be a copy; the newest turn where a loop wrote it itself."""
        last = next((message for message in reversed(messages) if message.get("role") == "assistant"), None)
        turns = [node for node in reversed(self.turns()) if node.messages and node.messages[0] == last]
        # Branches can say the same: then the object tells them apart, or else what was said before.
        same = [node for node in turns if node.messages[0] is last]
        if not same and len(turns) > 1:
            said = list(messages)
            same = [node for node in turns if said[: len(before := node.conversation)] == before]
        return next(iter(same or turns), self.newest)


class TreePath(NamedTuple):
    """The tokens of a row: what the model saw and what it sampled, up to a node.

    Args:
        tree: that the nodes belong to.
        nodes: ``path`` of the last one.
        shared: number of nodes at its beginning that are its prompt: the first one, and what an earlier row trains.
    """

    tree: Tree
    nodes: Sequence[Node]
    shared: int = 1

    @property
    def leaf(self) -> Node:
        """The last node."""
        return self.nodes[-1]

    @property
    def prompt(self) -> Sequence[Node]:
        """The nodes that are its prompt."""
        return self.nodes[: self.shared]

    @property
    def response(self) -> Sequence[Node]:
        """The nodes after its prompt."""
        return self.nodes[self.shared :]

    @property
    def prompt_ids(self) -> list[int]:
        return ids_of(self.nodes[: self.shared])

    @property
    def prompt_text(self) -> str:
        return "".join(node.text for node in self.nodes[: self.shared])

    @property
    def response_ids(self) -> list[int]:
        return ids_of(self.nodes[self.shared :])

    @property
    def response_mask(self) -> list[int]:
        mask: list[int] = []
        for node in self.nodes[self.shared :]:
            mask += [1 if node.kind == "turn" else 0] * len(node.ids)
        return mask

    @property
    def response_logprobs(self) -> list[float] | None:
        values: list[float] = []
        for node in self.nodes[self.shared :]:
            if node.kind == "turn" and node.log_probs is None:
                return None
            values += node.log_probs or [0.0] * len(node.ids)
        return values

    @property
    def log_prob_settings(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for node in self.nodes[self.shared :]:
            if node.kind == "turn" and node.settings is None:
                return []
            if node.settings is not None and node.settings not in found:
                found.append(node.settings)
        return found

    @property
    def policy_versions(self) -> list[int]:
        versions: list[int] = []
        for node in self.nodes[self.shared :]:
            versions += node.versions
        return versions

    @property
    def turn_ids(self) -> list[int]:
        numbers, ids = self.tree.numbers, list[int]()
        for node in self.nodes[self.shared :]:
            ids += [numbers.get(node, -1)] * len(node.ids)
        return ids

    @property
    def segments(self) -> list[tuple[int, str]]:
        return [(1 if node.kind == "turn" else 0, node.text) for node in self.nodes[self.shared :] if node.text]

    @property
    def images(self) -> tuple[str, ...]:
        """Names of the images whose tokens it has, in order."""
        return images_of(self.nodes)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that this row trains."""
        count = 0
        for node in self.nodes[self.shared :]:
            count += len(node.ids) if node.kind == "turn" else 0
        return count


def ids_of(nodes: Sequence[Node]) -> list[int]:
    """All tokens of some nodes."""
    ids: list[int] = []
    for node in nodes:
        ids += node.ids
    return ids


def images_of(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Names of the images of some nodes, in order."""
    return tuple([name for node in nodes for name in node.images])


def collapsed_of(nodes: Sequence[Node]) -> list[int]:
    """:func:`ids_of` with one placeholder for each image."""
    ids: list[int] = []
    for node in nodes:
        ids += node.collapsed or node.ids
    return ids


def packed_ids(nodes: Sequence[Node]) -> bytes:
    """:func:`ids_of` as integers of 32 bits."""
    return b"".join([node.ids if isinstance(node.ids, array) else array("i", node.ids) for node in nodes])


def paths_of(tree: Tree, leaves: Sequence[Node]) -> Iterator[TreePath]:
    """The rows that end with these nodes; each trains the turns that no earlier one does."""
    trained: set[Node] = set()
    for leaf in leaves:
        nodes = leaf.path
        shared = next((at for at, node in enumerate(nodes) if node not in trained), len(nodes))
        trained.update(nodes)
        yield TreePath(tree, nodes, max(shared, 1))


def spans_of(tree: Tree, waits: Sequence[Span]) -> list[tuple[Span, Node | None]]:
    """All that took time, in the order of the ends; with the turn, where a request sampled one.

    Args:
        waits: what no node has.
    """
    found: list[tuple[Span, Node | None]] = [(span, None) for span in waits]
    for node in (*tree.turns(), tree.early):
        if node.request is not None:
            found.append((Span("generate", node.request.start, node.request.seconds), node))
        found += [(Span("tools", call.start, call.seconds), None) for call in node.calls]
    return sorted(found, key=lambda each: each[0].start + each[0].seconds)
