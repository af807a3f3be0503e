"""Difference between the engine's and the actor's log-probs: the number that reveals most engine faults.

Legend: B rows, R response tokens, N sampled ones of all rows.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from agentrl_core.api import (
    EngineContext,
    EngineError,
    SamplingParams,
    Termination,
    TokenOutput,
    WorkerError,
)
from agentrl_core.api.tree import Node, Tree, TreePath
from agentrl_core.config.schema import ResolvedConfig
from agentrl_core.protocol import DataProto
from agentrl_core.protocol.ragged import on_values, under
from agentrl_core.protocol.rows import counts
from agentrl_core.rollout.batching import to_data_proto
from agentrl_core.rollout.loop_output import TreeRow
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.serving.replicas import EngineReplicas
from agentrl_core.workers.devices import compute_dtype
from agentrl_core.workers.protocols import Actor
from agentrl_core.workers.update import temperature_of

logger = logging.getLogger(__name__)
GAP = "rollout/logprob_gap"
PROBS_DIFF = "rollout/probs_diff"
PROBE_TOKENS = 64
MOST_TURNS = 16
"""Turns with their own metrics."""
EXPLAINED_GAP = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.1}
"""The largest mean that each data type explains, with room: TF32 on GPUs, and routing in models of experts."""
CAUSES = (
    "an update did not reach all of it, such as tied embeddings or experts",
    "it kept a prefix cache of the old weights",
    "its log-probs are before temperature, or after top-p and top-k",
    "another dtype or attention (rollout.engine.dtype, the engine's options)",
    "another model (model.path, config.json, chat template)",
)


def logprob_gap(batch: DataProto, log_probs_BR: torch.Tensor, version: int | None = None) -> dict[str, float]:
    """Mean and largest |engine - actor| over tokens with mask 1, and the same for each turn, counted from 1.

    Also mean, maximum and standard deviation (divisor N) of |exp(engine) - exp(actor)|, the difference of
    probabilities, which a few unlikely tokens cannot dominate.

    Args:
        batch: with ``rollout_log_probs``, ``response_mask`` and ``turn_ids``, all [B, R].
        log_probs_BR: of the actor.
        version: of the actor's weights, where rows may be older: only rows that it sampled from end to end count.
    """
    columns = [batch.batch[name] for name in ("response_mask", "rollout_log_probs", "turn_ids")] + [log_probs_BR]
    if version is not None:
        older_B = counts(
            on_values(
                lambda mask, versions: mask.bool() & (versions != version), columns[0], batch.batch["policy_versions"]
            )
        )
        columns = [column_BR[(older_B == 0).nonzero().squeeze(-1)] for column_BR in columns]
    engine_N, turn_N, actor_N = under(*columns)
    if not len(engine_N):
        return {}
    gap_N = (engine_N - actor_N).abs()
    metrics = {f"{GAP}_mean": float(gap_N.mean()), f"{GAP}_max": float(gap_N.max())}
    probs_diff_N = (engine_N.exp() - actor_N.exp()).abs()
    metrics |= {f"{PROBS_DIFF}_mean": float(probs_diff_N.mean()), f"{PROBS_DIFF}_max": float(probs_diff_N.max())}
    metrics[f"{PROBS_DIFF}_std"] = float(probs_diff_N.std(correction=0))
    turn_N = turn_N + 1
    for turn in turn_N[turn_N <= MOST_TURNS].unique().tolist():  # type: ignore[no-untyped-call]
        gaps = gap_N[turn_N == turn]
        metrics |= {f"{GAP}/turn_{turn}_mean": float(gaps.mean()), f"{GAP}/turn_{turn}_max": float(gaps.max())}
    return metrics


def other_distributions(batch: DataProto) -> str:
    """Which rows have log-probs of the rollout that are not those of softmax(logits / the run's temperature), and why;
    "" where none has.

    Args:
        batch: with ``log_prob_settings`` and ``meta_info["temperature"]``.
    """
    plain = [{"temperature": temperature_of(batch, "old_log_probs")}]
    settings = batch.non_tensor_batch["log_prob_settings"]
    kinds = Counter(" or ".join(map(_shown, each)) or "settings that its agent loop does not name"
                    for each in settings if each != plain)  # fmt: skip
    return "; ".join(f"{count} of {len(batch)} rows with {kind}" for kind, count in kinds.items())


def _shown(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!s:.60}" for name, value in settings.items())


def check_gap(metrics: Mapping[str, float], limit: float | None, where: str, cause: str = "") -> None:
    """Stop the run if the mean gap exceeds ``rollout.max_logprob_gap``.

    Raises:
        EngineError: names the likely causes.
    """
    if limit is not None and metrics.get(f"{GAP}_mean", 0.0) > limit:
        raise EngineError(f"{_explained(metrics, where, cause)}\nThe limit is rollout.max_logprob_gap={limit:g}.")


class GapWatch:
    """Warns of a gap that the data types of engine and actor do not explain, once for each streak of steps with one.

    The coarsest data type counts, of those in which the actor and the engine store and compute.
    """

    def __init__(self, config: ResolvedConfig, context: EngineContext) -> None:
        model = config.model
        dtypes = {model.dtype, compute_dtype(model, torch.device(context.device)), context.dtype}
        self._explained, self._dtype = max((EXPLAINED_GAP.get(dtype, 0.1), dtype) for dtype in dtypes)
        self._limit = config.rollout.max_logprob_gap
        self._in_streak = False

    def note(self, metrics: Mapping[str, float], where: str, cause: str = "") -> None:
        """Take the gap of a step, if it was measured.

        Args:
            cause: that is known; empty: the likely ones are named.

        Raises:
            EngineError: it is above the limit; names the likely causes.
        """
        gap = metrics.get(f"{GAP}_mean")
        if gap is None:
            return
        check_gap(metrics, self._limit, where, cause)
        # Also a gap that is no number.
        is_large = not gap <= self._explained
        if is_large and not self._in_streak:
            logger.warning(
                "%s\n%s explains up to %g. This is not repeated until the gap has been smaller in a step; "
                "rollout/logprob_gap_mean has it for every step, and rollout.max_logprob_gap stops a run over this.",
                _explained(metrics, where, cause), self._dtype, self._explained,
            )  # fmt: skip
        self._in_streak = is_large


def _explained(metrics: Mapping[str, float], where: str, cause: str) -> str:
    means = ((turn, metrics.get(f"{GAP}/turn_{turn}_mean")) for turn in range(1, MOST_TURNS + 1))
    turns = [f"{turn}: {mean:.3g}" for turn, mean in means if mean is not None]
    by_turn = f" (mean by turn: {', '.join(turns)})" if len(turns) > 1 else ""
    return (
        f"{where}: the engine's log-probs differ from the actor's by {metrics[f'{GAP}_mean']:.3g} on average, "
        f"{metrics[f'{GAP}_max']:.3g} at most{by_turn}. "
        + (cause or "Likely causes in the engine:\n" + "\n".join(f"  - {likely}" for likely in CAUSES))
    )


def gap_of_answers(
    answers: Sequence[tuple[Sequence[int], TokenOutput]], temperature: float, actor: Actor
) -> dict[str, float]:
    """As :func:`logprob_gap`, for prompts with an engine's answers; empty if no answer has log-probs."""
    results = []
    for number, (prompt, output) in enumerate(answers):
        if output.token_ids and output.log_probs is not None:
            asked = Node(None, "prompt", list(prompt))
            turn = Node(asked, "turn", output.token_ids, log_probs=output.log_probs, spans=output.spans)
            rows = [TreeRow(TreePath(Tree.of(asked, turn), (asked, turn)))]
            results.append(TrajectoryResult({"uid": "probe"}, f"answer {number}", Termination.COMPLETED, rows))
    if not results:
        return {}
    batch = to_data_proto(results, 0, {"temperature": temperature})
    return logprob_gap(batch, actor.compute_log_prob(batch).batch["old_log_probs"])


def compare_with_engines(
    config: ResolvedConfig,
    engines: EngineReplicas,
    actor: Actor,
    prompt_ids: Sequence[int],
    watch: GapWatch,
    when: str = "before the first step",
    before: Sequence[TokenOutput] = (),
    adapter: str = "",
) -> list[TokenOutput]:
    """Sample one answer on every replica, compute it with the actor, log the gap, and show it to ``watch``.

    Engines that sleep while the trainer computes are asleep afterwards.

    Args:
        before: what this returned before an update: with a gap, an engine that answers the same has the old weights.
        adapter: that the request asks for.

    Returns:
        The answers; none where an engine gave none.

    Raises:
        EngineError: it is above ``rollout.max_logprob_gap``.
    """
    sampling = config.rollout.sampling
    params = SamplingParams(
        min(PROBE_TOKENS, config.rollout.max_response_length), sampling.temperature, sampling.top_p, sampling.top_k,
        seed=config.trainer.seed, adapter=adapter,
    )  # fmt: skip
    prompt = list(prompt_ids[-config.data.max_prompt_length :])
    try:
        outputs = engines.probe(prompt, params)
    except (EngineError, WorkerError, TimeoutError) as error:
        # The rollouts retry, and their errors say more.
        logger.warning("the engine did not answer the request %s: %s", when, error)
        return []
    engines.sleep()
    gap = gap_of_answers([(prompt, output) for output in outputs], sampling.temperature, actor)
    if not gap:
        return outputs
    logger.info(
        "log-probs %s: engine and actor differ by %.2g on average, %.2g at most, over %d tokens of "
        "%d replicas", when, gap[f"{GAP}_mean"], gap[f"{GAP}_max"], sum(len(output.token_ids) for output in outputs),
        len(outputs),
    )  # fmt: skip
    stale = [number for number, (now, then) in enumerate(zip(outputs, before, strict=False)) if _same(now, then)]
    watch.note(gap, when, _stale(config, stale))
    return outputs


def _same(output: TokenOutput, before: TokenOutput) -> bool:
    """The answers of the same weights, but for what else was in the batch."""
    if output.token_ids != before.token_ids or output.log_probs is None or before.log_probs is None:
        return False
    pairs = zip(output.log_probs, before.log_probs, strict=True)
    return all(math.isclose(new, old, rel_tol=1e-3, abs_tol=1e-4) for new, old in pairs)


def _stale(config: ResolvedConfig, replicas: Sequence[int]) -> str:
    """The cause of a gap, if replicas answer after an update as before it."""
    if not replicas:
        return ""
    what = "the model without its adapter" if config.model.adapter is not None else "the weights from before the update"
    return f"replica {', '.join(map(str, replicas))} answers exactly as before: the engine still serves {what}"
