"""Turns verl's values into a configuration of agentrl, and says what became of each."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from agentrl_compat_verl import keys
from agentrl_compat_verl.attached import attach
from agentrl_compat_verl.conversion import Conversion
from agentrl_compat_verl.keys import UNSET, Key
from agentrl_compat_verl.reading import Reading

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_CORRECTION = "algorithm.rollout_correction"


UNLIMITED_BATCHES = 10
"""Takes the place of no limit, which agentrl does not have."""


def convert(reading: Reading) -> Conversion:
    """Convert values by verl's dotted key; those that are left out have verl's defaults."""
    named = {_renamed(key): value for key, value in reading.values.items()}
    unset = {key: value for key, value in named.items() if "$" in str(value) or "`" in str(value)}
    result = Conversion({key: value for key, value in named.items() if key not in unset}, reading.roots)
    result.incomplete |= reading.missing
    for key, value in unset.items():
        where = result.incomplete if key in keys.TASK else result.decisions
        where[key] = f"only the running script knows the value: {value}. Write {key}=VALUE after the script"
    _agent_loop(result, {*unset})
    _engine(result)
    result.take(keys.KEYS)
    _adapter(result)
    _prompts(result)
    critic = _estimator(result)
    _loss(result)
    _kl(result)
    _dynamic_sampling(result)
    _correction(result)
    _batches(result, "actor", _ACTOR, keys.KEYS)
    if critic:
        result.take(keys.CRITIC)
        _batches(result, "critic", "critic", keys.CRITIC)
    _validation(result)
    _run(result)
    _rewards(result)
    _other_media(result)
    _rest(result, critic)
    for key, text in reading.notes.items():
        key = _renamed(key)
        result.decisions[key] = "; ".join(filter(None, (result.decisions.get(key), text)))
    return result


def _renamed(key: str) -> str:
    for old, new in keys.RENAMED.items():
        if key == old or (old.endswith(".") and key.startswith(old)):
            return new + key.removeprefix(old)
    return key


def _agent_loop(result: Conversion, unset: set[str]) -> None:
    turns = f"{_ROLLOUT}.multi_turn"
    attach(result)
    loops = result.values["rollout.agent.loops"]
    if unset & set(keys.TASK) and loops == ["single_turn"]:
        loops[:] = [{"name": "tool_agent", "config": {}}]
    if {"name": "tool_agent", "config": {}} not in loops:
        return
    at = loops.index({"name": "tool_agent", "config": {}})
    result.take(keys.tool_agent(at))
    most = result.number(f"{turns}.max_user_turns")
    if most is not None:
        # verl counts tool answers as user turns too: a turn of the policy follows the last one.
        own = result.number(f"{turns}.max_assistant_turns")
        here, limit = f"rollout.agent.loops.{at}.config.max_assistant_turns", min(most + 1, own or most + 1)
        result.values[here] = limit
        result.converted[f"{turns}.max_user_turns"] = f"{here}={limit}: verl counts tool answers as user turns"
    result.decisions[f"{turns}.max_tool_response_length"] = (
        f"rollout.agent.loops.{at}.config.max_tool_response_tokens: verl counts characters, agentrl counts tokens"
    )


def _other_media(result: Conversion) -> None:
    """A task with videos or audio has no counterpart."""
    signs = [key for key in keys.OTHER_MEDIA if key in result.given]
    for key in signs:
        result.missing[key] = "agentrl has images, and no videos or audio"
    if found := [key for key in signs if result.get(key) is not None]:
        result.incomplete["videos"] = (
            f"no counterpart: agentrl has images, and no videos or audio ({', '.join(found)}). The configuration "
            "trains on texts and images; rows with a video are refused"
        )


def _engine(result: Conversion) -> None:
    key = f"{_ROLLOUT}.name"
    name = result.get(key, "vllm")
    if name not in keys.ENGINES:
        result.decisions[key] = f"rollout.engine: agentrl has no {name!r}; it has {', '.join(keys.ENGINES)}"
        return
    result.set(key, "rollout.engine.name", name)
    result.take(keys.ENGINES[name])
    if name != "hf":
        result.decisions[key] = (
            f"rollout.engine.python: `agentrl engines setup {name}` installs the engine and prints the line"
        )


def _adapter(result: Conversion) -> None:
    """A LoRA adapter: one that is stored, whose settings count, or a new one."""
    key = f"{_MODEL}.lora_adapter_path"
    if result.get(key) is not None:
        result.set(key, "model.adapter.path", result.get(key))
        result.done(*(row.verl for row in keys.ADAPTER))
    elif result.number(f"{_MODEL}.lora_rank", 0) > 0:
        result.take(keys.ADAPTER)


def _prompts(result: Conversion) -> None:
    filtered = result.get("data.filter_overlong_prompts", False)
    key = "data.filter_overlong_prompts" if filtered else "data.truncation"
    treatment = "filter" if filtered else result.get("data.truncation", "error")
    result.set(key, "data.overlong_prompts", treatment, "filter")
    result.done("data.filter_overlong_prompts", "data.truncation")


def _estimator(result: Conversion) -> bool:
    """Whether there is a critic."""
    key = "algorithm.adv_estimator"
    theirs = result.get(key, "gae")
    name = keys.ESTIMATORS.get(theirs)
    if name is None:
        result.decisions[key] = f"algorithm.advantage: agentrl has no {theirs!r}; `agentrl plugins list` shows all"
        return False
    result.set(key, "algorithm.advantage.name", name)
    result.take(keys.ESTIMATOR_OPTIONS.get(name, ()))
    return name in keys.WITH_CRITIC


def _loss(result: Conversion) -> None:
    key = f"{_ACTOR}.policy_loss.loss_mode"
    mode = result.get(key, "vanilla")
    if mode not in keys.LOSSES:
        result.decisions[key] = f"algorithm.loss: agentrl has no {mode!r} as verl defines it; see docs/algorithms.md"
        return
    name, options = keys.LOSSES[mode]
    result.set(key, "algorithm.loss.name", name, "ppo" if mode == "vanilla" else UNSET)
    if mode.startswith("dppo"):
        result.values["algorithm.loss.config.divergence"] = mode.removeprefix("dppo_")
    result.take(options)
    if result.get(f"{_ACTOR}.clip_ratio_c", 3.0) is None:
        result.values.pop("algorithm.loss.config.dual_clip", None)
    aggregation = f"{_ACTOR}.loss_agg_mode"
    if mode in keys.MEAN_OVER_ROWS:
        result.set(key, "algorithm.aggregation", "seq-mean-token-mean")
        result.done(aggregation)
    else:
        result.set(aggregation, "algorithm.aggregation", result.get(aggregation, "token-mean"), "token-mean")


def _kl(result: Conversion) -> None:
    if result.get(f"{_ACTOR}.use_kl_loss", False):
        result.take(keys.REFERENCE)
        limit = _micro_batch_tokens(result, _REF, "log_prob_micro_batch_size", "log_prob_max_token_len_per_gpu")
        dynamic = result.get(f"{_REF}.log_prob_use_dynamic_bsz", result.get(f"{_ACTOR}.use_dynamic_bsz", False))
        source = "log_prob_max_token_len_per_gpu" if dynamic else "log_prob_micro_batch_size_per_gpu"
        if limit is not None:
            result.set(f"{_REF}.{source}", "reference.micro_batch_tokens", limit, 32768)
    result.done(f"{_ACTOR}.use_kl_loss")
    if not result.get("algorithm.use_kl_in_reward", False):
        return
    if "algorithm.kl_coef" in result.values:
        result.decisions["algorithm.use_kl_in_reward"] = (
            "algorithm.kl_placement: the KL penalty is part of the loss or of the reward, not of both"
        )
        return
    result.set("algorithm.use_kl_in_reward", "algorithm.kl_placement", "reward")
    result.set("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef", result.number("algorithm.kl_ctrl.kl_coef", 0.001))
    if result.get("algorithm.kl_ctrl.type", "fixed") == "adaptive":
        target = result.number("algorithm.kl_ctrl.target_kl", 0.1)
        result.set("algorithm.kl_ctrl.target_kl", "algorithm.kl_target", target)
    result.done("algorithm.kl_ctrl.type")


def _dynamic_sampling(result: Conversion) -> None:
    section = "algorithm.filter_groups"
    if result.get(f"{section}.enable", False):
        # verl counts the first round too; 0 is no limit there.
        batches = result.number(f"{section}.max_num_gen_batches", 0) or UNLIMITED_BATCHES
        result.set(f"{section}.enable", "rollout.resample_rounds", max(batches - 1, 1))
    result.done(f"{section}.enable", f"{section}.max_num_gen_batches", f"{section}.metric")


def _correction(result: Conversion) -> None:
    level = result.get(f"{_CORRECTION}.rollout_is")
    threshold = result.get(f"{_CORRECTION}.rollout_is_threshold", 2.0)
    bypass = result.get(f"{_CORRECTION}.bypass_mode", False)
    parts = [f"{_CORRECTION}.{name}" for name in ("rollout_is_threshold", "rollout_is_batch_normalize", "loss_type")]
    rejection, bounds = f"{_CORRECTION}.rollout_rs", f"{_CORRECTION}.rollout_rs_threshold"
    if bypass and result.get(f"{_CORRECTION}.loss_type", "ppo_clip") == "reinforce":
        result.values["algorithm.loss"] = {"name": "tis_reinforce", "config": {"max_ratio": threshold}}
        result.values = {k: v for k, v in result.values.items() if not k.startswith("algorithm.loss.")}
        result.converted[f"{_CORRECTION}.bypass_mode"] = "algorithm.loss.name=tis_reinforce"
        result.done(f"{_CORRECTION}.rollout_is", *parts)
    elif bypass:
        result.decisions[f"{_CORRECTION}.bypass_mode"] = (
            "algorithm.loss: the actor computes the old log-probs here; dppo and tis_reinforce compare with the engine"
        )
    elif level is not None:
        key = f"{_CORRECTION}.rollout_is"
        normalize = {"normalize": True} if result.get(f"{_CORRECTION}.rollout_is_batch_normalize", False) else {}
        low, separator, high = str(threshold).partition("_")
        if separator:
            result.set(key, "algorithm.correction.name", keys.ICEPOPS.get(level, level))
            result.values["algorithm.correction.config"] = {"low": float(low), "high": float(high), **normalize}
        else:
            result.set(key, "algorithm.correction.name", keys.CORRECTIONS.get(level, level))
            result.values["algorithm.correction.config"] = {"max_weight": float(threshold), **normalize}
        result.done(*parts)
    if result.get(rejection) is not None:
        limits = _limits(str(result.get(rejection)), str(result.get(bounds)))
        plain = level in (None, *keys.CORRECTIONS) and "_" not in str(threshold) and not bypass
        weights = {} if level is None else {"weights": level, "max_weight": float(threshold)} if plain else {}
        if not limits or not plain or result.get(f"{_CORRECTION}.rollout_is_batch_normalize", False):
            result.decisions[rejection] = (
                "algorithm.correction: there is one correction; divergence_rejection rejects tokens and rows by limits"
            )
        elif limits.keys() == {"seq_mean_k1"} and level != "sequence":
            low, high = limits["seq_mean_k1"]
            result.set(rejection, "algorithm.correction.name", "geometric_rejection")
            weights.pop("weights", None)
            result.values["algorithm.correction.config"] = {"low": low, "high": high, **weights}
        else:
            result.set(rejection, "algorithm.correction.name", "divergence_rejection")
            result.values["algorithm.correction.config"] = {"limits": limits, **weights}
        result.done(bounds)
    result.done(rejection, bounds, *parts, f"{_CORRECTION}.bypass_mode", f"{_CORRECTION}.rollout_is")


def _limits(names: str, bounds: str) -> dict[str, list[float]]:
    """``divergence_rejection.limits`` of the criteria in ``rollout_rs`` and its thresholds; empty where they differ."""
    criteria, thresholds = names.split(","), bounds.split(",")
    if len(criteria) != len(thresholds):
        return {}
    limits = {}
    for name, threshold in zip(map(str.strip, criteria), thresholds, strict=True):
        try:
            numbers = [float(number) for number in threshold.split("_")]
        except ValueError:
            return {}
        if name.endswith("k1") and len(numbers) == 1 and numbers[0]:
            # verl's lower limit is the reciprocal then.
            numbers = sorted([1 / numbers[0], numbers[0]])
        if name not in keys.REJECTIONS or len(numbers) != 1 + name.endswith("k1"):
            return {}
        limits[name] = numbers
    return limits


def _micro_batch_tokens(result: Conversion, section: str, size: str, limit: str) -> int | None:
    """Tokens per pass: verl's limit, or its number of samples times the longest prompt and response."""
    dynamic = f"{section}.{'log_prob_' if section == _REF else ''}use_dynamic_bsz"
    names = [f"{section}.{size}_per_gpu", f"{section}.{size}"]
    samples = next((result.number(name) for name in names if result.get(name) is not None), None)
    result.done(dynamic, *names, f"{section}.{limit}")
    if result.get(dynamic, result.get(f"{_ACTOR}.use_dynamic_bsz", False)):
        return result.number(f"{section}.{limit}")
    longest = result.number("data.max_prompt_length", 512) + result.number("data.max_response_length", 512)
    return None if samples is None else int(samples * longest)


