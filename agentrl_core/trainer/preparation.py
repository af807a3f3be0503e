"""Everything that can be checked before a worker or a GPU is used. A dry run ends here."""

import inspect
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from transformers import AutoConfig, AutoTokenizer

from agentrl_core.api import (
    AgentLoopContext,
    AgentRLError,
    ConfigError,
    EngineClient,
    HookContext,
    Renderer,
    ToolParserContext,
    TrackerContext,
)
from agentrl_core.api.engine import RESHAPING
from agentrl_core.config import ResolvedConfig, to_dict
from agentrl_core.config.capabilities import installed_with, missing_capabilities
from agentrl_core.config.schema import (
    AgentLoopSlot,
    HookSlot,
    ModelConfig,
    NamedEngineSlot,
    RewardFunctionSlot,
    ToolSlot,
    TrackerSlot,
)
from agentrl_core.data.call_format import call_format, installed_parsers, renderer_of
from agentrl_core.data.chat_template import build_renderer
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.data.template_check import RenderedText, TemplateReport, check_template, require_tool_role
from agentrl_core.hosting.rewards import HostedRewardFunction, build_manager
from agentrl_core.hosting.tools import HostedTool
from agentrl_core.plugins.boundary import boundary, hang_reported
from agentrl_core.plugins.hooks import HookCaller
from agentrl_core.rollout.session import interaction_context
from agentrl_core.serving.clients import absent_clients
from agentrl_core.serving.interpreter import check_interpreter
from agentrl_core.serving.placement import check_sleep
from agentrl_core.serving.weight_transport import may_share_nccl
from agentrl_core.trainer.checkpoint import CheckpointStore
from agentrl_core.trainer.plan import arithmetic, check_context, describe, total_steps
from agentrl_core.trainer.prompt_data import PromptData, PromptLoader
from agentrl_core.trainer.sample_statistics import group_sizes
from agentrl_core.workers.model_files import check_weights
from agentrl_core.workers.models import check_architecture, resolve_device

logger = logging.getLogger(__name__)


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
        """Load tokenizer and data and check them against each other.

        Args:
            config: from ``load_config`` or ``bind``.
            training: check what only training needs, too.
            listeners: build trackers and hooks too, as a dry run does.

        Raises:
            ConfigError, TemplateError, DataError, PluginError: with what to do.
        """
        engine, model = config.rollout.engine, config.model
        missing = missing_capabilities(config, training=True, alternatives=installed_with) if training else ()
        if problems := [f"{key}: {message}" for key, message in missing]:
            raise ConfigError(problems)
        served = {"rollout.engine": engine, **{f"engines.{name}": slot for name, slot in config.engines.items()}}
        for key, slot in served.items():
            if slot.python is not None:
                shares_nccl = training and slot is engine and may_share_nccl(config)
                check_interpreter(slot.python, slot.ref, slot.plugin.spec, key=f"{key}.python", shares_nccl=shares_nccl)
        with boundary(ConfigError, f"model.path: {model.path} is not a model transformers can load:"):
            model_config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        text_config = model_config.get_text_config()
        check_logit_bias(config, int(text_config.vocab_size))
        renderer = build_renderer(config.rollout.renderer, model, config.rollout.tool_parser.build(ToolParserContext()))
        chat = cast(HFChatRenderer, renderer.chat)
        check_stop_ids(config, renderer.stop_token_ids, int(text_config.vocab_size))
        tools = rehearse(config, chat, listeners=listeners)
        if training:
            check_teacher(config, chat)
            warn_of_other_distribution(config)
        with hang_reported("the renderer or tool parser, checking the chat template,"):
            if config.tools:
                require_tool_role(RenderedText(renderer))
            template = check_template(RenderedText(renderer))
            if (config.tools or config.environments) and config.rollout.renderer.has("tool_parser"):
                check_call_format(config, chat)
        data = PromptLoader(config, renderer, tools).load()
        check_context(config, text_config)
        if training:
            check_best_metric(config, data.validation)
            if listeners:  # A run that starts reads the whole checkpoint itself, before anything else.
                run = Path(config.trainer.output_dir) / config.trainer.name
                CheckpointStore(run / "checkpoints", 1).find(config.trainer.resume)
        return cls(renderer, chat, data, total_steps(config, len(data.train)), int(text_config.vocab_size), template)

    def to_dict(self, config: ResolvedConfig) -> dict[str, Any]:
        """Batch arithmetic, memory and template for scripts."""
        return {
            **arithmetic(config, self.steps, len(self.data.train), len(self.data.validation), self.data.longest_prompt),
            "append_only": self.template.append_only,
            "history_rewritten_at": list(self.template.breaks),
        }

    def lines(self, config: ResolvedConfig) -> list[str]:
        """Batch arithmetic, memory and template in lines for a person."""
        data, policy = self.data, config.rollout.template_break
        lines = describe(config, self.steps, len(data.train), len(data.validation), data.longest_prompt)
        if self.template.append_only:
            lines.append("template    append-only: every turn's prompt starts with the exact tokens of the turn before")
        return [*lines, *(f"template    rewrites history ({policy}): {found}" for found in self.template.breaks)]


