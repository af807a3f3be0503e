"""Greedy and sampled answers to the validation prompts, and their metrics."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from agentrl_core.config import ResolvedConfig
from agentrl_core.data.rows import PromptBatch, Row
from agentrl_core.rollout.manager import AgentLoopManager
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.trainer.metrics import means
from agentrl_core.trainer.sample_statistics import best_at_k, group_sizes, maj_at_k, pass_at_k, standard_error


def validate(
    config: ResolvedConfig, rows: Sequence[Row], step: int, rollout: AgentLoopManager
) -> tuple[dict[str, float], list[TrajectoryResult]]:
    """Sample answers to the validation prompts ``rows`` with the weights that ``rollout`` has.

    Returns the metrics (see :func:`validation_metrics`) and all trajectories.
    """
    settings = config.trainer.validation
    rows, sampling = rows[: settings.max_prompts], asdict(settings.sampling)
    modes = {"greedy": (int(settings.greedy), {**sampling, "temperature": 0.0}), "sampled": (settings.n, sampling)}
    results: dict[str, list[TrajectoryResult]] = {}
    for mode, (n, parameters) in modes.items():
        if n and rows:
            prompts = PromptBatch.sampled(rows, step, f"validation.{mode}", n, parameters)
            results[mode] = rollout.generate_sequences(prompts)
            rollout.score_groups(results[mode])
    metrics = validation_metrics(results, settings.correct_above)
    return metrics, [result for group in results.values() for result in group]


def validation_metrics(results: Mapping[str, Sequence[TrajectoryResult]], correct_above: float) -> dict[str, float]:
    """``validation/<data source>/accuracy_greedy``, ``…/accuracy_sampled``, ``…/score_mean_<mode>``, the mean of
    each reward component as ``…/reward/<component>_<mode>``, and what :func:`_of_samples` adds for several samples per
    prompt.

    Args:
        results: by mode, ``greedy`` and ``sampled``.
        correct_above: a score above it counts as correct.

    A trajectory without a score (its infrastructure failed) counts as not correct, and in ``…/unscored``.
    """
    metrics: dict[str, float] = {}
    for mode, all_results in results.items():
        by_source: dict[str, list[TrajectoryResult]] = defaultdict(list)
        for result in all_results:
            by_source[result.row.get("data_source") or "default"].append(result)
        for source, group in by_source.items():
            prompts: dict[str, list[TrajectoryResult]] = defaultdict(list)
            for result in group:
                prompts[result.row["uid"]].append(result)
            rewards = [result.reward for result in group if result.reward]
            scores, components = [reward.score for reward in rewards], means(reward.components for reward in rewards)
            measured = {
                f"accuracy_{mode}": float(np.mean([_correct(result, correct_above) for result in group])),
                **({f"score_mean_{mode}": float(np.mean(scores))} if scores else {}),
                **{f"reward/{name}_{mode}": mean for name, mean in components.items()},
                **({f"unscored_{mode}": 1 - len(scores) / len(group)} if len(scores) < len(group) else {}),
                **(_of_samples(list(prompts.values()), correct_above) if mode == "sampled" else {}),
            }
            metrics |= {f"validation/{source}/{name}": value for name, value in measured.items()}
    return metrics


def _of_samples(prompts: Sequence[Sequence[TrajectoryResult]], correct_above: float) -> dict[str, float]:
    """``pass_at_<k>``, ``best_at_<k>`` and ``maj_at_<k>``, each with its ``…_stderr``; empty for one sample per prompt.

    A vote counts the answers that the reward reports, or else the last texts. Prompts with fewer than k scores are left
    out of ``best_at_<k>``.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for group in prompts:
        correct = [_correct(result, correct_above) for result in group]
        answers = [_answer(result) for result in group]
        scores = [result.reward.score for result in group if result.reward]
        for k in group_sizes(len(group)):
            values[f"pass_at_{k}"].append(pass_at_k(correct, k))
            values[f"maj_at_{k}"].append(maj_at_k(answers, correct, k))
            if k <= len(scores):
                values[f"best_at_{k}"].append(best_at_k(scores, k))
    means = {name: float(np.mean(by_prompt)) for name, by_prompt in values.items()}
    return means | {f"{name}_stderr": standard_error(by_prompt) for name, by_prompt in values.items()}


def _correct(result: TrajectoryResult, above: float) -> bool:
    return result.reward is not None and result.reward.score > above


def _answer(result: TrajectoryResult) -> str:
    if result.reward is not None and result.reward.answer is not None:
        return result.reward.answer
    return result.reward_input.last_text.strip() if result.reward_input is not None else ""
