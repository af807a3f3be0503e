"""A training backend: one model of a run, loaded, computed with and trained, on one of the ranks that do so together.

The core does once, for all backends: which rows make a mini-batch and a micro-batch, denominators, losses, corrections,
learning rates, metrics, the shell of checkpoints, and how weights get to engines. A backend never sees a batch's
rewards, and a loss never sees logits, so the vocabulary may stay sharded.

Every rank makes one object for each model: :meth:`TrainingBackend.load` comes first, then any of the others, one at a
time, from one thread, in the same order on all ranks. Where there are several ranks torch's default process group joins
them before; a method in which ranks talk to each other may rely on all of them calling it. An exception on one rank
ends the run.

    class Plain(TrainingBackend):
        def load(self):
            self._model = AutoModelForCausalLM.from_pretrained(self.context.path)

        def forward(self, micros, wanted):
            for micro in micros:
                yield self._outputs(micro, wanted)

        def forward_backward(self, micros, wanted, loss):
            for number, micro in enumerate(micros):
                loss(number, self._outputs(micro, wanted)).backward()

        ...

Shapes: b rows, p prompt and r response tokens of a micro-batch, B rows of a batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from agentrl_core.api.errors import ImageError, WorkerError
from agentrl_core.api.weights import ArrayBucket

if TYPE_CHECKING:
    import torch

Columns = dict[str, "torch.Tensor"]
TRAINING_FOLDER = "training"
"""Folder that a checkpoint has next to a model's weights, with what :meth:`TrainingBackend.restore` reads."""
SEQUENCE_COLUMNS = ("input_ids", "attention_mask", "position_ids")
IMAGES = "images"
"""Non-tensor column of a batch with the names of each row's images, and column of a micro-batch that a backend made of
them."""
EXPERTS = "routed_experts"
"""Non-tensor column of a batch with the experts that an engine sent each token of a row to, [tokens, layers, k], and
column [b, p+r, layers, k] of a micro-batch, where the largest number of the type says that none is known. See
``TokenOutput.routed_experts``."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch, cropped to their own longest prompt and response.

    Args:
        rows: [b] int64, their places in the batch.
        columns: :data:`SEQUENCE_COLUMNS` [b, p+r], prompts padded on the left and responses on the right;
            ``responses`` [b, r] and further columns of response tokens [b, r]; ``response_mask`` is bool. Images, if
            there may be some, stay on the CPU.
        is_plain: every row begins with its first token, at position 0, and has no gap. Causal attention then needs no
            mask, for what stands behind a row's end is seen by nobody; without a mask it is faster.
    """

    rows: "torch.Tensor"
    columns: Columns
    is_plain: bool = False

    def __getitem__(self, name: str) -> "torch.Tensor":
        return self.columns[name]

    @property
    def tokens(self) -> int:
        """Padded tokens of its forward pass."""
        return self.columns["input_ids"].numel()

    def to(self, device: "torch.device") -> "MicroBatch":
        """On the device of a forward pass, integers as models take them."""
        columns = {name: col if name == IMAGES else col.to(device) for name, col in self.columns.items()}
        return replace(self, columns={name: _widened(name, column) for name, column in columns.items()})

    @property
    def model_inputs(self) -> Columns:
        """What the model's forward takes."""
        return {name: self.columns[name] for name in SEQUENCE_COLUMNS if name == "input_ids" or not self.is_plain}

    def __str__(self) -> str:
        rows = ", ".join(str(row) for row in self.rows[:8].tolist()) + (", …" if len(self.rows) > 8 else "")
        return f"micro-batch of {len(self.rows)} rows and {self.tokens} padded tokens (rows {rows} of the batch)"


def _widened(name: str, column: "torch.Tensor") -> "torch.Tensor":
    import torch

    return column.long() if column.dtype == torch.int32 or name == "attention_mask" else column


@dataclass(frozen=True)
class Wanted:
    """What a pass shall compute of the model of a policy.

    Args:
        temperature: log-probabilities and entropies are those of softmax(logits / temperature).
        entropies: ``gradient``: with one, for losses that read them; ``value``: without one; ``none``.
    """

    temperature: float = 1.0
    entropies: Literal["none", "value", "gradient"] = "none"


@dataclass(frozen=True)
class Outputs:
    """What a model says of the response tokens of a micro-batch, [b, r] float32 each; what stands under
    ``response_mask`` 0 is not read.

    Args:
        log_probs: of the tokens; None of a model with values.
        entropies: in nats, of the distributions that the tokens were drawn from; None where none are wanted.
        values: of a critic, each read where its token is predicted, before it is sampled.
    """

    log_probs: "torch.Tensor | None" = None
    entropies: "torch.Tensor | None" = None
    values: "torch.Tensor | None" = None


Loss = Callable[[int, Outputs], "torch.Tensor"]
"""Loss [] of the micro-batch of this number, with a gradient to what the model said of it."""


