"""What keys must agree on with each other, the plugins' capabilities and the file system.

Each check is a generator of ``(key path, message)``. They run only on a tree that is sound in itself.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from agentrl_core.config.capabilities import Alternatives, installed_with, missing_capabilities
from agentrl_core.config.schema import ResolvedConfig, Slot

_MOST_PARENTS = 3


Problems = Iterator[tuple[str, str]]
Check = Callable[[ResolvedConfig], Problems]


def nothing_empty(config: ResolvedConfig) -> Problems:
    if not config.rollout.agent.loops:
        yield "rollout.agent.loops", "expected at least one agent loop, found none; see `agentrl plugins list`"
    if not config.data.train_files:
        yield "data.train_files", "expected at least one file, found none"


def group_size(config: ResolvedConfig) -> Problems:
    n = config.rollout.n
    if n < 2 and config.algorithm.advantage.has("groups"):
        name = config.algorithm.advantage.name
        yield (
            "rollout.n",
            f"group size {n} with advantage estimator '{name}', which compares the samples of one prompt: every "
            "advantage would be 0; expected rollout.n >= 2, or an estimator without groups in algorithm.advantage",
        )


def engine_environment(config: ResolvedConfig) -> Problems:
    if config.rollout.engine.python is not None and config.cluster.runtime == "local":
        yield (
            "rollout.engine.python",
            "an engine in its own environment needs cluster.runtime=ray, found local; set cluster.runtime=ray or "
            "rollout.engine.python=null",
        )


def training_processes(config: ResolvedConfig) -> Problems:
    cluster = config.cluster
    if cluster.runtime != "local":
        return
    for key, count in (("nodes", cluster.nodes), ("processes_per_node", cluster.processes_per_node)):
        if count > 1:
            yield (
                f"cluster.{key}",
                f"found {count}, but the local runtime is one process; set cluster.runtime=ray or cluster.{key}=1",
            )


def engine_parallelism(config: ResolvedConfig) -> Problems:
    engine = config.rollout.engine
    if engine.devices % engine.nodes:
        yield (
            "rollout.engine.nodes",
            f"{engine.devices} device(s) of a replica (tensor_parallel x pipeline_parallel x data_parallel) cannot be "
            f"spread evenly over {engine.nodes} nodes",
        )
    if config.cluster.runtime != "local":
        return
    parallel = {
        "tensor_parallel": engine.tensor_parallel,
        "pipeline_parallel": engine.pipeline_parallel,
        "data_parallel": engine.data_parallel,
        "nodes": engine.nodes,
    }
    for key, count in parallel.items():
        if count > 1:
            yield (
                f"rollout.engine.{key}",
                f"found {count}, but the local runtime is one process; set cluster.runtime=ray or "
                f"rollout.engine.{key}=1",
            )
    if engine.weight_transfer == "broadcast":
        yield (
            "rollout.engine.weight_transfer",
            "found broadcast, but in the local runtime engines are in the trainer's process; set cluster.runtime=ray "
            "or rollout.engine.weight_transfer=host_memory",
        )
    if engine.placement == "standalone":
        yield (
            "rollout.engine.placement",
            "found standalone, but in the local runtime engines are in the trainer's process; set cluster.runtime=ray "
            "or rollout.engine.placement=colocated",
        )


def offload_leaves_the_engine_its_weights(config: ResolvedConfig) -> Problems:
    if (
        config.actor.offload_parameters
        and config.cluster.runtime == "local"
        and config.rollout.engine.has("shared_module")
    ):
        yield (
            "actor.offload_parameters",
            f"engine '{config.rollout.engine.name}' generates with the actor's own weights in the local runtime, "
            "and they must stay on the device; set cluster.runtime=ray or actor.offload_parameters=false",
        )


def deterministic_rollouts(config: ResolvedConfig) -> Problems:
    rollout = config.rollout
    if not rollout.deterministic:
        return
    replicas = config.engine_replicas
    if replicas != 1:
        yield "rollout.engine.replicas", f"rollout.deterministic needs 1 replica, found {replicas}"
    if rollout.engine.max_in_flight is not None:
        yield (
            "rollout.engine.max_in_flight",
            f"rollout.deterministic needs all requests of a step in the engine, found {rollout.engine.max_in_flight}; "
            "set rollout.engine.max_in_flight=null",
        )
    if rollout.agent.num_workers != 1:
        yield "rollout.agent.num_workers", f"rollout.deterministic needs 1 worker, found {rollout.agent.num_workers}"
    trajectories = config.data.batch_size * rollout.n
    if rollout.agent.max_concurrent < trajectories:
        yield (
            "rollout.agent.max_concurrent",
            f"rollout.deterministic needs a whole step at once, data.batch_size x rollout.n = {trajectories}, "
            f"found {rollout.agent.max_concurrent}",
        )


def reference_is_used(config: ResolvedConfig) -> Problems:
    if config.reference.path is not None and config.algorithm.kl_coef == 0:
        yield (
            "reference.path",
            "no reference is used because algorithm.kl_coef is 0; set algorithm.kl_coef > 0 or reference.path=null",
        )


def critic_is_used(config: ResolvedConfig) -> Problems:
    if config.algorithm.advantage.has("values"):
        return
    critic, name = config.critic, config.algorithm.advantage.name
    reason = f"no critic is used because advantage estimator '{name}' needs no values"
    if critic.path is not None:
        yield "critic.path", f"{reason}; choose another algorithm.advantage or set critic.path=null"
    if critic.warmup_steps > 0:
        yield "critic.warmup_steps", f"{reason}; choose another algorithm.advantage or set critic.warmup_steps=0"


def optimizer_betas(config: ResolvedConfig) -> Problems:
    for role, section in (("actor", config.actor), ("critic", config.critic)):
        if len(section.optimizer.betas) != 2:
            yield f"{role}.optimizer.betas", f"expected two numbers, found {len(section.optimizer.betas)}"


def unique_names(config: ResolvedConfig) -> Problems:
    lists: dict[str, Sequence[Slot]] = {
        "rollout.agent.loops": config.rollout.agent.loops,
        "tools": config.tools,
        "interactions": config.interactions,
    }
    for path, slots in lists.items():
        first: dict[str, int] = {}
        for index, slot in enumerate(slots):
            name = slot.registered_name
            if first.setdefault(name, index) != index:
                yield (
                    f"{path}.{index}.name",
                    f"'{name}' stands twice, first as {path}.{first[name]}; rows choose by name, so each name may "
                    "stand once",
                )


def something_rewards(config: ResolvedConfig) -> Problems:
    scores_itself = any(config.reward.manager.has(capability) for capability in ("tool_rewards", "turn_scores"))
    if not config.reward.functions and not scores_itself:
        yield (
            "reward.functions",
            "nothing gives a reward: no function is configured, and reward manager "
            f"'{config.reward.manager.name}' uses neither the rewards of tools nor the scores of interactions; "
            "add a function (see `agentrl plugins list`, or ./file.py:function)",
        )


def validation_files(config: ResolvedConfig) -> Problems:
    trainer = config.trainer
    if not config.data.validation_files:
        if trainer.checkpoint.best_metric is not None:
            yield (
                "trainer.checkpoint.best_metric",
                f"'{trainer.checkpoint.best_metric}' is never measured without data.validation_files",
            )
    elif not trainer.validation.greedy and trainer.validation.n == 0:
        yield (
            "trainer.validation.n",
            "validation would measure nothing: set trainer.validation.greedy=true or trainer.validation.n >= 1",
        )


def models_exist(config: ResolvedConfig) -> Problems:
    paths = {
        "model.path": config.model.path,
        "critic.path": config.critic.path,
        "reference.path": config.reference.path,
    }
    for key, path in paths.items():
        if path is None:
            continue
        if not os.path.isdir(path):
            yield key, f"no such directory: {path}; expected a model that transformers can load{_remedy(path)}"
        elif not os.path.isfile(os.path.join(path, "config.json")):
            yield key, f"{path} has no config.json; expected a model that transformers can load{_remedy(path)}"


def files_exist(config: ResolvedConfig) -> Problems:
    paths = {f"data.train_files.{i}": path for i, path in enumerate(config.data.train_files)}
    paths |= {f"data.validation_files.{i}": path for i, path in enumerate(config.data.validation_files)}
    if config.model.chat_template is not None:
        paths["model.chat_template"] = config.model.chat_template
    for key, path in paths.items():
        if not os.path.isfile(path):
            yield key, f"no such file: {path}{_remedy(path)}"


def _remedy(path: str) -> str:
    """The command that makes what is missing, where a prepare.py stands close above it."""
    for parent in list(Path(path).parents)[:_MOST_PARENTS]:
        script = parent / "prepare.py"
        if script.is_file():
            return f"; make it with: python {os.path.relpath(script)}"
    return ""


CHECKS: tuple[Check, ...] = (
    nothing_empty,
    group_size,
    engine_environment,
    training_processes,
    engine_parallelism,
    offload_leaves_the_engine_its_weights,
    deterministic_rollouts,
    reference_is_used,
    critic_is_used,
    optimizer_betas,
    unique_names,
    something_rewards,
    validation_files,
)
FILE_CHECKS: tuple[Check, ...] = (models_exist, files_exist)


def check(config: ResolvedConfig, check_files: bool, alternatives: Alternatives = installed_with) -> Problems:
    """Every problem of every check; those of the file system only on request."""
    yield from missing_capabilities(config, training=False, alternatives=alternatives)
    for each in (*CHECKS, *(FILE_CHECKS if check_files else ())):
        yield from each(config)
