"""Which distribution brings which of agentrl's own plugins, for the `pip install` line of an error."""

OFFICIAL: dict[tuple[str, str], str] = {
    ("advantage_estimator", "gae"): "agentrl-algorithms",
    ("advantage_estimator", "grpo"): "agentrl-algorithms",
    ("advantage_estimator", "turn_gae"): "agentrl-algorithms",
    ("advantage_estimator", "rloo"): "agentrl-algorithms",
    ("advantage_estimator", "turn_rloo"): "agentrl-algorithms",
    ("advantage_estimator", "reinforce_plus_plus"): "agentrl-algorithms",
    ("advantage_estimator", "reinforce_plus_plus_baseline"): "agentrl-algorithms",
    ("advantage_estimator", "remax"): "agentrl-algorithms",
    ("advantage_estimator", "opo"): "agentrl-algorithms",
    ("advantage_estimator", "gpg"): "agentrl-algorithms",
    ("advantage_estimator", "gdpo"): "agentrl-algorithms",
    ("advantage_estimator", "grpo_passk"): "agentrl-algorithms",
    ("advantage_estimator", "maxrl"): "agentrl-algorithms",
    ("advantage_estimator", "optimal_token_baseline"): "agentrl-algorithms",
    ("advantage_estimator", "optimal_turn_baseline"): "agentrl-algorithms",
    ("advantage_estimator", "on_policy_distillation"): "agentrl-algorithms",
    ("agent_loop", "single_turn"): "agentrl-loop-single-turn",
    ("agent_loop", "tool_agent"): "agentrl-loop-tool-agent",
    ("dataset", "prompts"): "agentrl-dataset-prompts",
    ("engine", "hf"): "agentrl-engine-hf",
    ("engine", "sglang"): "agentrl-engine-sglang",
    ("engine", "vllm"): "agentrl-engine-vllm",
    ("interaction", "tutor"): "agentrl-interactions-basic",
    ("policy_loss", "ppo"): "agentrl-algorithms",
    ("reward_function", "exact_number"): "agentrl-rewards-basic",
    ("reward_function", "hash_answer"): "agentrl-rewards-basic",
    ("reward_manager", "naive"): "agentrl-rewards-basic",
    ("sampler", "curriculum"): "agentrl-dataset-prompts",
    ("sampler", "mixture"): "agentrl-dataset-prompts",
    ("sampler", "sequential"): "agentrl-dataset-prompts",
    ("sampler", "shuffle"): "agentrl-dataset-prompts",
    ("tool", "calculator"): "agentrl-tools-basic",
    ("tool_parser", "hermes"): "agentrl-tool-parsers",
    ("tracker", "console"): "agentrl-trackers-basic",
    ("tracker", "curve"): "agentrl-trackers-basic",
    ("tracker", "jsonl"): "agentrl-trackers-basic",
    ("tracker", "tensorboard"): "agentrl-trackers-basic",
}


def official_names(kind: str) -> list[str]:
    """Names of one kind that some distribution of ours brings."""
    return [name for of_kind, name in OFFICIAL if of_kind == kind]
