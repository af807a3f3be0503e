"""What keys must agree on with each other, the plugins' capabilities and the file system.

Each check is a generator of ``(key path, message)``. They run only on a tree that is sound in itself.
"""

import os
from collections.abc import Callable, Iterator
from glob import glob
from pathlib import Path

from agentrl_core.config.capabilities import Alternatives, installed_with, missing_capabilities
from agentrl_core.config.hub import is_hub_name
from agentrl_core.config.schema import PolicyConfig, ResolvedConfig, ServedSlot
from agentrl_core.engine_kit.requests import sampling_problem

_MOST_PARENTS = 3
_PARALLEL = ("tensor_parallel", "pipeline_parallel", "data_parallel")

Problems = Iterator[tuple[str, str]]
Check = Callable[[ResolvedConfig], Problems]


def served(config: ResolvedConfig) -> dict[str, ServedSlot]:
    """The policy's engine and the named ones, by key path."""
    return {"rollout.engine": config.rollout.engine} | {
        f"engines.{name}": slot for name, slot in config.engines.items()
    }


def data(config: ResolvedConfig) -> Problems:
    if not config.data.train_files and not config.environments:
        yield (
            "data.train_files",
            "expected at least one file, or an environment in `environments`; found none",
        )
    best, validation = config.trainer.checkpoint.best_metric, config.trainer.validation
    for key, sampling in (("rollout", config.rollout.sampling), ("trainer.validation", validation.sampling)):
        if "" in sampling.stop:
            yield f"{key}.sampling.stop", "expected texts of at least one character, found an empty one; remove it"
        if problem := sampling_problem(sampling.params()):
            yield f"{key}.sampling", problem
    if best is not None and not config.data.validation_files and not config.environments:
        yield "trainer.checkpoint.best_metric", f"'{best}' is never measured without data.validation_files"
    if config.data.validation_files and not validation.greedy and validation.n == 0:
        yield (
            "trainer.validation.n",
            "validation would measure nothing: set trainer.validation.greedy=true or trainer.validation.n >= 1",
        )


def local_runtime(config: ResolvedConfig) -> Problems:
    """What needs a Ray cluster."""
    if config.cluster.runtime != "local":
        return
    engine, engines = config.rollout.engine, served(config)
    for key, slot in engines.items():
        if slot.python is not None:
            yield (
                f"{key}.python",
                "an engine in its own environment needs cluster.runtime=ray, found local; set cluster.runtime=ray or "
                f"{key}.python=null",
            )
    one_process = "the local runtime is one process"
    same_process = "in the local runtime engines are in the trainer's process"
    if config.trainer.backend.python is not None:
        yield (
            "trainer.backend.python",
            "training processes in their own environment need cluster.runtime=ray, found local; set "
            "cluster.runtime=ray or trainer.backend.python=null",
        )
    found: list[tuple[str, object, object, str]] = [
        *((f"cluster.{key}", getattr(config.cluster, key), 1, one_process) for key in ("nodes", "processes_per_node")),
        *(
            (f"{path}.{key}", getattr(slot, key), 1, one_process)
            for path, slot in engines.items()
            for key in (*_PARALLEL, "nodes")
        ),
        (
            "rollout.engine.weight_transfer",
            engine.weight_transfer.replace("auto", "host_memory"),
            "host_memory",
            same_process,
        ),
        ("rollout.engine.placement", engine.placement, "colocated", same_process),
    ]
    for key, value, local, reason in found:
        if value != local:
            yield key, f"found {value}, but {reason}; set cluster.runtime=ray or {key}={local}"
    if engine.dtype is not None and config.shares_module:
        yield (
            "rollout.engine.dtype",
            f"found {engine.dtype}, but engine '{engine.name}' generates with the actor's own weights in the local "
            "runtime; set model.compute_dtype, or cluster.runtime=ray",
        )
    if config.actor.offload_parameters and config.shares_module:
        yield (
            "actor.offload_parameters",
            f"engine '{engine.name}' generates with the actor's own weights in the local runtime, and they must stay "
            "on the device; set cluster.runtime=ray or actor.offload_parameters=false",
        )


