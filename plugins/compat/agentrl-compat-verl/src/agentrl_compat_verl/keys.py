"""verl's configuration keys and agentrl's, as tables. Names and defaults of verl are those of August 2026."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

UNSET = object()
"""In place of verl's default: the key counts only where it is written."""


class NoCounterpartError(ValueError):
    """A value that agentrl has no equivalent of; the message says what to do."""


def same(value: Any) -> Any:
    return value


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def off_is_zero(value: Any) -> Any:
    """-1 and null mean off in verl."""
    return 0 if value is None or value < 0 else value


def layer_names(value: Any) -> Any:
    """Names of layers; verl takes a string for a pattern."""
    if isinstance(value, str) and value != "all-linear" and not value.isidentifier():
        raise NoCounterpartError(f"agentrl has no patterns such as {value!r}; name the layers, as in [q_proj, v_proj]")
    return value


def one_of(choices: dict[Any, Any]) -> Callable[[Any], Any]:
    """Translate a name."""

    def convert(value: Any) -> Any:
        if value not in choices:
            raise NoCounterpartError(f"agentrl has no {value!r}; it has {', '.join(map(str, choices.values()))}")
        return choices[value]

    return convert


@dataclass(frozen=True)
class Key:
    """One row: verl's key and default, agentrl's key and default, and how a value is converted."""

    verl: str
    verl_default: Any
    here: str
    here_default: Any
    convert: Callable[[Any], Any] = same


_DTYPES = {name: name for name in ("float32", "bfloat16", "float16")} | {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}
_FORMATS = {
    "hermes": "hermes", "qwen": "hermes", "qwen25": "hermes", "gpt-oss": "harmony", "qwen3_coder": "qwen3_coder",
    "llama3_json": "llama3_json", "glm": "glm4", "seed": "seed_oss", "minimax": "minimax_m2", "kimi": "kimi_k2",
    "deepseek_v4": "deepseek_v32", "gemma4": "gemma4",
}  # fmt: skip
_SCHEDULES = {name: name for name in ("constant", "linear", "cosine")}
_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_VALIDATION, _TURNS = f"{_ROLLOUT}.val_kwargs", f"{_ROLLOUT}.multi_turn"

