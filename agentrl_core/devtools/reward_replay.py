"""``agentrl reward replay``: scores the trajectories that a run wrote again, in one process."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl_core.api.engine_client import Engines
from agentrl_core.api.errors import ConfigError, DataError, RewardError
from agentrl_core.api.reward import RewardTrajectory
from agentrl_core.config import RewardFunctionSlot, load_config
from agentrl_core.hosting.rewards import build_reward_function, check_score
from agentrl_core.plugins.resolution import resolve
from agentrl_core.runs.records import RolloutRecord, read_rollouts, reward_trajectory_of

_SAME = 1e-9
_SHOWN = 20


@dataclass(frozen=True)
class Replayed:
    """The scores of one trajectory; ``old`` is None where the run had none."""

    trajectory_id: str
    old: float | None
    new: float

    @property
    def changed(self) -> bool:
        return self.old is None or not math.isclose(self.old, self.new, rel_tol=_SAME, abs_tol=_SAME)


def replay(rollouts: Path, reward: str, config: Path | None, console: Console, show_all: bool = False) -> None:
    """Score every trajectory of a rollouts file again and print old and new scores.

    The old score is this function's, if the reward manager kept it by name, else the whole reward.

    Args:
        rollouts: ``rollouts/step-….jsonl``.
        reward: a registered name, ``package:name``, or ``./file.py:function`` relative to the working directory.
        config: a configuration with an entry of that name in ``reward.functions``, whose options are used.
        console: the console to print on.
        show_all: print every trajectory; else at most 20, and if there are more, only those whose score changed.

    Raises:
        ConfigError: ``config`` has no such function.
        DataError: no such file, or no trajectory in it can be scored.
        RewardError: the function raised or returned no finite number; the message names the trajectory.
    """
    name, function = _function(reward, config)
    packed = rollouts.with_name(rollouts.name + ".gz")
    rollouts = packed if packed.is_file() and not rollouts.exists() else rollouts
    if not rollouts.is_file():
        raise DataError(f"{rollouts}: no such file; expected rollouts/step-….jsonl of a run directory")
    done: list[Replayed] = []
    without: set[str] = set()
    for record in read_rollouts(rollouts):
        trajectory = reward_trajectory_of(record)
        if trajectory is None:
            without.add(record.trajectory_id)
            continue
        new = _score(name, function, record, trajectory)
        done.append(Replayed(record.trajectory_id, record.reward_metrics.get(name, record.reward), new))
    if not done:
        raise DataError(f"{rollouts}: holds no trajectory that a reward has seen")
    shown = done
    if not show_all and len(done) > _SHOWN:
        shown = [each for each in done if each.changed][:_SHOWN]
    _print(console, done, shown, len(without - {each.trajectory_id for each in done}))


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
    reason = "`agentrl reward replay` starts no engines"
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
            "(`agentrl --verbose reward replay …` shows where)"
        ) from error
    return check_score(f"reward function {name!r} for trajectory {record.trajectory_id}", value).score


async def _result(value: Awaitable[Any]) -> Any:
    return await value


def _print(console: Console, done: list[Replayed], shown: list[Replayed], without: int) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("TRAJECTORY", overflow="fold")
    for column in ("OLD", "NEW", ""):
        table.add_column(column, justify="right")
    for each in shown:
        mark = Text("changed", style="yellow") if each.changed else Text("")
        table.add_row(Text(each.trajectory_id), _number(each.old), _number(each.new), mark)
    if shown:
        console.print(table)
    if len(shown) < len(done):
        console.print(f"\n{len(done) - len(shown)} more are not shown: --all")
    olds = [each.old for each in done if each.old is not None]
    old_mean = _number(sum(olds) / len(olds)) if olds else "none"
    console.print(
        f"\n{len(done)} trajectories: mean {old_mean} -> {_number(sum(each.new for each in done) / len(done))}, "
        f"{sum(each.changed for each in done)} changed"
    )
    if without:
        console.print(f"{without} more were never scored in the run and are left out")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
