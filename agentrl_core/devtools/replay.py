"""``agentrl replay``: recorded trajectories once more, with the tokens that the policy sampled and other parts."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl_core.api.dataset import Split
from agentrl_core.api.engine import EngineContext
from agentrl_core.api.errors import DataError, EngineError
from agentrl_core.config import ResolvedConfig, load_config
from agentrl_core.controller import LocalRuntime
from agentrl_core.data.rows import PromptBatch, Row
from agentrl_core.rollout.manager import AgentLoopManager
from agentrl_core.runs.records import RolloutRecord, read_rollouts
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.serving.replicas import EngineReplicas
from agentrl_core.trainer.outcomes import make_records
from agentrl_core.trainer.plan import max_model_len
from agentrl_core.trainer.roles import start_named_engines

_SHOWN = 20
_OFFLINE = (
    'rollout.engine={name: scripted, config: {script: "agentrl_core.devtools.replay:answer"}}',
    "rollout.agent.num_workers=1", "rollout.deterministic=false", "rollout.retries=0",
    "rollout.max_failed_fraction=1.0", "reward.num_workers=1",
    "cluster.runtime=local", "cluster.nodes=1", "cluster.processes_per_node=1",
)  # fmt: skip
"""One process, and an engine that answers with what is recorded."""


class RecordedTurns:
    """What the policy sampled in one trajectory, handed out turn by turn.

    Args:
        rows: of the trajectory.
    """

    def __init__(self, rows: Sequence[RolloutRecord]) -> None:
        self._turns: list[tuple[list[int], list[int]]] = []
        for row in rows:
            ids, mask = row.response_ids, row.response_mask
            starts = [at for at in range(len(mask)) if mask[at] and _begins_turn(row, at)]
            for start in starts:
                end = next((at for at in range(start + 1, len(mask)) if not mask[at] or at in starts), len(mask))
                self._turns.append((row.prompt_ids + ids[:start], ids[start:end]))

    def __len__(self) -> int:
        """Turns that were not asked for."""
        return len(self._turns)

    def next(self, prompt_ids: Sequence[int]) -> list[int]:
        """The turn that was sampled after these ids, else the first one that is left.

        Raises:
            EngineError: none is left.
        """
        if not self._turns:
            raise EngineError("the policy is asked for a turn that the record does not have")
        prompt = list(prompt_ids)
        same = (number for number, (before, _) in enumerate(self._turns) if before == prompt)
        return self._turns.pop(next(same, 0))[1]


def _begins_turn(row: RolloutRecord, at: int) -> bool:
    return at == 0 or not row.response_mask[at - 1] or bool(row.turn_ids and row.turn_ids[at] != row.turn_ids[at - 1])


_recorded: dict[str, RecordedTurns] = {}


def answer(request_id: str, turn: int, prompt_ids: Sequence[int]) -> list[int]:
    """The script of the engine: ``request_id`` is that of a trajectory, or of a branch of it."""
    return _recorded[request_id.partition("/")[0].rpartition("-")[0]].next(prompt_ids)


@dataclass(frozen=True)
class Difference:
    """How a trajectory came out otherwise: by what differs, how."""

    trajectory_id: str
    changes: dict[str, str]


def replay(run: RunDir, step: int, split: Split, changes: Sequence[str], console: Console, show_all: bool) -> None:
    """Run the trajectories of a step again and print what differs.

    Args:
        run: whose configuration and records are used.
        step, split: which rollouts.
        changes: values of the configuration to replace, ``rollout.tool_parser=hermes``.
        console: the console to print on.
        show_all: print every trajectory that differs; else the first 20.

    Raises:
        ConfigError, PluginError: the changed configuration cannot run.
        DataError: the file holds no trajectory that can be replayed.
    """
    path = run.rollout_file(step, split)
    old: dict[str, list[RolloutRecord]] = defaultdict(list)
    for record in read_rollouts(path):
        old[record.trajectory_id].append(record)
    complete = {name: rows for name, rows in old.items() if any(any(row.response_mask) for row in rows)}
    if not complete:
        raise DataError(f"{path}: holds no trajectory in which the policy sampled anything")
    config = load_config(run.config_file, [*changes, *_OFFLINE], check_files=False)
    _recorded.clear()
    _recorded.update({name: RecordedTurns(rows) for name, rows in complete.items()})
    new = _generated(config, [_row(name, rows) for name, rows in complete.items()], split)
    found = [_difference(name, rows, new[name], len(_recorded[name])) for name, rows in complete.items()]
    _print(console, found, len(old) - len(complete), show_all)


def _row(trajectory_id: str, rows: Sequence[RolloutRecord]) -> tuple[str, int, Row]:
    """Split and step of a trajectory, and its data row, as far as it is recorded."""
    split, step, prompt, sample = trajectory_id.rsplit("-", 3)
    last = rows[-1]
    seen = last.reward_input or {}
    said = next((n for n, each in enumerate(last.messages) if each.get("role") == "assistant"), len(last.messages))
    row = {
        **seen.get("row", {}),
        "raw_prompt": last.messages[:said],
        "data_source": last.data_source,
        "extra_info": seen.get("extra_info") or {},
        "reward_model": {"ground_truth": last.ground_truth},
        "uid": last.uid,
        "prompt_index": int(prompt),
        "sample_index": int(sample),
    }
    return split, int(step), row


def _generated(
    config: ResolvedConfig, rows: Sequence[tuple[str, int, Row]], split: Split
) -> dict[str, list[RolloutRecord]]:
    from transformers import AutoConfig

    batches: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for name, step, row in rows:
        batches[name, step].append(row)
    model = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    vocab_size = int(model.get_text_config().vocab_size)
    context = EngineContext(config.model.path, max_model_len=max_model_len(config), vocab_size=vocab_size)
    new: dict[str, list[RolloutRecord]] = defaultdict(list)
    with LocalRuntime() as runtime:
        engines = EngineReplicas(runtime, config, context)
        engines.start()
        manager = AgentLoopManager(config, runtime, engines, start_named_engines(config, runtime))
        try:
            for (name, step), batch in batches.items():
                results = manager.generate_sequences(PromptBatch(batch, step, name, {}))
                for record in make_records(step, split, results, {}):
                    new[record.trajectory_id].append(record)
        finally:
            manager.close()
    return new


def _difference(name: str, old: Sequence[RolloutRecord], new: Sequence[RolloutRecord], unused: int) -> Difference:
    changes: dict[str, str] = {}
    before, after = old[-1], new[-1]
    if unused or (after.error and "turn that the record does not have" in after.error):
        changes["turns"] = f"{unused} recorded ones were not asked for" if unused else "more were asked for"
    ids = [[row.prompt_ids + row.response_ids for row in rows] for rows in (old, new)]
    if ids[0] != ids[1]:
        changes["tokens"] = _first_difference(*ids)
    if [row.response_mask for row in old] != [row.response_mask for row in new]:
        changes["mask"] = "differs"
    calls = [[(call["name"], call["arguments"]) for call in each.tool_calls] for each in (before, after)]
    if calls[0] != calls[1]:
        changes["calls"] = f"{_calls(calls[0])} -> {_calls(calls[1])}"
    responses = [[call["response"] for call in each.tool_calls] for each in (before, after)]
    if responses[0] != responses[1]:
        changes["responses"] = "differ"
    if before.reward != after.reward and not _equal(before.reward, after.reward):
        changes["reward"] = f"{_number(before.reward)} -> {_number(after.reward)}"
    if before.termination != after.termination:
        changes["termination"] = f"{before.termination.value} -> {after.termination.value}"
    return Difference(name, changes)


def _first_difference(old: list[list[int]], new: list[list[int]]) -> str:
    if len(old) != len(new):
        return f"{len(old)} rows -> {len(new)}"
    number = next(n for n, (left, right) in enumerate(zip(old, new, strict=True)) if left != right)
    left, right = old[number], new[number]
    at = next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return f"row {number} from token {at}, {len(left)} -> {len(right)}"


def _calls(calls: Sequence[tuple[str, Any]]) -> str:
    return ", ".join(f"{name}({json.dumps(arguments, ensure_ascii=False)})" for name, arguments in calls) or "none"


def _equal(old: float | None, new: float | None) -> bool:
    return old is not None and new is not None and math.isclose(old, new, rel_tol=1e-6, abs_tol=1e-9)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _print(console: Console, found: Sequence[Difference], failed: int, show_all: bool) -> None:
    differing = [each for each in found if each.changes]
    shown = differing if show_all else differing[:_SHOWN]
    table = Table("TRAJECTORY", "DIFFERS IN", "HOW", box=None, pad_edge=False, header_style="bold")
    for each in shown:
        for number, (what, how) in enumerate(each.changes.items()):
            table.add_row(Text(each.trajectory_id if number == 0 else ""), what, Text(how, overflow="fold"))
    if shown:
        console.print(table)
    if len(shown) < len(differing):
        console.print(f"\n{len(differing) - len(shown)} more are not shown: --all")
    counts = Counter(what for each in differing for what in each.changes)
    summary = f": {', '.join(f'{what} {count}' for what, count in counts.most_common())}" if counts else ""
    console.print(f"\n{len(found)} trajectories, {len(differing)} differ{summary}")
    if failed:
        console.print(f"{failed} more hold nothing that the policy sampled, and are left out")
