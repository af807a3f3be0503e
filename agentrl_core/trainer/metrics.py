"""Metrics of a step: flat names, floats, shares in 0..1, lengths in tokens, times in seconds."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import psutil
import torch

from agentrl_core.rollout.results import TrajectoryResult


class PhaseTimer:
    """Seconds by phase of the current step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of a block to ``timing/<name>``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The seconds since the last call, as metrics."""
        metrics = {f"timing/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean and extremes of some numbers; nothing where there are none."""
    if not values:
        return {}
    array = np.asarray(values, dtype=np.float64)
    return {f"{name}/mean": float(array.mean()), f"{name}/max": float(array.max()), f"{name}/min": float(array.min())}


def rollout_metrics(results: Sequence[TrajectoryResult], max_response_length: int) -> dict[str, float]:
    """What happened in a rollout: ``reward/``, ``response_length/``, ``prompt_length/``, ``rollout/``, what the agent
    loops measured under ``loop/``, and the slowest trajectory's time under ``timing/slowest_trajectory/``."""
    total = max(len(results), 1)
    trained = [result for result in results if result.termination.trained]
    rewards = [result.reward.score for result in trained if result.reward is not None]
    metrics = spread("reward", rewards)
    if rewards:
        metrics["reward/std"] = float(np.std(rewards))
    for name, values in _reward_details(trained).items():
        metrics[f"reward/{name}"] = float(np.mean(values))
    lengths = [sum(len(output.response_ids) for output in result.outputs) for result in trained]
    metrics |= spread("response_length", lengths)
    metrics |= spread("prompt_length", [len(output.prompt_ids) for r in trained for output in r.outputs[:1]])
    if lengths:
        metrics["response_length/clip_ratio"] = float(np.mean([length >= max_response_length for length in lengths]))
    for name, count in Counter(result.termination.value for result in results).items():
        metrics[f"rollout/termination/{name}"] = count / total
    metrics |= {
        "rollout/tool_call_share": sum(result.metrics.get("tool_calls", 0) > 0 for result in results) / total,
        "rollout/tool_calls_mean": sum(result.metrics.get("tool_calls", 0) for result in results) / total,
        "rollout/turns_mean": float(np.mean([r.outputs[-1].num_turns for r in trained])) if trained else 0.0,
        "rollout/failed_fraction": sum(result.failed for result in results) / total,
        "rollout/retries": float(sum(result.attempts - 1 for result in results)),
        "rollout/sampled_tokens": float(sum(result.sampled_tokens for result in results)),
    }
    for name, values in _session_counters(results).items():
        metrics[f"rollout/{name}"] = sum(values) / total
    return metrics | _loop_metrics(results) | _slowest(results)


def _reward_details(results: Sequence[TrajectoryResult]) -> dict[str, list[float]]:
    details: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for name, value in (result.reward.metrics if result.reward else {}).items():
            details[name].append(float(value))
    return details


def _session_counters(results: Sequence[TrajectoryResult]) -> dict[str, list[float]]:
    counters: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for name, value in result.metrics.items():
            if name != "tool_calls":
                counters[name].append(value)
    return counters


def _loop_metrics(results: Sequence[TrajectoryResult]) -> dict[str, float]:
    by_name: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for name in {name: None for output in result.outputs for name in output.metrics}:
            rows = [output.metrics[name] for output in result.outputs if name in output.metrics]
            by_name[name].append(float(np.mean(rows)))
    return {f"loop/{name}": float(np.mean(values)) for name, values in by_name.items()}


def _slowest(results: Sequence[TrajectoryResult]) -> dict[str, float]:
    slowest = max(results, key=lambda result: result.timings.get("total", 0.0), default=None)
    if slowest is None:
        return {}
    return {f"timing/slowest_trajectory/{name}": seconds for name, seconds in slowest.timings.items()}


def engine_metric(name: str) -> str:
    """The full name of an engine's counter: times under ``timing/``, rates under ``perf/``, the rest ``rollout/``."""
    if name.endswith("_seconds"):
        return f"timing/engine/{name.removesuffix('_seconds')}"
    return f"perf/engine/{name}" if name.endswith("_per_second") else f"rollout/engine/{name}"


def resource_metrics() -> dict[str, float]:
    """``perf/rss_gib`` of this process, and ``perf/gpu_memory_gib`` at its peak where there is a GPU."""
    metrics = {"perf/rss_gib": psutil.Process().memory_info().rss / 2**30}
    if torch.cuda.is_available():
        metrics["perf/gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return metrics


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
    solved: dict[str, list[bool]] = defaultdict(list)
    for result, is_correct in zip(group, correct, strict=True):
        solved[result.row["uid"]].append(is_correct)
    k = max(len(answers) for answers in solved.values())
    if k < 2:
        return {}
    return {f"validation/{source}/pass_at_{k}": float(np.mean([any(answers) for answers in solved.values()]))}