def mini_batches(config: ResolvedConfig) -> Problems:
    trajectories = config.data.batch_size * config.rollout.n
    trained = {"actor": config.actor, **({"critic": config.critic} if config.needs_critic else {})}
    for key, section in trained.items():
        if section.mini_batches > trajectories:
            yield (
                f"{key}.mini_batches",
                f"found {section.mini_batches}, but a step has {trajectories} trajectories (data.batch_size x "
                f"rollout.n); allowed is up to {trajectories}",
            )


def replicas(config: ResolvedConfig) -> Problems:
    for key, engine in served(config).items():
        if engine.devices % engine.nodes:
            yield (
                f"{key}.nodes",
                f"{engine.devices} device(s) of a replica ({' x '.join(_PARALLEL)}) cannot be spread evenly over "
                f"{engine.nodes} nodes",
            )


def deterministic_rollouts(config: ResolvedConfig) -> Problems:
    rollout = config.rollout
    if not rollout.deterministic:
        return
    trajectories = config.data.batch_size * rollout.n
    found = [
        ("engine.replicas", config.engine_replicas, config.engine_replicas == 1, "1 replica"),
        (
            "engine.max_in_flight",
            rollout.engine.max_in_flight,
            rollout.engine.max_in_flight is None,
            "all requests of a step in the engine (rollout.engine.max_in_flight=null)",
        ),
        ("agent.num_workers", config.agent_workers, config.agent_workers == 1, "1 worker"),
        (
            "agent.max_concurrent",
            rollout.agent.max_concurrent,
            rollout.agent.max_concurrent >= trajectories,
            f"all trajectories of a step to run concurrently, data.batch_size x rollout.n = {trajectories}",
        ),
    ]
    for key, value, fits, needed in found:
        if not fits:
            yield f"rollout.{key}", f"rollout.deterministic needs {needed}, found {value}"


def staleness(config: ResolvedConfig) -> Problems:
    """What training on older rollouts needs."""
    rollout, algorithm, most = config.rollout, config.algorithm, config.rollout.max_staleness
    if config.pipeline_depth > most:
        yield (
            "rollout.pipeline_depth",
            f"found {config.pipeline_depth}, but batches that are begun so far ahead would be older than "
            f"rollout.max_staleness={most}; allowed is up to {most}",
        )
    if not most:
        return
    if config.cluster.runtime == "local":
        yield (
            "rollout.max_staleness",
            f"found {most}, but in the local runtime, which is one process, nothing can be sampled while the trainer "
            "trains; set cluster.runtime=ray, or rollout.max_staleness=0",
        )
    elif rollout.engine.placement != "standalone":
        yield (
            "rollout.max_staleness",
            f"found {most}, but the engines share the devices of the training processes, and rest while these train; "
            "set rollout.engine.placement=standalone, or rollout.max_staleness=0",
        )
    if rollout.deterministic and config.pipeline_depth > 1:
        yield (
            "rollout.pipeline_depth",
            f"found {config.pipeline_depth}, but rollout.deterministic samples one whole batch while the one before it "
            "is trained; set rollout.pipeline_depth=1",
        )
    if config.needs_rollout_log_probs is None and not algorithm.uncorrected_staleness:
        yield (
            "rollout.max_staleness",
            f"found {most}, but the loss '{algorithm.loss.registered_name}' compares with the policy before the "
            "update, not with the one that sampled: training on old rollouts like that can destroy the run. Set "
            "algorithm.loss=dppo, or a correction such as algorithm.correction=token_tis, or, to do it nevertheless, "
            "algorithm.uncorrected_staleness=true",
        )


