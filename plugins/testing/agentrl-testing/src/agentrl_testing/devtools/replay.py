"""``agentrl replay``: recorded trajectories once more, with the tokens that the policy sampled and other parts.

With ``--reward`` only a reward function runs again; ``agentrl reward replay`` is the same for a file.
"""

import asyncio
import inspect
import json
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl_core.api.agent_loop import Status
from agentrl_core.api.dataset import Split
from agentrl_core.api.engine import EngineContext
from agentrl_core.api.engine_client import Engines
from agentrl_core.api.errors import ConfigError, DataError, EngineError, RewardError
from agentrl_core.api.reward import RewardTrajectory
from agentrl_core.config import ResolvedConfig, RewardFunctionSlot, load_config
from agentrl_core.config.nodes import read_file
from agentrl_core.config.schema import UNTRAINED
from agentrl_core.controller import LocalRuntime, Runtime
from agentrl_core.data.rows import PromptBatch, Row
from agentrl_core.engine_kit.media import has_processor, images_in
from agentrl_core.hosting.rewards import build_reward_function, check_score
from agentrl_core.plugins.resolution import resolve
from agentrl_core.rollout.manager import AgentLoopManager
from agentrl_core.rollout.results import AGENT
from agentrl_core.runs.atomic import open_file
from agentrl_core.runs.media import FOLDER, RowUploads, ShownImages, image_file, start_media
from agentrl_core.runs.records import RolloutRecord, read_rollouts, records_of, reward_trajectory_of, to_json
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.serving.replicas import EngineReplicas
from agentrl_core.trainer.outcomes import make_records
from agentrl_core.trainer.plan import max_model_len
from agentrl_core.trainer.roles import start_named_engines
from agentrl_core.trainer.row_images import RowImages

_SHOWN = 20
_OFFLINE = (
    'rollout.engine={name: scripted, config: {script: "agentrl_testing.devtools.replay:answer"}}',
    "rollout.agent.num_workers=1", "rollout.deterministic=false", "rollout.retries=0",
    "rollout.max_failed_fraction=1.0", "reward.num_workers=1",
    "cluster.runtime=local", "cluster.nodes=1", "cluster.processes_per_node=1",
)  # fmt: skip
"""One process, and an engine that answers with what is recorded."""


_ALONE = {**UNTRAINED, "adapter": "null"}
"""Of each policy: the engine has no adapters."""


class RecordedTurns:
    """What the policy sampled in one trajectory, handed out turn by turn.

    Args:
        rows: of the trajectory; of all agents, where several acted.
    """

    def __init__(self, rows: Sequence[RolloutRecord]) -> None:
        self._agents = list(dict.fromkeys(row.agent for row in rows))
        self._turns: list[tuple[str, list[int], list[int]]] = []
        for row in rows:
            ids, mask = row.response_ids, row.response_mask
            starts = [at for at in range(len(mask)) if mask[at] and _begins_turn(row, at)]
            for start in starts:
                end = next((at for at in range(start + 1, len(mask)) if not mask[at] or at in starts), len(mask))
                self._turns.append((row.agent, row.prompt_ids + ids[:start], ids[start:end]))

    def left(self, agent: str) -> int:
        """Number of an agent's turns that were not asked for."""
        return sum(whose == agent for whose, _, _ in self._turns)

    def next(self, prompt_ids: Sequence[int], branch: int = 0) -> list[int]:
        """The turn that was sampled after these ids, else the first one that is left, of the same agent if possible.

        Args:
            branch: number of the token record; of several agents each has one, in the order in which they appear.

        Raises:
            EngineError: none is left.
        """
        if not self._turns:
            raise EngineError("the policy is asked for a turn that the record does not have")
        prompt = list(prompt_ids)
        same = (number for number, (_, before, _) in enumerate(self._turns) if before == prompt)
        agent = self._agents[min(branch, len(self._agents) - 1)]
        own = (number for number, (whose, _, _) in enumerate(self._turns) if whose == agent)
        return self._turns.pop(next(same, next(own, 0)))[2]