KEYS = (
    Key(f"{_MODEL}.path", UNSET, "model.path", None),
    Key(f"{_MODEL}.trust_remote_code", False, "model.trust_remote_code", False),
    Key(f"{_MODEL}.enable_gradient_checkpointing", True, "model.gradient_checkpointing", False),
    Key(f"{_MODEL}.use_remove_padding", True, "model.packing", True),
    Key(f"{_MODEL}.override_config.attn_implementation", UNSET, "model.attn_implementation", "sdpa"),
    Key(f"{_ACTOR}.fsdp_config.model_dtype", "fp32", "model.dtype", "float32", one_of(_DTYPES)),
    Key(f"{_ACTOR}.freeze_vision_tower", False, "model.freeze", [], one_of({True: ["vision"], False: []})),
    Key(f"{_ROLLOUT}.limit_images", UNSET, "model.images.max_count", 16, lambda most: 16 if most is None else most),
    Key("data.train_files", UNSET, "data.train_files", None, as_list),
    Key("data.val_files", UNSET, "data.validation_files", [], as_list),
    Key("data.train_batch_size", 1024, "data.batch_size", 32),
    Key("data.max_prompt_length", 512, "data.max_prompt_length", 512),
    Key("data.prompt_key", "prompt", "data.dataset.config.prompt_key", "prompt"),
    Key("data.image_key", "images", "data.dataset.config.image_key", "images"),
    Key("data.shuffle", True, "data.sampler.name", "shuffle", one_of({True: "shuffle", False: "sequential"})),
    Key("data.seed", UNSET, "trainer.seed", 0),
    Key("data.val_max_samples", UNSET, "trainer.validation.max_prompts", None, lambda most: None if most < 0 else most),
    Key("data.max_response_length", 512, "rollout.max_response_length", 512),
    Key(f"{_ROLLOUT}.n", 1, "rollout.n", 8),
    Key(f"{_ROLLOUT}.temperature", 1.0, "rollout.sampling.temperature", 1.0),
    Key(f"{_ROLLOUT}.top_p", 1, "rollout.sampling.top_p", 1),
    Key(f"{_ROLLOUT}.top_k", -1, "rollout.sampling.top_k", 0, off_is_zero),
    Key(f"{_ROLLOUT}.agent.num_workers", UNSET, "rollout.agent.num_workers", None),
    Key(f"{_TURNS}.format", "hermes", "rollout.tool_parser.name", "hermes", one_of(_FORMATS)),
    Key(f"{_ROLLOUT}.tensor_model_parallel_size", 2, "rollout.engine.tensor_parallel", 1),
    Key(f"{_ROLLOUT}.pipeline_model_parallel_size", 1, "rollout.engine.pipeline_parallel", 1),
    Key(f"{_ROLLOUT}.data_parallel_size", 1, "rollout.engine.data_parallel", 1),
    Key(f"{_ROLLOUT}.free_cache_engine", True, "rollout.engine.sleep", None, one_of({True: 2, False: 0})),
    Key(f"{_ACTOR}.entropy_coeff", 0, "algorithm.entropy_coef", 0),
    Key(f"{_ACTOR}.optim.lr", 1e-6, "actor.optimizer.lr", 1e-6),
    Key(f"{_ACTOR}.optim.weight_decay", 0.01, "actor.optimizer.weight_decay", 0.0),
    Key(f"{_ACTOR}.optim.betas", [0.9, 0.999], "actor.optimizer.betas", [0.9, 0.999]),
    Key(f"{_ACTOR}.optim.lr_scheduler_type", "constant", "actor.optimizer.schedule", "constant", one_of(_SCHEDULES)),
    Key(f"{_ACTOR}.optim.min_lr_ratio", 0.0, "actor.optimizer.min_lr_ratio", 0.0),
    Key(f"{_ACTOR}.ppo_epochs", 1, "actor.epochs", 1),
    Key(f"{_ACTOR}.grad_clip", 1.0, "actor.grad_clip", 1.0),
    Key(f"{_ACTOR}.fsdp_config.param_offload", False, "actor.offload_parameters", False),
    Key(f"{_ACTOR}.fsdp_config.optimizer_offload", False, "actor.offload_optimizer", False),
    Key("trainer.experiment_name", "gsm8k", "trainer.name", "run"),
    Key("trainer.default_local_dir", UNSET, "trainer.output_dir", "runs"),
    Key("trainer.total_epochs", 30, "trainer.epochs", 1),
    Key("trainer.total_training_steps", None, "trainer.steps", None),
    Key("trainer.val_before_train", True, "trainer.validation.before", True),
    Key("trainer.test_freq", -1, "trainer.validation.interval", 0, off_is_zero),
    Key("trainer.save_freq", -1, "trainer.checkpoint.interval", 10, off_is_zero),
    Key("trainer.max_actor_ckpt_to_keep", UNSET, "trainer.checkpoint.keep", 3),
    Key("trainer.nnodes", 1, "cluster.nodes", 1),
    Key("trainer.n_gpus_per_node", 8, "cluster.processes_per_node", 1),
    Key("reward_model.num_workers", UNSET, "reward.num_workers", 1),
)

ADAPTER = (
    Key(f"{_MODEL}.lora_rank", UNSET, "model.adapter.rank", UNSET),
    Key(f"{_MODEL}.lora_alpha", 16, "model.adapter.alpha", 32),
    Key(f"{_MODEL}.target_modules", "all-linear", "model.adapter.targets", "all-linear", layer_names),
)
"""Where a new adapter is trained."""

