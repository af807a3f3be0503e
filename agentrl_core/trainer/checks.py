"""What is checked before a run uses a worker or a GPU, and needs more than the configuration: the phases of
:meth:`agentrl_core.trainer.preparation.Preparation.of`. All that a phase finds is reported together."""

import inspect
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import AutoConfig, AutoTokenizer

from agentrl_core.api import (
    AgentLoopContext,
    AgentRLError,
    ChatRenderer,
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
from agentrl_core.config.cross_checks import served
from agentrl_core.config.schema import ModelConfig, NamedEngineSlot, ToolSlot
from agentrl_core.config.slots import all_slots
from agentrl_core.data.call_format import call_format, installed_parsers, renderer_of
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.data.template_check import RenderedText, TemplateReport, check_template, require_tool_role
from agentrl_core.engine_kit.routers import Routers
from agentrl_core.fsdp2.adapters import peft_config
from agentrl_core.fsdp2.model_files import check_weights
from agentrl_core.fsdp2.models import check_architecture
from agentrl_core.hosting.rewards import HostedRewardFunction, build_manager
from agentrl_core.hosting.tools import HostedTool
from agentrl_core.plugins.boundary import boundary, hang_reported
from agentrl_core.plugins.file_plugin import FILE_DIST
from agentrl_core.plugins.hooks import HookCaller
from agentrl_core.rollout.session import interaction_context
from agentrl_core.serving.clients import absent_clients
from agentrl_core.serving.interpreter import CORE, check_interpreter
from agentrl_core.serving.placement import check_sleep
from agentrl_core.serving.weight_transport import may_share_nccl
from agentrl_core.trainer.plan import max_model_len
from agentrl_core.trainer.sample_statistics import group_sizes
from agentrl_core.workers.devices import resolve_device

logger = logging.getLogger(__name__)
ADAPTER_LR = 1e-5
"""Lower learning rates than this one train an adapter slowly."""
_DISTRIBUTION = {"top_p": 1.0, "top_k": 0, **RESHAPING}
"""Sampling parameters that change the distribution, with the values that don't."""


@contextmanager
def phase() -> Iterator[Callable[[str], AbstractContextManager[None]]]:
    """Report together what several checks refuse: ``with phase() as of:`` and in it ``with of("a.key"): check()``.

    Raises:
        ConfigError: at the end, with every problem.
    """
    problems: list[str] = []

    @contextmanager
    def of(key: str) -> Iterator[None]:
        prefix = f"{key}: " if key else ""
        try:
            yield
        except ConfigError as error:
            problems.extend(prefix + each for each in error.problems)
        except AgentRLError as error:
            problems.append(f"{prefix}{error}")

    yield of
    if problems:
        raise ConfigError(problems)


def check_training(config: ResolvedConfig) -> None:
    """What only training needs of the plugins, and what makes its ratios wrong."""
    missing = missing_capabilities(config, training=True, alternatives=installed_with)
    if problems := [f"{key}: {message}" for key, message in missing]:
        raise ConfigError(problems)
    if config.model.quantize is not None and find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"model.quantize: found {config.model.quantize}, which needs bitsandbytes: pip install bitsandbytes"
        )
    if config.policies and not any(each.is_trained for each in config.policies.values()):
        raise ConfigError("policies: expected at least one that is trained, found only frozen ones and copies")
    # PEFT keeps the matrices of all adapters of a layer in one module, by name.
    if taken := [name for name in config.policies if hasattr(nn.ModuleDict(), name)]:
        raise ConfigError(f"policies: torch uses the names {', '.join(taken)} itself; rename them")
    for lr in {own.actor.optimizer.lr for own in config.trained.values() if own.model.adapter is not None}:
        if lr < ADAPTER_LR:
            logger.warning(
                "actor.optimizer.lr=%g is a learning rate for training all weights; adapters need about ten times as "
                "much (1e-5 to 1e-4, Schulman et al. 2025, LoRA Without Regret): set actor.optimizer.lr", lr,
            )  # fmt: skip
    sampling = config.rollout.sampling
    needed = next(filter(None, (own.needs_rollout_log_probs for own in config.trained.values())), None)
    used = {name: getattr(sampling, name) for name, off in _DISTRIBUTION.items() if getattr(sampling, name) != off}
    if needed is not None and used:
        logger.warning(
            "%s compares the engine's log-probs with the trainer's, but rollout.sampling draws from another "
            "distribution than the policy's (%s), which the trainer's log-probs ignore: set %s",
            needed,
            ", ".join(f"{name}={value}" for name, value in used.items()),
            " and ".join(f"{name}={_DISTRIBUTION[name]}" for name in used),
        )


def _check_backend(config: ResolvedConfig) -> Any:
    """The class of the training backend, or None where it is in another environment: what it needs is installed."""
    backend = config.trainer.backend
    if backend.python is None:
        return backend.plugin.load()
    # The configuration goes there as a whole, with the options of every plugin.
    packages = {slot.ref.dist for slot in all_slots(config) if slot.resolved is not None} - {FILE_DIST, CORE}
    check_interpreter(
        backend.python, backend.ref, backend.plugin.spec, ("ray", *sorted(packages)), "trainer.backend.python"
    )  # fmt: skip
    return None


