"""Greedy and sampled answers to the validation prompts, and their metrics."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from agentrl_core.config import ResolvedConfig
from agentrl_core.data.rows import PromptBatch, Row
from agentrl_core.rollout.manager import AgentLoopManager
from agentrl_core.rollout.results import TrajectoryResult


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
    """``validation/<data source>/accuracy_greedy``, ``…/accuracy_sampled``, ``…/pass_at_<k>``, ``…/score_mean``.

    Args:
        results: by mode, ``greedy`` and ``sampled``; k is the number of samples per prompt.
        correct_above: a score above it counts as correct.

    A trajectory without a score (its infrastructure failed) counts as not correct, and in ``…/unscored``.
    """
    metrics: dict[str, float] = {}
    for mode, all_results in results.items():
        by_source: dict[str, list[TrajectoryResult]] = defaultdict(list)
        for result in all_results:
            by_source[result.row.get("data_source") or "default"].append(result)
        for source, group in by_source.items():
            scores = [result.reward.score if result.reward else None for result in group]
            correct = [score is not None and score > correct_above for score in scores]
            metrics[f"validation/{source}/accuracy_{mode}"] = float(np.mean(correct))
            known = [score for score in scores if score is not None]
            if known:
                metrics[f"validation/{source}/score_mean_{mode}"] = float(np.mean(known))
            if len(known) < len(scores):
                metrics[f"validation/{source}/unscored_{mode}"] = 1 - len(known) / len(scores)
            if mode == "sampled":
                metrics |= _pass_at_k(source, group, correct)
    return metrics


def _pass_at_k(source: str, group: Sequence[TrajectoryResult], correct: Sequence[bool]) -> dict[str, float]:
    """The share of prompts with a correct answer among their k; empty for one answer per prompt."""
    solved: dict[str, list[bool]] = defaultdict(list)
    for result, is_correct in zip(group, correct, strict=True):
        solved[result.row["uid"]].append(is_correct)
    k = max(len(answers) for answers in solved.values())
    if k < 2:
        return {}
    return {f"validation/{source}/pass_at_{k}": float(np.mean([any(answers) for answers in solved.values()]))}