CRITIC = (
    Key("critic.model.path", UNSET, "critic.path", None),
    Key("critic.optim.lr", 1e-5, "critic.optimizer.lr", 1e-6),
    Key("critic.optim.weight_decay", 0.01, "critic.optimizer.weight_decay", 0.0),
    Key("critic.optim.betas", [0.9, 0.999], "critic.optimizer.betas", [0.9, 0.999]),
    Key("critic.optim.lr_scheduler_type", "constant", "critic.optimizer.schedule", "constant", one_of(_SCHEDULES)),
    Key("critic.optim.min_lr_ratio", 0.0, "critic.optimizer.min_lr_ratio", 0.0),
    Key("critic.cliprange_value", 0.5, "critic.value_clip", 0.2),
    Key("critic.grad_clip", 1.0, "critic.grad_clip", 1.0),
    Key("critic.model.fsdp_config.param_offload", False, "critic.offload_parameters", False),
    Key("critic.model.fsdp_config.optimizer_offload", False, "critic.offload_optimizer", False),
    Key("trainer.critic_warmup", 0, "critic.warmup_steps", 0),
)
"""Where the estimator has a critic."""

_KL = {
    "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs", "kl+": "k1+",
    "k1+": "k1+", "mse+": "k2", "k2+": "k2", "low_var_kl+": "k3+", "k3+": "k3+", "abs+": "abs+",
}  # fmt: skip
REFERENCE = (
    Key(f"{_ACTOR}.kl_loss_coef", 0.001, "algorithm.kl_coef", 0.0),
    Key(f"{_ACTOR}.kl_loss_type", "low_var_kl", "algorithm.kl_estimator", "k3", one_of(_KL)),
    Key("actor_rollout_ref.ref.fsdp_config.param_offload", False, "reference.offload_parameters", False),
)
"""With ``use_kl_loss``."""

RESUME = {"disable": "never", "auto": "auto"}
TRACKERS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "mlflow": ("experiment", ()),
    "swanlab": ("project", (("mode", "online"),)),
    "trackio": ("project", ()),
    "wandb": ("project", (("mode", "online"),)),
}
"""Those that are not on by default: the option that takes verl's project, and further options."""
DEFAULT_TRACKERS = ("console", "jsonl", "tensorboard", "curve")
SAME_TRACKERS = {"file": "jsonl"}
CORRECTIONS = {"token": "token_tis", "sequence": "sequence_tis"}
ICEPOPS = {"token": "icepop", "sequence": "sequence_icepop"}
REJECTIONS = {
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
}
"""Criteria of ``rollout_rs``, which are called the same here."""

GREEDY = 0
VALIDATION_SAMPLING = (
    Key(f"{_VALIDATION}.n", 1, "trainer.validation.n", 1),
    Key(f"{_VALIDATION}.temperature", GREEDY, "trainer.validation.sampling.temperature", 1.0),
    Key(f"{_VALIDATION}.top_p", 1.0, "trainer.validation.sampling.top_p", 1.0),
    Key(f"{_VALIDATION}.top_k", -1, "trainer.validation.sampling.top_k", 0, off_is_zero),
)
"""With a temperature above 0."""


def tool_agent(at: int) -> tuple[Key, ...]:
    """With ``multi_turn.enable``, tools or an interaction; ``at``: which of the loops it is."""
    loop = f"rollout.agent.loops.{at}.config"
    return (
        Key(f"{_TURNS}.max_assistant_turns", None, f"{loop}.max_assistant_turns", None),
        Key(f"{_TURNS}.max_parallel_calls", 1, f"{loop}.max_parallel_calls", 4),
        Key(f"{_TURNS}.max_tool_response_length", 256, f"{loop}.max_tool_response_tokens", 256),
        Key(f"{_TURNS}.tool_response_truncate_side", "middle", f"{loop}.tool_response_truncation", "right"),
    )


TOOL_AGENT = tool_agent(0)
LOOPS = {"single_turn_agent": "single_turn", "single_turn": "single_turn", "tool_agent": "tool_agent"}
"""Agent loops by verl's name."""
TASK = tuple(
    f"{_TURNS}.{name}" for name in ("enable", "tool_config_path", "function_tool_path", "interaction_config_path")
) + tuple(f"{_ROLLOUT}.agent.{name}" for name in ("agent_loop_config_path", "default_agent_loop"))
"""Keys without which a run has another task."""