def _batches(result: Conversion, role: str, section: str, table: Iterable[Key]) -> None:
    mini = result.number(f"{section}.ppo_mini_batch_size", result.number(f"{_ACTOR}.ppo_mini_batch_size", 256))
    batches = max(math.ceil(result.number("data.train_batch_size", 1024) / mini), 1)
    result.set(f"{section}.ppo_mini_batch_size", f"{role}.mini_batches", batches, 1)
    dynamic = result.get(f"{section}.use_dynamic_bsz", result.get(f"{_ACTOR}.use_dynamic_bsz", False))
    source = f"{section}.{'ppo_max_token_len_per_gpu' if dynamic else 'ppo_micro_batch_size_per_gpu'}"
    tokens = _micro_batch_tokens(result, section, "ppo_micro_batch_size", "ppo_max_token_len_per_gpu")
    if tokens is not None:
        result.set(source, f"{role}.micro_batch_tokens", tokens, 16384)
    epochs = result.number(f"{section}.ppo_epochs", result.number(f"{_ACTOR}.ppo_epochs", 1))
    if role == "critic":
        result.set(f"{section}.ppo_epochs", "critic.epochs", epochs, 1)
    _warmup(result, role, f"{section}.optim", batches * epochs)


def _warmup(result: Conversion, role: str, section: str, per_step: int) -> None:
    """verl's schedule advances once per step, ours with each optimizer step."""
    steps, key = result.number(f"{section}.lr_warmup_steps", -1), f"{section}.lr_warmup_steps"
    share = result.number(f"{section}.lr_warmup_steps_ratio", 0.0)
    total = result.number("trainer.total_training_steps")
    if steps is None or steps < 0:
        key, steps = f"{section}.lr_warmup_steps_ratio", None if share and total is None else int(share * (total or 0))
    if steps is None:
        result.decisions[key] = (
            f"{role}.optimizer.warmup_steps: {share} of all steps, times {per_step} optimizer steps in each"
        )
    else:
        result.set(key, f"{role}.optimizer.warmup_steps", steps * per_step, 0)
    result.done(f"{section}.lr_warmup_steps", f"{section}.lr_warmup_steps_ratio")


