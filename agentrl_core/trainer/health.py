"""Signs that a run has stopped learning: one warning each, once it has lasted for some steps.

A check reads the metrics of a step, and the core computes these from rewards, masks, advantages and optimizer steps. So
it holds for every estimator, loss and agent loop. ``docs/troubleshooting.md`` has a section for each check.
"""

import logging
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from agentrl_core.config import ResolvedConfig

logger = logging.getLogger(__name__)
Metrics = Mapping[str, float]
Need = Literal["sampled tokens", "advantages", "rewards", "tools"]
NO_ENTROPY = 1e-3
"""Nats per token: a policy below it takes its likeliest token in all but one of about ten thousand."""
MOST = 0.95
_SHOW = "agentrl rollouts show {run} --step {step} -n 3"
_VIEW = "agentrl view {run}"


@dataclass(frozen=True)
class Check:
    """A sign that learning has stopped.

    Args:
        name: in records and documentation.
        metrics: what ``applies`` reads; a step without one of them neither continues nor ends a streak.
        applies: whether a step has the sign.
        finding: what was the case, for ``in steps 1 to 10 …``.
        causes: the usual ones.
        command: shows the sign, with ``{run}``, ``{step}`` and ``{model}``.
        needs: the sign means nothing in a run without these.
        explained_by: checks that say more; while one of them lasts, this one is silent.
        untrained: nothing is trained meanwhile; a run that ends so is warned of however short it was.
    """

    name: str
    metrics: tuple[str, ...]
    applies: Callable[[Metrics], bool]
    finding: str
    causes: tuple[str, ...]
    command: str
    needs: tuple[Need, ...] = ()
    explained_by: tuple[str, ...] = ()
    untrained: bool = False


CHECKS = (
    Check(
        "equal_samples",
        ("rollout/identical_groups_share",),
        lambda step: step["rollout/identical_groups_share"] == 1,
        "all samples of each prompt were the same, token for token",
        (
            "rollout.sampling is greedy: temperature 0 or top_k 1",
            "the policy has collapsed onto one answer for each prompt",
            "the agent loop does not pass its sampling parameters on",
        ),
        _SHOW,
        needs=("sampled tokens", "advantages"),
    ),
    Check(
        "constant_reward",
        ("reward/max", "reward/min"),
        lambda step: step["reward/max"] == step["reward/min"],
        "all trajectories of a step had the same reward",
        (
            "the reward function never finds the answer, or reads the wrong field",
            "the task is far too hard, or solved",
            "responses are cut before the part that is scored",
        ),
        _SHOW,
        needs=("advantages", "rewards"),
    ),
    Check(
        "no_signal",
        ("advantage/groups_without_signal",),
        lambda step: step["advantage/groups_without_signal"] == 1,
        "no prompt had a sample with an advantage, so nothing was learned",
        (
            "all samples of a prompt have the same reward: the task is too easy, too hard or solved",
            "rollout.n is too small to see a difference",
            "the advantage estimator returns zeros",
        ),
        _SHOW,
        needs=("advantages",),
        explained_by=("equal_samples", "constant_reward"),
        untrained=True,
    ),
    Check(
        "skipped_steps",
        ("actor/skipped_steps",),
        lambda step: step["actor/skipped_steps"] > 0 and not 0 < step.get("actor/grad_norm", 0.0) < float("inf"),
        "all optimizer steps were skipped, because their gradients were not finite",
        (
            "rewards or advantages are far too large",
            "the learning rate is so high that the weights have grown out of range",
            "model.dtype is float16, which overflows",
        ),
        _VIEW,
        untrained=True,
    ),
    Check(
        "zero_gradient",
        ("actor/grad_norm", "actor/skipped_steps"),
        lambda step: step["actor/grad_norm"] == 0 and step["actor/skipped_steps"] == 0,
        "the gradient was 0 although there were rows to train",
        (
            "the policy loss clips or masks every token",
            "algorithm.correction rejects every token",
            "the policy loss does not depend on the log-probs",
        ),
        _VIEW,
        explained_by=("equal_samples", "constant_reward", "no_signal"),
        untrained=True,
    ),
    Check(
        "no_entropy",
        ("actor/entropy",),
        lambda step: step["actor/entropy"] < NO_ENTROPY,
        f"the entropy of the policy was below {NO_ENTROPY:g} nats per token, so it explores no more",
        (
            "the learning rate is too high, or the run too long for its few prompts",
            "nothing holds the policy back: no KL term and no entropy bonus",
            "the task is solved",
        ),
        _VIEW,
        needs=("sampled tokens", "advantages"),
    ),
    Check(
        "length_limit",
        ("response_length/clip_ratio",),
        lambda step: step["response_length/clip_ratio"] >= MOST,
        f"at least {MOST:.0%} of the trajectories reached rollout.max_response_length",
        (
            "rollout.max_response_length is too small for the task",
            "the model does not end its turns: a base model, or a chat template with another stop token",
            "the reward pays for length",
        ),
        _SHOW,
        needs=("sampled tokens",),
    ),
    Check(
        "parse_errors",
        ("rollout/parse_errors", "rollout/tool_calls_mean"),
        lambda step: step["rollout/parse_errors"] * (1 - MOST) > step["rollout/tool_calls_mean"] * MOST,
        f"more than {MOST:.0%} of the tool calls could not be parsed",
        (
            "rollout.tool_parser reads another format than the model writes",
            "turns are cut in the middle of a call: rollout.sampling.max_tokens is too small",
            "the model is too weak to write valid JSON",
        ),
        "agentrl doctor --model {model}",
        needs=("sampled tokens",),
    ),
    Check(
        "no_tool_calls",
        ("rollout/tool_calls_mean",),
        lambda step: step["rollout/tool_calls_mean"] == 0,
        "no trajectory called a tool",
        (
            "rollout.tool_parser reads another format than the model writes",
            "the chat template does not show the tools: `agentrl doctor --model {model}`",
            "the model can do without tools, and nothing asks for them",
        ),
        _SHOW,
        needs=("sampled tokens", "tools"),
        explained_by=("parse_errors",),
    ),
)


