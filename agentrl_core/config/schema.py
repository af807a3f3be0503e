"""Every key of a configuration: types, defaults, help and units. Defaults live here and nowhere else.

A pluggable slot is ``{name: …, config: {…}}`` plus keys that the core owns. ``config`` is checked against the
plugin's own dataclass, and is an instance of it once the file is loaded.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from agentrl_core.api.config import option
from agentrl_core.api.engine import SamplingParams
from agentrl_core.api.tool import Isolation
from agentrl_core.config.slots import Slot

TRAJECTORIES_PER_WORKER, WORKERS_PER_NODE = 128, 8
"""Of agent-loop workers, where their number is not given."""
POLICY = "policy"
"""Name of the adapter that is trained, where one is."""
UNTRAINED = {"frozen": "true", "copy_of": "null", "actor": "null", "algorithm": "null"}
"""Overrides below ``policies.NAME`` with which a policy is not trained."""
DeviceName = Literal["auto", "cpu", "cuda"]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]
Retry = Literal["continue", "restart"]
OnNewWeights = Literal["recompute", "continue", "restart", "finish"]
TemplateBreak = Literal["fork", "mask", "error"]
Records = Literal["all", "sample", "none"]
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass
class ServedSlot(Slot):
    """What the policy's engine and the named engines have in common."""

    kind: ClassVar[str] = "engine"
    name: str = option("hf", help="a registered name, 'package:name', or './file.py:object'")
    python: str | None = option(None, path=True, help="Python of the engine's environment (cluster.runtime=ray only)")
    tensor_parallel: int = option(1, ge=1, unit="devices", help="number of devices that each layer is split across")
    pipeline_parallel: int = option(1, ge=1, unit="devices", help="number of devices that the layers are split over")
    data_parallel: int = option(1, ge=1, unit="copies", help="data-parallel model copies per replica")
    nodes: int = option(1, ge=1, help="number of hosts per replica; its devices are split evenly")
    max_in_flight: int | None = option(
        None, ge=1, unit="requests", help="maximum concurrent requests per replica; null: no limit"
    )
    retry: Retry = option(
        "continue", help="how to retry an interrupted request: continue after its tokens, or restart from the prompt"
    )
    restarts: int = option(3, ge=0, help="maximum restarts per replica during a run")
    start_timeout: float = option(
        600.0, gt=0, unit="seconds", help="time limit for starting a replica, for a weight update and for sleeping"
    )
    health_interval: float = option(5.0, gt=0, unit="seconds", help="interval between health checks during a rollout")
    health_timeout: float = option(
        60.0,
        gt=0,
        unit="seconds",
        help="restart a replica that does not answer in time, or that computes no token for so long although it has "
        "requests",
    )

    @property
    def devices(self) -> int:
        """Number of devices of one replica."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


@dataclass
class EngineSlot(ServedSlot):
    replicas: int | None = option(
        None,
        ge=1,
        help="number of engine replicas; null: as many as fit on the training processes' devices, 1 if deterministic",
    )
    placement: Literal["colocated", "standalone"] = option(
        "colocated",
        help="GPUs of the engines: colocated shares those of the training processes, standalone has its own",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None,
        help="data type of the engine's weights and of the weights that it is sent; null: the trainer's compute type, "
        "which is bfloat16 on CUDA. float32 on CUDA costs twice the memory and the fast attention kernels",
    )
    sleep: int | None = option(
        None,
        ge=0,
        le=2,
        help="memory that engines release while the trainer computes: 0 nothing, 1 the KV cache, 2 also the weights; "
        "null: 2 on GPUs of the training processes (1 for the actor's own module), else 0",
    )
    weight_transfer: Literal["auto", "host_memory", "broadcast"] = option(
        "auto",
        help="how new weights reach engines of other processes: through the memory of hosts, or sent from the actor's "
        "devices to theirs (NCCL, CUDA IPC where they share a GPU, gloo on the CPU). auto: host_memory, but broadcast "
        "where replicas may be on several hosts",
    )


@dataclass(kw_only=True)
class NamedEngineSlot(ServedSlot):
    """A frozen model of ``engines``. On Ray with GPUs each replica has its own."""

    model: str = option(
        path=True,
        hub=True,
        help="directory with weights, config and tokenizer, relative to the config file; or org/name of the hub. Its "
        "config says in which data type it is loaded",
    )
    replicas: int = option(1, ge=1, help="number of engine replicas")
    max_model_len: int = option(4096, ge=2, unit="tokens", help="maximum length of prompt and answer together")


@dataclass
class AgentLoopSlot(Slot):
    kind: ClassVar[str] = "agent_loop"


@dataclass
class ToolParserSlot(Slot):
    kind: ClassVar[str] = "tool_parser"
    name: str = option("hermes", help="a registered name, 'package:name', or './file.py:object'")


@dataclass
class RendererSlot(Slot):
    kind: ClassVar[str] = "renderer"
    name: str = option("chat_template", help="a registered name, 'package:name', or './file.py:object'")


@dataclass
class ToolSlot(Slot):
    kind: ClassVar[str] = "tool"
    timeout: float = option(30.0, gt=0, unit="seconds", help="time limit of one call")
    isolation: Isolation | None = option(None, help="run inline or in a child process; null: as the tool declares")
    processes: int = option(2, ge=1, help="child processes per agent-loop worker, for isolation=process")
    env: list[str] = option(default_factory=list, help="environment variables that these processes get, by name")


@dataclass
class InteractionSlot(Slot):
    kind: ClassVar[str] = "interaction"
    timeout: float = option(30.0, gt=0, unit="seconds", help="time limit of one answer")


@dataclass
class EnvironmentSlot(Slot):
    kind: ClassVar[str] = "environment"
    timeout: float = option(30.0, gt=0, unit="seconds", help="time limit of one call, reply, start or score")


@dataclass
class RewardManagerSlot(Slot):
    kind: ClassVar[str] = "reward_manager"
    name: str = option("naive", help="a registered name, 'package:name', or './file.py:object'")


@dataclass
class RewardFunctionSlot(Slot):
    kind: ClassVar[str] = "reward_function"
    weight: float = option(1.0, help="weight of this function in the manager's sum")
    range: list[float] | None = option(
        None, help="lowest and highest score that this function may return; another one is a reward_error; null: any"
    )
    timeout: float = option(30.0, gt=0, unit="seconds", help="time limit of one call")
    isolation: Isolation | None = option(None, help="inline or in a child process; null: as the function declares")
    processes: int = option(1, ge=1, help="child processes per reward worker, for isolation=process")
    env: list[str] = option(default_factory=list, help="environment variables that these processes get, by name")


@dataclass
class AdvantageSlot(Slot):
    kind: ClassVar[str] = "advantage_estimator"
    name: str = option("grpo", help="a registered name, 'package:name', or './file.py:object'")


@dataclass
class PolicyLossSlot(Slot):
    kind: ClassVar[str] = "policy_loss"
    name: str = option("ppo", help="a registered name, 'package:name', or './file.py:object'")


@dataclass
class CorrectionSlot(Slot):
    kind: ClassVar[str] = "rollout_correction"


@dataclass
class DatasetSlot(Slot):
    kind: ClassVar[str] = "dataset"
    name: str = option("prompts", help="a registered name, 'package:name', or './file.py:object'")


@dataclass
class SamplerSlot(Slot):
    kind: ClassVar[str] = "sampler"
    name: str = option("shuffle", help="a registered name, 'package:name', or './file.py:object'")


@dataclass
class BatchPolicySlot(Slot):
    kind: ClassVar[str] = "batch_policy"
    name: str = option("deadline", help="a registered name, 'package:name', or './file.py:object'")


@dataclass
class TrackerSlot(Slot):
    kind: ClassVar[str] = "tracker"


@dataclass
class BackendSlot(Slot):
    kind: ClassVar[str] = "training_backend"
    name: str = option("fsdp2", help="a registered name, 'package:name', or './file.py:object'")
    python: str | None = option(
        None, path=True, help="Python of the training processes' environment (cluster.runtime=ray only); null: this one"
    )


@dataclass
class HookSlot(Slot):
    kind: ClassVar[str] = "hook"


@dataclass
class AdapterConfig:
    rank: int = option(16, ge=1, help="rank of the matrices")
    alpha: float = option(32.0, gt=0, help="what the adapter adds is multiplied by alpha / rank")
    targets: list[str] | str = option(
        "all-linear",
        help="linear layers that get one, by the last part of their names (q_proj); all-linear: all but the output's",
    )
    dropout: float = option(
        0.0, ge=0, lt=1, help="dropout of the adapter's input in updates; above 0 the ratio of policies is noisy"
    )
    path: str | None = option(
        None,
        path=True,
        help="directory of an adapter to begin with, as PEFT saves it: its rank, alpha and targets count; null: a new "
        "one",
    )


@dataclass
class ImagesConfig:
    max_count: int = option(16, ge=1, help="images of a conversation at most, those of its prompt included")
    max_pixels: int | None = option(
        None, ge=1, unit="pixels", help="larger images are scaled down to so many; null: as the model's processor does"
    )
    max_row_pixels: int | None = option(
        None, ge=1, unit="pixels", help="of all images of a row together, after that; null: no limit"
    )
    urls: bool = option(False, help="fetch images that rows and clients of the chat endpoint name by http(s) address")


@dataclass
class ModelConfig:
    path: str = option(
        path=True,
        hub=True,
        help="directory with weights, config and tokenizer, relative to the config file; or a model of the "
        "Hugging Face hub: org/name, org/name@revision",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", help="data type of the stored weights")
    adapter: AdapterConfig | None = option(
        None, help="train a LoRA adapter and leave the weights as they are, for actor and critic; null: train them all"
    )
    quantize: Literal["4bit", "8bit"] | None = option(
        None,
        help="store the linear layers in 4 bits (NF4, QLoRA, arXiv 2305.14314) or in 8 (LLM.int8(), arXiv 2208.07339), "
        "by bitsandbytes; only with model.adapter, in one training process",
    )
    freeze: list[Literal["vision"]] = option(
        default_factory=list,
        help="parts that are not trained, for actor and critic; vision: all that makes features of images, the tower "
        "and its projector",
    )
    compute_dtype: Literal["float32", "bfloat16"] | None = option(
        None, help="data type of the forward and backward passes; null: bfloat16 on CUDA, else model.dtype"
    )
    trust_remote_code: bool = option(False, help="run Python code that comes with the model")
    gradient_checkpointing: bool = option(False, help="recompute activations in the backward pass to save memory")
    attn_implementation: str = option("sdpa", help="attention implementation of transformers")
    packing: bool = option(
        True,
        help="train without padding and compute what several rows begin with once, if the model allows it "
        "(attn_implementation sdpa, only causal masks: no sliding windows, no chunks)",
    )
    chat_template: str | None = option(None, path=True, help="file with a Jinja chat template instead of the model's")
    chat_template_kwargs: dict[str, Any] = option(default_factory=dict, help="extra arguments of the chat template")
    images: ImagesConfig = option(
        default_factory=ImagesConfig, help="limits of the images that a vision-language model is shown"
    )


@dataclass
class DataConfig:
    train_files: list[str] = option(
        default_factory=list,
        path=True,
        help="Parquet or JSON Lines files, relative to the config file: names, patterns (data/*.parquet) or addresses "
        "(hf://…, s3://…); not needed where environments have tasks",
    )
    validation_files: list[str] = option(default_factory=list, path=True, help="the same, for validation")
    batch_size: int = option(32, ge=1, unit="prompts", help="prompts per step")
    max_prompt_length: int = option(512, ge=1, unit="tokens", help="maximum length of a rendered prompt with tools")
    overlong_prompts: Literal["filter", "error", "left", "right", "middle"] = option(
        "filter",
        help="for prompts that are too long: drop the row, stop with an error, or cut the last user message on a side",
    )
    streaming: bool = option(
        False, help="read, check and measure a training row when its step comes, for data that does not fit in memory"
    )
    dataset: DatasetSlot = option(default_factory=DatasetSlot)
    sampler: SamplerSlot = option(default_factory=SamplerSlot)


@dataclass
class SamplingConfig:
    temperature: float = option(
        SamplingParams.temperature, ge=0, le=2, help="sampling temperature, at least 0.01; 0: greedy"
    )
    top_p: float = option(SamplingParams.top_p, gt=0, le=1, help="nucleus sampling threshold; 1: off")
    top_k: int = option(SamplingParams.top_k, ge=0, help="sample from the k most likely tokens; 0: off")
    min_p: float = option(
        SamplingParams.min_p, ge=0, le=1, help="only tokens this fraction as likely as the likeliest one; 0: off"
    )
    presence_penalty: float = option(
        SamplingParams.presence_penalty, ge=-2, le=2, help="subtracted from the logits of tokens sampled in this turn"
    )
    frequency_penalty: float = option(
        SamplingParams.frequency_penalty, ge=-2, le=2, help="the same, times how often a token was sampled in this turn"
    )
    repetition_penalty: float = option(
        SamplingParams.repetition_penalty,
        gt=0,
        help="divides positive logits, multiplies negative ones, of tokens in the conversation so far; 1: off",
    )
    logit_bias: dict[int, float] = option(default_factory=dict, help="added to the logits of these token ids")
    max_tokens: int | None = option(None, ge=1, unit="tokens", help="maximum per turn; null: the remaining budget")
    stop: list[str] = option(
        default_factory=list,
        help="texts that end a turn, in addition to the stop tokens of the chat template; kept in the turn",
    )

    def params(self) -> SamplingParams:
        """Those of a request, without ``stop``, which the tokenizer decides."""
        own = {name: value for name, value in vars(self).items() if name not in ("max_tokens", "stop")}
        return SamplingParams(self.max_tokens or 1, **own)


@dataclass
class AgentConfig:
    loops: list[AgentLoopSlot] = option(help="agent loops that rows select with agent_name; the first is the default")
    num_workers: int | None = option(
        None,
        ge=1,
        help="number of agent-loop workers; null: on Ray one for each 128 trajectories of a step, at most 8 for each "
        "node of training and one for each prompt, else 1",
    )
    max_concurrent: int = option(1024, ge=1, help="maximum concurrent trajectories per worker")


@dataclass
class RolloutConfig:
    agent: AgentConfig = option()
    engine: EngineSlot = option(default_factory=EngineSlot)
    renderer: RendererSlot = option(default_factory=RendererSlot)
    tool_parser: ToolParserSlot = option(default_factory=ToolParserSlot)
    n: int = option(8, ge=1, help="samples per prompt")
    sampling: SamplingConfig = option(default_factory=SamplingConfig)
    max_response_length: int = option(
        512, ge=1, unit="tokens", help="maximum length of everything after the prompt, over all turns"
    )
    template_break: TemplateBreak = option(
        "fork",
        help="what to do if the chat template rewrites history: start a new row, keep one row and train only its last "
        "turn, or stop with an error",
    )
    records: Records = option(
        "all",
        help="trajectories that are written to rollouts/step-*.jsonl: all, those of 16 prompts of each step (sample), "
        "or none",
    )
    resample_rounds: int = option(
        0,
        ge=0,
        help="most rounds of further prompts that replace those whose samples all have the same reward (DAPO's dynamic "
        "sampling); a batch that is not full then ends the run; 0: none are replaced",
    )
    deterministic: bool = option(False, help="exactly repeatable rollouts; needs one worker and one replica; slower")
    max_staleness: int = option(
        0,
        ge=0,
        unit="versions",
        help="how much older than the weights that it updates a trained token may be; above 0 trajectories are sampled "
        "while the trainer trains, which needs engines of their own (rollout.engine.placement=standalone)",
    )
    pipeline_depth: int | None = option(
        None,
        ge=0,
        unit="batches",
        help="batches that are begun ahead of the trainer; at most max_staleness; null: 1 if max_staleness is above 0",
    )
    batch_policy: BatchPolicySlot = option(default_factory=BatchPolicySlot)
    on_new_weights: OnNewWeights = option(
        "recompute",
        help="for requests that run while weights change: compute their KV cache again with the new weights, continue "
        "with the cache of the old ones, or restart them, so that no turn has tokens of two versions. finish: each "
        "trajectory ends with the weights with which it began (only with model.adapter)",
    )
    retries: int = option(2, ge=0, help="retries of a trajectory whose infrastructure failed")
    max_failed_fraction: float = option(0.1, ge=0, le=1, help="stop if a larger share of a step's trajectories fails")
    turn_timeout: float = option(
        1200.0, gt=0, unit="seconds", help="time limit of one generation, its time in the engine's queue included"
    )
    trajectory_timeout: float = option(3600.0, gt=0, unit="seconds", help="time limit of a trajectory")
    max_logprob_gap: float | None = option(
        None,
        gt=0,
        help="stop the run if the mean gap between the engine's and the actor's log-probs is larger; null: never",
    )


@dataclass
class RewardConfig:
    functions: list[RewardFunctionSlot] = option(
        default_factory=list, help="reward functions; the manager combines their scores"
    )
    manager: RewardManagerSlot = option(default_factory=RewardManagerSlot)
    num_workers: int = option(1, ge=1, help="number of reward workers")
    timeout: float = option(
        600.0, gt=0, unit="seconds", help="time limit for scoring one trajectory, including the wait for a free process"
    )


@dataclass
class AlgorithmConfig:
    advantage: AdvantageSlot = option(default_factory=AdvantageSlot)
    loss: PolicyLossSlot = option(default_factory=PolicyLossSlot)
    correction: CorrectionSlot | None = option(None, help="weights for tokens that another policy sampled; null: none")
    aggregation: Aggregation = option("token-mean", help="how per-token losses are averaged")
    kl_coef: float = option(0.0, ge=0, help="weight of the KL penalty in the loss; 0: no reference model is loaded")
    kl_estimator: KLEstimator = option("k3", help="KL estimator (Schulman 2020); those with +: with the gradient of k2")
    kl_placement: Literal["loss", "reward"] = option(
        "loss",
        help="where the KL penalty goes: into the loss, or into the rewards: kl_coef * (old - reference) of each token",
    )
    kl_target: float | None = option(
        None, gt=0, help="mean KL per token that adapts kl_coef in the reward (Ziegler 2019); null: kl_coef is fixed"
    )
    entropy_coef: float = option(0.0, ge=0, help="weight of the entropy bonus")
    entropy_target: float | None = option(
        None, gt=0, unit="nats", help="the bonus pauses while the entropy per token is above it; null: never"
    )
    old_log_probs: Literal["auto", "actor", "rollout"] = option(
        "auto",
        help="log-probs of the policy before the update: computed by the actor, or those of the rollout, which saves a "
        "pass. auto: those of the rollout only if the engine generates with the actor's own module, and all turns were "
        "sampled at the run's temperature without penalties, logit_bias and json_schema",
    )
    uncorrected_staleness: bool = option(
        False,
        help="allow rollout.max_staleness > 0 although nothing keeps the policy near the one that sampled, which can "
        "destroy a run",
    )
    drop_zero_advantage: bool = option(
        True,
        help="compute no backward pass for rows without an advantage, which changes no result; rows that have a KL or "
        "entropy term always have one (actor/trained_rows_share: the share of rows that had one)",
    )


@dataclass
class OptimizerConfig:
    lr: float = option(1e-6, gt=0, help="peak learning rate")
    betas: list[float] = option(default_factory=lambda: [0.9, 0.999], ge=0, lt=1, help="beta1 and beta2 of AdamW")
    weight_decay: float = option(0.0, ge=0, help="weight decay of AdamW")
    schedule: Literal["constant", "linear", "cosine"] = option("constant", help="learning rate after the warm-up")
    warmup_steps: int = option(0, ge=0, unit="optimizer steps", help="length of the linear warm-up")
    min_lr_ratio: float = option(0.0, ge=0, le=1, help="final learning rate as a fraction of the peak")


@dataclass
class UpdateConfig:
    optimizer: OptimizerConfig = option(default_factory=OptimizerConfig)
    epochs: int = option(1, ge=1, help="passes over the batch in each step")
    mini_batches: int = option(1, ge=1, help="optimizer steps per pass")
    micro_batch_tokens: int = option(
        16384,
        ge=1,
        unit="tokens",
        help="maximum tokens per forward and backward pass: those that are computed where rows are packed, else those "
        "with padding",
    )
    grad_clip: float = option(1.0, gt=0, help="maximum gradient norm; larger gradients are scaled down")
    max_skipped_updates: int = option(
        3, ge=1, help="stop the run after this many updates in a row without an optimizer step: no gradient was finite"
    )
    offload_parameters: bool = option(False, help="keep weights in host memory between phases (CUDA only)")
    offload_optimizer: bool = option(
        False,
        help="keep AdamW's moments in host memory; a step brings those of a few parameters at a time to the device and "
        "takes them back (CUDA only)",
    )


@dataclass
class ActorConfig(UpdateConfig):
    router_replay: bool = option(
        False,
        help="of a model of experts: send each token to the experts that the engine chose for it, so that both compute "
        "the same",
    )


@dataclass
class PolicyConfig:
    agents: list[str] = option(
        default_factory=list, help="agents that this policy plays, by name; empty: the one with the policy's name"
    )
    frozen: bool = option(False, help="the policy is not trained: the model without an adapter, or the one of adapter")
    copy_of: str | None = option(
        None, help="another policy, which this one plays with its weights of an earlier step; it is not trained itself"
    )
    updates_ago: int = option(1, ge=1, unit="steps", help="how many steps a copy is behind; the first weights before")
    adapter: AdapterConfig | None = option(
        None, help="keys of model.adapter that differ for this policy; null: none (a frozen policy then has no adapter)"
    )
    actor: ActorConfig | None = option(None, help="keys of actor that differ for this policy; null: none")
    algorithm: AlgorithmConfig | None = option(None, help="keys of algorithm that differ for this policy; null: none")

    @property
    def is_trained(self) -> bool:
        """Whether rows of its agents are trained."""
        return not self.frozen and self.copy_of is None


@dataclass
class CriticConfig(UpdateConfig):
    path: str | None = option(None, path=True, hub=True, help="initial critic; null: model.path with a new value head")
    value_clip: float | None = option(0.2, gt=0, help="clip range of the value loss; null: squared error, unclipped")
    warmup_steps: int = option(0, ge=0, unit="steps", help="first steps in which only the critic is trained")


@dataclass
class ReferenceConfig:
    path: str | None = option(None, path=True, hub=True, help="reference model; null: model.path")
    micro_batch_tokens: int = option(
        32768,
        ge=1,
        unit="tokens",
        help="maximum tokens per forward pass: those that are computed where rows are packed, else those with padding",
    )
    offload_parameters: bool = option(False, help="keep weights in host memory between phases (CUDA only)")


@dataclass
class TeacherConfig(ReferenceConfig):
    path: str | None = option(
        None,
        path=True,
        hub=True,
        help="model for estimators that need its log-probs, with the policy's tokenizer; null: the policy itself, if "
        "there is a context",
    )
    context: str | None = option(
        None,
        help="text that the teacher reads after the user's and the policy does not, with {ground_truth}; null: none",
    )


@dataclass
class ValidationConfig:
    interval: int = option(0, ge=0, unit="steps", help="steps between validations; 0: only before and after training")
    before: bool = option(True, help="validate before the first step")
    greedy: bool = option(True, help="also validate with one greedy answer per prompt")
    n: int = option(1, ge=0, help="sampled answers per prompt; 0: none")
    sampling: SamplingConfig = option(default_factory=SamplingConfig)
    correct_above: float = option(0.5, help="scores above this count as correct")
    max_prompts: int | None = option(None, ge=1, unit="prompts", help="maximum number of validation prompts; null: all")


@dataclass
class CheckpointConfig:
    interval: int = option(10, ge=0, unit="steps", help="steps between checkpoints; 0: only at the end")
    keep: int = option(3, ge=1, help="number of newest checkpoints to keep, in addition to the best one")
    best_metric: str | None = option(None, help="validation metric that selects the best checkpoint; null: none")


@dataclass
class ProfileConfig:
    steps: list[int] = option(
        default_factory=list, help="steps in which every training process and the driver write a torch profile"
    )


@dataclass
class TrainerConfig:
    name: str = option("run", help="name of the run and of its directory")
    output_dir: str = option("runs", help="parent of the run's directory, relative to the working directory")
    steps: int | None = option(None, ge=1, help="number of training steps; null: computed from epochs")
    epochs: int = option(1, ge=1, help="passes over the training data; used if steps is null")
    seed: int = option(0, ge=0, help="random seed of the whole run")
    backend: BackendSlot = option(default_factory=BackendSlot)
    resume: str = option("never", help="never, auto (newest checkpoint), intact (newest undamaged one), or a path")
    trackers: list[TrackerSlot] = option(
        default_factory=lambda: [TrackerSlot(name) for name in ("console", "jsonl", "tensorboard", "curve")],
        help="trackers that receive the metrics",
    )
    validation: ValidationConfig = option(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = option(default_factory=CheckpointConfig)
    profile: ProfileConfig = option(default_factory=ProfileConfig)
    warn_after: int = option(
        10,
        ge=0,
        unit="steps",
        help="warn of a sign that learning has stopped, such as no advantage in any group, once so many steps in a row "
        "have it; 0: never",
    )


@dataclass
class ClusterConfig:
    runtime: Literal["local", "ray"] = option("local", help="local: everything in this process; ray: a Ray cluster")
    address: str | None = option(None, help="address of a running Ray cluster; null: start one on this machine")
    nodes: int = option(1, ge=1, unit="nodes", help="number of nodes for training (cluster.runtime=ray only)")
    processes_per_node: int = option(1, ge=1, help="training processes on each node, one per GPU")
    device: DeviceName = option("auto", help="device of training workers and engines")
    cpu_threads: int | None = option(
        None, ge=1, help="torch threads per process; null: torch decides. 1 is best for tiny models and busy machines"
    )

    @property
    def processes(self) -> int:
        """Number of training processes, each with one shard of every model."""
        return self.nodes * self.processes_per_node


@dataclass
class PluginsConfig:
    block: list[str] = option(default_factory=list, help="plugins that must not be used, by name or package")
    allow_drift: bool = option(False, help="resume although plugin versions have changed")


@dataclass
class Config:
    """The whole tree as a user writes it; :func:`agentrl_core.config.bind` makes a :class:`ResolvedConfig` of it."""

    model: ModelConfig = option()
    data: DataConfig = option()
    rollout: RolloutConfig = option()
    engines: dict[str, NamedEngineSlot] = option(
        default_factory=dict, help="engines with frozen models, by name, that rewards, interactions and tools can ask"
    )
    tools: list[ToolSlot] = option(default_factory=list, help="tools that the policy can call")
    interactions: list[InteractionSlot] = option(default_factory=list, help="plugins that answer in the user's place")
    environments: list[EnvironmentSlot] = option(
        default_factory=list, help="environments: their tasks are rows, in addition to those of data.train_files"
    )
    policies: dict[str, PolicyConfig] = option(
        default_factory=dict,
        help="several policies, each an adapter of the model, by name; empty: one policy plays all agents",
    )
    reward: RewardConfig = option(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = option(default_factory=AlgorithmConfig)
    actor: ActorConfig = option(default_factory=ActorConfig)
    critic: CriticConfig = option(default_factory=CriticConfig)
    reference: ReferenceConfig = option(default_factory=ReferenceConfig)
    teacher: TeacherConfig = option(default_factory=TeacherConfig)
    trainer: TrainerConfig = option(default_factory=TrainerConfig)
    cluster: ClusterConfig = option(default_factory=ClusterConfig)
    hooks: list[HookSlot] = option(default_factory=list, help="hooks that listen to the run's events, in order")
    plugins: PluginsConfig = option(default_factory=PluginsConfig)

    references: dict[tuple[str | int, ...], tuple[str, Any]] = field(
        default_factory=dict, repr=False, compare=False, metadata={"internal": True}
    )
    """By key path: the text with ``${oc.env:…}`` that a value was written as, and the value. Not a key of the file."""

    @property
    def engine_replicas(self) -> int:
        """``rollout.engine.replicas``, or the number that null stands for."""
        engine = self.rollout.engine
        if engine.replicas is None and self.rollout.deterministic:
            return 1
        return engine.replicas or max(self.cluster.processes // engine.devices, 1)

    @property
    def agent_workers(self) -> int:
        """``rollout.agent.num_workers``, or the number that null stands for."""
        workers, cluster = self.rollout.agent.num_workers, self.cluster
        if workers is not None:
            return workers
        if cluster.runtime == "local" or self.rollout.deterministic:
            return 1
        prompts = self.data.batch_size
        wanted = -(-prompts * self.rollout.n // TRAJECTORIES_PER_WORKER)
        return min(wanted, prompts, WORKERS_PER_NODE * cluster.nodes)

    @property
    def pipeline_depth(self) -> int:
        """``rollout.pipeline_depth``, or the number that null stands for."""
        depth, most = self.rollout.pipeline_depth, self.rollout.max_staleness
        return min(1, most) if depth is None else depth

    @property
    def loops_reward(self) -> bool:
        """Whether an agent loop may return rewards itself."""
        return any(loop.has("rewards") for loop in self.rollout.agent.loops)


class ResolvedConfig(Config):
    """A configuration that ``load_config`` or ``bind`` has checked: each slot knows its plugin, and can build it."""

    @property
    def trained(self) -> "dict[str, ResolvedConfig]":
        """The policies that are trained, each with the configuration that holds for it alone."""
        return {name: self._of_policy(each) for name, each in self.policies.items() if each.is_trained} or {
            POLICY: self
        }

    def _of_policy(self, policy: PolicyConfig) -> "ResolvedConfig":
        return replace(
            self,
            model=replace(self.model, adapter=policy.adapter or self.model.adapter),
            actor=policy.actor or self.actor,
            algorithm=policy.algorithm or self.algorithm,
        )

    def policy_of(self, agent: str | None) -> str | None:
        """The policy that plays an agent, the first that is trained one without a name. None: no policy does."""
        if not agent or not self.policies:
            return next(iter(self.trained))
        return next((name for name, each in self.policies.items() if agent in (each.agents or [name])), None)

    def adapter_of(self, policy: str) -> str:
        """What requests for a policy ask the engine for, see ``SamplingParams.adapter``; empty: the model alone."""
        each = self.policies.get(policy)
        has_none = each is not None and each.frozen and each.adapter is None
        return policy if self.serves_adapters and not has_none else ""

    def some_advantage_has(self, capability: str) -> bool:
        """Whether the advantage estimator of a policy that is trained has a capability."""
        return any(own.algorithm.advantage.has(capability) for own in self.trained.values())

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage estimator has the capability ``values``; never with several policies."""
        return not self.policies and self.algorithm.advantage.has("values")

    @property
    def needs_reference(self) -> bool:
        """Whether something reads the reference's log-probs."""
        slots = (self.algorithm.advantage, self.algorithm.loss)
        return self.algorithm.kl_coef > 0 or any(slot.has("ref_log_probs") for slot in slots)

    @property
    def reference_is_adapted(self) -> bool:
        """Whether the reference is the actor's own model with the adapter off, or as the run began with it."""
        return self.model.adapter is not None and self.reference.path is None

    @property
    def teacher_is_adapted(self) -> bool:
        """Whether the teacher is the actor's own model with the adapter off."""
        adapter = self.model.adapter
        return adapter is not None and adapter.path is None and self.teacher.path == self.model.path

    @property
    def serves_adapters(self) -> bool:
        """Whether engines get the policy's adapter; else its weights are merged into the model's."""
        return (self.model.adapter is not None or bool(self.policies)) and self.rollout.engine.has("adapters")

    @property
    def shares_module(self) -> bool:
        """Whether an engine in the actor's process generates with the actor's own module."""
        return self.rollout.engine.has("shared_module") and self.trainer.backend.has("shared_module")

    @property
    def needs_rollout_log_probs(self) -> str | None:
        """The first key that makes the engine's log-probs necessary; None if none does."""
        algorithm = self.algorithm
        if algorithm.correction is not None:
            return f"algorithm.correction={algorithm.correction.registered_name}"
        if algorithm.old_log_probs == "rollout":
            return "algorithm.old_log_probs=rollout"
        for key, slot in (("loss", algorithm.loss), ("advantage", algorithm.advantage)):
            if slot.has("rollout_log_probs"):
                return f"algorithm.{key}={slot.registered_name}"
        return None
