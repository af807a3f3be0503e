"""Sampling parameters that a row brings, ``extra_info.sampling``, over those of the run."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_core.api import DataError
from agentrl_core.api.config import option
from agentrl_core.api.dataset import Split
from agentrl_core.api.engine import RESHAPING
from agentrl_core.config.nodes import Origin, from_plain
from agentrl_core.config.schema import SamplingConfig
from agentrl_core.config.validation import Walker
from agentrl_core.engine_kit.requests import sampling_problem
from agentrl_core.plugins.resolution import resolve

KEY = "sampling"
_ALWAYS = ("max_tokens", "stop", "seed", "top_p", "top_k", "min_p")
_VALIDATION = ("temperature", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""The trainer computes log-probs at the run's values of these, so only rows that are not trained may have their own."""


@dataclass
class _RowSampling(SamplingConfig):
    seed: int | None = option(None, ge=0, help="in place of the run's seed, step and prompt")


def check_row_sampling(
    extra: Mapping[str, Any], where: str, split: Split, run: SamplingConfig, capabilities: Collection[str]
) -> None:
    """Check the sampling parameters of a row, if it has any.

    Args:
        extra: ``extra_info`` of the row.
        where: names the row.
        run: what the row's parameters replace.
        capabilities: of the engine.

    Raises:
        DataError: no mapping, an unknown name, a wrong value, or one that the engine or the trainer cannot serve.
    """
    if not (given := extra.get(KEY)):
        return
    key = f"{where}: extra_info.{KEY}"
    allowed = [*_ALWAYS, *(_VALIDATION if split == "validation" else ())]
    allowed = [name for name in allowed if name not in RESHAPING or name in capabilities]
    if not isinstance(given, Mapping):
        raise DataError(f"{key} is {given!r:.100}; allowed is a mapping with {', '.join(allowed)}")
    if unknown := [str(name) for name in given if name not in allowed]:
        why = "" if split == "validation" else f"; validation rows may also have {', '.join(_VALIDATION)}"
        raise DataError(f"{key} has {', '.join(unknown)}; allowed with this engine: {', '.join(allowed)}{why}")
    walker = Walker(resolve, ())
    walker.section(_RowSampling, from_plain(dict(given), Origin(where, Path())), ("extra_info", KEY))
    if walker.problems:
        raise DataError("; ".join(walker.problems))
    if "" in given.get("stop", ()):
        raise DataError(f"{key}.stop: expected texts of at least one character, found an empty one; remove it")
    params = _RowSampling(**{**vars(run), **given}).params()
    if problem := sampling_problem(params):
        raise DataError(f"{key}: {problem}")
    if "chained_truncation" in params.capabilities.difference(capabilities):
        raise DataError(
            f"{key}: with the run's parameters the row has top_p={params.top_p}, top_k={params.top_k} and "
            f"min_p={params.min_p}; this engine takes top_p of the whole distribution (it lacks the capability "
            "'chained_truncation'), so set top_p to 1, or top_k and min_p to 0"
        )


def with_row_sampling(sampling: Mapping[str, Any], extra: Mapping[str, Any], *, greedy: bool) -> dict[str, Any]:
    """The run's sampling parameters, replaced by those of the row; a greedy pass stays greedy."""
    own = dict(extra.get(KEY) or {})
    return {**sampling, **own, "temperature": 0.0} if greedy else {**sampling, **own}
