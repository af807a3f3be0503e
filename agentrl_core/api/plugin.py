"""What an entry point names: a light description of a plugin, whose heavy class stays an unimported string.

    PLUGIN = PluginSpec(
        kind="tool",
        name="calculator",
        api_version=1,
        summary="evaluates arithmetic",
        factory="agentrl_tools_basic.calculator:Calculator",
    )

and ``pyproject.toml`` names it:

    [project.entry-points."agentrl.tools"]
    calculator = "agentrl_tools_basic.plugin:PLUGIN"

The factory is called ``factory(config, context)``: ``config`` is an instance of ``PluginSpec.config``, ``context`` the
frozen dataclass of the kind (``ToolContext``, ``EngineContext``, …). A module that holds specs must import nothing
heavy: listing plugins imports it.
"""

from dataclasses import dataclass, field

from agentrl_core.api.config import NoConfig


@dataclass(frozen=True)
class PluginKind:
    """One pluggable slot of agentrl.

    ``capabilities`` are the names that a plugin of this kind may declare, each with its meaning.

    ``api_version`` is the version of the kind's contract, one whole number. A plugin states the one that it was
    written for; a plugin with another number is rejected, and only its spec is imported. ``adapted`` holds older
    numbers that still work, with a warning, and what has changed since.

    Compatible, the number stays: a new method with a default implementation; a new field with a default in a dataclass
    that the core makes (contexts, inputs) or that a plugin makes (outputs); a new capability; a new key in a row or in
    ``metrics``; accepting more than before; a new exception class below one that was raised before.

    Not compatible, the number rises: a method, field, argument or capability that is removed, renamed or gets another
    type or meaning; a new abstract method; a new required argument; a call that comes from another thread, process or
    event loop, or at another point of the lifecycle; rejecting what was accepted; other shapes, dtypes or units.
    """

    kind: str
    group: str
    api_version: int
    title: str
    capabilities: dict[str, str] = field(default_factory=dict)
    adapted: dict[int, str] = field(default_factory=dict)