def _begins_turn(row: RolloutRecord, at: int) -> bool:
    return at == 0 or not row.response_mask[at - 1] or bool(row.turn_ids and row.turn_ids[at] != row.turn_ids[at - 1])


_recorded: dict[str, RecordedTurns] = {}


def answer(request_id: str, turn: int, prompt_ids: Sequence[int]) -> list[int]:
    """The script of the engine: ``request_id`` is that of a trajectory, or of a branch of it."""
    trajectory, _, branch = request_id.partition("/")
    return _recorded[trajectory.rpartition("-")[0]].next(prompt_ids, int(branch or 0))


@dataclass(frozen=True)
class Replayed:
    """A trajectory, its rewards (None: it had none), and by what differs, how."""

    trajectory_id: str
    old: float | None
    new: float | None
    changes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Replay:
    """The trajectories that ran or were scored again.

    Args:
        trajectories: in the order of the file.
        left_out: number of trajectories that could not.
        why: predicate of a sentence about them.
    """

    trajectories: Sequence[Replayed]
    left_out: int
    why: str

    @property
    def differing(self) -> list[Replayed]:
        return [each for each in self.trajectories if each.changes]

    def to_json(self) -> str:
        """Every trajectory, with ``changes`` by what differs."""
        trajectories = [asdict(each) for each in self.trajectories]
        return json.dumps(
            {"schema_version": 1, "trajectories": trajectories, "left_out": self.left_out}, indent=2, ensure_ascii=False
        )


def replay(run: RunDir, step: int, split: Split, changes: Sequence[str]) -> Replay:
    """Run the trajectories of a step again.

    Args:
        run: whose configuration and records are used.
        step, split: which rollouts.
        changes: values of the configuration to replace, ``rollout.tool_parser=hermes``.

    Raises:
        ConfigError, PluginError: the changed configuration cannot run.
        DataError: the file holds no trajectory that can be replayed.
    """
    path = run.rollout_file(step, split)
    old: dict[str, list[RolloutRecord]] = defaultdict(list)
    for record in read_rollouts(path):
        old[_whole(record.trajectory_id)].append(record)
    complete = {name: rows for name, rows in old.items() if any(any(row.response_mask) for row in rows)}
    if not complete:
        raise DataError(f"{path}: holds no trajectory in which the policy sampled anything")
    open_file(run.config_file).close()
    policies: Any = read_file(run.config_file, str(run.config_file)).plain().get("policies") or {}
    alone = [f"policies.{name}.{key}={value}" for name in policies for key, value in _ALONE.items()]
    config = load_config(run.config_file, [*changes, *alone, *_OFFLINE], check_files=False)
    _recorded.clear()
    _recorded.update({name: RecordedTurns(rows) for name, rows in complete.items()})
    with TemporaryDirectory() as folder:
        _link_images(run.path / FOLDER, Path(folder) / FOLDER)
        new = _generated(config, [_row(name, rows) for name, rows in complete.items()], split, Path(folder))
    found = [each for name, rows in complete.items() for each in _differences(name, rows, new[name])]
    return Replay(found, len(old) - len(complete), "hold nothing that the policy sampled, and are left out")


def replay_reward(path: Path, reward: str, config: Path | None) -> Replay:
    """Score every trajectory of a rollouts file again, in this process.

    The old reward is this function's, if the reward manager kept it by name, else the whole reward.

    Args:
        path: ``rollouts/step-….jsonl``.
        reward: a registered name, ``package:name``, or ``./file.py:function`` relative to the working directory.
        config: a configuration with an entry of that name in ``reward.functions``, whose options are used.

    Raises:
        ConfigError: ``config`` has no such function.
        DataError: no such file, or no trajectory in it can be scored.
        RewardError: the function raised or returned no finite number; the message names the trajectory.
    """
    name, function = _function(reward, config)
    packed = path.with_name(path.name + ".gz")
    path = packed if packed.is_file() and not path.exists() else path
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected rollouts/step-….jsonl of a run directory")
    done: list[Replayed] = []
    without: set[str] = set()
    for record in read_rollouts(path):
        trajectory = reward_trajectory_of(record)
        if trajectory is None:
            without.add(record.trajectory_id)
            continue
        read = partial(image_file, path.parent.parent / FOLDER)
        trajectory = replace(trajectory, images=ShownImages(read, images_in(trajectory.messages)))
        old, new = record.reward_metrics.get(name, record.reward), _score(name, function, record, trajectory)
        done.append(Replayed(record.trajectory_id, old, new, {} if _equal(old, new) else {"reward": ""}))
    if not done:
        raise DataError(f"{path}: holds no trajectory that a reward has seen")
    unscored = len(without - {each.trajectory_id for each in done})
    return Replay(done, unscored, "were never scored in the run and are left out")


