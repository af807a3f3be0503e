"""Trains the calculator example on rollouts of old policies, with and without corrections; writes a table and curves.

    python benchmarks/staleness.py --seeds 3 --output docs/results

Each step samples with the weights that the policy had 0, 1, 4 or 8 steps ago. A run that is complete in ``--work`` is
read, not repeated.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _runs import Job, Outcome, command_line, parsed, run_all
from matplotlib.figure import Figure

from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.trainer import Trainer

DELAYS = (0, 1, 4, 8)
LAST = 10
"""Steps at the end whose mean reward is reported."""
SETTINGS = (
    "data.batch_size=8",
    "data.validation_files=[]",
    "rollout.max_response_length=48",
    "actor.optimizer.lr=4e-4",
    "actor.optimizer.schedule=constant",
    "algorithm.old_log_probs=actor",
)
CORRECTIONS = {
    "none": (),
    "token_tis": ("algorithm.correction=token_tis",),
    "decoupled": ("algorithm.correction=token_tis", "algorithm.correction.config.max_weight=1e6"),
    "dppo": ("algorithm.loss.name=dppo",),
}
MEANING = """\
- `none`: GRPO with PPO's clip. The ratio is to the policy before the step's updates, as if that one had sampled.
- `token_tis`: the same, and each token's loss is multiplied by min(π_old/μ, 2), where μ is the policy that sampled.
- `decoupled`: decoupled PPO. The same without the bound.
- `dppo`: the loss `dppo`, whose ratio and trust region are to μ."""


class DelayedTrainer(Trainer):
    """A trainer whose rollouts come from the weights of ``delay`` steps ago.

    Only for an engine that generates with the actor's own module.
    """

    def __init__(self, config: Any, delay: int) -> None:
        super().__init__(config)
        self._versions: deque[dict[str, torch.Tensor]] = deque(maxlen=delay + 1)

    def rollout(self, step: int) -> list[TrajectoryResult]:
        module = self.roles.actor.workers[0].module  # type: ignore[attr-defined]
        newest = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        self._versions.append(newest)
        self._serve(module, self._versions[0], step - len(self._versions))
        results = super().rollout(step)
        self._serve(module, newest, step - 1)
        return results

    def _serve(self, module: torch.nn.Module, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load weights into the shared module; the update makes the engine forget what it has cached."""
        module.load_state_dict(weights)
        self.roles.engines.update_weights(self.roles.weights.newest(version))


def trainer_of(job: Job) -> Any:
    return partial(DelayedTrainer, delay=job.delay)


def job(correction: str, delay: int, seed: int, steps: int) -> Job:
    """One run. Without a delay all weights of a correction are 1, and its run is that of ``none``."""
    if not delay and correction != "dppo":
        correction = "none"
    overrides = (*SETTINGS, *CORRECTIONS[correction], f"trainer.steps={steps}")
    return Job(f"{correction}-{delay}", seed, overrides, delay=delay)


def last_reward(outcome: Outcome, steps: int) -> float:
    """Mean reward of the last steps; 0 for a run that failed before them."""
    return sum(outcome.rewards[steps - LAST :]) / LAST


def draw(path: Path, outcomes: Mapping[tuple[str, int], Sequence[Outcome]]) -> None:
    """A panel for each delay: the mean of the seeds, and a band from the lowest to the highest."""
    figure = Figure(figsize=(13, 3.6), dpi=110, layout="constrained")
    for axes, delay in zip(figure.subplots(1, len(DELAYS), sharey=True), DELAYS, strict=True):
        for number, correction in enumerate(CORRECTIONS):
            curves = [_smooth(each.rewards) for each in outcomes[correction, delay]]
            length = min(map(len, curves), default=0)
            if not length:
                continue
            stacked, steps = np.array([curve[:length] for curve in curves]), range(1, length + 1)
            axes.plot(steps, stacked.mean(0), color=f"C{number}", label=correction)
            axes.fill_between(steps, stacked.min(0), stacked.max(0), color=f"C{number}", alpha=0.12, linewidth=0)
        axes.set(title=f"{delay} step{'s' * (delay != 1)} old", xlabel="step", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("training reward")
    figure.axes[0].legend(loc="lower right", frameon=False, fontsize=8)
    figure.savefig(path)


def _smooth(values: Sequence[float], width: int = 3) -> list[float]:
    """Mean of each value and those before it."""
    return [float(np.mean(values[max(0, end - width) : end])) for end in range(1, len(values) + 1)]


def write_page(path: Path, outcomes: Mapping[tuple[str, int], Sequence[Outcome]], seeds: int, steps: int) -> None:
    """The table, with the command that makes it; what it shows is kept from the page that is there."""
    marker = "## What it shows"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    shows = before[before.index(marker) :] if marker in before else f"{marker}\n"
    header = [f"{delay} step{'s' * (delay != 1)} old" for delay in DELAYS]
    rows = []
    for correction in CORRECTIONS:
        cells = []
        for delay in DELAYS:
            values = [last_reward(run, steps) for run in outcomes[correction, delay]]
            each = ", ".join(f"{value:.2f}" for value in values)
            cells.append(f"**{np.mean(values):.2f}** ({each})" if values else "not run")
        rows.append(f"| `{correction}` | {' | '.join(cells)} |")
    lines = [
        "# Stale rollouts",
        "",
        f"`python benchmarks/staleness.py --seeds {seeds} --steps {steps} --output docs/results`, {date.today()}.",
        "",
        "The calculator example, sampled in each step with the weights that the policy had so many steps ago. Engine",
        "and trainer have the same probabilities, so the delay is all that differs. 8 prompts with 8 samples and 2",
        "updates per step, a constant learning rate of 4e-4.",
        "",
        f"Mean training reward of the last {LAST} of {steps} steps: **mean of the seeds** (each seed). Before training",
        "it is about 0.2.",
        "",
        f"| correction | {' | '.join(header)} |",
        "|---" * (len(DELAYS) + 1) + "|",
        *rows,
        "",
        "![Training reward, mean of the seeds and their range, over 3 steps](staleness.png)",
        "",
        MEANING,
        "",
        "Without a delay the weights of `token_tis` and `decoupled` are 1. Their numbers are those of `none`.",
        "",
        shows.rstrip("\n"),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(command_line("staleness", __doc__, seeds=3, steps=40), arguments)
    cells = {
        (correction, delay): [job(correction, delay, seed, options.steps) for seed in range(options.seeds)]
        for delay in DELAYS
        for correction in CORRECTIONS
    }
    # The ends of the scale first: an interrupted grid has something to compare.
    order = {delay: place for place, delay in enumerate((DELAYS[-1], DELAYS[0], *DELAYS[-2:0:-1]))}
    jobs = list(dict.fromkeys(each for runs in cells.values() for each in runs))
    jobs.sort(key=lambda each: (order[each.delay], each.seed))
    found = run_all(jobs, options.work, options.processes, trainer_of)
    outcomes = {cell: [found[each] for each in runs if each in found] for cell, runs in cells.items()}
    draw(options.output / "staleness.png", outcomes)
    write_page(options.output / "staleness.md", outcomes, options.seeds, options.steps)


if __name__ == "__main__":
    main()