def _validation(result: Conversion) -> None:
    temperature = f"{_ROLLOUT}.val_kwargs.temperature"
    if result.number(temperature, keys.GREEDY) > 0:
        result.set(temperature, "trainer.validation.greedy", False)
        result.take(keys.VALIDATION_SAMPLING)
    else:
        result.set(temperature, "trainer.validation.n", 0)
        result.done(*(key.verl for key in keys.VALIDATION_SAMPLING))


def _run(result: Conversion) -> None:
    result.values["cluster.runtime"] = "ray"
    key = "trainer.resume_mode"
    mode = result.get(key, "auto")
    result.set(key, "trainer.resume", keys.RESUME.get(mode) or result.get("trainer.resume_from_path", "auto"), "never")
    result.done("trainer.resume_from_path")
    if result.get("trainer.max_actor_ckpt_to_keep", 1) is None:
        result.values.pop("trainer.checkpoint.keep", None)
    _trackers(result)


def _trackers(result: Conversion) -> None:
    key, project = "trainer.logger", "trainer.project_name"
    loggers = [keys.SAME_TRACKERS.get(name, name) for name in keys.as_list(result.get(key, []))]
    added = [name for name in loggers if name in keys.TRACKERS]
    if added:
        trackers: list[Any] = list(keys.DEFAULT_TRACKERS)
        for name in added:
            option, further = keys.TRACKERS[name]
            named = {option: result.get(project)} if result.get(project) else {}
            trackers.append({"name": name, "config": named | dict(further)})
        result.set(key, "trainer.trackers", trackers)
        result.done(project)
    others = [name for name in loggers if name not in (*keys.TRACKERS, *keys.DEFAULT_TRACKERS)]
    if others:
        result.decisions[key] = (
            f"trainer.trackers: {', '.join(map(str, others))}, if a package registers it; `agentrl plugins list` shows"
        )
    else:
        result.done(key)


