"""Contract suites: what every plugin of a kind must do, as tests that an author inherits.

    from agentrl_testing.contracts import ToolCase, ToolContract
    from my_tool.plugin import PLUGIN

    class TestMyTool(ToolContract):
        @pytest.fixture
        def plugin(self):
            return ToolCase(PLUGIN, arguments={"text": "hello"})

One fixture, ``plugin``, says what is tested; the capabilities that its spec declares select the tests. The suites run
with pytest alone: no cluster, no network, no GPU.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentrl_testing.contracts.case import PluginCase, PluginContract

if TYPE_CHECKING:
    from agentrl_testing.contracts.advantage_estimator import AdvantageEstimatorCase, AdvantageEstimatorContract
    from agentrl_testing.contracts.agent_loop import AgentLoopCase, AgentLoopContract
    from agentrl_testing.contracts.batch_policy import BatchPolicyCase, BatchPolicyContract
    from agentrl_testing.contracts.dataset import DatasetCase, DatasetContract
    from agentrl_testing.contracts.engine import EngineCase, EngineContract
    from agentrl_testing.contracts.environment import EnvironmentCase, EnvironmentContract
    from agentrl_testing.contracts.interaction import InteractionCase, InteractionContract
    from agentrl_testing.contracts.policy_loss import PolicyLossCase, PolicyLossContract
    from agentrl_testing.contracts.renderer import RendererCase, RendererContract
    from agentrl_testing.contracts.reward_function import RewardFunctionCase, RewardFunctionContract
    from agentrl_testing.contracts.reward_manager import RewardManagerCase, RewardManagerContract
    from agentrl_testing.contracts.rollout_correction import RolloutCorrectionCase, RolloutCorrectionContract
    from agentrl_testing.contracts.sampler import SamplerCase, SamplerContract
    from agentrl_testing.contracts.tool import ToolCase, ToolContract
    from agentrl_testing.contracts.tool_parser import ToolParserCase, ToolParserContract
    from agentrl_testing.contracts.tracker import TrackerCase, TrackerContract
    from agentrl_testing.contracts.training_backend import TrainingBackendCase, TrainingBackendContract

__all__ = [
    "AdvantageEstimatorCase",
    "AdvantageEstimatorContract",
    "AgentLoopCase",
    "AgentLoopContract",
    "BatchPolicyCase",
    "BatchPolicyContract",
    "DatasetCase",
    "DatasetContract",
    "EngineCase",
    "EngineContract",
    "EnvironmentCase",
    "EnvironmentContract",
    "InteractionCase",
    "InteractionContract",
    "PluginCase",
    "PluginContract",
    "PolicyLossCase",
    "PolicyLossContract",
    "RendererCase",
    "RendererContract",
    "RewardFunctionCase",
    "RewardFunctionContract",
    "RewardManagerCase",
    "RewardManagerContract",
    "RolloutCorrectionCase",
    "RolloutCorrectionContract",
    "SamplerCase",
    "SamplerContract",
    "ToolCase",
    "ToolContract",
    "ToolParserCase",
    "ToolParserContract",
    "TrackerCase",
    "TrackerContract",
    "TrainingBackendCase",
    "TrainingBackendContract",
]

_MODULES = {
    "AdvantageEstimator": "advantage_estimator",
    "AgentLoop": "agent_loop",
    "BatchPolicy": "batch_policy",
    "Dataset": "dataset",
    "Engine": "engine",
    "Environment": "environment",
    "Interaction": "interaction",
    "PolicyLoss": "policy_loss",
    "Renderer": "renderer",
    "RewardFunction": "reward_function",
    "RewardManager": "reward_manager",
    "RolloutCorrection": "rollout_correction",
    "Sampler": "sampler",
    "Tool": "tool",
    "ToolParser": "tool_parser",
    "Tracker": "tracker",
    "TrainingBackend": "training_backend",
}


def __getattr__(name: str) -> Any:
    # One at a time: who tests a tool needs neither torch, as losses do, nor hypothesis, as parsers do.
    module = _MODULES.get(name.removesuffix("Case").removesuffix("Contract"))
    if module is None or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