@dataclass(frozen=True)
class DataShare:
    """Which part of the rows of each call a rank computes.

    Args:
        index: of the part.
        count: of parts; all ranks say the same.
        counts: of the ranks that compute the same part, one's results and metrics count: where a model is split over
            ranks, this one has them.
    """

    index: int = 0
    count: int = 1
    counts: bool = True


@dataclass(frozen=True)
class AdapterPlan:
    """An adapter that the model gets.

    Args:
        settings: the section ``model.adapter``.
        path: directory of the adapter that it begins with; None: a new one.
        seed: of a new adapter's matrices.
        keeps_initial: what it began with is the reference of the run.
    """

    settings: Any
    path: str | None
    seed: int
    keeps_initial: bool = False


@dataclass(frozen=True)
class TrainingContext:
    """What a backend gets when it is made.

    Args:
        role: ``actor``, ``critic``, ``reference`` or ``teacher``.
        head: ``tokens``: log-probabilities and entropies; ``values``: a linear value head on the last hidden state,
            which starts at 0 unless ``path`` has one.
        trains: the model is trained. Others only have forward passes.
        path: directory of the model.
        key: the config key that it comes from, for messages.
        model: the section ``model`` of the configuration.
        settings: the section of the role.
        device: ``cpu``, ``cuda`` or ``cuda:0``.
        rank, world_size: among the ranks of the model.
        longest: tokens of the longest row.
        seed: of the run.
        engine_dtype: in which weights leave for engines.
        adapters: of the model, by policy.
        policy: whose adapter this object trains, where there are some.
        sends_adapter: engines serve it; :meth:`TrainingBackend.weights` gives its tensors alone.
        shared: a name that no other run has, under which the policies of a process find the model whose adapters they
            are; empty: the model is this object's own.
        media: has the bytes of the images of batches; None: they have none.
    """

    role: str
    head: Literal["tokens", "values"]
    trains: bool
    path: str
    key: str
    model: Any
    settings: Any
    device: str = "cpu"
    rank: int = 0
    world_size: int = 1
    longest: int = 0
    seed: int = 0
    engine_dtype: str = "float32"
    adapters: Mapping[str, AdapterPlan] = field(default_factory=dict)
    policy: str = "policy"
    sends_adapter: bool = False
    shared: str = ""
    media: Any = None