def _rewards(result: Conversion) -> None:
    key = "reward_model.reward_manager"
    manager = result.get(key, "naive")
    if manager == "naive":
        result.done(key)
    else:
        result.decisions[key] = f"reward.manager: verl's is {manager!r}; `agentrl plugins list` shows ours"
    file, function = result.get("custom_reward_function.path"), result.get("custom_reward_function.name")
    result.decisions["custom_reward_function"] = (
        "reward.functions: verl chooses a function by data_source; name one of `agentrl plugins list`, or your own as "
        "./file.py:function"
        if file is None
        else f"reward.functions: {file}:{function or 'compute_score'} gets a RewardTrajectory here; wrap it"
    )
    result.done("custom_reward_function.path", "custom_reward_function.name")


def _rest(result: Conversion, critic: bool) -> None:
    """What the tables of prefixes and reasons say of the keys that are left."""
    tables = (*keys.ENGINES.values(), *keys.ESTIMATOR_OPTIONS.values(), *(table for _, table in keys.LOSSES.values()))
    tables = (*tables, keys.ADAPTER, keys.CRITIC, keys.REFERENCE, keys.TOOL_AGENT)
    every = {row.verl for table in tables for row in table}
    for key, value in result.given.items():
        if result.is_known(key):
            continue
        for prefix, here in keys.PREFIXES.items():
            if key.startswith(prefix):
                result.set(key, here + key.removeprefix(prefix), value)
        if result.is_known(key):
            continue
        if value in (None, False, -1):
            result.default[key] = "off"
        elif key.startswith("critic.") and not critic:
            result.default[key] = "no critic is used"
        elif key.startswith(f"{_REF}.") or key in every:
            result.default[key] = "not used with the other choices"
        elif reason := _reason(keys.ALWAYS, key):
            result.default[key] = reason
        elif reason := _reason(keys.DECISIONS, key):
            result.decisions[key] = reason
        elif reason := _reason(keys.MISSING, key):
            result.missing[key] = f"agentrl has no {reason}" if " " not in reason.split(";")[0] else reason
        else:
            result.missing[key] = "unknown to this converter"


def _reason(table: Mapping[str, str], key: str) -> str | None:
    """That of the key, or of the longest section around it."""
    parts = key.split(".")
    return next((table[name] for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in table), None)