@dataclass
class Streak:
    """Steps in a row that have a sign.

    Args:
        check: its name.
        first, last: the first step and, so far, the last.
        steps: how many, without those that could not tell.
        warned: whether the run has warned of it.
        over: a later step does not have the sign.
        policy: that has it, of several.
    """

    check: str
    first: int
    last: int
    steps: int = 0
    warned: bool = False
    over: bool = False
    policy: str = ""


class Health:
    """Watches the steps of a run.

    Args:
        config: of the run; ``trainer.warn_after`` says how long a streak must be.
        run: its directory, for messages.
        reads_advantages: whether the policy loss does; a sign without a meaning for other losses is not looked for.
    """

    def __init__(self, config: ResolvedConfig, run: Path, reads_advantages: bool) -> None:
        has: dict[Need, bool] = {
            "advantages": reads_advantages,
            # A teacher's advantages do not come from the reward, and a single reward is always constant.
            "rewards": not config.algorithm.advantage.has("teacher_log_probs")
            and config.data.batch_size * config.rollout.n > 1,
            "tools": bool(config.tools),
        }
        self._checks = [check for check in CHECKS if all(has.get(need, True) for need in check.needs)]
        self._warn_after = config.trainer.warn_after
        self._run, self._model = shlex.quote(str(run)), shlex.quote(config.model.path)
        self.streaks: list[Streak] = []
        """Those that were warned of, and those that last. Checkpoints keep them."""

    def note(self, step: int, metrics: Metrics, last: bool = False) -> None:
        """Look at a finished step, and warn of each streak that has become long enough.

        Args:
            last: the run ends with this step.
        """
        if not self._warn_after:
            return
        open_ones = {(streak.policy, streak.check): streak for streak in self.streaks if not streak.over}
        # The loop of a demonstration samples nothing.
        samples = metrics.get("timing/trajectory/generate/max", 0.0) > 0
        seen = [
            (policy, own, check)
            for policy, own in _by_policy(metrics).items()
            for check in self._checks
            if own.keys() >= set(check.metrics) and ("sampled tokens" not in check.needs or samples)
        ]
        for policy, own, check in seen:
            streak = open_ones.get((policy, check.name))
            if check.applies(own):
                if streak is None:
                    streak = open_ones[policy, check.name] = Streak(check.name, step, step, policy=policy)
                    self.streaks.append(streak)
                streak.last, streak.steps = step, streak.steps + 1
            elif streak is not None:
                streak.over = True
                del open_ones[policy, check.name]
        self.streaks = [streak for streak in self.streaks if streak.warned or not streak.over]
        long = {key for key, streak in open_ones.items() if streak.steps >= self._warn_after}
        for check in self._checks:
            for (policy, name), streak in open_ones.items():
                explained = any((each, other) in long for each in ("", policy) for other in check.explained_by)
                if name != check.name or streak.warned or explained:
                    continue
                if (policy, name) in long or (last and check.untrained and streak.first == 1):
                    streak.warned = True
                    logger.warning("%s", self._message(check, streak))

    def _message(self, check: Check, streak: Streak) -> str:
        steps = f"steps {streak.first} to {streak.last}" if streak.first < streak.last else f"step {streak.first}"
        whose = f"policy {streak.policy!r}, " if streak.policy else ""
        text = f"{check.name}: {whose}in {steps} {check.finding}. Usual causes: {'; '.join(check.causes)}. To see it: "
        return (text + f"`{check.command}`").format(run=self._run, step=streak.last, model=self._model)

    @property
    def warnings(self) -> list[dict[str, Any]]:
        """What the run has warned of, in order, with the steps up to now, for people and for ``state.json``."""
        checks = {check.name: check for check in CHECKS}
        return [
            asdict(streak) | {"message": self._message(checks[streak.check], streak)}
            for streak in self.streaks
            if streak.warned and streak.check in checks
        ]


def _by_policy(metrics: Metrics) -> dict[str, dict[str, float]]:
    """The metrics of the run under the name "", and those of each of several policies by the names of a single one."""
    found: dict[str, dict[str, float]] = {"": dict(metrics)}
    for name, value in metrics.items():
        if name.startswith("policy/"):
            _, policy, own = name.split("/", 2)
            found.setdefault(policy, {})[own] = value
    return found
