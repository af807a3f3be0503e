"""Rollout and training at the same time, with scripted times: how much faster, how old is what is trained?

    OMP_NUM_THREADS=1 python benchmarks/async_sim.py [--steps 40] [--output docs/results]

`Trainer.fit` runs with all of its parts, on the local runtime. Scripted are an engine with a number of slots whose
answers take the time of their lengths, and the trainer's update, which waits. On a simulated clock, which jumps from
one timer to the next, all else takes no time: results depend on nothing but the seed. ``--clock real`` measures what
the parts themselves cost.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import rich
import transformers
from _async_parts import LONGEST, MIXES, SimulatedTime, tokens_of

from agentrl_core.config import ResolvedConfig, load_config
from agentrl_core.controller import LocalRuntime
from agentrl_core.protocol import DataProto
from agentrl_core.rollout.identity import TrajectoryKey
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.trainer import Trainer
from agentrl_core.trainer import trainer as trainer_module
from agentrl_core.trainer.pipeline import Pipeline
from agentrl_core.trainer.policies import Policy
from agentrl_testing.tiny_model import save_tiny_model

SAMPLES = 4
WARM_UP = 5
"""Steps at the start, and at the end, that are not measured: pipelines fill and drain."""
BOUNDS = ((1, 1), (2, 1), (4, 1), (4, 2), (8, 2))
PARTS = Path(__file__).with_name("_async_parts.py")
FREE = 10**6
"""A bound of staleness that binds nothing."""


@dataclass(frozen=True)
class Rule:
    """What is compared: a batch policy, and the numbers that it is given. ``staleness`` 0: one after the other."""

    name: str
    staleness: int
    depth: int

    @property
    def policy(self) -> str:
        return {"count": f"{PARTS}:FirstEnded", "drop": f"{PARTS}:FirstEnded", "order": f"{PARTS}:InOrder"}.get(
            self.name, "deadline"
        )


SYNCHRONOUS = Rule("synchronous", 0, 0)
RULES = (
    *(Rule("deadline", staleness, depth) for staleness, depth in BOUNDS),
    Rule("order", 4, 4),
    *(Rule("count", FREE, depth) for depth in (1, 2, 4)),
    *(Rule("drop", staleness, depth) for staleness, depth in BOUNDS),
)


@dataclass(frozen=True)
class Setting:
    """What all rules of a mix share.

    Args:
        batch_size: groups of a batch.
        slots: of the engine.
        token_seconds: of one token.
        update_seconds: of the trainer's update.
        is_real: on the clock of this machine.
    """

    mix: str
    batch_size: int
    steps: int
    slots: int
    token_seconds: float
    update_seconds: float
    is_real: bool = False

    @property
    def lengths(self) -> dict[str, int]:
        """Of all trajectories of the run, by their ids."""
        keys = [
            TrajectoryKey(0, "train", step, prompt, sample)
            for step in range(1, self.steps + 1)
            for prompt in range(self.batch_size)
            for sample in range(SAMPLES)
        ]
        return {key.trajectory_id: tokens_of(self.mix, key.trajectory_id) for key in keys}

    @property
    def engine_seconds(self) -> float:
        """What a batch takes at least, with all slots at work."""
        return sum(self.lengths.values()) * self.token_seconds / self.slots / self.steps


@dataclass
class Outcome:
    """A run.

    Args:
        ended: when each step began, and the last one ended, in seconds.
        ages: mean and largest of each batch, of its groups.
        token_ages: largest of the tokens of each batch, as the engine has noted their versions.
        positions: trained, in the order of training.
        lengths: trained, by trajectory.
        dropped: positions that were thrown away.
    """

    rule: Rule
    begun: list[float] = field(default_factory=list)
    ages: list[tuple[float, float]] = field(default_factory=list)
    token_ages: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """Mean of a step, those of the warm-up aside."""
        edge = WARM_UP if len(self.begun) > 4 * WARM_UP else 1
        return (self.begun[-1 - edge] - self.begun[edge]) / (len(self.begun) - 1 - 2 * edge)


class SimulatedRuntime(LocalRuntime):
    """On a simulated clock."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = SimulatedTime()