def adapters(config: ResolvedConfig) -> Problems:
    """What a LoRA adapter excludes, and what needs one."""
    rollout = config.rollout
    if config.model.adapter is None and not config.policies and rollout.on_new_weights == "finish":
        yield (
            "rollout.on_new_weights",
            "found finish, but only versions of an adapter can be served side by side; set model.adapter.rank=16 to "
            "train one, or rollout.on_new_weights=recompute",
        )
    if config.model.quantize is not None:
        yield from _quantized(config)
    if not config.serves_adapters:
        return
    if rollout.on_new_weights == "continue":
        yield (
            "rollout.on_new_weights",
            f"found continue, but engine '{rollout.engine.name}' keeps the cache of each adapter version apart; set "
            "finish, recompute or restart",
        )
    if rollout.engine.weight_transfer == "broadcast":
        yield (
            "rollout.engine.weight_transfer",
            "found broadcast, but engines are sent the adapter alone, which is small and goes through the memory of "
            "hosts; set rollout.engine.weight_transfer=auto",
        )


def policies(config: ResolvedConfig) -> Problems:
    """Whether names, agents and sections of several policies fit together."""
    if not config.policies:
        return
    engine, players = config.rollout.engine, dict[str, str]()
    if not config.serves_adapters and any(each.adapter or not each.frozen for each in config.policies.values()):
        yield (
            "policies",
            f"engine '{engine.name}' takes no adapters (capability 'adapters'), so it cannot serve several policies of "
            "one model; choose another engine, or remove policies",
        )
    for name, policy in config.policies.items():
        key = f"policies.{name}"
        if not name.isidentifier() or name.endswith("_initial"):
            yield (
                key,
                f"{name!r} is no name for a policy; allowed are letters, digits and _, not a digit first, and no name "
                "that ends with _initial",
            )
        for agent in policy.agents or [name]:
            if agent in players:
                yield f"{key}.agents", f"agent {agent!r} is played by the policy {players[agent]!r} already; remove one"
            players[agent] = name
        yield from _policy(config, key, policy)


def _policy(config: ResolvedConfig, key: str, policy: PolicyConfig) -> Problems:
    if policy.is_trained:
        adapter = policy.adapter or config.model.adapter
        if adapter is None:
            yield (
                f"{key}.adapter",
                "a policy that is trained is an adapter of the model, and neither this key nor model.adapter describes "
                "one; set model.adapter.rank=16",
            )
        advantage = (policy.algorithm or config.algorithm).advantage
        if advantage.has("values"):
            yield (
                f"{key}.algorithm.advantage",
                f"advantage estimator '{advantage.registered_name}' needs a critic, which runs with policies do not "
                "have; choose another one, such as grpo",
            )
        offloads = config.actor.offload_parameters
        if policy.actor is not None and policy.actor.offload_parameters != offloads:
            yield (
                f"{key}.actor.offload_parameters",
                f"found {str(not offloads).lower()}, but all policies are adapters of one model; set "
                "actor.offload_parameters for all of them",
            )
        return
    unused = ["actor", "algorithm", *(["adapter"] if policy.copy_of is not None else [])]
    for section in unused:
        if getattr(policy, section) is not None:
            yield f"{key}.{section}", f"has no effect on a policy that is not trained; set {key}.{section}=null"
    if policy.frozen and policy.adapter is not None and policy.adapter.path is None:
        yield (
            f"{key}.adapter.path",
            f"a new adapter changes nothing, and a frozen policy never learns; name one, or set {key}.adapter=null for "
            "the model without an adapter",
        )
    if policy.copy_of is None:
        return
    trained = [name for name, each in config.policies.items() if each.is_trained]
    if policy.frozen:
        yield f"{key}.frozen", f"a copy of {policy.copy_of!r} changes with it; set {key}.frozen=false, or copy_of=null"
    if policy.copy_of not in trained:
        yield (
            f"{key}.copy_of",
            f"found {policy.copy_of!r}; allowed are the policies that are trained: {', '.join(trained) or 'none'}",
        )


def _quantized(config: ResolvedConfig) -> Problems:
    key, found, engine = "model.quantize", f"found {config.model.quantize}", config.rollout.engine
    if config.model.adapter is None and not config.policies:
        yield (
            key,
            f"{found}, but weights in so few bits cannot be trained; set model.adapter.rank=16 to train an adapter, or "
            "model.quantize=null",
        )
    elif not config.serves_adapters:
        yield (
            key,
            f"{found}, but engine '{engine.name}' takes no adapters (capability 'adapters'), only whole weights; "
            "choose another engine, or model.quantize=null",
        )
    if config.cluster.processes > 1:
        yield (
            key,
            f"{found}, but {config.cluster.processes} processes cannot shard such weights; set model.quantize=null",
        )
    for role, section in (("actor", config.actor), ("critic", config.critic)):
        if section.offload_parameters:
            yield (
                f"{role}.offload_parameters",
                f"found true, but weights of {key}={config.model.quantize} stay on the device; set it to false",
            )