KINDS: dict[str, PluginKind] = {
    kind.kind: kind
    for kind in (
        PluginKind("agent_loop", "agentrl.agent_loops", 1, "agent loop", {
            "tools": "drives the configured tools",
            "interactions": "drives the configured interactions",
            "rewards": "may return the reward of a trajectory (AgentLoopOutput.reward_score)",
            "chat_endpoint": "serves the policy to clients that bring their own tools",
        }),
        PluginKind("engine", "agentrl.engines", 1, "inference engine", {
            "logprobs": "returns the log-probability of every sampled token",
            "seeds": "SamplingParams.seed decides a request's tokens, whatever else is in the batch",
            "abort": "a request can be ended early and returns what it has",
            "pause": "generation can be halted and resumed",
            "sleep": "memory can be released and taken back",
            "weight_update": "takes new weights without a restart",
            "live_update": "takes new weights while requests run, which then continue with a new KV cache",
            "old_cache": "requests that run while weights change can keep their KV cache (WeightUpdate.running)",
            "routed_experts": "says to which experts it sent each token (EngineContext.routed_experts)",
            "images": "serves prompts with images, for vision-language models (MultiModal, EngineContext.max_images)",
            "adapters": "serves versions of LoRA adapters side by side (EngineContext.adapters, WeightUpdate.adapter)",
            "broadcast": "takes weights that the actor sends from device to device (torch.distributed)",
            "ipc": "takes broadcast weights also on a GPU that it shares with the actor (CUDA IPC)",
            "parallel": "a replica computes on several devices: tensor, pipeline and data parallelism",
            "multi_node": "a replica can span several hosts",
            "shared_module": "can generate with the actor's own torch module, in the actor's process",
            "deterministic": "can repeat a rollout exactly (rollout.deterministic)",
            "sessions": "keeps state between the turns of a trajectory: open_session and close_session are called",
            "min_p": "SamplingParams.min_p: truncates sampling relative to the likeliest token",
            "chained_truncation": "SamplingParams.top_p takes its share of what min_p and top_k have left",
            "presence_penalty": "SamplingParams.presence_penalty: penalizes tokens that the request has sampled",
            "frequency_penalty": "SamplingParams.frequency_penalty: penalizes tokens by how often they were sampled",
            "repetition_penalty": "SamplingParams.repetition_penalty: penalizes tokens of prompt and output",
            "logit_bias": "SamplingParams.logit_bias: adds to the logits of given tokens",
            "json_schema": "SamplingParams.json_schema: samples only JSON that fits a schema",
            "remote_weights": "samples where a training backend with the same capability keeps its weights",
        }),
        PluginKind("tool", "agentrl.tools", 1, "tool"),
        PluginKind("renderer", "agentrl.renderers", 1, "renderer", {
            "tool_parser": "finds calls with rollout.tool_parser",
        }),
        PluginKind("tool_parser", "agentrl.tool_parsers", 1, "tool-call parser"),
        PluginKind("interaction", "agentrl.interactions", 1, "interaction"),
        PluginKind("environment", "agentrl.environments", 1, "environment"),
        PluginKind("reward_manager", "agentrl.reward_managers", 1, "reward manager", {
            "group": "scores all samples of a prompt together",
            "tool_rewards": "uses the rewards that tools return",
            "turn_scores": "uses the scores that interactions return",
        }),
        PluginKind("reward_function", "agentrl.reward_functions", 1, "reward function"),
        PluginKind("advantage_estimator", "agentrl.advantage_estimators", 2, "advantage estimator", {
            "values": "needs a critic's values",
            "groups": "compares the samples of one prompt: needs rollout.n >= 2",
            "components": "needs the parts of the score: a reward manager that names them",
            "rollout_log_probs": "needs the engine's log-probs",
            "ref_log_probs": "needs the reference's log-probs",
            "entropies": "needs the entropies of the policy before the update",
            "teacher_log_probs": "needs the log-probs of teacher.path",
            "greedy_baseline": "needs the score of a greedy answer to each prompt: one more trajectory per prompt",
            "separate_groups": "a group's advantages follow from it alone: gets parts of a step, returns no metrics",
        }, {1: "rewards now stand on the turn that earned them; this plugin gets them all on each row's last token"}),
        PluginKind("policy_loss", "agentrl.policy_losses", 2, "policy loss", {
            "rollout_log_probs": "needs the engine's log-probs",
            "ref_log_probs": "needs the reference's log-probs",
            "entropies": "needs entropies with a gradient",
            "mini_batch_log_probs": "needs log_probs in prepare(): one more forward pass",
        }, {1: "the input has more fields, and prepare() sees whole mini-batches; nothing that was there has changed"}),
        PluginKind("rollout_correction", "agentrl.rollout_corrections", 1, "rollout correction"),
        PluginKind("dataset", "agentrl.datasets", 1, "prompt dataset"),
        PluginKind("sampler", "agentrl.samplers", 1, "prompt sampler"),
        PluginKind("batch_policy", "agentrl.batch_policies", 1, "batch policy"),
        PluginKind("training_backend", "agentrl.training_backends", 1, "training backend", {
            "all_weights": "trains all weights of a model; without it adapters alone (model.adapter)",
            "adapters": "trains a LoRA adapter on a frozen model (model.adapter)",
            "policies": "trains adapters of several policies on one model (policies)",
            "critic": "trains a value function (TrainingContext.head)",
            "entropies": "computes entropies, with a gradient if asked",
            "temperature": "computes log-probs at other temperatures than 1",
            "ranks": "trains one model on several ranks",
            "images": "shows images to a model (TrainingContext.media)",
            "freeze": "leaves parts of a model untrained (model.freeze)",
            "quantize": "trains adapters on quantized weights (model.quantize)",
            "offload": "keeps weights or moments in host memory between phases (offload_parameters, offload_optimizer)",
            "shared_module": "gives engines in its process the model itself (TrainingBackend.module)",
            "remote_weights": "keeps weights at a server: engines get their place alone, and need the same capability",
            "router_replay": "sends tokens to the experts that the engine chose (MicroBatch, column routed_experts)",
        }),
        PluginKind("tracker", "agentrl.trackers", 1, "tracker"),
        PluginKind("hook", "agentrl.hooks", 1, "lifecycle hook"),
    )
}  # fmt: skip

CLI_GROUP = "agentrl.cli"
"""Entry-point group of lazy subcommands: ``name = "package.module:typer_app"``, loaded only when typed; ``group.name``
is a command of a group."""

PREDICTION_GROUP = "agentrl.predictions"
"""Entry-point group of what foresees the memory of a run: ``name = "package.module:function"``, called with the
configuration. Its result has a ``line`` for a person and ``to_dict()`` for scripts."""

RESERVED_GROUPS = (PREDICTION_GROUP,)


@dataclass(frozen=True)
class PluginSpec:
    """The light description that an entry point names.

    Args:
        kind: a key of :data:`KINDS`.
        name: how a config names it; lower case, digits, ``_`` and ``-``.
        api_version: the version of the kind's contract that the plugin was written for.
        summary: one line for ``agentrl plugins list``.
        factory: ``"package.module:attribute"``, imported only when the plugin is chosen.
        config: a dataclass with the plugin's options (see :func:`agentrl_core.api.option`).
        requires: PEP 508 strings, checked in the interpreter that runs the factory.
        capabilities: names from ``KINDS[kind].capabilities``.
    """

    kind: str
    name: str
    api_version: int
    summary: str
    factory: str
    config: type = NoConfig
    requires: tuple[str, ...] = ()
    capabilities: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PluginRef:
    """Names one resolved plugin across processes.

    The driver resolves a name once; workers get the reference, resolve it again and reject a difference. For an
    unpackaged plugin ``dist`` is ``"file"``, ``version`` the sha256 of the file, ``source`` its text, ``path`` where
    the driver read it and ``name`` ``"<file name>:<object>"``.
    """

    kind: str
    name: str
    dist: str
    version: str
    source: str = field(default="", repr=False)
    path: str = field(default="", repr=False, compare=False)