def _function(reward: str, config: Path | None) -> tuple[str, Callable[[RewardTrajectory], Any]]:
    if config is None:
        plugin = resolve("reward_function", reward, base_dir=Path.cwd())
        try:
            options = plugin.spec.config()
        except TypeError as error:
            raise ConfigError(f"reward function {reward!r} has required options ({error}): give --config") from error
        slot = RewardFunctionSlot(reward, options, resolved=plugin)
        return slot.registered_name, _built(slot)
    slots = load_config(config, check_files=False).reward.functions
    wanted = reward.rpartition(":")[2]
    found = [slot for slot in slots if slot.registered_name == wanted]
    if not found:
        listed = ", ".join(slot.registered_name for slot in slots) or "none"
        raise ConfigError(f"--reward: {reward!r} is not in reward.functions of {config}; listed: {listed}")
    return wanted, _built(found[0])


def _built(slot: RewardFunctionSlot) -> Callable[[RewardTrajectory], Any]:
    reason = "replaying a reward starts no engines"
    engines = Engines(user=f"reward function {slot.registered_name!r}", reason=reason)
    function: Callable[[RewardTrajectory], Any] = build_reward_function(slot, engines)
    return function


def _score(
    name: str, function: Callable[[RewardTrajectory], Any], record: RolloutRecord, trajectory: RewardTrajectory
) -> float:
    try:
        value = function(trajectory)
        if inspect.isawaitable(value):
            value = asyncio.run(_result(value))
    except Exception as error:
        raise RewardError(
            f"reward function {name!r} raised {type(error).__name__} for trajectory {record.trajectory_id}: {error} "
            "(`agentrl --verbose …` shows where)"
        ) from error
    return check_score(f"reward function {name!r} for trajectory {record.trajectory_id}", value).score


async def _result(value: Awaitable[Any]) -> Any:
    return await value


def _whole(trajectory_id: str) -> str:
    """The id without the name of an agent."""
    return trajectory_id.partition(AGENT)[0]


def _row(trajectory_id: str, rows: Sequence[RolloutRecord]) -> tuple[str, int, Row]:
    """Split and step of a trajectory, and its data row, as far as it is recorded."""
    split, step, prompt, sample = trajectory_id.rsplit("-", 3)
    # Of several agents the first one was shown the row's prompt.
    last = [row for row in rows if row.agent == rows[0].agent][-1]
    seen = last.reward_input or {}
    said = next((n for n, each in enumerate(last.messages) if each.get("role") == "assistant"), len(last.messages))
    row = {
        **seen.get("row", {}),
        "raw_prompt": last.messages[:said],
        "data_source": last.data_source,
        "extra_info": seen.get("extra_info") or {},
        "reward_model": {"ground_truth": last.ground_truth},
        "uid": last.uid.partition(AGENT)[0],
        "prompt_index": int(prompt),
        "sample_index": int(sample),
    }
    return split, int(step), row


