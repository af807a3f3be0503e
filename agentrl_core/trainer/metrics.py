"""Metrics of a step: flat names, floats, shares in 0..1, lengths in tokens, times in seconds.

``docs/metrics.md`` lists them with the names that verl and TRL use. Legend: B rows, R response tokens.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import torch

from agentrl_core.api.agent_loop import Status
from agentrl_core.api.tree import packed_ids
from agentrl_core.protocol import DataProto
from agentrl_core.protocol.ragged import on_values, under
from agentrl_core.protocol.rows import counts
from agentrl_core.rollout.results import TrajectoryResult

_BY_TOKEN = ("advantages", "returns", "values")
SMALLEST_ADVANTAGE = 1e-6


class PhaseTimer:
    """Measures the seconds of each phase of the current step, and calls ``begins`` with the name of each.

    ``spans`` has when each phase was since it was last cleared: name, start as Unix time, seconds.
    """

    def __init__(self, begins: Callable[[str], None] = lambda _: None) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._begins = begins
        self.spans: list[tuple[str, float, float]] = []

    @contextmanager
    def phase(self, name: str, shown: bool = True) -> Iterator[None]:
        """Add the seconds of a block to ``timing/<name>``; ``shown``: it begins a phase, and is not within one."""
        if shown:
            self._begins(name)
        begun, start = time.time(), time.perf_counter()
        try:
            # A profile shows the phase.
            with torch.profiler.record_function(name):
                yield
        finally:
            seconds = time.perf_counter() - start
            self._seconds[name] += seconds
            self.spans.append((name, round(begun, 4), round(seconds, 5)))

    def seconds(self, name: str) -> float:
        """Return the seconds of one phase since the last :meth:`take`."""
        return self._seconds[name]

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, as metrics."""
        metrics = {f"timing/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics


def spread(name: str, values: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float]:
    """Mean, maximum and minimum of some numbers; empty without numbers."""
    if not len(values):
        return {}
    array = np.asarray(values, dtype=np.float64)
    return {f"{name}/mean": float(array.mean()), f"{name}/max": float(array.max()), f"{name}/min": float(array.min())}


def batch_metrics(batch: DataProto) -> dict[str, float]:
    """Mean, maximum, minimum and standard deviation over the sampled tokens of a batch.

    ``critic/advantages/``, ``critic/returns/`` and, with a critic, ``critic/values/``. The standard deviation is that
    of all tokens, not an estimate from a sample (divisor N).

    Args:
        batch: with ``response_mask`` and some of ``advantages``, ``returns`` and ``values``, all [B, R].
    """
    metrics: dict[str, float] = {}
    for name in _BY_TOKEN:
        if name in batch.batch.keys():
            values = under(batch.batch["response_mask"], batch.batch[name], dtype=torch.float64)[0].numpy()
            metrics |= spread(f"critic/{name}", values)
            if len(values):
                # In place: what std() copies is the largest array of the step.
                values -= values.mean()
                values *= values
                metrics[f"critic/{name}/std"] = float(np.sqrt(values.mean()))
            # Before the next one is made.
            del values
    return metrics


def signal_metrics(*batches: DataProto) -> dict[str, float]:
    """``advantage/groups_without_signal``: share of prompts none of whose samples has an advantage; 1 without rows.

    Args:
        batches: with ``response_mask`` and ``advantages`` [B, R], and ``uid``.
    """
    signals: dict[object, bool] = {}
    for batch in batches:
        if not len(batch):
            continue
        mask_BR = batch.batch["response_mask"]

        # A mean of equal rewards can differ from them by its rounding error, which is no advantage.
        def moves(mask: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
            return mask.bool() & (advantages.abs() > SMALLEST_ADVANTAGE)

        moved_B = counts(on_values(moves, mask_BR, batch.batch["advantages"])) > 0
        for row in counts(mask_BR).nonzero().squeeze(-1).tolist():
            uid = batch.non_tensor_batch["uid"][row]
            signals[uid] = signals.get(uid, False) or bool(moved_B[row])
    return {"advantage/groups_without_signal": 1 - sum(signals.values()) / max(len(signals), 1)}


def throughput(batch: DataProto, seconds: float, devices: int) -> dict[str, float]:
    """``perf/total_num_tokens``, prompts and responses of a batch, and ``perf/throughput``, per second and device.

    Args:
        batch: with ``attention_mask`` [B, P+R].
        seconds: of the step.
        devices: of training processes and engines together.
    """
    tokens = float(counts(batch.batch["attention_mask"]).sum())
    return {"perf/total_num_tokens": tokens, "perf/throughput": tokens / seconds / devices}


def source_metrics(results: Sequence[TrajectoryResult], correct_above: float) -> dict[str, float]:
    """``train/<data source>/accuracy`` and ``…/score_mean`` over the scored trajectories that are trained.

    Args:
        correct_above: a score above it counts as correct.
    """
    by_source: dict[str, list[float]] = defaultdict(list)
    for result in results:
        if result.status.counts and result.reward is not None:
            by_source[result.row.get("data_source") or "default"].append(result.reward.score)
    metrics: dict[str, float] = {}
    for source, scores in by_source.items():
        metrics[f"train/{source}/accuracy"] = float(np.mean([score > correct_above for score in scores]))
        metrics[f"train/{source}/score_mean"] = float(np.mean(scores))
    return metrics


def rollout_metrics(results: Sequence[TrajectoryResult], max_response_length: int) -> dict[str, float]:
    """Metrics of a rollout: ``reward/``, ``response_length/``, ``prompt_length/``, ``rollout/``, what the agent
    loops measured under ``loop/``, seconds by kind over all trajectories under ``timing/trajectory/``, and those of
    the slowest one under ``timing/slowest_trajectory/``."""
    whole = [result for result in results if not result.other_agent]
    total = max(len(whole), 1)
    trained = [result for result in results if result.status.counts]
    rewards = [result.reward.score for result in trained if result.reward is not None]
    metrics = spread("reward", rewards) | _by_agent(results)
    if rewards:
        metrics["reward/std"] = float(np.std(rewards))
    details = means({**r.reward.components, **r.reward.metrics} for r in trained if r.reward is not None)
    metrics |= {f"reward/{name}": mean for name, mean in details.items()}
    lengths = [length for result in trained for length in result.path_lengths]
    metrics |= spread("response_length", lengths)
    prompts = [r.outputs[0].tokens.prompt for r in trained if r.outputs]
    metrics |= spread("prompt_length", [sum(len(node.ids) for node in nodes) for nodes in prompts])
    if lengths:
        metrics["response_length/clip_ratio"] = float(np.mean([length >= max_response_length for length in lengths]))
    for name, count in Counter(result.termination.value for result in whole).items():
        metrics[f"rollout/termination/{name}"] = count / total
    metrics |= {
        "rollout/tool_call_share": sum(result.metrics.get("tool_calls", 0) > 0 for result in whole) / total,
        "rollout/tool_calls_mean": sum(result.metrics.get("tool_calls", 0) for result in whole) / total,
        "rollout/turns_mean": float(np.mean([r.outputs[-1].num_turns for r in trained])) if trained else 0.0,
        "rollout/failed_fraction": sum(result.status is Status.FAILED for result in whole) / total,
        "rollout/retries": float(sum(result.attempts - 1 for result in whole)),
        "rollout/sampled_tokens": float(sum(result.sampled_tokens for result in results)),
    }
    if replaced := sum(result.status is Status.REPLACED for result in results):
        metrics["rollout/replaced_share"] = replaced / len(results)
    groups: dict[object, list[list[bytes]]] = defaultdict(list)
    for result in trained:
        groups[result.row["uid"]].append([packed_ids(output.tokens.response) for output in result.outputs])
    if several := [samples for samples in groups.values() if len(samples) > 1]:
        identical = [all(sample == samples[0] for sample in samples) for samples in several]
        metrics["rollout/identical_groups_share"] = float(np.mean(identical))
    counters = _by_name(result.metrics for result in whole)
    metrics |= {f"rollout/{name}": sum(values) / total for name, values in counters.items() if name != "tool_calls"}
    by_loops = means(means(output.metrics for output in result.outputs) for result in results)
    metrics |= {f"loop/{name}": mean for name, mean in by_loops.items()}
    for kind in dict.fromkeys(kind for result in whole for kind in result.timings):
        metrics |= spread(f"timing/trajectory/{kind}", [result.timings.get(kind, 0.0) for result in whole])
    slowest = max(whole, key=lambda result: result.timings.get("total", 0.0), default=None)
    timings = slowest.timings if slowest is not None else {}
    return metrics | {f"timing/slowest_trajectory/{name}": seconds for name, seconds in timings.items()}


def _by_agent(results: Sequence[TrajectoryResult]) -> dict[str, float]:
    """``reward/agent/<name>`` and ``reward/policy/<name>``: the mean reward of each agent, and of all agents of each of
    several policies, also of those that are not trained."""
    scores: dict[str, list[float]] = defaultdict(list)
    for result in results:
        if result.termination.status.counts and result.reward is not None and result.outputs:
            if result.outputs[0].agent:
                scores[f"agent/{result.outputs[0].agent}"].append(result.reward.score)
            if result.policy:
                scores[f"policy/{result.policy}"].append(result.reward.score)
    return {f"reward/{name}": float(np.mean(values)) for name, values in scores.items()}


def _by_name(metrics: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """The values of each name, over all mappings that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for each in metrics:
        for name, value in each.items():
            values[name].append(float(value))
    return values


def means(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the mappings that have it."""
    return {name: float(np.mean(values)) for name, values in _by_name(metrics).items()}


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
