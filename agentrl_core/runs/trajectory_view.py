"""Shows one decoded trajectory: the prompt, what the policy sampled, and text of tools, users and template."""

import json
import re
from typing import Any

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agentrl_core.engine_kit.media import is_name, parts_of, size_of
from agentrl_core.runs.records import RolloutRecord
from agentrl_core.runs.run_dir import is_number

PROMPT_STYLE = "dim"
SAMPLED_STYLE = "bold green"
OTHER_STYLE = "yellow"

_OPEN, _CLOSE = "⟦", "⟧"
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def show_trajectory(record: RolloutRecord, console: Console, max_chars: int | None = None, branch: int = 1) -> None:
    """Print one trajectory: prompt, response by mask, tool calls, reward, termination and timings.

    Without colour, ⟦ ⟧ enclose what the policy sampled. Control characters are made visible, so that a model's text
    cannot control the terminal.

    Args:
        record: the trajectory.
        console: where to print.
        max_chars: maximum characters of one segment; the middle of a longer one is left out. None: no limit.
        branch: number of this row in its trajectory, from 1; the title shows it from the second row on.
    """
    colour = console.color_system is not None and not console.no_color
    parts: list[RenderableType] = [_body(record, colour, max_chars), Text(), _facts(record)]
    name = f"step {record.step} · {record.split} · sample {record.sample} of {_visible(record.uid)}"
    if branch > 1:
        name += f" · branch {branch}"
    title = Text(name, style="bold not dim")
    console.print(Panel(Group(*parts), box=ROUNDED, title=title, title_align="left", border_style="dim"))


def legend(console: Console) -> Text:
    """Explain the colours, or without colour the brackets, of :func:`show_trajectory`."""
    colour = console.color_system is not None and not console.no_color
    sampled = "sampled by the policy (mask 1)"
    return Text.assemble(
        ("prompt", PROMPT_STYLE), "  ·  ", (sampled if colour else f"{_OPEN}{sampled}{_CLOSE}", SAMPLED_STYLE),
        "  ·  ", ("tool, user and template text (mask 0)", OTHER_STYLE),
    )  # fmt: skip


def _body(record: RolloutRecord, colour: bool, max_chars: int | None) -> Text:
    body = Text.assemble((_clip(_visible(record.prompt_text), max_chars), PROMPT_STYLE))
    for mask, text in record.segments:
        shown = _clip(_visible(text), max_chars)
        if mask:
            body.append(shown if colour else f"{_OPEN}{shown}{_CLOSE}", style=SAMPLED_STYLE)
        else:
            body.append(shown, style=OTHER_STYLE)
    body.rstrip()
    return body


def _facts(record: RolloutRecord) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    if record.tool_schemas:
        table.add_row("tools", Text(_visible(", ".join(_signature(schema) for schema in record.tool_schemas))))
    for number, call in enumerate(record.tool_calls):
        arguments = ", ".join(f"{name}={_json(value)}" for name, value in call["arguments"].items())
        text = Text(_visible(f"{call['name']}({arguments}) → {_clip(call['response'], 400)}"))
        if call["failed"]:
            text.append("  failed", style="bold red")
        table.add_row("" if number else "tool calls", text)
    for number, name in enumerate(name for message in record.messages for name in parts_of(message) if is_name(name)):
        table.add_row("" if number else "images", Text(label(name)))
    table.add_row("reward", _reward(record))
    table.add_row("ended", _ending(record))
    table.add_row("tokens", _tokens(record))
    if record.timings:
        table.add_row("time", Text("  ".join(f"{name} {_seconds(value)}" for name, value in record.timings.items())))
    return table


def label(name: str) -> str:
    """How an image is named to a reader.

    Args:
        name: of the image.
    """
    width, height = size_of(name)
    return f"<image {name[:4]}… {width}x{height}>"


def _reward(record: RolloutRecord) -> Text:
    if record.reward is None:
        text = Text("none", style="bold red")
    else:
        text = Text(_number(record.reward), style="bold green" if record.reward > 0 else "bold red")
    details = [(name, _number(value)) for name, value in record.reward_metrics.items()]
    for name, values in (("tool rewards", record.tool_rewards), ("turn scores", record.turn_scores)):
        if values:
            details.append((name, ", ".join(map(_number, values))))
    if record.advantage is not None:
        details.append(("advantage", f"{record.advantage:+.3g}"))
    if record.ground_truth is not None:
        details.append(("ground truth", _visible(_clip(_json(record.ground_truth), 200))))
    for name, shown in details:
        text.append(f"  {name} {shown}", style="not bold default")
    return text


def _ending(record: RolloutRecord) -> Text:
    text = Text(f"{record.termination} after {record.num_turns} turns")
    if record.status not in ("", "trained"):
        text.append(f"  {record.status}: {record.reason}", style="bold red")
    if record.policy:
        text.append(f"  policy {_visible(record.policy)}")
    if record.data_source:
        text.append(f"  data source {_visible(record.data_source)}", style="dim")
    if record.error:
        text.append(f"\n{_visible(record.error)}", style="bold red")
    return text


def _tokens(record: RolloutRecord) -> str:
    sampled = sum(record.response_mask)
    parts = [f"prompt {len(record.prompt_ids)}", f"response {len(record.response_ids)}", f"sampled {sampled}"]
    pairs = zip(record.response_logprobs or [], record.response_mask, strict=False)
    log_probs = [value for value, mask in pairs if mask and is_number(value)]
    if log_probs:
        parts.append(f"mean log-prob {sum(log_probs) / len(log_probs):.3f}")
    versions = sorted({version for version in record.policy_versions if version >= 0})
    if versions:
        parts.append(f"policy version {', '.join(map(str, versions))}")
    return "  ".join(parts)


def _signature(schema: dict[str, Any]) -> str:
    function = schema.get("function", schema)
    parameters = function.get("parameters") or {}
    return f"{function.get('name', '?')}({', '.join(parameters.get('properties') or {})})"


def _seconds(value: float) -> str:
    if value >= 60:
        return f"{value // 60:.0f}m{value % 60:02.0f}s"
    return f"{_number(value)} s" if value >= 0.1 else f"{_number(value * 1000)} ms"


def _number(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.2f}" if 0.01 <= abs(value) < 1000 else f"{value:.3g}"


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _visible(text: str) -> str:
    return _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _clip(text: str, max_chars: int | None) -> str:
    if max_chars is None or len(text) <= max_chars:
        return text
    head = max_chars // 2
    return f"{text[:head]} … {len(text) - max_chars:,} characters left out … {text[len(text) - (max_chars - head) :]}"