def _generated(
    config: ResolvedConfig, rows: Sequence[tuple[str, int, Row]], split: Split, folder: Path
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
        named = start_named_engines(config, runtime)
        manager = AgentLoopManager(config, runtime, engines, named, _images(config, runtime, folder))
        try:
            for (name, step), batch in batches.items():
                results = manager.generate_sequences(PromptBatch(batch, step, name, {}))
                for line in make_records(step, split, results):
                    new[line["trajectory_id"]] += records_of(to_json(line))
        finally:
            manager.close()
    return new


def _link_images(recorded: Path, folder: Path) -> None:
    """What tools show now does not come into the run."""
    if recorded.is_dir():
        folder.mkdir()
        for file in recorded.iterdir():
            (folder / file.name).symlink_to(file.absolute())


def _images(config: ResolvedConfig, runtime: Runtime, folder: Path) -> RowUploads | None:
    if not has_processor(config.model.path):
        return None
    # Rows are recorded with the names of their images: there is nothing to read again.
    return RowUploads(start_media(runtime, folder), RowImages(config.model.images, "", ()).read_again)


def _differences(name: str, old: Sequence[RolloutRecord], new: Sequence[RolloutRecord]) -> Iterator[Replayed]:
    """What differs in one trajectory, in the part of each agent where several act."""
    failed = new[-1].termination.status is not Status.TRAINED
    for agent in dict.fromkeys(row.agent for row in (*old, *(() if failed else new))):
        before, after = ([row for row in rows if row.agent == agent] for rows in (old, new))
        part = f"{name}{AGENT}{agent}" if agent else name
        if before and (after or failed):
            yield _difference(part, before, after or new, _recorded[name].left(agent))
        else:
            was, now = (rows[-1].reward if rows else None for rows in (before, after))
            yield Replayed(part, was, now, {"turns": "the agent did not act now" if before else "a new agent acted"})


def _difference(name: str, old: Sequence[RolloutRecord], new: Sequence[RolloutRecord], unused: int) -> Replayed:
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
    if not _equal(before.reward, after.reward):
        changes["reward"] = ""
    if before.termination != after.termination:
        changes["termination"] = f"{before.termination.value} -> {after.termination.value}"
    return Replayed(name, before.reward, after.reward, changes)


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
    if old is None or new is None:
        return old is new
    return math.isclose(old, new, rel_tol=1e-6, abs_tol=1e-9)


def show_replay(found: Replay, console: Console, show_all: bool) -> None:
    """Print the trajectories that differ, the first 20 or all of them, and a summary."""
    _show(found, found.differing if show_all else found.differing[:_SHOWN], console)


def show_rewards(found: Replay, console: Console, show_all: bool) -> None:
    """Print every trajectory where they are few or ``show_all``, else the first 20 that differ, and a summary."""
    few = show_all or len(found.trajectories) <= _SHOWN
    _show(found, found.trajectories if few else found.differing[:_SHOWN], console)


def _show(found: Replay, shown: Sequence[Replayed], console: Console) -> None:
    """Print some trajectories, and a summary of all."""
    differing = found.differing
    table = Table("TRAJECTORY", "REWARD", "NOW", "DIFFERS IN", "HOW", box=None, pad_edge=False, header_style="bold")
    for each in shown:
        texts: list[Text | str] = [Text(each.trajectory_id), _number(each.old), _number(each.new)]
        for what, how in (each.changes or {"": ""}).items():
            table.add_row(*texts, Text(what, style="yellow"), Text(how, overflow="fold"))
            texts = [""] * 3
    if shown:
        console.print(table)
    left = len(set(map(id, differing)) - set(map(id, shown)))
    if left:
        console.print(f"\n{left} more that differ are not shown: --all")
    counts = Counter(what for each in differing for what in each.changes)
    summary = f": {', '.join(f'{what} {count}' for what, count in counts.most_common())}" if counts else ""
    means = " -> ".join(
        _mean([reward for reward in rewards if reward is not None])
        for rewards in ([each.old for each in found.trajectories], [each.new for each in found.trajectories])
    )
    console.print(f"\n{len(found.trajectories)} trajectories, {len(differing)} differ{summary}\nmean reward {means}")
    if found.left_out:
        console.print(f"{found.left_out} more {found.why}")


def _mean(rewards: Sequence[float]) -> str:
    return _number(sum(rewards) / len(rewards) if rewards else None)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
