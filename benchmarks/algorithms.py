"""Trains the calculator example with every estimator, every loss and every correction; writes a table and curves.

    python benchmarks/algorithms.py --seeds 3 --output docs/results

A method is a kind and a name, such as ``loss-gspo``. Estimators run with the loss ppo, losses and corrections with the
estimator grpo. A run that is complete in ``--work`` is read, not repeated: start the command again after an
interruption.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path

import numpy as np
from _runs import Job, Outcome, command_line, parsed, run_all
from matplotlib.figure import Figure

from agentrl_algorithms import plugin as plugins
from agentrl_core.api import PluginSpec

LEARNED = 0.85
KEYS = {"advantage_estimator": "advantage", "policy_loss": "loss", "rollout_correction": "correction"}
LABELS = {"advantage": "estimator"}
PER_ROW = "algorithm.aggregation=seq-mean-token-mean"
TEACHER, STUDENT = "estimator-grpo", "estimator-on_policy_distillation"
SETTINGS = {
    "loss-gspo": [PER_ROW],
    "loss-gmpo": [PER_ROW],
    "loss-sapo": [PER_ROW],
    "loss-dro": [PER_ROW, "algorithm.loss.config.tau=0.25"],
    "loss-sft": ["algorithm.loss.config.tokens=positive"],
}
"""What the page on algorithms says about a method; ``sft`` on all tokens does not see the reward."""
REASONS = {
    "estimator-grpo_passk": "`estimator-grpo_passk` optimises pass@8. A second right sample of a problem adds nothing "
    "to it, so accuracy stays behind.",
}
"""Why a method stays below LEARNED, where that is what it should do."""


def methods() -> Iterator[tuple[str, list[str]]]:
    """Each method with its overrides."""
    for spec in vars(plugins).values():
        if isinstance(spec, PluginSpec):
            if spec is plugins.PPO:  # the run of the estimator grpo
                continue
            key = KEYS[spec.kind]
            method = f"{LABELS.get(key, key)}-{spec.name}"
            yield method, [f"algorithm.{key}.name={spec.name}", *SETTINGS.get(method, [])]


METHODS = dict(methods())


def job(method: str, seed: int, steps: int) -> Job:
    """The run of one method and seed."""
    critic = method.endswith("gae")
    return Job(
        method,
        seed,
        (*METHODS[method], f"trainer.steps={steps}", f"data.batch_size={32 if critic else 16}"),
        config="ppo.yaml" if critic else "config.yaml",
        teacher=TEACHER if method == STUDENT else None,
    )


def draw(path: Path, outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    """The training reward over the steps: a panel for each kind, the mean of the seeds."""
    kinds = ("estimator", "loss", "correction")
    figure = Figure(figsize=(13, 5.5), dpi=110, layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), sharey=True), kinds, strict=True):
        chosen = [method for method in outcomes if method.startswith(kind)]
        for number, method in enumerate(chosen):
            curves = [each.rewards for each in outcomes[method]]
            length = min(map(len, curves))
            mean = np.mean([curve[:length] for curve in curves], axis=0)
            label = method.removeprefix(f"{kind}-")
            axes.plot(range(1, length + 1), mean, ("-", "--")[number // 10], color=f"C{number % 10}", label=label)
        axes.set(xlabel="step", title={"loss": "losses"}.get(kind, f"{kind}s"), ylim=(0, 1))
        axes.grid(alpha=0.3)
        if chosen:
            axes.legend(loc="lower right", frameon=False, fontsize=7)
    figure.axes[0].set_ylabel("training reward, mean of the seeds")
    figure.savefig(path)


def write_page(path: Path, outcomes: Mapping[str, Sequence[Outcome]], seeds: int, steps: int) -> None:
    """The table, with the command that makes it."""
    left_out = [method for method in METHODS if method not in outcomes]
    chosen = f" --methods {' '.join(outcomes)}" if left_out else ""
    lines = [
        "# Algorithms on the calculator example",
        "",
        f"`python benchmarks/algorithms.py --seeds {seeds} --steps {steps}{chosen} --output docs/results`, "
        f"{date.today()}.",
        "",
        "Accuracy is that of eight sampled answers to each of 50 unseen problems after the last step, about 0.2",
        "before training; pass@8 is the share of problems with a correct one among the eight. A seed makes its own",
        "model and data. A step has 128 trajectories: 16 prompts with 8 samples, or 32 with 4 for estimators with a",
        f"critic. A method has learned if every seed that was run reaches {LEARNED}. The task is easy: the table",
        "shows which methods learn, not which is best.",
        "",
        "![Training reward](algorithms.png)",
        "",
        f"| method | {' | '.join(f'seed {seed}' for seed in range(seeds))} | mean pass@8 | learned | seconds per run |",
        "|---" * (seeds + 4) + "|",
    ]
    for method, runs in outcomes.items():
        shown = {each.job["seed"]: "failed" if each.failure else f"{each.accuracy:.3f}" for each in runs}
        accuracies = " | ".join(shown.get(seed, "not run") for seed in range(seeds))
        verdict = "yes" if all(each.accuracy >= LEARNED for each in runs) else "no"
        pass_at_8, seconds = (
            sum(map(of, runs)) / len(runs) for of in (lambda run: run.pass_at_8, lambda run: run.seconds)
        )
        lines.append(f"| `{method}` | {accuracies} | {pass_at_8:.3f} | {verdict} | {seconds:.0f} |")
    lines += [
        "",
        "- `loss-sft` trains on tokens with a positive advantage only. On all tokens it does not see the reward.",
        "- `estimator-on_policy_distillation` learns from the last policy of `estimator-grpo` with the same seed.",
        "- `gae` and `turn_gae` train a critic from nothing, with `ppo.yaml`.",
        "- Engine and trainer have the same probabilities here, so corrections should change nothing.",
        "  [Staleness](staleness.md) has runs in which they do.",
        "- Seconds depend on what else the machine did. Do not compare methods by them.",
    ]
    for method, runs in outcomes.items():
        if method in REASONS and min(each.accuracy for each in runs) < LEARNED:
            lines.append(f"- {REASONS[method]}")
    if left_out:
        lines += ["", f"Not measured: {', '.join(f'`{method}`' for method in left_out)}."]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("algorithms", __doc__, seeds=1, steps=12)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    options = parsed(parser, arguments)
    chosen = {method: [job(method, seed, options.steps) for seed in range(options.seeds)] for method in options.methods}
    # All methods with a seed, then the next seed: an interrupted run has every method.
    jobs = sorted((each for runs in chosen.values() for each in runs), key=lambda each: each.seed)
    found = run_all(jobs, options.work, options.processes)
    outcomes = {
        method: finished
        for method, runs in chosen.items()
        if (finished := [found[job] for job in runs if job in found])
    }
    draw(options.output / "algorithms.png", outcomes)
    write_page(options.output / "algorithms.md", outcomes, options.seeds, options.steps)


if __name__ == "__main__":
    main()
