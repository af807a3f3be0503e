"""Everything that can be checked before a worker or a GPU is used. A dry run ends here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agentrl_core.api import Renderer, ToolParserContext
from agentrl_core.config import ResolvedConfig
from agentrl_core.data.chat_template import build_renderer
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.data.template_check import TemplateReport
from agentrl_core.trainer.checkpoint import CheckpointStore, resumed_state
from agentrl_core.trainer.checks import (
    build_plugins,
    check_best_metric,
    check_conversations,
    check_files,
    check_tokenizers,
    check_training,
)
from agentrl_core.trainer.plan import arithmetic, describe, total_steps
from agentrl_core.trainer.prompt_data import PromptData, PromptLoader


@dataclass(frozen=True)
class Preparation:
    """A run that is ready to start.

    Args:
        renderer: of the rollout, able to render what the run needs.
        chat: tokenizer and template.
        data: prompts that fit.
        steps: of the whole run.
        vocab_size: of the model.
        template: what the conversations that the renderer writes can do.
    """

    renderer: Renderer
    chat: HFChatRenderer
    data: PromptData
    steps: int
    vocab_size: int
    template: TemplateReport

    @classmethod
    def of(cls, config: ResolvedConfig, *, training: bool = True, listeners: bool = False) -> "Preparation":
        """Load tokenizer and data, and check all that can be checked without a worker, in phases.

        ``load_config`` has done the first ones: each value (``config/validation.py``), then what keys must agree on
        with each other and with what plugins can do, and whether files exist (``config/cross_checks.py``).

        Args:
            config: from ``load_config`` or ``bind``.
            training: check what only training needs, too.
            listeners: build trackers and hooks too, as a dry run does.

        Raises:
            ConfigError, TemplateError, DataError, PluginError: with what to do.
        """
        if training:
            check_training(config)
        vocab_size = int(check_files(config, training=training).vocab_size)
        renderer = build_renderer(
            config.rollout.renderer, config.model, config.rollout.tool_parser.build(ToolParserContext())
        )
        check_tokenizers(config, renderer, vocab_size, training=training)
        tools = build_plugins(config, renderer.chat, listeners=listeners)
        template = check_conversations(config, renderer)
        data = PromptLoader(config, renderer, tools).load()
        if training:
            check_best_metric(config, data.validation)
            if listeners:  # A run that starts reads the whole checkpoint itself, before anything else.
                run = Path(config.trainer.output_dir) / config.trainer.name
                if checkpoint := CheckpointStore(run / "checkpoints", 1).find(config.trainer.resume):
                    resumed_state(config, checkpoint, data.fingerprint())
        chat = cast(HFChatRenderer, renderer.chat)
        return cls(renderer, chat, data, total_steps(config, len(data.train)), vocab_size, template)

    def to_dict(self, config: ResolvedConfig) -> dict[str, Any]:
        """Batch arithmetic, memory and template for scripts."""
        return {
            **arithmetic(config, self.steps, *self._sizes(config)),
            "append_only": self.template.append_only,
            "history_rewritten_at": list(self.template.breaks),
        }

    def lines(self, config: ResolvedConfig) -> list[str]:
        """Batch arithmetic, memory and template in lines for a person."""
        policy = config.rollout.template_break
        lines = describe(config, self.steps, *self._sizes(config))
        if self.template.append_only:
            lines.append("template    append-only: every turn's prompt starts with the exact tokens of the turn before")
        return [*lines, *(f"template    rewrites history ({policy}): {found}" for found in self.template.breaks)]

    def _sizes(self, config: ResolvedConfig) -> tuple[int, int, int]:
        """Prompts for training, prompts for a validation, and tokens of the longest prompt."""
        validation = self.data.validation[: config.trainer.validation.max_prompts]
        return len(self.data.train), len(validation), self.data.longest_prompt
