"""Everything that can be checked and rejected before a worker or a GPU is touched. A dry run ends here."""

from dataclasses import dataclass
from pathlib import Path

from agentrl_core.api import ConfigError
from agentrl_core.config import ResolvedConfig
from agentrl_core.config.capabilities import installed_with, missing_capabilities
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.data.sampler import fingerprint
from agentrl_core.data.template_check import TemplateReport, check_template, require_tool_role
from agentrl_core.hosting.rewards import RewardWorker
from agentrl_core.serving.interpreter import check_interpreter
from agentrl_core.trainer.checkpoint import CheckpointStore
from agentrl_core.trainer.plan import RunPlan, describe, memory_lines
from agentrl_core.trainer.prompt_data import PromptData, PromptLoader
from agentrl_core.trainer.rehearsal import check_best_metric, rehearse
from agentrl_core.trainer.roles import ModelFacts, needs_critic


@dataclass(frozen=True)
class Preparation:
    """A run that is ready to start.

    Args:
        renderer: tokenizer and template, able to render what the run needs.
        data: prompts that fit.
        plan: its arithmetic.
        facts: of the model.
        template: what the chat template can do.
        fingerprint: of the training prompts.
    """

    renderer: HFChatRenderer
    data: PromptData
    plan: RunPlan
    facts: ModelFacts
    template: TemplateReport
    fingerprint: str

    @classmethod
    def of(cls, config: ResolvedConfig, *, training: bool = True, listeners: bool = False) -> "Preparation":
        """Load tokenizer and data and check them against each other.

        Args:
            config: from ``load_config`` or ``bind``.
            training: also what only training needs.
            listeners: also build trackers and hooks, as a dry run does.

        Raises:
            ConfigError, TemplateError, DataError, PluginError: with what to do.
        """
        problems = missing_capabilities(config, training=True, alternatives=installed_with) if training else ()
        if found := [f"{key}: {message}" for key, message in problems]:
            raise ConfigError(found)
        engine = config.rollout.engine
        if engine.python is not None:
            check_interpreter(engine.python, engine.ref, engine.plugin.spec)
        # Reward workers build these again. Here a reward that cannot work is reported before anything starts.
        RewardWorker(config.reward)
        facts = ModelFacts.read(config)
        renderer = HFChatRenderer.from_config(config.model)
        rehearse(config, renderer, listeners=listeners)
        if config.tools:
            require_tool_role(renderer)
        template = check_template(renderer)
        data = PromptLoader(config, renderer).load()
        plan = RunPlan.of(config, len(data.train))
        plan.check_context(facts.max_position_embeddings)
        if training:
            check_best_metric(config, data.validation)
            CheckpointStore(Path(config.trainer.output_dir) / config.trainer.name, 1).find(config.trainer.resume)
        return cls(renderer, data, plan, facts, template, fingerprint(data.train))

    def lines(self, config: ResolvedConfig) -> list[str]:
        """Batch arithmetic, memory and template in lines for a person."""
        lines = describe(config, self.plan, len(self.data.train), len(self.data.validation), self.data.longest_prompt)
        lines += memory_lines(config, needs_critic(config))
        if self.template.append_only:
            return [
                *lines,
                "template    append-only: every turn's prompt starts with the exact tokens of the turn before",
            ]
        policy = config.rollout.template_break
        return [*lines, *(f"template    rewrites history ({policy}): {found}" for found in self.template.breaks)]
