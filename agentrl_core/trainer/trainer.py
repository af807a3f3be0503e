"""The PPO loop.

``fit`` reads as the algorithm; each phase is one method. What is not needed is not computed: no reference pass
without a KL term, no second log-prob pass where the engine generates with the actor's own module, no critic for
estimators that compare samples.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl_core.algorithms.outcome import advantage_input
from agentrl_core.api import AdvantageEstimator, AlgorithmContext
from agentrl_core.config import ResolvedConfig, to_dict
from agentrl_core.data.rows import PromptBatch
from agentrl_core.protocol import DataProto
from agentrl_core.rollout.batching import to_data_proto
from agentrl_core.rollout.identity import TrajectoryKey
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.runs.run_dir import Split
from agentrl_core.trainer.logprob_gap import check_gap, compare_with_engines, logprob_gap
from agentrl_core.trainer.metrics import (
    PhaseTimer,
    engine_metric,
    resource_metrics,
    rollout_metrics,
    scalars,
)
from agentrl_core.trainer.preparation import Preparation
from agentrl_core.trainer.records import ended_trajectory, make_records, trajectory_advantages
from agentrl_core.trainer.roles import build_roles, start_runtime
from agentrl_core.trainer.run import Run
from agentrl_core.trainer.signals import StopRequest
from agentrl_core.trainer.validation import Validator
from agentrl_core.trainer.weight_sync import WeightSync

logger = logging.getLogger(__name__)
GAP_ROWS = 4
"""Rows whose log-probs are computed a second time, to watch the engine, where a second pass is not needed."""
TOOL_SILENCE_STEPS = 10


@dataclass
class StepInProgress:
    """What the phases of one step leave for its end."""

    step: int
    results: list[TrajectoryResult] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Trains an agent as a configuration says.

        Trainer(load_config("config.yaml")).fit()

    Args:
        config: from ``load_config`` or ``bind``.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self.config = config
        self.timer = PhaseTimer()
        self.stop = StopRequest()
        self.step = 0
        self._current = StepInProgress(0)
        self._steps_without_tools = 0

    def fit(self) -> Path:
        """Run to the last step, or to the first SIGINT or SIGTERM; returns the run directory.

        Raises:
            ConfigError, DataError, TemplateError, PluginError: before anything starts.
            AgentRLError: what stopped the run; the last checkpoint is whole.
        """
        self._prepare()
        with self.run.recording(), self.runtime, self.stop.listening(), self._started():
            self.stop.may_finish_step = True
            for step, prompts in self.batches():
                with self.timer.phase("step"):
                    trajectories = self.rollout(prompts)
                    batch = self.score(trajectories)
                    self.rest_engines()
                    if len(batch):
                        batch = self.add_log_probs_and_values(batch)
                        batch = self.add_advantages(batch)
                    metrics = self.update(batch)
                    self.sync_weights(step)
                self.finish_step(step, batch, metrics)
            self._save_last()
        return self.run.path

    def _prepare(self) -> None:
        """All checks that need no worker, then the run directory."""
        self.preparation = Preparation.of(self.config)
        self.plan = self.preparation.plan
        self.renderer = self.preparation.renderer
        context = AlgorithmContext(group_size=self.config.rollout.n)
        self.estimator: AdvantageEstimator = self.config.algorithm.advantage.build(context)
        self.run = Run.open(self.config, self.plan, self.preparation.fingerprint)
        self.runtime = start_runtime(self.config)

    @contextmanager
    def _started(self) -> Iterator[None]:
        """Workers, closed however the run ends; weights, and the validation before training."""
        self.roles = build_roles(self.config, self.runtime, self.plan, self.preparation.facts)
        self._give_weights = WeightSync(self.config, self.roles.actor, self.roles.rollout)
        try:
            self._begin()
            yield
        finally:
            self.roles.rollout.close()

    def _begin(self) -> None:
        self.validator = Validator(self.config, self.preparation.data.validation, self.roles.rollout)
        self.step = self.run.resume(self.roles.actor, self.roles.critic)
        self.sync_weights(self.step)
        self._compare_with_engines()
        self.run.hooks.on_run_start(config=to_dict(self.config), run_dir=self.run.path)
        if self.step == 0 and self.config.trainer.validation.before and self.preparation.data.validation:
            self._log(0, self.validate(0))

    def _compare_with_engines(self) -> None:
        """What each engine says its tokens' log-probs are, against one forward of the actor."""
        if "logprobs" in self.roles.rollout.capabilities:
            messages = self.preparation.data.train[0]["raw_prompt"]
            prompt_ids = self.renderer.encode(self.renderer.render(messages, generation_prompt=True))
            compare_with_engines(self.config, self.roles.rollout, self.roles.actor, prompt_ids)
            # What the engines counted of it belongs to no step: a resumed run has it too.
            self.roles.rollout.engine_metrics()

    def _save_last(self) -> None:
        """A signal may have come after the last step had decided that it was not the last."""
        if not self.run.has_checkpoint(self.step):
            self.run.save_checkpoint(self.step, self.roles.actor, self.roles.critic)

    def batches(self) -> Iterator[tuple[int, PromptBatch]]:
        """The prompts of each step that is left, ``rollout.n`` rows per prompt."""
        for step in range(self.step + 1, self.plan.steps + 1):
            rows = [self.preparation.data.train[index] for index in self.preparation.data.sampler.batch(step)]
            rollout = self.config.rollout
            yield step, PromptBatch.sampled(rows, step, "train", rollout.n, asdict(rollout.sampling))
            if self.stop.requested:
                return

    def rollout(self, prompts: PromptBatch) -> list[TrajectoryResult]:
        """Trajectories of the step's prompts, each scored as it ended."""
        self._current = StepInProgress(prompts.step)
        self.run.hooks.on_rollout_start(step=self._current.step)
        with self.timer.phase("rollout"):
            return self.roles.rollout.generate_sequences(prompts)

    def score(self, results: list[TrajectoryResult]) -> DataProto:
        """One padded batch of the trained trajectories, with ``rm_scores``; group rewards are settled here."""
        step = self._current.step
        with self.timer.phase("score"):
            self.roles.rollout.score_groups(results)
            meta = {
                "step": step,
                "temperature": self.config.rollout.sampling.temperature,
                "seed": TrajectoryKey(self.config.trainer.seed, "update", step, 0, 0).seed(0),
            }
            batch = to_data_proto(results, self.renderer.pad_token_id, meta)
        self._current.results = results
        self._current.metrics = rollout_metrics(results, self.config.rollout.max_response_length)
        self._tell_hooks(step, "train", results)
        self.run.hooks.on_rollout_end(step=step, batch=batch)
        return batch

    def rest_engines(self) -> None:
        """Let the engines sleep until they get the next weights, where ``rollout.engine.sleep`` says so."""
        if self.config.rollout.engine.sleep:
            with self.timer.phase("sleep"):
                self.roles.rollout.sleep()

    def add_log_probs_and_values(self, batch: DataProto) -> DataProto:
        """``old_log_probs``, and where they are needed ``values`` and ``ref_log_prob``, all [B, R]."""
        with self.timer.phase("log_probs"):
            measured = "rollout_log_probs" in batch.batch.keys()
            if measured and self.roles.rollout.shares_module:
                batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
                few = batch.slice(0, GAP_ROWS)
                gap = logprob_gap(few, self.roles.actor.compute_log_prob(few).batch["old_log_probs"])
            else:
                batch.union(self.roles.actor.compute_log_prob(batch))
                gap = logprob_gap(batch, batch.batch["old_log_probs"]) if measured else {}
            check_gap(gap, self.config.rollout.max_logprob_gap, f"step {self._current.step}")
            self._current.metrics |= gap
            if self.roles.reference is not None:
                batch.union(self.roles.reference.compute_ref_log_prob(batch))
        if self.roles.critic is not None:
            with self.timer.phase("values"):
                batch.union(self.roles.critic.compute_values(batch))
        return batch

    def add_advantages(self, batch: DataProto) -> DataProto:
        """``advantages`` and ``returns`` [B, R]; hooks may replace the batch."""
        with self.timer.phase("advantages"):
            output = self.estimator(advantage_input(batch))
            batch.batch["advantages"] = output.advantages
            batch.batch["returns"] = output.returns
            self._current.metrics |= {f"advantage/{name}": value for name, value in output.metrics.items()}
        replaced: DataProto = self.run.hooks.on_batch_ready(step=self._current.step, batch=batch)
        return replaced

    def update(self, batch: DataProto) -> dict[str, float]:
        """The optimizer steps of critic and actor; all metrics of the step so far."""
        metrics = dict(self._current.metrics)
        if not len(batch):
            logger.warning("step %d: no trajectory can be trained; the update is skipped", self.step + 1)
            return metrics
        if self.roles.critic is not None:
            with self.timer.phase("update_critic"):
                metrics |= mean_of(self.roles.critic.update(batch))
        # While the critic warms up the policy is only measured.
        batch.meta_info["measure_only"] = self.step < self.config.critic.warmup_steps
        with self.timer.phase("update_actor"):
            metrics |= mean_of(self.roles.actor.update(batch))
        return metrics

    def sync_weights(self, step: int) -> None:
        """Give the engines the actor's weights, as version ``step``."""
        with self.timer.phase("sync_weights"):
            self._give_weights(step)

    def finish_step(self, step: int, batch: DataProto, metrics: dict[str, float]) -> None:
        """Records, validation, checkpoint, trackers, hooks."""
        self.step = step
        last = step == self.plan.steps or self.stop.requested
        records = make_records(step, "train", self._current.results, trajectory_advantages(batch) if len(batch) else {})
        self.run.write_records(step, "train", records)
        self._watch_tools(metrics)
        validation = self.config.trainer.validation
        if (last and validation.after) or (validation.interval and step % validation.interval == 0):
            metrics |= self.validate(step)
        best = self.run.note_best(step, metrics)
        # Before the checkpoint: a run killed in between must not come back without this step's record.
        self._log(step, metrics)
        interval = self.config.trainer.checkpoint.interval
        if last or best or (interval and step % interval == 0):
            with self.timer.phase("checkpoint"):
                self.run.save_checkpoint(step, self.roles.actor, self.roles.critic)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        everything = {**metrics, **resource_metrics(), **self.timer.take()}
        for name, value in self.roles.rollout.engine_metrics().items():
            everything[engine_metric(name)] = value
        seconds = everything.get("timing/step", 0.0)
        if seconds:
            everything["perf/tokens_per_second"] = everything["rollout/sampled_tokens"] / seconds
        self.run.log(step, scalars(everything))

    def _tell_hooks(self, step: int, split: Split, results: Sequence[TrajectoryResult]) -> None:
        for result in results:
            self.run.hooks.on_trajectory_end(step=step, trajectory=ended_trajectory(split, result))

    def _watch_tools(self, metrics: Mapping[str, float]) -> None:
        silent = bool(self.config.tools) and not metrics["rollout/tool_calls_mean"]
        self._steps_without_tools = self._steps_without_tools + 1 if silent else 0
        if self._steps_without_tools == TOOL_SILENCE_STEPS:
            logger.warning(
                "no trajectory has called a tool in the last %d steps; does the model know rollout.tool_parser=%s? "
                "`agentrl rollouts show %s` shows what it wrote",
                TOOL_SILENCE_STEPS, self.config.rollout.tool_parser.name, self.run.path,
            )  # fmt: skip

    def validate(self, step: int) -> dict[str, float]:
        """Greedy and sampled answers to the validation prompts; metrics under ``validation/``."""
        with self.timer.phase("validation"):
            metrics, results = self.validator.run(step)
        if results:
            self.run.write_records(step, "validation", make_records(step, "validation", results, {}))
            self._tell_hooks(step, "validation", results)
            self.run.hooks.on_validation_end(step=step, metrics=metrics)
        return metrics


def mean_of(metrics: Any) -> dict[str, float]:
    """Metrics of all ranks, averaged."""
    ranks: list[dict[str, float]] = metrics if isinstance(metrics, list) else [metrics]
    return {name: sum(rank[name] for rank in ranks) / len(ranks) for name in ranks[0]}
