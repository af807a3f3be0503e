"""What the entry point names."""

from dataclasses import dataclass

from agentrl_core.api import PluginSpec, option


@dataclass
class MathConfig:
    boxed: bool = option(False, help=r"accept only the last \boxed{…} as the answer; false: any expression")


PLUGIN = PluginSpec(
    kind="reward_function",
    name="math",
    api_version=1,
    summary="1 if math-verify finds the answer equal to the ground truth",
    config=MathConfig,
    factory="agentrl_rewards_math.function:Math",
)