def algorithm(config: ResolvedConfig) -> Problems:
    n, advantage, critic = config.rollout.n, config.algorithm.advantage, config.critic
    if n < 2 and advantage.has("groups"):
        yield (
            "rollout.n",
            f"group size {n} with advantage estimator '{advantage.name}', which compares the samples of one prompt: "
            "every advantage would be 0; expected rollout.n >= 2, or an estimator without groups in "
            "algorithm.advantage",
        )
    if config.reference.path is not None and not config.needs_reference:
        yield (
            "reference.path",
            "no reference is used because algorithm.kl_coef is 0; set algorithm.kl_coef > 0 or reference.path=null",
        )
    yield from _coefficients(config)
    needs_teacher = advantage.has("teacher_log_probs")
    if needs_teacher and config.teacher.path is None and config.teacher.context is None:
        what = "needs a teacher: name its model, or set teacher.context for the policy to teach itself"
        yield "teacher.path", f"advantage estimator '{advantage.name}' {what}"
    for name, given in (("path", config.teacher.path), ("context", config.teacher.context)):
        if given is not None and not needs_teacher:
            yield f"teacher.{name}", f"advantage estimator '{advantage.name}' uses no teacher; set teacher.{name}=null"
    if config.algorithm.correction is not None and config.algorithm.old_log_probs == "rollout":
        yield (
            "algorithm.correction",
            "algorithm.old_log_probs=rollout leaves no difference to correct; set algorithm.old_log_probs=actor or "
            "algorithm.correction=null",
        )
    for key, value, unused in (("path", critic.path, None), ("warmup_steps", critic.warmup_steps, 0)):
        if value != unused and not advantage.has("values"):
            yield (
                f"critic.{key}",
                f"no critic is used because advantage estimator '{advantage.name}' needs no values; choose another "
                f"algorithm.advantage or set critic.{key}={'null' if unused is None else unused}",
            )
    for role, betas in (("actor", config.actor.optimizer.betas), ("critic", critic.optimizer.betas)):
        if len(betas) != 2:
            yield f"{role}.optimizer.betas", f"expected two numbers, found {len(betas)}"


def _coefficients(config: ResolvedConfig) -> Problems:
    """Keys of ``algorithm`` that have no effect without another one."""
    settings = config.algorithm
    in_reward = settings.kl_placement == "reward"
    for key, is_set, works, needed in (
        ("kl_placement", in_reward, settings.kl_coef > 0, "kl_coef > 0"),
        ("kl_target", settings.kl_target is not None, in_reward, "kl_placement=reward"),
        ("entropy_target", settings.entropy_target is not None, settings.entropy_coef > 0, "entropy_coef > 0"),
    ):
        if is_set and not works:
            yield f"algorithm.{key}", f"has no effect without algorithm.{needed}"


def plugins(config: ResolvedConfig) -> Problems:
    loops, manager = config.rollout.agent.loops, config.reward.manager
    if not loops:
        yield "rollout.agent.loops", "expected at least one agent loop, found none; see `agentrl plugins list`"
    lists = (
        ("rollout.agent.loops", loops),
        ("tools", config.tools),
        ("interactions", config.interactions),
        ("environments", config.environments),
    )
    for path, slots in lists:
        names = [slot.registered_name for slot in slots]
        for index, name in enumerate(names):
            if (first := names.index(name)) != index:
                yield (
                    f"{path}.{index}.name",
                    f"duplicate name '{name}', first used in {path}.{first}; rows choose by name, so remove or rename "
                    "one",
                )
    for index, function in enumerate(config.reward.functions):
        if function.range is not None and (len(function.range) != 2 or function.range[0] >= function.range[1]):
            yield f"reward.functions.{index}.range", f"expected [lowest, highest], found {function.range}"
    others = (*((manager, name) for name in ("tool_rewards", "turn_scores")), *((loop, "rewards") for loop in loops))
    given = config.reward.functions or config.environments
    if not given and not any(slot.has(capability) for slot, capability in others):
        yield (
            "reward.functions",
            "nothing gives a reward: no function is configured, no agent loop returns rewards, and reward manager "
            f"'{manager.name}' uses neither the rewards of tools nor the scores of interactions; add a "
            "function (see `agentrl plugins list`, or ./file.py:function)",
        )