SANDBOX = {"sandbox_fusion_url": "url", "default_timeout": "timeout", "num_workers": "max_concurrent"}
SEARCH = {
    "retrieval_service_url": "url", "timeout": "timeout", "num_workers": "max_concurrent", "topk": "documents",
}  # fmt: skip
"""Options of verl's tools that ask a service."""
SLOT_TIMEOUT, ANSWER_TIMEOUT = 30.0, 25.0
"""Defaults of agentrl: ``timeout`` of a tool's slot, ``answer_timeout`` of remote_python."""

OTHER_MEDIA = ("data.video_key", "data.audio_key")
"""Signs of a task with videos or audio."""

_ENGINE = "rollout.engine.config"
ENGINES = {
    "hf": (),
    "vllm": (
        Key(f"{_ROLLOUT}.gpu_memory_utilization", 0.5, f"{_ENGINE}.mem_fraction", 0.0),
        Key(f"{_ROLLOUT}.max_num_seqs", 256, f"{_ENGINE}.max_num_seqs", 0),
        Key(f"{_ROLLOUT}.enforce_eager", False, f"{_ENGINE}.enforce_eager", False),
        Key(f"{_ROLLOUT}.enable_prefix_caching", True, f"{_ENGINE}.prefix_caching", True),
        Key(f"{_ROLLOUT}.max_num_batched_tokens", UNSET, f"{_ENGINE}.engine_args.max_num_batched_tokens", None),
    ),
    "sglang": (
        Key(f"{_ROLLOUT}.gpu_memory_utilization", 0.5, f"{_ENGINE}.mem_fraction", 0.0),
        Key(f"{_ROLLOUT}.max_num_seqs", 256, f"{_ENGINE}.max_running_requests", 0),
    ),
}
PREFIXES = {
    "data.apply_chat_template_kwargs.": "model.chat_template_kwargs.",
    f"{_ROLLOUT}.engine_kwargs.vllm.": f"{_ENGINE}.engine_args.",
    f"{_ROLLOUT}.engine_kwargs.sglang.": f"{_ENGINE}.server_args.",
}
"""Keys whose last part is kept."""

ESTIMATORS = {
    "gae": "gae",
    "gdpo": "gdpo",
    "gpg": "gpg",
    "grpo": "grpo",
    "grpo_passk": "grpo_passk",
    "grpo_vectorized": "grpo",
    "opo": "opo",
    "optimal_token_baseline": "optimal_token_baseline",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}
WITH_CRITIC = ("gae",)
_ADVANTAGE = "algorithm.advantage.config"
ESTIMATOR_OPTIONS = {
    "gae": (
        Key("algorithm.gamma", 1.0, f"{_ADVANTAGE}.gamma", 1.0),
        Key("algorithm.lam", 1.0, f"{_ADVANTAGE}.lam", 1.0),
    ),
    "reinforce_plus_plus": (Key("algorithm.gamma", 1.0, f"{_ADVANTAGE}.gamma", 1.0),),
    "grpo": (Key("algorithm.norm_adv_by_std_in_grpo", True, f"{_ADVANTAGE}.norm_by_std", True),),
}

_LOSS = "algorithm.loss.config"


def _clip(low: float, high: float, convert_low: Callable[[Any], Any] = same) -> tuple[Key, ...]:
    return (
        Key(f"{_ACTOR}.clip_ratio_low", 0.2, f"{_LOSS}.clip_low", low, convert_low),
        Key(f"{_ACTOR}.clip_ratio_high", 0.2, f"{_LOSS}.clip_high", high),
    )


def _divergence() -> tuple[Key, ...]:
    return (
        Key(f"{_ACTOR}.clip_ratio_high", 0.2, f"{_LOSS}.threshold", None),
        Key(f"{_ACTOR}.clip_ratio_c", 3.0, f"{_LOSS}.max_ratio", 20.0),
    )


