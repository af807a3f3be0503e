"""Which distribution brings which of agentrl's own plugins, for the `pip install` line of an error."""

_BROUGHT = {
    "agentrl-algorithms": {
        "advantage_estimator": "gae gdpo gpg grpo grpo_passk maxrl on_policy_distillation opo optimal_token_baseline "
        "optimal_turn_baseline reinforce_plus_plus reinforce_plus_plus_baseline remax rloo turn_gae turn_rloo",
        "policy_loss": "cispo clip_cov dppo dro gmpo gpg gspo kl_cov ppo sapo sft tis_reinforce",
        "rollout_correction": "divergence_rejection geometric_rejection icepop percentile_rejection sequence_icepop "
        "sequence_mis sequence_tis token_mis token_tis",
    },
    "agentrl-backend-megatron": {"training_backend": "megatron"},
    "agentrl-backend-tinker": {"engine": "tinker", "hook": "tinker_limits", "training_backend": "tinker"},
    "agentrl-compat-verl": {"command": "from-verl"},
    "agentrl-dataset-prompts": {
        "dataset": "prompts",
        "sampler": "curriculum mixture sequential shuffle",
    },
    "agentrl-engine-hf": {"engine": "hf"},
    "agentrl-engine-sglang": {"engine": "sglang"},
    "agentrl-engine-vllm": {"engine": "vllm"},
    "agentrl-engines": {"command": "backends engines"},
    "agentrl-env-openenv": {"agent_loop": "training_trace", "command": "openenv-trace", "environment": "openenv"},
    "agentrl-env-reasoning-gym": {"environment": "reasoning_gym", "sampler": "levels"},
    "agentrl-env-textarena": {"environment": "textarena"},
    "agentrl-interactions-basic": {"interaction": "simulated_user tutor"},
    "agentrl-loop-single-turn": {"agent_loop": "single_turn"},
    "agentrl-loop-tool-agent": {"agent_loop": "compacting_tool_agent multi_agent tool_agent"},
    "agentrl-plan": {"command": "bench plan"},
    "agentrl-renderers": {"renderer": "family harmony"},
    "agentrl-rewards-basic": {
        "reward_function": "exact_match exact_number fuzzy_match hash_answer json_schema length_penalty remote "
        "repetition_penalty tags",
        "reward_manager": "batch by_source dapo naive rate_limited",
    },
    "agentrl-rewards-judge": {"reward_function": "judge reward_model"},
    "agentrl-rewards-math": {"reward_function": "math"},
    "agentrl-testing": {
        "command": "config.schema init plugins.check plugins.new replay reward try",
        "engine": "scripted",
    },
    "agentrl-tinker": {"command": "tinker"},
    "agentrl-tool-mcp": {"tool": "mcp"},
    "agentrl-tool-parsers": {
        "tool_parser": "deepseek_v3 deepseek_v32 gemma4 glm4 granite harmony hermes internlm2 kimi_k2 lfm2 llama3_json "
        "llama4_pythonic minimax_m2 mistral nemotron olmo3 phi4_mini qwen3_coder seed_oss xlam",
    },
    "agentrl-tool-search": {"command": "search-index", "tool": "remote_search search"},
    "agentrl-tools-basic": {"tool": "calculator"},
    "agentrl-tools-sandbox": {"reward_function": "code_tests", "tool": "python remote_python shell"},
    "agentrl-tracker-mlflow": {"tracker": "mlflow"},
    "agentrl-tracker-otel": {"tracker": "otel"},
    "agentrl-tracker-swanlab": {"tracker": "swanlab"},
    "agentrl-tracker-trackio": {"tracker": "trackio"},
    "agentrl-tracker-wandb": {"tracker": "wandb"},
    "agentrl-trackers-basic": {"tracker": "console curve jsonl tensorboard"},
    "agentrl-viewer": {"command": "runs view"},
}
"""By distribution and kind: names of plugins."""

OFFICIAL: dict[tuple[str, str], str] = {
    (kind, name): package
    for package, kinds in _BROUGHT.items()
    for kind, names in kinds.items()
    for name in names.split()
}
"""The distribution of each plugin, by kind and name."""