def files(config: ResolvedConfig) -> Problems:
    models = {
        "model.path": config.model.path,
        "critic.path": config.critic.path,
        "reference.path": config.reference.path,
        "teacher.path": config.teacher.path,
        **{f"engines.{name}.model": slot.model for name, slot in config.engines.items()},
    }
    for key, path in models.items():
        if path is not None and not is_hub_name(path) and not os.path.isfile(os.path.join(path, "config.json")):
            what = f"{path} has no config.json" if os.path.isdir(path) else f"no such directory: {path}"
            yield key, f"{what}; expected a model that transformers can load{_remedy(path)}"
    adapters = {"model.adapter.path": config.model.adapter}
    adapters |= {f"policies.{name}.adapter.path": each.adapter for name, each in config.policies.items()}
    names = ("adapter_config.json", "adapter_model.safetensors")
    for key, settings in adapters.items():
        adapter = None if settings is None else settings.path
        missing = [name for name in names if adapter is not None and not os.path.isfile(os.path.join(adapter, name))]
        if adapter is not None and missing:
            what = f"{adapter} has no {missing[0]}" if os.path.isdir(adapter) else f"no such directory: {adapter}"
            yield key, f"{what}; expected an adapter as PEFT saves it"
    paths = {f"data.train_files.{i}": path for i, path in enumerate(config.data.train_files)}
    paths |= {f"data.validation_files.{i}": path for i, path in enumerate(config.data.validation_files)}
    if config.model.chat_template is not None:
        paths["model.chat_template"] = config.model.chat_template
    for key, path in paths.items():
        # The dataset reads remote files, and reports those that are missing.
        if "://" not in path and not (os.path.isfile(path) or (key.startswith("data.") and glob(path, recursive=True))):
            yield key, f"no such file: {path}{_remedy(path)}"


def _remedy(path: str) -> str:
    """The command that makes what is missing, if a prepare.py is in a directory close above it."""
    for parent in list(Path(path).parents)[:_MOST_PARENTS]:
        script = parent / "prepare.py"
        if script.is_file():
            return f"; make it with: python {os.path.relpath(script)}"
    return ""


CHECKS: tuple[Check, ...] = (
    data, plugins, algorithm, mini_batches, replicas, local_runtime, deterministic_rollouts, staleness, adapters,
    policies,
)  # fmt: skip


def check(config: ResolvedConfig, check_files: bool, alternatives: Alternatives = installed_with) -> Problems:
    """Every problem of every check; those of the file system only on request."""
    yield from missing_capabilities(config, training=False, alternatives=alternatives)
    for each in (*CHECKS, *((files,) if check_files else ())):
        yield from each(config)
    yield from _of_policies(config, alternatives)


def _of_policies(config: ResolvedConfig, alternatives: Alternatives) -> Problems:
    """What is wrong with the sections that policies set themselves."""
    for name, policy in config.policies.items():
        own = [section for section in ("actor", "algorithm") if getattr(policy, section) is not None]
        if not own or not policy.is_trained:
            continue
        its = config.trained[name]
        found = [*missing_capabilities(its, training=False, alternatives=alternatives)]
        found += [problem for each in (algorithm, mini_batches, staleness) for problem in each(its)]
        for key, message in found:
            if key.partition(".")[0] in own:
                yield f"policies.{name}.{key}", message
            elif "algorithm" in own:
                yield key, f"for policies.{name}: {message}"