class TrainingBackend(ABC):
    """One model on one rank.

    Args:
        config: the plugin's options.
        context: which model, for what, and where.
    """

    def __init__(self, config: Any, context: TrainingContext) -> None:
        self.config = config
        self.context = context
        self.steps = 0
        """Optimizer steps so far. The core counts them, a checkpoint keeps them."""
        self.last_files: Sequence[str] = ()
        """Files of this model in the last checkpoint: the run's last one, or the one it resumed from. The core sets
        this before each :meth:`snapshot`; empty: there is none."""
        self.kept_files: Sequence[str] = ()
        """Those of :attr:`last_files` in which nothing has changed. A backend may set this in :meth:`snapshot`, on all
        ranks, and not write them: the core lets the new checkpoint share them with the last one."""

    @classmethod  # noqa: B027 - most have nothing to refuse
    def check(cls, config: Any, model: Any, adapted: bool, ranks: int, key: str) -> None:
        """Refuse before anything starts what :meth:`load` would refuse, as far as the model's config says it.

        Args:
            config: the plugin's options.
            model: of transformers, without weights.
            adapted: it gets adapters.
            ranks: that train it.
            key: the config key that it comes from, for messages.

        Raises:
            ConfigError: the options do not fit the model or the ranks.
        """

    @abstractmethod
    def load(self) -> None:
        """Read the model, in eval mode, and make the optimizer if it is trained.

        Raises:
            ConfigError: the model cannot be loaded, or not be computed rightly.
        """

    @property
    def share(self) -> DataShare:
        """Of this rank, once the model is loaded. Rank 0 has the first part. As it stands every rank has its own."""
        return DataShare(self.context.rank, self.context.world_size)

    @property
    def packs_prefixes(self) -> bool:
        """Rows that begin alike cost less in one micro-batch."""
        return False

    # Passes -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def forward(self, micros: Sequence[MicroBatch], wanted: Wanted) -> Iterator[Outputs]:
        """What the model says of each of them, in their order, without gradients.

        Every rank has as many of them; those of ranks with the same part are the same. They are on the device. Ranks
        whose results do not count yield an empty :class:`Outputs` where they have none. It is called where gradients
        are off.
        """

    @abstractmethod
    def forward_backward(self, micros: Sequence[MicroBatch], wanted: Wanted, loss: Loss) -> None:
        """Add the gradients of the sum of all losses, over micro-batches and ranks, to those that there are.

        ``loss`` is called once for each micro-batch, on the rank of its part whose results count, and where others need
        its gradient also on these. It says what the loss is divided by: nothing is divided here.
        """

    @abstractmethod
    def optimizer_step(self, lr: float, max_norm: float) -> float:
        """Scale the gradients so that their norm is at most ``max_norm``, take a step of AdamW, forget the gradients.

        The norm is that of all parameters, on all ranks; it is returned as it was before. If it is not finite, weights
        and moments stay as they are. ``settings.optimizer`` has the other options of AdamW. A parameter that got no
        gradient has one of 0.
        """

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget the gradients."""

    def updating(self, seed: int) -> AbstractContextManager[None]:
        """An update, with all its passes and steps: what is drawn at random in it, an adapter's dropout, follows from
        ``seed``."""
        return nullcontext()

    # Where the model is -------------------------------------------------------------------------------------------

    def on_device(self) -> AbstractContextManager[None]:
        """A phase of passes, steps or sending: inside, the weights are on the device. The gradients of a phase end with
        it."""
        return nullcontext()

    def sending(self) -> AbstractContextManager[None]:
        """The same for :meth:`weights` alone."""
        return self.on_device()

    @property
    def bytes_to_come(self) -> int:
        """Device memory that this model will hold between phases, and does not yet."""
        return 0

    # Weights ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def weights(self, bucket_bytes: int, on_host: bool = True, everywhere: bool = False) -> "Iterator[Columns]":
        """All weights, or those of the adapter that is sent, in the data type of the engines.

        Names and shapes are those of their files on the Hugging Face hub; tied weights come once.

        They come in buckets of at most ``bucket_bytes``, or one tensor, or as much as must be converted together; the
        same ones each time. All ranks must exhaust the iterator.

        Args:
            on_host: on the host; otherwise on the model's device.
            everywhere: every rank gets them; otherwise only rank 0 must, and buckets of others may be empty.
        """

    def weight_layout(self, bucket_bytes: int) -> list[ArrayBucket]:
        """What :meth:`weights` gives, without the data. All ranks must call this."""
        return [described(tensors) for tensors in self.weights(bucket_bytes, everywhere=True)]

    def weight_file(self) -> tuple[str, ...] | None:
        """The same in safetensors files in this host's memory, each time the same ones, overwritten; their paths on
        rank 0. None: the core writes them."""
        return None

    @property
    def adapter_config(self) -> Mapping[str, Any] | None:
        """``adapter_config.json`` of the adapter that is trained, as PEFT has it; None: all weights are."""
        return None

    def reference(self) -> AbstractContextManager[None]:
        """Inside, forward passes compute with the policy before the run: with the adapter that it began with, or none.

        Capability ``adapters``.
        """
        raise WorkerError(f"{type(self).__name__} has no adapters (capability 'adapters')")

    def use(self) -> None:
        """Called before the weights are used: several policies may share a model. Capability ``policies``."""
        return None

    # Checkpoints --------------------------------------------------------------------------------------------------

    @abstractmethod
    def snapshot(self) -> Callable[[str], Sequence[str]]:
        """Copy the state of weights, optimizer and :attr:`steps` to host memory; what is returned writes it.

        It is called once on all ranks with the same directory, perhaps in another thread while training goes on. It
        returns the names of the files in it that this rank has written.

        Afterwards the directory has the weights in the layout of the Hugging Face hub, with config.json and without
        tokenizer, or an adapter as PEFT reads it. Below :data:`TRAINING_FOLDER` is all that :meth:`restore` reads:
        nodes that do not share the disk get that alone.
        """

    @abstractmethod
    def restore(self, path: str) -> None:
        """Take over a snapshot, :attr:`steps` included, written by any number of ranks, in place: whoever shares the
        module sees it.

        Raises:
            CheckpointError: it is damaged, or of another model.
        """

    # What only some have ------------------------------------------------------------------------------------------

    @property
    def module(self) -> Any:
        """The model itself, for an engine in this process that generates with it. Capability ``shared_module``."""
        raise WorkerError(f"{type(self).__name__} shares no module (capability 'shared_module')")

    def image_columns(self, names: Sequence[Sequence[str]] | None, columns: Columns, method: str) -> Columns:
        """The column :data:`IMAGES` of a batch, from the names of its rows' images. Capability ``images``.

        Raises:
            ImageError: there are images, and the model is shown none.
            ProtocolError: a row has another number of tokens for images than its images take.
        """
        if any(map(len, names or ())):
            raise ImageError(f"{method}: the batch has images, and {type(self).__name__} shows none to a model")
        return {}

    def utilisation(self, trained_tokens: int, other_tokens: int, seconds: float) -> float | None:
        """Share of the devices' peak that an update has used; None where it is not known.

        Args:
            trained_tokens: with a backward pass.
            other_tokens: with a forward pass only.
        """
        return None

    def metrics(self) -> dict[str, float]:
        """Counters since the last call, which become metrics of an update under ``<role>/``."""
        return {}

    def close(self) -> None:
        """Forget the model. A second call does nothing."""
        return None


def described(tensors: "Columns") -> ArrayBucket:
    """The names, shapes and data types of a bucket, without its data."""
    return ArrayBucket(
        names=tuple(tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors.values()),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()),
    )
