"""Every error that agentrl raises on purpose.

    AgentRLError
    ├── ConfigError              one or many problems in a configuration, reported together
    ├── PluginError              discovery and resolution
    │   ├── PluginNotFoundError
    │   ├── PluginConflictError      two packages, one kind and name
    │   ├── PluginIncompatibleError  wrong api_version
    │   ├── PluginBrokenError        the entry point, spec or factory raised
    │   ├── PluginRequirementError   a requirement of the plugin is missing
    │   └── PluginDriftError         a worker or checkpoint has another version
    ├── DataError                a data set, file or row
    ├── ImageError               an image that cannot be read or shown
    ├── TemplateError            a tokenizer or chat template that cannot serve
    ├── EngineError              the inference engine or the connection to it
    ├── ToolError                a tool call that failed (the model sees an observation)
    │   └── ToolUnavailableError     what the tool needs failed (the trajectory is retried)
    ├── InteractionError         an interaction that failed
    ├── EpisodeError             an environment that could not begin a task
    ├── RewardError              a reward function or manager
    ├── DeadlineError            an await passed its deadline
    ├── HttpError                a server that was asked gave no usable answer
    │   └── BodyTooLargeError        its body is longer than the limit
    ├── RolloutError             more trajectories failed than the run allows
    ├── WorkerError              a worker process raised or died
    ├── SimulationError          a model whose code cannot run on tensors without data
    ├── ProtocolError            a DataProto operation on unsuitable data, or unsuitable rows
    └── CheckpointError          a checkpoint that cannot be written or read

A message says where, what was found, what is allowed, and what to do about it. Plugins raise ordinary Python
exceptions; the core wraps them at the boundary where they surface.
"""

from collections.abc import Sequence


class AgentRLError(Exception):
    """Base class of all errors that agentrl raises on purpose."""


class ConfigError(AgentRLError):
    """One or many problems in a configuration.

    ``problems`` holds one message for each, complete in itself.
    """

    def __init__(self, problems: str | Sequence[str], source: str = "") -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        self.source = source
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} in {source or 'the configuration'}:"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[str, ...], str]]:
        return type(self), (self.problems, self.source)


class PluginError(AgentRLError):
    """Base class for discovery and resolution."""


class PluginNotFoundError(PluginError):
    """No installed plugin has this kind and name."""


class PluginConflictError(PluginError):
    """Two packages register one kind and name."""


class PluginIncompatibleError(PluginError):
    """The plugin was written for another api_version."""


class PluginBrokenError(PluginError):
    """The entry point, the spec or the factory raised, or is not what it should be."""


class PluginRequirementError(PluginError):
    """A requirement that the plugin declares is not installed here."""


class PluginDriftError(PluginError):
    """A plugin differs between driver and worker, or between checkpoint and now."""


class DataError(AgentRLError):
    """A data set, file or row that cannot be used."""


class ImageError(AgentRLError):
    """An image that cannot be read, or that a model cannot be shown."""


class TemplateError(AgentRLError):
    """A tokenizer or chat template that cannot serve the run."""


class EngineError(AgentRLError):
    """The inference engine failed, or cannot be reached. Infrastructure: the trajectory is retried."""


class ToolError(AgentRLError):
    """A tool call failed. The model sees an observation and continues."""


class ToolUnavailableError(ToolError):
    """What a tool needs failed: a sandbox, a server, a disk. Infrastructure: the trajectory is retried."""


class InteractionError(AgentRLError):
    """An interaction failed."""


class EpisodeError(AgentRLError):
    """An environment could not begin a task. The trajectory is retried."""


class RewardError(AgentRLError):
    """A reward function or manager raised, or returned what is not a finite number."""


class DeadlineError(AgentRLError):
    """An await passed its deadline."""


class HttpError(AgentRLError):
    """A server gave no usable answer. ``status`` is that of its answer, if it is what was wrong."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class BodyTooLargeError(HttpError):
    """The body of an answer is longer than the limit, received or decompressed."""


class RolloutError(AgentRLError):
    """More trajectories failed than ``rollout.max_failed_fraction`` allows."""


class WorkerError(AgentRLError):
    """A worker raised, or its process died."""


class SimulationError(AgentRLError):
    """A model's code cannot run on tensors without data."""


class ProtocolError(AgentRLError, ValueError):
    """A DataProto operation on unsuitable data, or rows that cannot become a DataProto."""


class CheckpointError(AgentRLError):
    """A checkpoint that cannot be written or read."""