class Dropping(Pipeline):
    """The drop rule: what would be too old for the next batch is thrown away, or cancelled, and others start instead.

    No batch policy can do this: the pipeline drops nothing.
    """

    outcome: Outcome

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tasks: dict[int, asyncio.Task[Any]] = {}

    async def _run(self, groups: list[Any]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks |= {group.position: task for group in groups}
        await super()._run(groups)

    async def _new_version(self, version: int) -> None:
        for position, group in list(self._groups.items()):
            if version - group.version > self._context.max_staleness:
                self.outcome.dropped.append(position)
                self._tasks[position].cancel()
                del self._groups[position]
        await super()._new_version(version)


class ScriptedTrainer(Trainer):
    """A trainer whose updates take a scripted time, and change nothing."""

    def __init__(self, config: ResolvedConfig, setting: Setting, outcome: Outcome) -> None:
        super().__init__(config)
        self._setting = setting
        self._outcome = outcome

    def _build_rollouts(self, runtime: Any) -> Any:
        self._runtime = runtime
        built = super()._build_rollouts(runtime)
        if isinstance(built, Dropping):
            built.outcome = self._outcome
        return built

    def _compare_with_engines(self, when: str = "") -> None:
        """The engine has no model."""

    def rollout(self, step: int) -> list[TrajectoryResult]:
        self._outcome.begun.append(self._now())
        results = super().rollout(step)
        for result in results:
            if result.error is not None:
                raise RuntimeError(f"{result.trajectory_id}: {result.error}")
            _, drawn, prompt, _ = result.trajectory_id.split("-")
            position = (int(drawn) - 1) * self._setting.batch_size + int(prompt)
            if position not in self._outcome.positions[-self._setting.batch_size :]:
                self._outcome.positions.append(position)
            self._outcome.lengths[result.trajectory_id] = result.sampled_tokens
        return results

    def add_log_probs_and_values(self, policy: Policy, batch: DataProto, metrics: dict[str, float]) -> None:
        batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        oldest = int(batch.batch["policy_versions"][batch.batch["response_mask"].bool()].min())
        self._outcome.token_ages.append(self.step - oldest)

    def update(self, policy: Policy, batch: DataProto, metrics: dict[str, float]) -> None:
        # As after an update: the engine gets new weights.
        self._updates += 1
        if self._setting.is_real:
            time.sleep(self._setting.update_seconds)
        else:
            self._runtime.run(asyncio.sleep(self._setting.update_seconds))

    def finish_step(self, step: int, results: Any, batches: Any, metrics: dict[str, float]) -> None:
        super().finish_step(step, results, batches, metrics)
        if self.config.rollout.max_staleness:
            found = self.rollouts.metrics(0.0)
            self._outcome.ages.append((found["staleness/mean"], found["staleness/max"]))
        if step == self.steps:
            self._outcome.begun.append(self._now())

    def _now(self) -> float:
        async def now() -> float:
            return asyncio.get_running_loop().time()

        return time.monotonic() if self._setting.is_real else float(self._runtime.run(now()))


def run(rule: Rule, setting: Setting, directory: Path) -> Outcome:
    """Train with a rule."""
    outcome = Outcome(rule)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        config = configuration(rule, setting, directory, Path(folder))

        def start(_: ResolvedConfig) -> LocalRuntime:
            runtime = LocalRuntime() if setting.is_real else SimulatedRuntime()
            if rule.staleness:
                runtime.overlap()
            return runtime

        pipeline = Dropping if rule.name == "drop" else Pipeline
        with patch.object(trainer_module, "start_runtime", start), patch.object(trainer_module, "Pipeline", pipeline):
            ScriptedTrainer(config, setting, outcome).fit()
    return outcome


def configuration(rule: Rule, setting: Setting, model: Path, folder: Path) -> ResolvedConfig:
    """Of a run; the check that an asynchronous one has processes of its own is passed by."""
    rows = [
        {
            "data_source": "simulation",
            "prompt": [{"role": "user", "content": f"say {index}"}],
            "reward_model": {"ground_truth": str(index)},
        }
        for index in range(setting.batch_size)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text(
        "def parity(trajectory):\n    return float(len(trajectory.model_text) % 2)\n", encoding="utf-8"
    )
    engine = {"mix": setting.mix, "slots": setting.slots, "token_seconds": setting.token_seconds}
    tree = {
        "model": {"path": str(model)},
        "data": {"train_files": [str(folder / "train.jsonl")], "batch_size": setting.batch_size},
        "rollout": {
            "engine": {"name": f"{PARTS}:SlotEngine", "config": engine},
            "agent": {"loops": ["single_turn"], "max_concurrent": 10_000},
            "n": SAMPLES,
            "max_response_length": LONGEST,
            "records": "none",
            "batch_policy": {"name": rule.policy},
        },
        "reward": {"functions": [{"name": f"{folder / 'reward.py'}:parity", "isolation": "inline"}]},
        "trainer": {
            "name": "run",
            "output_dir": str(folder),
            "steps": setting.steps,
            "trackers": [],
            "checkpoint": {"interval": 0},
        },
        "cluster": {"device": "cpu", "runtime": "local"},
    }
    (folder / "config.yaml").write_text(json.dumps(tree), encoding="utf-8")
    config = load_config(folder / "config.yaml")
    config.rollout.max_staleness, config.rollout.pipeline_depth = rule.staleness, rule.depth
    return config


def checked(outcome: Outcome, setting: Setting) -> Outcome:
    """The outcome, if it kept what its rule promises; otherwise its figures mean nothing.

    Raises:
        RuntimeError: a prompt was skipped, or trained twice, with another length than it was sampled with, or too late.
    """
    rule = outcome.rule
    if rule.name != "drop":
        wanted = range(setting.steps * setting.batch_size)
        if sorted(outcome.positions) != list(wanted) or outcome.lengths != setting.lengths:
            raise RuntimeError(f"{rule}: not every trajectory that was sampled was trained exactly once")
    elif len(set(outcome.positions)) != len(outcome.positions) or set(outcome.positions) & set(outcome.dropped):
        raise RuntimeError(f"{rule}: a prompt was trained twice, or after it was dropped")
    oldest = max([*outcome.token_ages, *(most for _, most in outcome.ages)])
    if oldest > rule.staleness:
        raise RuntimeError(f"{rule}: something of age {oldest:g} was trained")
    return outcome


@dataclass(frozen=True)
class Compared:
    """The rules under one setting; ``rollout_seconds`` is a synchronous rollout, and ``alone`` a synchronous step."""

    setting: Setting
    ratio: float
    rollout_seconds: float
    alone: float
    outcomes: Sequence[Outcome]

    @property
    def possible(self) -> float:
        """The speed-up if trainer or engine never waited."""
        return self.alone / max(self.setting.update_seconds, self.setting.engine_seconds)

    def speed_up(self, outcome: Outcome) -> float:
        return self.alone / outcome.step_seconds


def compare(mix: str, ratio: float, rules: Sequence[Rule], options: argparse.Namespace, model: Path) -> Compared:
    """Run the rules where an update takes ``ratio`` times as long as the rollout of a batch."""
    token_seconds = options.token_ms / 1000
    without = Setting(mix, options.batch_size, options.steps, options.slots, token_seconds, 0.0)
    # On the simulated clock a step takes this long plus the update.
    rollout = checked(run(SYNCHRONOUS, without, model), without).step_seconds
    setting = replace(without, update_seconds=ratio * rollout)
    outcomes = [checked(run(rule, setting, model), setting) for rule in rules]
    return Compared(setting, ratio, rollout, rollout * (1 + ratio), outcomes)


def compare_for_real(mix: str, options: argparse.Namespace, model: Path) -> Compared:
    """Synchronous and S = 4, P = 1 on the clock of this machine, update and rollout as long as each other."""
    steps, seconds = options.real_steps, options.real_token_ms / 1000
    without = Setting(mix, options.batch_size, steps, options.slots, seconds, 0.0)
    rollout = run(SYNCHRONOUS, without, model).step_seconds
    setting = replace(without, update_seconds=rollout, is_real=True)
    alone, overlapping = (checked(run(rule, setting, model), setting) for rule in (SYNCHRONOUS, Rule("deadline", 4, 1)))
    return Compared(setting, 1.0, rollout, alone.step_seconds, [overlapping])


def distance(trained: Sequence[int], sampled: Sequence[int]) -> float:
    """The statistic of Kolmogorov and Smirnov: the largest distance of the two distribution functions."""
    counts = Counter(trained), Counter(sampled)
    largest, sums = 0.0, [0, 0]
    for length in sorted(counts[0] | counts[1]):
        sums = [total + count[length] for total, count in zip(sums, counts, strict=True)]
        largest = max(largest, abs(sums[0] / len(trained) - sums[1] / len(sampled)))
    return largest


HEADER = (
    "| rule | S | P | speed-up | of the possible | mean age | largest age | dropped | mean length | distance |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def rows(compared: Compared) -> list[str]:
    """The table of a setting."""
    sampled = list(compared.setting.lengths.values())
    lines = []
    for outcome in compared.outcomes:
        rule, speed = outcome.rule, compared.speed_up(outcome)
        staleness = "none" if rule.staleness == FREE else str(rule.staleness)
        trained = list(outcome.lengths.values())
        cells = [
            rule.name,
            staleness,
            str(rule.depth),
            f"{speed:.2f}",
            f"{speed / compared.possible:.0%}",
            f"{mean(each for each, _ in outcome.ages):.2f}",
            f"{max(most for _, most in outcome.ages):.0f}",
            str(len(outcome.dropped)),
            f"{mean(trained) / mean(sampled):.3f}",
            f"{distance(trained, sampled):.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [HEADER, *lines]


def goals(simulated: Sequence[Compared]) -> list[str]:
    """What the runs with the built-in policy must reach, and whether they do."""
    found = [(each, outcome) for each in simulated for outcome in each.outcomes if outcome.rule.name == "deadline"]
    whole = [each.speed_up(out) for each, out in found if each.ratio == 1 and out.rule == Rule("deadline", 4, 1)]
    slowest = min(each.speed_up(out) for each, out in found)
    lines = [f"- never below 0.98 times synchronous: the slowest has {slowest:.2f}, {_verdict(slowest >= 0.98)}"]
    if whole:
        lines.insert(
            0,
            "- update as long as the rollout, S = 4, P = 1: at least 1.90 times synchronous: "
            f"{', '.join(f'{speed:.2f}' for speed in whole)}, {_verdict(min(whole) >= 1.9)}",
        )
    return [
        *lines,
        "- age at most S, each prompt trained exactly once, with the lengths that were sampled: reached (the benchmark "
        "fails otherwise)",
    ]


def _verdict(reached: bool) -> str:
    return "reached" if reached else "**missed**"


def page(simulated: Sequence[Compared], real: Sequence[Compared], options: argparse.Namespace, shows: str) -> str:
    """The results as Markdown."""
    lines = [
        "# Rollout and training at the same time",
        "",
        f"`python benchmarks/async_sim.py --steps {options.steps} --real-steps {options.real_steps} --output "
        f"docs/results`, {date.today()}.",
        "",
        "`Trainer.fit` with manager, pipeline and batch policy on the local runtime; scripted are the engine, whose",
        f"{options.slots} slots take {options.token_ms:g} ms a token, and the update, which waits. {options.batch_size}"
        f" prompts with {SAMPLES} samples a step, {options.steps} steps;",
        f"the first and last {WARM_UP} are not measured. The clock is simulated: only what is scripted takes time.",
        "",
        "- `deadline` is the built-in batch policy; `order` trains groups in the order in which they started.",
        "- `count` limits how many groups may start, and trains whatever ended first.",
        "- `drop` does so too, and throws away what would be older than S. No batch policy can: this one changes the",
        "  pipeline. What it drops is replaced by other prompts.",
        "",
        "Age is how many versions before the weights that it updates a group began. The possible speed-up is that of",
        "a run in which the trainer, or all slots of the engine, never wait. Mean length is that of what was trained,",
        "as a share of that of all prompts of the run; distance is the Kolmogorov-Smirnov statistic of the two.",
    ]
    for each in simulated:
        setting = each.setting
        lines += [
            "",
            f"## {_TITLES[setting.mix]}; update takes {_RATIOS.get(each.ratio, f'{each.ratio:g} times')} the rollout",
            "",
            f"A synchronous step: rollout {each.rollout_seconds * 1000:.0f} ms, update "
            f"{setting.update_seconds * 1000:.0f} ms. All slots at work need {setting.engine_seconds * 1000:.0f} ms "
            f"for a batch. Possible: {each.possible:.2f} times.",
            "",
            *rows(each),
        ]
    lines += ["", "## Goals", "", *goals(simulated)]
    if real:
        lines += [
            "",
            "## On a real clock",
            "",
            f"The same parts with {options.real_token_ms:g} ms a token and {options.real_steps} steps; update and "
            "rollout take equally long. One process does all the work of",
            "trainer, agent loops and records:",
        ]
        for each in real:
            lines += [
                "",
                f"{_TITLES[each.setting.mix]}: a synchronous step takes {each.alone * 1000:.0f} ms, of which rollout "
                f"and update are scripted to {2 * each.setting.update_seconds * 1000:.0f} ms.",
                "",
                *rows(each),
            ]
    return "\n".join([*lines, "", shows.rstrip("\n")]) + "\n"


_TITLES = {
    "log-normal": "Log-normal lengths, 95th percentile 4 times the median",
    "5% at 10x": "5% of the trajectories 10 times as long as the others",
}
_RATIOS = {1.0: "as long as", 0.25: "a quarter of"}


@contextmanager
def quiet() -> Iterator[None]:
    """Without the trajectory that each run shows."""
    console = rich.get_console()
    before, console.quiet = console.quiet, True
    try:
        yield
    finally:
        console.quiet = before


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16, help="prompts of a step")
    parser.add_argument("--slots", type=int, default=32, help="requests that the engine runs at once")
    parser.add_argument("--token-ms", type=float, default=1.0, help="of one token, on the simulated clock")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=MIXES, help="distributions of lengths")
    parser.add_argument("--ratios", type=float, nargs="+", default=[1.0, 0.25], help="update, in rollouts of a batch")
    parser.add_argument("--rules", nargs="+", default=sorted({rule.name for rule in RULES}))
    parser.add_argument("--real-steps", type=int, default=25, help="on a real clock; 0: none")
    parser.add_argument("--real-token-ms", type=float, default=10.0, help="of one token, on a real clock")
    parser.add_argument("--output", type=Path, metavar="DIRECTORY", help="write async.md there; what it shows is kept")
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    chosen = [rule for rule in RULES if rule.name in options.rules]
    with tempfile.TemporaryDirectory() as directory, quiet():
        model = Path(save_tiny_model(directory))
        simulated = [compare(mix, ratio, chosen, options, model) for mix in options.mixes for ratio in options.ratios]
        real = [compare_for_real(mix, options, model) for mix in options.mixes] if options.real_steps else []
    marker, shows = "## What it shows", ""
    if options.output and (file := options.output / "async.md").exists():
        _, found, after = file.read_text(encoding="utf-8").partition(marker)
        shows = found + after
    text = page(simulated, real, options, shows or marker)
    if options.output:
        (options.output / "async.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