LOSSES: dict[str, tuple[str, tuple[Key, ...]]] = {
    "vanilla": ("ppo", (*_clip(0.2, 0.2), Key(f"{_ACTOR}.clip_ratio_c", 3.0, f"{_LOSS}.dual_clip", None))),
    "gspo": ("gspo", _clip(3e-4, 4e-4)),
    "cispo": ("cispo", _clip(1.0, 4.0, lambda low: min(low, 1.0))),
    "geo_mean": ("gmpo", _clip(0.4, 0.4)),
    "gpg": ("gpg", ()),
    "sapo": (
        "sapo",
        (
            Key(f"{_ACTOR}.tau_pos", 1.0, f"{_LOSS}.tau_positive", 1.0),
            Key(f"{_ACTOR}.tau_neg", 1.05, f"{_LOSS}.tau_negative", 1.05),
        ),
    ),
    "clip_cov": (
        "clip_cov",
        (
            *_clip(0.2, 0.2),
            Key(f"{_ACTOR}.policy_loss.clip_cov_ratio", 2e-4, f"{_LOSS}.share", 2e-4),
            Key(f"{_ACTOR}.policy_loss.clip_cov_lb", 1.0, f"{_LOSS}.cov_low", 1.0),
            Key(f"{_ACTOR}.policy_loss.clip_cov_ub", 5.0, f"{_LOSS}.cov_high", 5.0),
        ),
    ),
    "kl_cov": (
        "kl_cov",
        (
            Key(f"{_ACTOR}.policy_loss.kl_cov_ratio", 2e-4, f"{_LOSS}.share", 2e-4),
            Key(f"{_ACTOR}.policy_loss.ppo_kl_coef", 0.1, f"{_LOSS}.kl_coef", 1.0),
        ),
    ),
    "dppo_tv": ("dppo", _divergence()),
    "dppo_kl": ("dppo", _divergence()),
}
"""By ``policy_loss.loss_mode``: the loss here and its options."""

MEAN_OVER_ROWS = ("gspo", "sapo", "geo_mean")
"""Losses that ignore ``loss_agg_mode``: the mean over a row's tokens, then over rows."""

RENAMED = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.num_workers": "reward_model.num_workers",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward.reward_model.": "reward_model.",
    "critic.fsdp.": "critic.model.fsdp_config.",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.optim.lr_decay_style": "critic.optim.lr_scheduler_type",
    f"{_ACTOR}.optim.warmup_style": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.optim.lr_decay_style": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.optim.clip_grad": f"{_ACTOR}.grad_clip",
    f"{_ACTOR}.megatron.param_offload": f"{_ACTOR}.fsdp_config.param_offload",
    f"{_ACTOR}.megatron.optimizer_offload": f"{_ACTOR}.fsdp_config.optimizer_offload",
    "actor_rollout_ref.ref.megatron.param_offload": "actor_rollout_ref.ref.fsdp_config.param_offload",
    "critic.megatron.param_offload": "critic.model.fsdp_config.param_offload",
    "critic.megatron.optimizer_offload": "critic.model.fsdp_config.optimizer_offload",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
}
"""Keys of other versions and backends of verl, and the ones that the tables name."""

