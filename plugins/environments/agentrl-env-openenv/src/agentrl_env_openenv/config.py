"""Options of the environment."""

from dataclasses import dataclass
from typing import Any

from agentrl_core.api import option


@dataclass(kw_only=True)
class OpenEnvConfig:
    environment: str | None = option(
        None, help="class of the environment, such as my_env.server.environment:MyEnvironment; null: it has a url"
    )
    url: str | None = option(
        None, help="address of a running server, such as http://localhost:8000; null: in the worker"
    )
    max_body_bytes: int = option(
        4 * 2**20, ge=1, unit="bytes", help="longest message of the server, and longest schema, decompressed"
    )
    action: str | None = option(
        None, help="class of its actions, such as my_env.models:MyAction; null: the annotation of `action` in `step`"
    )
    text_field: str | None = option(
        None, help="field of the action that gets the policy's whole turn; null: the policy calls the tool `act`"
    )
    prompt: str | None = option(None, help="instructions in front of the first observation; null: none")
    observation: list[str] | None = option(
        None, help="fields of the observation that the policy reads; null: all but done, reward and metadata, as JSON"
    )
    images: list[str] = option(
        default_factory=list,
        help="fields of the observation that the policy is shown as images, after the text: base64, data URLs, pixels "
        "[height, width, 3], or lists of these",
    )
    arguments: dict[str, Any] = option(default_factory=dict, help="keyword arguments of the environment class")
    reset: dict[str, Any] = option(default_factory=dict, help="keyword arguments of each reset, next to the seed")
    tasks: int = option(10_000, ge=1, help="number of training tasks, which differ in the seed and the index")
    validation_tasks: int = option(100, ge=0, help="number of validation tasks")
    send_index: bool = option(False, help="pass the task's split (train or test) and index to reset, as task sets take")
