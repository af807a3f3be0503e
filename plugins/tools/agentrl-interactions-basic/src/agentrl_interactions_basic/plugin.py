"""What the entry points name."""

from agentrl_core.api import PluginSpec
from agentrl_interactions_basic.config import SimulatedUserConfig, TutorConfig

TUTOR = PluginSpec(
    kind="interaction",
    name="tutor",
    api_version=1,
    summary="says that an answer is wrong and gives another try",
    config=TutorConfig,
    factory="agentrl_interactions_basic.tutor:Tutor",
)
SIMULATED_USER = PluginSpec(
    kind="interaction",
    name="simulated_user",
    api_version=1,
    summary="a model of `engines` that plays the user",
    config=SimulatedUserConfig,
    factory="agentrl_interactions_basic.simulated_user:SimulatedUser",
)