ALWAYS = {
    "actor_rollout_ref.hybrid_engine": "rollout.engine.placement is colocated by default",
    f"{_ACTOR}.strategy": "FSDP2 shards every model",
    f"{_ACTOR}.fsdp_config.strategy": "FSDP2 shards every model",
    "actor_rollout_ref.ref.strategy": "FSDP2 shards every model",
    "critic.strategy": "FSDP2 shards every model",
    f"{_ROLLOUT}.calculate_log_probs": "engines always return log-probs",
    f"{_ROLLOUT}.mode": "rollouts are asynchronous",
    f"{_ROLLOUT}.load_format": "engines load weights from the actor",
    f"{_ROLLOUT}.layered_summon": "weights are sent in buckets",
    f"{_ROLLOUT}.checkpoint_engine": "rollout.engine.weight_transfer chooses the transport",
    f"{_ROLLOUT}.enable_chunked_prefill": "the engine decides",
    f"{_ROLLOUT}.max_model_len": "the sum of the longest prompt and response",
    f"{_ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{_ROLLOUT}.response_length": "rollout.max_response_length",
    f"{_TURNS}.max_user_turns": "there is one turn",
    f"{_ROLLOUT}.multi_stage_wake_up": "engines wake up as far as they need",
    f"{_ROLLOUT}.do_sample": "rollout.sampling.temperature decides",
    f"{_ROLLOUT}.disable_log_stats": "rollout/engine/ has the counters",
    f"{_ROLLOUT}.skip_tokenizer_init": "the trainer has the tokenizer",
    f"{_VALIDATION}.do_sample": "the temperature decides",
    f"{_ROLLOUT}.log_prob_use_dynamic_bsz": "actor.micro_batch_tokens limits these passes too",
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": "actor.micro_batch_tokens limits these passes too",
    f"{_ROLLOUT}.log_prob_micro_batch_size": "actor.micro_batch_tokens limits these passes too",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": "actor.micro_batch_tokens limits these passes too",
    "critic.forward_max_token_len_per_gpu": "critic.micro_batch_tokens limits these passes too",
    "critic.forward_micro_batch_size_per_gpu": "critic.micro_batch_tokens limits these passes too",
    f"{_ACTOR}.clip_ratio": "clip_ratio_low and clip_ratio_high win in verl",
    f"{_ACTOR}.calculate_sum_pi_squared": "estimated from log-probs and entropies",
    f"{_ACTOR}.use_prefix_grouper": "model.packing computes what rows begin with once",
    f"{_MODEL}.use_shm": "weights are read from the path",
    "critic.model.use_remove_padding": "model.packing holds for all models",
    "critic.model.enable_gradient_checkpointing": "model.gradient_checkpointing holds for all models",
    "critic.model.trust_remote_code": "model.trust_remote_code holds for all models",
    "data.trust_remote_code": "model.trust_remote_code holds for all",
    "data.return_multi_modal_inputs": "images are processed where a model needs them",
    "data.image_patch_size": "the model's own processor decides",
    "data.return_raw_chat": "agent loops get messages",
    "data.return_raw_input_ids": "agent loops get messages",
    "data.return_full_prompt": "agent loops get messages",
    "data.reward_fn_key": "rows have data_source",
    "data.val_batch_size": "all validation prompts are sampled at once",
    "data.gen_batch_size": "data.batch_size",
    "data.dataloader_num_workers": "rows are read ahead",
    "data.filter_overlong_prompts_workers": "rows are encoded in batches",
    "reward_model.use_reward_loop": "rewards are computed as each trajectory ends",
    "reward_model.launch_reward_fn_async": "rewards are computed as each trajectory ends",
    "trainer.balance_batch": "rows are always balanced over processes",
    "trainer.log_val_generations": "validation trajectories are kept; see `agentrl rollouts show`",
    "trainer.rollout_data_dir": "rollout.records keeps trajectories",
    "trainer.validation_data_dir": "rollout.records keeps trajectories",
    "trainer.max_critic_ckpt_to_keep": "trainer.checkpoint.keep counts both",
    "trainer.use_legacy_worker_impl": "there is one implementation",
    "trainer.device": "cluster.device is auto",
}
"""What agentrl does without a key, or with one that is converted from another key."""