def check_files(config: ResolvedConfig, *, training: bool) -> Any:
    """Interpreters of engines, and the files of every model; returns the text config of the policy's."""
    model, text_config = config.model, None
    with phase() as of:
        for key, slot in served(config).items():
            if slot.python is not None:
                shares = training and slot is config.rollout.engine and may_share_nccl(config)
                with of(""):
                    check_interpreter(slot.python, slot.ref, slot.plugin.spec, key=f"{key}.python", shares_nccl=shares)
        backend = None
        if training:
            with of("trainer.backend"):
                backend = _check_backend(config)
        sections: dict[str, Any] = {
            "model": model,
            "critic": config.critic,
            "reference": config.reference,
            "teacher": config.teacher,
        }
        keys = {section.path: f"{name}.path" for name, section in reversed(sections.items())}
        models: dict[str, Any] = {}
        for path, key in reversed(keys.items()):
            if path is not None:
                with of(f"weights in {path}"):
                    # Those of a model that is trained and sampled at a server are there.
                    if not config.rollout.engine.has("remote_weights"):
                        check_weights(Path(path))
                with of(f"config.json in {path}"):
                    models[key] = built = check_architecture(path, model)
                    text_config = built.config.get_text_config() if path == model.path else text_config
                if path == model.path and text_config is not None:
                    adapters = {"": model.adapter}
                    adapters |= {f"policies.{name}": each.adapter for name, each in config.policies.items()}
                    for key, adapter in adapters.items():
                        if adapter is not None:
                            with of(key):
                                peft_config(built, adapter)
        for key, built in models.items():
            adapted = key in ("model.path", "critic.path") and any(own.model.adapter for own in config.trained.values())
            if backend is not None:
                with of(""):
                    backend.check(config.trainer.backend.config, built, adapted, config.cluster.processes, key)
        if training and "model.path" in models and any(own.actor.router_replay for own in config.trained.values()):
            with of(""):
                Routers(models["model.path"], "actor.router_replay")
        for name, named in config.engines.items():
            with of(f"engines.{name}"):
                _check_frozen_model(named)
        if text_config is not None:
            with of(""):
                check_context(config, text_config)
            for key, section in (("rollout", config.rollout), ("trainer.validation", config.trainer.validation)):
                with of(f"{key}.sampling.logit_bias"):
                    _check_ids(config, section.sampling.logit_bias, int(text_config.vocab_size))
    return text_config


def check_context(config: ResolvedConfig, text_config: Any) -> None:
    """Refuse lengths that the model does not support, and engines that cannot split it."""
    context, heads = (getattr(text_config, key, None) for key in ("max_position_embeddings", "num_attention_heads"))
    if context is not None and max_model_len(config) > context:
        raise ConfigError(
            f"data.max_prompt_length + rollout.max_response_length = {max_model_len(config)} tokens, but the model in "
            f"model.path has a context of {context}. Lower one of the two"
        )
    split = config.rollout.engine.tensor_parallel
    if heads and heads % split:
        allowed = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
        raise ConfigError(
            f"rollout.engine.tensor_parallel: {split} devices cannot share the {heads} attention heads of the model in "
            f"model.path equally; allowed are {allowed}"
        )


def _check_frozen_model(slot: NamedEngineSlot) -> None:
    check_weights(Path(slot.model))
    with boundary(ConfigError, f"{slot.model} is not a model transformers can load:"):
        model = AutoConfig.from_pretrained(slot.model).get_text_config()
    HFChatRenderer.from_config(ModelConfig(slot.model))
    context = getattr(model, "max_position_embeddings", None)
    if context is not None and slot.max_model_len > context:
        raise ConfigError(
            f"max_model_len {slot.max_model_len} is more than the context of {slot.model}, {context}; lower it"
        )


def _check_ids(config: ResolvedConfig, ids: Iterable[int], size: int, why: str = "") -> None:
    """Engines refuse each request that names a token which the model does not have."""
    if outside := [str(token) for token in ids if not 0 <= token < size]:
        raise ConfigError(f"{', '.join(outside)} {why}is no token id of {config.model.path}; allowed: 0 to {size - 1}")


def check_tokenizers(config: ResolvedConfig, renderer: Renderer, vocab_size: int, *, training: bool) -> None:
    """The stop tokens, and a teacher's tokenizer: with other ids, its log-probs would be those of other text."""
    with phase() as of:
        why = "ends a turn (the tokenizer's eos_token, or eos_token_id in generation_config.json) and "
        with of("model.path"):
            _check_ids(config, renderer.stop_token_ids, vocab_size, why)
        path = config.teacher.path if training else None
        if path is None:
            return
        with of("teacher.path"):
            with boundary(ConfigError, f"{path} has no tokenizer that transformers can load:"):
                tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
            found, expected = tokenizer.get_vocab(), cast(HFChatRenderer, renderer.chat).tokenizer.get_vocab()
            if found != expected:
                token = min(found.items() ^ expected.items())[0]
                raise ConfigError(
                    f"the tokenizer of {path} differs from that of model.path, for example in {token!r} (id "
                    f"{found.get(token)} there, {expected.get(token)} here). A teacher must have the tokenizer of the "
                    "model"
                )


