"""What models add to a batch: log-probs of actor, reference and teacher, and values of the critic.

One pass of a model makes its columns. It may compute rows ahead, while other trajectories still run. Its results are
kept by the tokens and the mask of each row. So they are used for these rows only, whatever becomes of trajectories.

Shapes: B rows, R response tokens, r those of one row.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from torch import Tensor

from agentrl_core.api import ConfigError
from agentrl_core.api.training_backend import EXPERTS
from agentrl_core.config import ResolvedConfig
from agentrl_core.protocol import DataProto
from agentrl_core.protocol.ragged import ragged, values_in
from agentrl_core.rollout.batching import to_data_proto
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.rollout.summaries import handed, whole
from agentrl_core.trainer.logprob_gap import GapWatch, logprob_gap, other_distributions
from agentrl_core.trainer.metrics import PhaseTimer
from agentrl_core.trainer.preparation import Preparation
from agentrl_core.trainer.roles import Roles
from agentrl_core.trainer.teacher_context import add_teacher_prompts, as_the_teacher_reads
from agentrl_core.workers.micro_batching import narrowed, plain_rows, response_rows
from agentrl_core.workers.update import temperature_of

logger = logging.getLogger(__name__)
GAP_ROWS = 4
"""Rows whose log-probs are computed again to check the engine, if no full second pass is needed."""
Values = tuple[np.ndarray[Any, Any], ...]
"""[r] of each column."""


@dataclass(eq=False)
class _Pass:
    """The columns of one model.

    Args:
        compute: makes the columns, [B, R] each, of a batch with what a forward pass needs.
        lasts: for how many versions of the actor a result stays right: 0 for models that are trained.
        reads: further columns that the pass needs.
        known: results of rows that were computed ahead, with the version that the actor had then, by the rows' keys.
    """

    compute: Callable[[DataProto], Sequence[Tensor]]
    lasts: int
    reads: tuple[str, ...] = ()
    known: dict[bytes, tuple[int, Values]] = field(default_factory=dict)
    used: int = 0
    asked: int = 0

    def __call__(self, batch: DataProto) -> Sequence[Tensor]:
        """The columns of a batch: rows that are known, and the others computed."""
        small = narrowed(batch, self.reads)
        found = [self.known.get(key) for key in _keys(small)] if self.known else []
        self.asked += len(batch)
        self.used += sum(each is not None for each in found)
        if not any(found):
            return self.compute(small)
        missing = [row for row, each in enumerate(found) if each is None]
        computed = iter(self._values(small.select_idxs(missing)) if missing else ())
        values = [next(computed) if each is None else each[1] for each in found]
        mask = ragged(small.batch["response_mask"])
        assert mask is not None, "rows with keys have no padding"
        return [mask.like(np.concatenate(column)) for column in zip(*values, strict=True)]

    def ahead(self, batch: DataProto, version: int) -> None:
        """Compute the rows that are not known."""
        small = narrowed(batch, self.reads)
        keys = _keys(small)
        rows = list({key: row for row, key in enumerate(keys) if key not in self.known}.values())
        if rows:
            values = self._values(small.select_idxs(rows))
            self.known |= {keys[row]: (version, each) for row, each in zip(rows, values, strict=True)}

    def forget(self, version: int) -> None:
        """Drop what is not right for the version that the actor has now."""
        self.known = {key: each for key, each in self.known.items() if version - each[0] <= self.lasts}

    def _values(self, small: DataProto) -> list[Values]:
        rows = response_rows(small.batch)
        columns = [values_in(column, rows) for column in self.compute(small)]
        return [tuple(column[place].copy() for column in columns) for place in rows.slices]


def _keys(batch: DataProto) -> list[bytes]:
    """One for each row, which follows from its tokens, their experts and its mask; none where rows are padded."""
    rows, mask = plain_rows(batch.batch), ragged(batch.batch["response_mask"])
    if rows is None or mask is None:
        return []
    ids, flags = values_in(batch.batch["input_ids"], rows).astype(np.int32), mask.flat.astype(np.bool_)
    experts = batch.non_tensor_batch.get(EXPERTS, [b""] * len(batch))
    parts = ((ids[row], flags[place]) for row, place in zip(rows.slices, mask.rows.slices, strict=True))
    return [
        blake2b(ids_l.tobytes() + b"%d" % len(flags_r) + flags_r.tobytes() + bytes(experts_l)).digest()
        for (ids_l, flags_r), experts_l in zip(parts, experts, strict=True)
    ]


class ModelColumns:
    """Adds the columns of all models to a batch, and computes them ahead for rows that may become part of it.

    ``old_log_probs`` and ``values``, and the teacher's log-probs where the actor is the teacher, are of the weights
    that the step updates. Those of reference and teacher are of weights that no step changes.

    Args:
        config: of the run.
        roles: that compute.
        preparation: of the run.
        timer: measures phases.
        version: of the actor's weights.
    """

    def __init__(
        self, config: ResolvedConfig, roles: Roles, preparation: Preparation, timer: PhaseTimer, version: int
    ) -> None:
        self._config, self._roles, self._preparation, self._timer = config, roles, preparation, timer
        self._version = version
        self._warned = False
        self.gap_watch = GapWatch(config, roles.engines.context)
        advantage, frozen = config.algorithm.advantage, config.rollout.max_staleness
        self._with_entropies = advantage.has("entropies")
        names = ("old_log_probs", *(["entropys"] if self._with_entropies else []))
        actor, reference, critic, teacher = roles.actor, roles.reference, roles.critic, roles.teacher
        reads = (EXPERTS,) if config.actor.router_replay else ()
        self._actor = _Pass(lambda batch: _columns(actor.compute_log_prob(batch), *names), 0, reads)
        self._reference = self._critic = self._teacher = None
        if reference is not None:
            self._reference = _Pass(
                lambda batch: _columns(reference.compute_ref_log_prob(batch), "ref_log_prob"), frozen
            )
        if critic is not None:
            self._critic = _Pass(lambda batch: _columns(critic.compute_values(batch), "values"), 0)
        if advantage.has("teacher_log_probs"):
            self._teacher = (
                _Pass(lambda batch: _columns(actor.compute_log_prob(batch), "old_log_probs"), 0)
                if teacher is None
                else _Pass(lambda batch: _columns(teacher.compute_ref_log_prob(batch), "ref_log_prob"), frozen)
            )
        self._passes = [
            each for each in (self._actor, self._reference, self._critic, self._teacher) if each is not None
        ]

    @property
    def may_compute_ahead(self) -> bool:
        """Whether a model has something to compute while trajectories run, and does not share devices with the
        engines. A deterministic run computes whole batches: what is computed together decides the last bits."""
        config = self._config
        others = config.cluster.runtime == "ray" and config.rollout.engine.placement == "standalone"
        return others and not config.rollout.deterministic and bool(self._computed_ahead)

    @property
    def _computed_ahead(self) -> list[_Pass]:
        """Without the actor's log-probs where the rollout's stand for them."""
        takes = self._config.algorithm.old_log_probs == "rollout" and not self._with_entropies
        return [each for each in self._passes if each is not self._actor or not takes]

    def batch(self, results: Sequence[TrajectoryResult], meta: dict[str, Any]) -> DataProto:
        """The trained rows of trajectories, with what models need to compute their columns."""
        # A prompt that left no room has no sampled tokens to train.
        sampled = [result for result in results if result.sampled_tokens]
        meta = {"temperature": self._config.rollout.sampling.temperature, **meta}
        batch = to_data_proto(sampled, self._preparation.chat.pad_token_id, meta)
        context = self._config.teacher.context
        if context is not None:
            add_teacher_prompts(batch, list(whole(handed(sampled))), context, self._preparation.renderer)
        return batch

    def ahead(self, results: Sequence[TrajectoryResult]) -> None:
        """Compute the columns of trajectories that have ended, while others run. May be called in another thread, while
        this object is not used in any other."""
        # Not as a phase that trackers show: the rollout goes on.
        with self._timer.phase("early_log_probs", shown=False):
            batch = self.batch(results, {"calculate_entropy": self._with_entropies})
            if len(batch):
                for each in self._computed_ahead:
                    each.ahead(self._read_by(each, batch), self._version)

    def _read_by(self, each: _Pass, batch: DataProto) -> DataProto:
        return as_the_teacher_reads(batch, self._preparation.chat.pad_token_id) if each is self._teacher else batch

    def updated(self, version: int) -> None:
        """The models that are trained have other weights now."""
        self._version = version
        for each in self._passes:
            each.forget(version)

    def add(self, batch: DataProto, metrics: dict[str, float]) -> None:
        """Add ``old_log_probs``, and ``values``, ``ref_log_prob`` and ``teacher_log_probs`` if the run needs them, all
        [B, R]. Adds the gap between engine and actor to ``metrics``, and how much was computed ahead."""
        with self._timer.phase("log_probs"):
            self._add_old_log_probs(batch, metrics)
            if self._reference is not None:
                (batch.batch["ref_log_prob"],) = self._reference(batch)
            if self._teacher is not None:
                (batch.batch["teacher_log_probs"],) = self._teacher(self._read_by(self._teacher, batch))
        if self._critic is not None:
            with self._timer.phase("values"):
                (batch.batch["values"],) = self._critic(batch)
        if self.may_compute_ahead:
            used, asked = (sum(getattr(each, name) for each in self._passes) for name in ("used", "asked"))
            metrics["perf/early_log_probs_share"] = used / max(asked, 1)
        for each in self._passes:
            each.used = each.asked = 0

    def _add_old_log_probs(self, batch: DataProto, metrics: dict[str, float]) -> None:
        algorithm = self._config.algorithm
        measured = "rollout_log_probs" in batch.batch.keys()
        if not measured and algorithm.old_log_probs == "rollout":
            raise ConfigError(
                "algorithm.old_log_probs=rollout: some trajectories of this step have no log-probs: an agent loop "
                "made rows without response_logprobs; set algorithm.old_log_probs=actor"
            )
        if self._actor.reads and EXPERTS not in batch.non_tensor_batch and len(batch):
            raise ConfigError(
                "actor.router_replay=true: some trajectories of this step have no experts of the engine: an agent loop "
                "made or changed rows by hand, or the engine answered without; set actor.router_replay=false"
            )
        version = self._version if self._config.rollout.max_staleness else None
        batch.meta_info["calculate_entropy"] = self._with_entropies
        if measured and self._reuses(batch):
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
            # Rows of several prompts, others in each step.
            stride = -(-len(batch) // GAP_ROWS)
            few = batch.select_idxs(list(range(batch.meta_info["step"] % stride, len(batch), stride)))
            gap = logprob_gap(few, self._actor.compute(narrowed(few, self._actor.reads))[0], version)
        else:
            batch.batch["old_log_probs"], *entropies = self._actor(batch)
            if entropies:
                (batch.batch["entropys"],) = entropies
            gap = logprob_gap(batch, batch.batch["old_log_probs"], version) if measured else {}
            if algorithm.old_log_probs == "rollout":
                # The pass was for entropies.
                batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        policy = batch.meta_info.get("policy")
        whose = "" if policy is None else f", policy {policy!r}"
        self.gap_watch.note(gap, f"step {batch.meta_info['step']}{whose}")
        metrics |= gap

    def _reuses(self, batch: DataProto) -> bool:
        """Whether the rollout's log-probs stand for those of the policy before the update: no second pass."""
        algorithm = self._config.algorithm
        shared = self._roles.engines.context.shared_module is not None
        wanted = algorithm.old_log_probs == "auto" and shared and algorithm.correction is None
        needed = self._config.needs_rollout_log_probs
        other = other_distributions(batch) if wanted or needed else ""
        if other and not self._warned:
            self._warned = True
            logger.warning(
                "step %d: %s. Those log-probs are not of the policy at temperature %g: %s", batch.meta_info["step"],
                other, temperature_of(batch, "old_log_probs"),
                f"{needed} compares two distributions" if needed else
                "algorithm.old_log_probs=auto computes them again with the actor",
            )  # fmt: skip
        reuses = algorithm.old_log_probs == "rollout" or (wanted and not other)
        return reuses and not self._with_entropies


def _columns(batch: DataProto, *names: str) -> list[Tensor]:
    return [batch.batch[name] for name in names]
