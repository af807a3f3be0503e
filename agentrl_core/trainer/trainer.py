"""The PPO loop.

``fit`` reads as the algorithm; each phase is one method. Redundant compute is skipped: there is no reference pass
without a KL term, no second log-prob pass if the engine generates with the actor's own module, and no critic for
estimators that compare samples.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from agentrl_core.algorithms.value import explained_variance
from agentrl_core.api import AgentRLError, ConfigError, TokenOutput
from agentrl_core.config import ResolvedConfig, to_dict
from agentrl_core.controller.runtime import Runtime
from agentrl_core.engine_kit.media import without_images
from agentrl_core.hosting.shared_memory import remove_orphans, shared_memory_recorded
from agentrl_core.protocol import DataProto
from agentrl_core.rollout.identity import TrajectoryKey
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.trainer.algorithm import Algorithms
from agentrl_core.trainer.logprob_gap import compare_with_engines
from agentrl_core.trainer.metrics import (
    PhaseTimer,
    batch_metrics,
    engine_metric,
    resource_metrics,
    rollout_metrics,
    signal_metrics,
    source_metrics,
    throughput,
)
from agentrl_core.trainer.model_columns import ModelColumns
from agentrl_core.trainer.pipeline import Pipeline
from agentrl_core.trainer.plan import devices
from agentrl_core.trainer.policies import Policy
from agentrl_core.trainer.preparation import Preparation
from agentrl_core.trainer.roles import Roles, build_roles, start_runtime
from agentrl_core.trainer.rollouts import Rollouts
from agentrl_core.trainer.run import Run
from agentrl_core.trainer.signals import StopRequest
from agentrl_core.trainer.skipped_updates import SkippedUpdates
from agentrl_core.trainer.validation import validate
from agentrl_core.workers.actor import OPTIONAL_COLUMNS, update_columns
from agentrl_core.workers.critic import UPDATE_COLUMNS
from agentrl_core.workers.micro_batching import narrowed
from agentrl_core.workers.profiling import stacks_sampled, start_profile, stop_profile

logger = logging.getLogger(__name__)


class Trainer:
    """Trains an agent from a configuration.

        Trainer(load_config("config.yaml")).fit()

    Args:
        config: from ``load_config`` or ``bind``.

    Raises:
        ConfigError, DataError, TemplateError, PluginError: what can be known before a worker starts.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self.config = config
        logger.info("checking model, tokenizer and prompts")
        self.preparation = Preparation.of(config)
        self.steps = self.preparation.steps
        if never := [step for step in config.trainer.profile.steps if not 1 <= step <= self.steps]:
            raise ConfigError(f"trainer.profile.steps: {never} are no steps of this run, which has 1 to {self.steps}")
        if self.steps <= config.critic.warmup_steps:
            logger.warning(
                "critic.warmup_steps=%d covers all %d steps of the run, so the policy is never trained: lower it",
                config.critic.warmup_steps, self.steps,
            )  # fmt: skip
        self.renderer = self.preparation.renderer
        self.algorithms = Algorithms(config)
        data = self.preparation.data
        self.stop = StopRequest()
        self.run = Run(config, self.steps, data.fingerprint(), data.sampler, self.algorithms, self.stop.request)
        self.timer = PhaseTimer(lambda phase: self.run.trackers.progress(phase))
        self.step = 0
        self._roles: Roles | None = None
        self._skipped = SkippedUpdates("critic", config.critic.max_skipped_updates)
        self._overlaps = config.rollout.max_staleness > 0
        self._has_copies = any(policy.copy_of is not None for policy in config.policies.values())
        self._updates = 0
        self._sent_updates = -1
        self._answers: dict[str, list[TokenOutput]] = {}
        self._is_compared = False

    def fit(self) -> Path:
        """Run to the last step, or until SIGINT, SIGTERM, SIGHUP or a hook stops the run; returns the run directory.

        Resuming a run that is complete changes nothing.

        Raises:
            ConfigError, CheckpointError, PluginDriftError: the run directory cannot be used; nothing in it changed.
            AgentRLError: the run failed; the last checkpoint is complete.
        """
        if self.run.is_complete:
            logger.info("%s is complete: all %d steps ran. To go on, raise trainer.steps", self.run.path, self.steps)
            return self.run.path
        with self.run.recording(), start_runtime(self.config) as runtime, self.stop.listening(), self._started(runtime):
            for step in self.steps_left():
                with self._profiled(step), self.timer.phase("step"):
                    results = self.rollout(step)
                    metrics = rollout_metrics(results, self.config.rollout.max_response_length)
                    batches = self.score(step, results)
                    self.rest_engines()
                    for policy in self.policies:
                        metrics |= self.train(policy, batches)
                    self.sync_weights(step)
                self.finish_step(step, results, batches, metrics)
            self._save_last()
            for line in self.rollouts.report():
                logger.info("%s", line)
        return self.run.path

    def train(self, policy: Policy, batches: dict[str, DataProto]) -> dict[str, float]:
        """Train a policy on its batch, which is replaced by what was trained; returns its metrics."""
        batch, metrics = batches[policy.name], dict[str, float]()
        if len(batch):
            self.add_log_probs_and_values(policy, batch, metrics)
            batch = batches[policy.name] = self.add_advantages(policy, batch, metrics)
        self.update(policy, batch, metrics)
        return policy.named(metrics)

    @property
    def roles(self) -> Roles:
        """Workers and engines; after ``fit``, those that it used."""
        if self._roles is None:
            raise AgentRLError("a Trainer has no roles before fit(), which starts its workers")
        return self._roles

    @contextmanager
    def _started(self, runtime: Runtime) -> Iterator[None]:
        """Start workers and engines, send the weights, validate; close everything however the run ends."""
        remove_orphans()
        runtime.when_lost(self.run.note_loss)
        logger.info("starting workers and engines")
        # Closed here and not by the runtime's end: while signals are still handled.
        with runtime.started:
            self._roles = build_roles(self.config, runtime, self.preparation, self.run.load)
            self.step = self.run.begin(runtime)
            self.policies = [self._policy(name, own) for name, own in self.config.trained.items()]
            self.rollouts = self._build_rollouts(runtime)
            self.roles.engines.accept_changes(self.run.path)
            self.roles.rollout.on_progress = partial(self.run.trackers.progress, "")
            # Weights that wait on the host need the GPU to be sent.
            self.rest_engines()
            self.sync_weights(self.step)
            self._compare_with_engines()
            # Drop what the engines counted: it belongs to no step.
            self.roles.engines.metrics()
            self.run.hooks.on_run_start(config=to_dict(self.config), run_dir=self.run.path)
            if self.step == 0 and self.config.trainer.validation.before and self.preparation.data.validation:
                self.run.log(0, self._measured(self.validate(0)), self.timer.spans)
            self.stop.may_finish_step = True
            with shared_memory_recorded():
                try:
                    yield
                except (AgentRLError, KeyboardInterrupt):
                    # What failed, or a second signal, may have nothing to do with the checkpoint that is being written.
                    with suppress(AgentRLError):
                        self._publish_checkpoint()
                    raise
                finally:
                    # However the run ends, what was handed over is written; an error of its own comes first.
                    with suppress(AgentRLError, OSError):
                        self.run.records.wait()

    def _policy(self, name: str, config: ResolvedConfig) -> Policy:
        columns = ModelColumns(config, self.roles.of_policy(name, config), self.preparation, self.timer, self.step)
        return Policy(
            name,
            config,
            f"policy/{name}/" if self.config.policies else "",
            self.roles.actors[name],
            self.algorithms.by_policy[name],
            columns,
            SkippedUpdates("actor", config.actor.max_skipped_updates, name if self.config.policies else ""),
        )

    def _ahead(self, results: Sequence[TrajectoryResult]) -> None:
        for policy in self.policies:
            if policy.columns.may_compute_ahead:
                policy.columns.ahead(policy.own(results))

    def _build_rollouts(self, runtime: Runtime) -> Rollouts:
        ahead = self._ahead if any(policy.columns.may_compute_ahead for policy in self.policies) else None
        known = self.config, self.preparation.data, self.steps, self.roles.rollout, self.timer, ahead
        if not self._overlaps:
            return Rollouts(*known)
        pipeline = Pipeline(*known, runtime=runtime, step=self.step, position=self.run.position)
        runtime.started.callback(pipeline.close)
        return pipeline

    @contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        """Profile the driver and all training processes, if ``trainer.profile.steps`` has this step."""
        if step not in self.config.trainer.profile.steps:
            yield
            return
        directory = self.run.path / "profiles" / f"step-{step:06d}"
        roles = list(self.roles.groups.values())
        with stacks_sampled(directory / "driver.speedscope.json"):
            start_profile()
            for role in roles:
                role.start_profile()
            try:
                yield
                for role in roles:
                    role.stop_profile(str(directory))
            finally:
                stop_profile(directory / "driver")
        logger.info("wrote profiles of step %d to %s; https://ui.perfetto.dev opens the *.json.gz", step, directory)

    def _compare_with_engines(self, when: str = "before the first step") -> None:
        """Compare each engine's log-probs with those of the actor."""
        if self.config.rollout.engine.has("logprobs"):
            prompt = self.renderer.render(
                without_images(self.preparation.data.first_prompt), generation_prompt=True
            ).ids
            for policy in self.policies:
                if self.roles.engines.sleep_level and policy is not self.policies[0]:
                    self.sync_weights(self.step)
                self._answers[policy.name] = compare_with_engines(
                    policy.config,
                    self.roles.engines,
                    policy.actor,
                    prompt,
                    policy.columns.gap_watch,
                    f"of {policy.label} {when}" if policy.label else when,
                    self._answers.get(policy.name, ()),
                    self.config.adapter_of(policy.name),
                )
            if self.roles.engines.sleep_level:
                self.sync_weights(self.step)

    def _save_last(self) -> None:
        """Save a checkpoint if a signal stopped the run after its last step was finished as an ordinary one."""
        if not self.run.has_checkpoint(self.step):
            self.run.save_checkpoint(self.step, {}, self.rollouts.position)
        self._publish_checkpoint()
        self.run.records.wait()

    def _publish_checkpoint(self, wait: bool = True) -> None:
        """Publish the checkpoint that is being written, if there is one and it is whole, or wait for that."""
        published = self.run.publish_checkpoint(wait)
        if published is not None:
            self.run.hooks.on_checkpoint_saved(step=published[0], path=published[1])

    def steps_left(self) -> Iterator[int]:
        """The numbers of the steps that remain, until a signal asks to stop."""
        for step in range(self.step + 1, self.steps + 1):
            yield step
            if self.stop.requested:
                return

    def rollout(self, step: int) -> list[TrajectoryResult]:
        """The trajectories that the step trains on, each scored when it ended."""
        self.run.hooks.on_rollout_start(step=step)
        return self.rollouts.batch(step)

    def score(self, step: int, results: list[TrajectoryResult]) -> dict[str, DataProto]:
        """Make a batch of each policy's trained trajectories, with ``rm_scores``."""
        batches = {}
        with self.timer.phase("score"):
            for number, policy in enumerate(self.policies):
                seed = TrajectoryKey(self.config.trainer.seed, "update", step, number, 0).seed(0)
                meta = {"step": step, "seed": seed, **({"policy": policy.name} if policy.prefix else {})}
                batches[policy.name] = policy.columns.batch(policy.own(results), meta)
        self.run.log_trajectories(step, "train", results)
        for batch in batches.values():
            self.run.hooks.on_rollout_end(step=step, batch=batch)
        return batches

    def rest_engines(self) -> None:
        """Put the engines to sleep until they get the next weights, if they sleep at all."""
        if self.roles.engines.sleep_level:
            with self.timer.phase("sleep"):
                self.roles.engines.sleep()

    def add_log_probs_and_values(self, policy: Policy, batch: DataProto, metrics: dict[str, float]) -> None:
        """Add the columns that models compute: see :class:`ModelColumns`."""
        policy.columns.add(batch, metrics)

    def add_advantages(self, policy: Policy, batch: DataProto, metrics: dict[str, float]) -> DataProto:
        """Add ``advantages`` and ``returns`` [B, R], and the estimator's metrics. Hooks may replace the batch."""
        with self.timer.phase("advantages"):
            metrics |= policy.algorithm.correct(batch)
            metrics |= policy.algorithm.penalise(batch)
            metrics |= policy.algorithm.estimate(batch)
        replaced: DataProto = self.run.hooks.on_batch_ready(step=batch.meta_info["step"], batch=batch)
        return replaced

    def update(self, policy: Policy, batch: DataProto, metrics: dict[str, float]) -> None:
        """Run the optimizer steps of critic and actor, and add their metrics."""
        if not len(batch):
            logger.warning(
                "step %d: no trajectory %scan be trained; the update is skipped",
                self.step + 1, f"of {policy.label} " if policy.label else "",
            )  # fmt: skip
            return
        if self.roles.critic is not None:
            with self.timer.phase("update_critic"):
                metrics |= mean_of(self.roles.critic.update(narrowed(batch, UPDATE_COLUMNS)))
            columns = (batch.batch[name] for name in ("values", "returns", "response_mask"))
            explained = explained_variance(*columns)
            metrics["critic/explained_variance"] = explained
            self._skipped.note(self.step + 1, metrics)
        # While the critic warms up, the policy is measured but not updated.
        warming_up = self.step < self.config.critic.warmup_steps
        batch.meta_info["measure_only"] = warming_up
        batch.meta_info["entropy_coef"] = policy.algorithm.entropy_coef
        with self.timer.phase("update_actor"):
            names = (*update_columns(policy.config), *OPTIONAL_COLUMNS)
            metrics |= mean_of(policy.actor.update(narrowed(batch, names)))
        policy.algorithm.note(metrics)
        policy.skipped.note(self.step + 1, metrics)
        # Without a step, because nothing had a gradient or all gradients were not finite, there is no norm.
        self._updates += "actor/grad_norm" in metrics

    def sync_weights(self, step: int) -> None:
        """Give the engines the actor's weights, as version ``step``, if they have changed; wake sleeping engines.

        Where sampling overlaps with training, they get each version: a bound on the age of tokens counts versions. With
        copies too: these are other weights after each step.
        """
        changed = self._updates != self._sent_updates or self._has_copies
        with self.timer.phase("sync_weights"):
            self.rollouts.before_weights()
            if changed or self.roles.engines.sleep_level == 2 or self._overlaps:
                self.roles.engines.update_weights(self.roles.weights.newest(step))
                self._sent_updates = self._updates
            else:
                self.roles.engines.wake_up()
            self.rollouts.weights_changed(step)

    def finish_step(
        self, step: int, results: list[TrajectoryResult], batches: dict[str, DataProto], metrics: dict[str, float]
    ) -> None:
        """Write records, validate, begin a checkpoint, and report to trackers and hooks."""
        self.step = step
        for policy in self.policies:
            policy.columns.updated(step)
        self._publish_checkpoint(wait=False)
        self.rollouts.trained(step, results)
        # Before the validation, which sends requests too.
        metrics |= {engine_metric(name): value for name, value in self.roles.engines.metrics().items()}
        if self._updates and not self._is_compared:
            self._is_compared = True
            self._compare_with_engines("after the first update")
            # Drop what the engines counted: it belongs to no step.
            self.roles.engines.metrics()
        metrics |= self.roles.rollout.named_metrics() | self.roles.rollout.image_metrics()
        metrics |= source_metrics(results, self.config.trainer.validation.correct_above)
        metrics["epoch"] = step * self.config.data.batch_size / len(self.preparation.data.train)
        metrics |= signal_metrics(*batches.values())
        seconds, tokens = self.timer.seconds("step"), Counter[str]()
        for policy in self.policies:
            if len(batch := batches[policy.name]):
                metrics |= policy.named(batch_metrics(batch))
                tokens.update(throughput(batch, seconds, devices(self.config)))
        metrics |= tokens
        last = step == self.steps or self.stop.requested
        self.run.write_records(step, "train", results, [*batches.values()])
        self.run.health.note(step, metrics, last)
        interval = self.config.trainer.validation.interval
        if last or (interval and step % interval == 0):
            metrics |= self.validate(step)
        metrics = self._measured(metrics)
        best = self.run.note_best(step, metrics)
        interval = self.config.trainer.checkpoint.interval
        # Before the trackers: one that hangs or stops the run must not lose the step.
        if last or best or (interval and step % interval == 0):
            with self.timer.phase("checkpoint"):
                self._publish_checkpoint()
                self.run.save_checkpoint(step, metrics, self.rollouts.position)
        # Here, because rollout may wait for the validation and the checkpoint too.
        metrics |= self.rollouts.metrics(metrics.get(engine_metric("pause_seconds"), 0.0))
        self.run.log(step, metrics | self.timer.take(), self.timer.spans)

    def _measured(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add timings and resources to metrics."""
        everything = {**metrics, **resource_metrics(), **self.timer.take()}
        seconds = everything.get("timing/step", 0.0)
        if seconds:
            everything["perf/tokens_per_second"] = everything["rollout/sampled_tokens"] / seconds
        return {name: float(value) for name, value in sorted(everything.items())}

    def validate(self, step: int) -> dict[str, float]:
        """Answer the validation prompts; return metrics under ``validation/``."""
        with self.timer.phase("validation"):
            metrics, results = validate(self.config, self.preparation.data.validation, step, self.roles.rollout)
            # Drop what the engines counted: it belongs to no step.
            self.roles.engines.metrics()
        if results:
            self.run.write_records(step, "validation", results)
            self.run.log_trajectories(step, "validation", results)
            self.run.hooks.on_validation_end(step=step, metrics=metrics)
        return metrics


def mean_of(metrics: Any) -> dict[str, float]:
    """Metrics of all ranks, averaged."""
    ranks: list[dict[str, float]] = metrics if isinstance(metrics, list) else [metrics]
    return {name: sum(rank[name] for rank in ranks) / len(ranks) for name in ranks[0]}