def build_plugins(config: ResolvedConfig, chat: ChatRenderer, *, listeners: bool) -> list[HostedTool]:
    """Build every plugin once, as the workers of a run do, and check what the devices are.

    This reports what cannot work before an earlier run is moved. No weights of a reward function are loaded.

    Args:
        config: of the run.
        chat: tokenizer and template of its model.
        listeners: build trackers and hooks too, in a temporary directory. A run that starts builds them itself.

    Returns:
        The tools, of which nothing runs yet.
    """
    tools, functions = list[HostedTool](), list[HostedRewardFunction]()
    seed, clients, rollout = config.trainer.seed, absent_clients(config.engines), config.rollout
    with phase() as of, tempfile.TemporaryDirectory(prefix="agentrl-dry-run-") as folder:
        if config.cluster.runtime == "local" or config.cluster.address is None:
            # Otherwise the nodes decide, see `roles.uses_gpus`.
            with of("cluster.device"):
                check_sleep(config, resolve_device(config.cluster.device).type == "cuda")
        for key, slot in served(config).items():
            if slot.python is None:
                with of(key):
                    slot.plugin.load()
        with of("rollout.tool_parser"):
            rollout.tool_parser.build(ToolParserContext())
        for index, tool in enumerate(config.tools):
            with of(f"tools.{index}"):
                _build_tool(tool, seed, clients, tools)
        for index, function in enumerate(config.reward.functions):
            with of(f"reward.functions.{index}"):
                functions.append(HostedRewardFunction(function, clients, check_only=True))
                check_call(functions[-1].function, function.registered_name, "(trajectory)", None)
        with of("reward.manager"):
            # Without a function that could not be built, a manager could miss it.
            if len(functions) == len(config.reward.functions):
                build_manager(config.reward, functions, config.loops_reward, bool(config.environments))
        for index, interaction in enumerate(config.interactions):
            with of(f"interactions.{index}"):
                interaction.build(interaction_context(interaction, seed, clients))
        for index, loop in enumerate(rollout.agent.loops):
            with of(f"rollout.agent.loops.{index}"):
                parser = rollout.tool_parser.build(ToolParserContext())
                interactions = tuple(each.registered_name for each in config.interactions)
                names = tuple(name for tool in tools for name in tool.schemas)
                loop.build(AgentLoopContext(chat, parser, names, interactions, rollout.max_response_length))
        for index, tracker in enumerate(config.trainer.trackers if listeners else ()):
            with of(f"trainer.trackers.{index}"), boundary(ConfigError):
                context = TrackerContext(config.trainer.name, Path(folder), 1, to_dict(config))
                tracker.build(context).finish("stopped")
        for index, hook in enumerate(config.hooks if listeners else ()):
            with of(f"hooks.{index}"):
                name = hook.registered_name
                HookCaller([(name, hook.build(HookContext(name, Path(folder))))])
    return tools


def _build_tool(slot: ToolSlot, seed: int, clients: Mapping[str, EngineClient], others: list[HostedTool]) -> None:
    hosted = HostedTool(slot, seed, clients)
    tool = hosted.tool
    if shared := sorted(hosted.schemas.keys() & {name for other in others for name in other.schemas}):
        raise ConfigError(f"another tool has the function name {shared[0]!r} too, which models call it by; rename one")
    others.append(hosted)
    check_call(tool.execute, "execute", "(instance_id, parameters)", "id", {})
    if not inspect.iscoroutinefunction(tool.execute):
        raise ConfigError("execute is not a coroutine function; write `async def execute(self, …)`")


def check_call(function: Callable[..., Any], what: str, shape: str, *arguments: Any) -> None:
    """Refuse a function that cannot be called with these arguments, with its signature."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Some callables written in C have no signature.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{what}{signature} cannot be called with {shape}: {error}") from None


def check_conversations(config: ResolvedConfig, renderer: Renderer) -> TemplateReport:
    """What the renderer writes: tools' answers and calls, where the run has them, and whether history stays."""
    with hang_reported("the renderer or tool parser, checking the chat template,"):
        if config.tools:
            require_tool_role(RenderedText(renderer))
        report = check_template(RenderedText(renderer))
        if (config.tools or config.environments) and config.rollout.renderer.has("tool_parser"):
            _check_call_format(config, cast(HFChatRenderer, renderer.chat))
    return report


def _check_call_format(config: ResolvedConfig, renderer: HFChatRenderer) -> None:
    """Refuse a tool parser that does not read the calls that the model's chat template writes.

    An environment may do without tools: there it is a warning, and so it is where the template writes no calls.
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


def check_best_metric(config: ResolvedConfig, rows: Sequence[Any]) -> None:
    """Refuse a ``trainer.checkpoint.best_metric`` that the validation of these rows never measures."""
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