def rehearse(config: ResolvedConfig, renderer: HFChatRenderer, *, listeners: bool) -> list[HostedTool]:
    """Build every plugin once, as the workers of a run do, and check the model's files.

    This reports what cannot work before an earlier run is moved. No weights of a reward function are loaded.

    Args:
        config: of the run.
        renderer: of its model.
        listeners: build trackers and hooks too, in a temporary directory. A run that starts builds them itself.

    Returns:
        The tools, of which nothing runs yet.

    Raises:
        ConfigError: with every problem that was found.
    """
    problems: list[str] = []
    tools: list[HostedTool] = []
    with tempfile.TemporaryDirectory(prefix="agentrl-dry-run-") as folder:
        for key, check in _checks(config, renderer, Path(folder), listeners, tools):
            try:
                check()
            except ConfigError as error:
                problems += [f"{key}: {problem}" for problem in error.problems]
            except AgentRLError as error:
                problems.append(f"{key}: {error}")
    if problems:
        raise ConfigError(problems)
    return tools


def _checks(
    config: ResolvedConfig, renderer: HFChatRenderer, folder: Path, listeners: bool, tools: list[HostedTool]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    if config.cluster.runtime == "local" or config.cluster.address is None:
        # Otherwise the nodes decide, see `roles.uses_gpus`.
        yield "cluster.device", lambda: check_sleep(config, resolve_device(config.cluster.device).type == "cuda")
    if config.rollout.engine.python is None:
        yield "rollout.engine", config.rollout.engine.plugin.load
    clients = absent_clients(config.engines)
    for name, named in config.engines.items():
        yield f"engines.{name}", partial(check_frozen_model, named)
        if named.python is None:
            yield f"engines.{name}", named.plugin.load
    for path in dict.fromkeys((config.model.path, config.critic.path, config.reference.path)):
        if path is not None:
            yield f"weights in {path}", partial(check_weights, Path(path))
            yield f"config.json in {path}", partial(check_architecture, path, config.model)
    seed, functions = config.trainer.seed, list[HostedRewardFunction]()
    yield "rollout.tool_parser", partial(config.rollout.tool_parser.build, ToolParserContext())
    for index, tool in enumerate(config.tools):
        yield f"tools.{index}", partial(_check_tool, tool, seed, clients, tools)
    for index, function in enumerate(config.reward.functions):
        yield f"reward.functions.{index}", partial(_check_reward_function, function, clients, functions)
    yield "reward.manager", partial(_check_manager, config, functions)
    for index, interaction in enumerate(config.interactions):
        context = interaction_context(interaction, seed, clients)
        yield f"interactions.{index}", partial(interaction.build, context)
    for index, loop in enumerate(config.rollout.agent.loops):
        yield f"rollout.agent.loops.{index}", partial(_check_loop, loop, config, renderer, tools)
    for index, tracker in enumerate(config.trainer.trackers if listeners else ()):
        yield f"trainer.trackers.{index}", partial(_check_tracker, tracker, config, folder)
    for index, hook in enumerate(config.hooks if listeners else ()):
        yield f"hooks.{index}", partial(_check_hook, hook, folder)


def _check_tool(slot: ToolSlot, seed: int, clients: Mapping[str, EngineClient], others: list[HostedTool]) -> None:
    hosted = HostedTool(slot, seed, clients)
    tool = hosted.tool
    if shared := sorted(hosted.schemas.keys() & {name for other in others for name in other.schemas}):
        raise ConfigError(f"another tool has the function name {shared[0]!r} too, which models call it by; rename one")
    others.append(hosted)
    check_call(tool.execute, "execute", "(instance_id, parameters)", "id", {})
    if not inspect.iscoroutinefunction(tool.execute):
        raise ConfigError("execute is not a coroutine function; write `async def execute(self, …)`")


def _check_reward_function(
    slot: RewardFunctionSlot, clients: Mapping[str, EngineClient], functions: list[HostedRewardFunction]
) -> None:
    hosted = HostedRewardFunction(slot, clients, check_only=True)
    functions.append(hosted)
    check_call(hosted.function, slot.registered_name, "(trajectory)", None)


def _check_manager(config: ResolvedConfig, functions: Sequence[HostedRewardFunction]) -> None:
    # Without one that could not be built, a manager could miss it.
    if len(functions) == len(config.reward.functions):
        build_manager(config.reward, functions, config.loops_reward, bool(config.environments))


def _check_loop(slot: AgentLoopSlot, config: ResolvedConfig, renderer: HFChatRenderer, tools: list[HostedTool]) -> None:
    parser = config.rollout.tool_parser.build(ToolParserContext())
    interactions = tuple(each.registered_name for each in config.interactions)
    names = tuple(name for tool in tools for name in tool.schemas)
    slot.build(AgentLoopContext(renderer, parser, names, interactions, config.rollout.max_response_length))


def _check_tracker(slot: TrackerSlot, config: ResolvedConfig, folder: Path) -> None:
    with boundary(ConfigError):
        slot.build(TrackerContext(config.trainer.name, folder, 1, to_dict(config))).finish("stopped")


def _check_hook(slot: HookSlot, folder: Path) -> None:
    name = slot.registered_name
    HookCaller([(name, slot.build(HookContext(name, folder)))])


def check_call(function: Callable[..., Any], what: str, shape: str, *arguments: Any) -> None:
    """Reject a function that cannot be called with these arguments.

    Raises:
        ConfigError: with its signature.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Some callables written in C have no signature.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{what}{signature} cannot be called with {shape}: {error}") from None


def check_call_format(config: ResolvedConfig, renderer: HFChatRenderer) -> None:
    """Reject a tool parser that does not read the calls that the model's chat template writes.

    An environment may do without tools: there it is a warning, and so it is where the template writes no calls.

    Raises:
        ConfigError: naming the parser that reads them.
    """
    slot = config.rollout.tool_parser
    found = call_format(renderer, [renderer.decode([stop]) for stop in renderer.stop_token_ids])
    if not found.one:
        logger.warning(
            "rollout.tool_parser: whether %s fits the model could not be checked: its chat template %s",
            slot.registered_name,
            f"refuses calls: {found.reason}" if found.reason else "leaves calls out of the history",
        )  # fmt: skip
        return
    if found.is_read_by(slot.build(ToolParserContext())):
        if better := renderer_of(slot.registered_name, config.plugins.block):
            logger.warning(
                "rollout.renderer: the model writes %s, and %s reads it as text, in which a control token's name in a "
                "message looks like the token: set rollout.renderer to %s, which reads the tokens",
                better,
                config.rollout.renderer.registered_name,
                better,
            )
        return
    readers = found.readers(installed_parsers(config.plugins.block))
    fix = (
        f"Set rollout.tool_parser to {readers[0]}"
        if readers
        else "No installed parser does. Install one, or write it: agentrl plugins new tool_parser"
    )
    message = (
        f"rollout.tool_parser: {slot.registered_name} does not read the calls that the model's chat template writes, "
        f"such as {found.one[:200]!r}. {fix}"
    )
    if config.tools:
        raise ConfigError(message)
    logger.warning("%s, if the environments have tools", message)


def check_teacher(config: ResolvedConfig, renderer: HFChatRenderer) -> None:
    """Reject a teacher whose tokenizer has other ids: its log-probs would be those of other text.

    Raises:
        ConfigError: naming a token that differs.
    """
    path = config.teacher.path
    if path is None:
        return
    with boundary(ConfigError, f"teacher.path: {path} has no tokenizer that transformers can load:"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    found, expected = tokenizer.get_vocab(), renderer.tokenizer.get_vocab()
    if found != expected:
        token = min(found.items() ^ expected.items())[0]
        raise ConfigError(
            f"teacher.path: the tokenizer of {path} differs from that of model.path, for example in {token!r} (id "
            f"{found.get(token)} there, {expected.get(token)} here). A teacher must have the tokenizer of the model"
        )


def check_logit_bias(config: ResolvedConfig, vocab_size: int) -> None:
    """Reject a bias of a token that the model does not have.

    Raises:
        ConfigError: naming the ids.
    """
    sections = {"rollout": config.rollout.sampling, "trainer.validation": config.trainer.validation.sampling}
    for key, sampling in sections.items():
        if outside := [str(token) for token in sampling.logit_bias if not 0 <= token < vocab_size]:
            raise ConfigError(
                f"{key}.sampling.logit_bias: {', '.join(outside)} is no token id of {config.model.path}; allowed: 0 to "
                f"{vocab_size - 1}"
            )


def check_stop_ids(config: ResolvedConfig, stops: Sequence[int], vocab_size: int) -> None:
    """Reject a stop token that the model does not have: engines refuse each request that names one.

    Raises:
        ConfigError: naming the ids.
    """
    if outside := [str(token) for token in stops if not 0 <= token < vocab_size]:
        raise ConfigError(
            f"model.path: {', '.join(outside)} ends a turn (the tokenizer's eos_token, or eos_token_id in "
            f"generation_config.json) and is no token id of {config.model.path}; allowed: 0 to {vocab_size - 1}"
        )


def warn_of_other_distribution(config: ResolvedConfig) -> None:
    """Say what truncation, penalties and biases do to ratios between engine and trainer."""
    sampling, needed = config.rollout.sampling, config.needs_rollout_log_probs
    off = {"top_p": 1.0, "top_k": 0, **RESHAPING}
    used = {name: getattr(sampling, name) for name, value in off.items() if getattr(sampling, name) != value}
    if needed is not None and used:
        logger.warning(
            "%s compares the engine's log-probs with the trainer's, but rollout.sampling draws from another "
            "distribution than the policy's (%s), which the trainer's log-probs ignore: set %s",
            needed,
            ", ".join(f"{name}={value}" for name, value in used.items()),
            " and ".join(f"{name}={off[name]}" for name in used),
        )


def check_frozen_model(slot: NamedEngineSlot) -> None:
    """Reject a model of ``engines`` that cannot be served.

    Raises:
        ConfigError, TemplateError: with what to do.
    """
    check_weights(Path(slot.model))
    with boundary(ConfigError, f"{slot.model} is not a model transformers can load:"):
        model = AutoConfig.from_pretrained(slot.model).get_text_config()
    HFChatRenderer.from_config(ModelConfig(slot.model))
    context = getattr(model, "max_position_embeddings", None)
    if context is not None and slot.max_model_len > context:
        raise ConfigError(
            f"max_model_len {slot.max_model_len} is more than the context of {slot.model}, {context}; lower it"
        )


def check_best_metric(config: ResolvedConfig, rows: Sequence[Any]) -> None:
    """Reject a ``trainer.checkpoint.best_metric`` that the validation of these rows never measures.

    Raises:
        ConfigError: listing what it measures.
    """
    wanted, validation = config.trainer.checkpoint.best_metric, config.trainer.validation
    modes = [mode for mode, used in (("greedy", validation.greedy), ("sampled", validation.n)) if used]
    names = [f"{each}_{mode}" for mode in modes for each in ("accuracy", "score_mean", "unscored")]
    names += [f"{each}_at_{k}" for k in group_sizes(validation.n) for each in ("pass", "maj", "best")]
    sources = sorted({row.get("data_source") or "default" for row in rows[: validation.max_prompts]})
    measured = [f"validation/{source}/{name}" for source in sources for name in names]
    if wanted is not None and wanted not in measured:
        raise ConfigError(
            f"trainer.checkpoint.best_metric: {wanted!r} is never measured; allowed: {', '.join(measured) or 'none'}"
        )
