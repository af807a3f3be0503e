"""The entry points of the renderers."""

from agentrl_core.api.plugin import PluginSpec
from agentrl_renderers.config import FamilyConfig

HARMONY = PluginSpec(
    kind="renderer",
    name="harmony",
    api_version=1,
    summary="gpt-oss: channels and calls by their control tokens, with the model's chat template",
    factory="agentrl_renderers.harmony:HarmonyRenderer",
)
FAMILY = PluginSpec(
    kind="renderer",
    name="family",
    api_version=1,
    summary="a model family of PyPI's renderers package, without its chat template",
    factory="agentrl_renderers.family:FamilyRenderer",
    config=FamilyConfig,
    requires=("renderers>=0.1.12",),
)