MISSING = {
    "critic.model.lora_rank": "an adapter of the critic alone; model.adapter holds for actor and critic",
    "critic.model.lora_alpha": "an adapter of the critic alone; model.adapter holds for actor and critic",
    "critic.model.target_modules": "an adapter of the critic alone; model.adapter holds for actor and critic",
    f"{_MODEL}.use_liger": "fused kernels",
    f"{_MODEL}.use_fused_kernels": "fused kernels",
    f"{_MODEL}.fused_kernel_options": "fused kernels",
    f"{_MODEL}.enable_activation_offload": "activation offload; model.gradient_checkpointing saves memory too",
    f"{_MODEL}.mtp": "multi-token prediction",
    f"{_MODEL}.override_config": "changes of the model's config; edit its config.json",
    f"{_ACTOR}.megatron": "Megatron; FSDP2 shards every model",
    "actor_rollout_ref.ref.megatron": "Megatron; FSDP2 shards every model",
    "critic.megatron": "Megatron; FSDP2 shards every model",
    f"{_ACTOR}.ulysses_sequence_parallel_size": "sequence parallelism",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": "sequence parallelism",
    "critic.ulysses_sequence_parallel_size": "sequence parallelism",
    f"{_ACTOR}.router_replay": "router replay",
    f"{_ACTOR}.use_torch_compile": "torch.compile",
    "actor_rollout_ref.ref.use_torch_compile": "torch.compile",
    f"{_ACTOR}.fsdp_config": "tuning of FSDP",
    "actor_rollout_ref.ref.fsdp_config": "tuning of FSDP",
    "critic.model.fsdp_config": "tuning of FSDP",
    f"{_ACTOR}.profiler": "the profiler",
    "actor_rollout_ref.ref.profiler": "the profiler",
    f"{_ROLLOUT}.profiler": "the profiler",
    "critic.profiler": "the profiler",
    "global_profiler": "the profiler",
    f"{_ROLLOUT}.expert_parallel_size": "expert parallelism; see engine_args and server_args of the engines",
    f"{_ROLLOUT}.over_sample_rate": "oversampling",
    f"{_ROLLOUT}.max_num_batched_tokens": "this option of the engine",
    f"{_ACTOR}.optim.override_optimizer_config": "other options of the optimizer",
    f"{_ACTOR}.checkpoint": "a choice of what checkpoints hold",
    f"{_ROLLOUT}.dtype": "another data type of the engine; model.dtype is that of the weights",
    "actor_rollout_ref.nccl_timeout": "a time limit of collectives",
    "ray_kwargs": "options of Ray; cluster.address joins a running cluster",
    "algorithm.pf_ppo": "PF-PPO",
    "algorithm.use_pf_ppo": "PF-PPO",
    "distillation": "verl's distillation trainer; the estimator on_policy_distillation has a teacher",
    "trainer.project_name": "projects; trainer.name and trainer.output_dir name a run",
}
"""What agentrl cannot do (yet)."""

DECISIONS = {
    "custom_reward_function": "reward.functions: wrap the function, which gets a RewardTrajectory here",
    "reward_model.enable": "reward.functions: reward_model, or a function that asks a served model",
    "reward_model.micro_batch_size_per_gpu": "reward.functions: reward_model, or a function that asks a served model",
    "reward_model.model": "reward.functions: reward_model, or a function that asks a served model",
    "reward_model.rollout": "reward.functions: reward_model, or a function that asks a served model",
    "reward_model.reward_kwargs": "reward.functions or reward.manager: the options of the reward",
    "reward_model.sandbox_fusion": "tools or reward.functions: the sandbox",
    f"{_ROLLOUT}.trace": "trainer.trackers: otel and mlflow record every trajectory as a trace; see docs/tracking.md",
    f"{_MODEL}.exclude_modules": "model.adapter.targets: name the layers that get an adapter",
    f"{_MODEL}.lora": "model.adapter: set rank, alpha, targets and dropout in place of Megatron's LoRA",
    f"{_MODEL}.custom_chat_template": "model.chat_template: write the template into a file",
    "data.custom_cls": "data.dataset: port the dataset to ./file.py:Class",
    "data.sampler": "data.sampler: port the sampler to ./file.py:Class",
    "data.train_max_samples": "data.train_files: shorten the files",
    "algorithm.kl_penalty": "algorithm.kl_estimator: in the reward the penalty is k1",
}
"""What a person has to write, by key or section of verl."""
