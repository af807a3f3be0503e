"""Models that are named as on the Hugging Face hub: ``org/name``, or ``org/name@revision``.

They are read from the hub's cache, which HF_HOME moves; with HF_HUB_OFFLINE=1 from nowhere else.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from agentrl_core.api.errors import ConfigError

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?", re.ASCII)
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]
_UNWANTED = ["*/*", "consolidated*"]
"""Other formats of the same weights."""


def is_hub_name(path: str) -> bool:
    """Whether this can be a model of the hub; a path of two parts looks the same."""
    return _NAME.fullmatch(path) is not None


def hub_directory(name: str) -> str:
    """The directory of the hub's cache with config, tokenizer and weights of a model; what is missing is downloaded.

    Raises:
        ConfigError: there is no such model, it cannot be reached, or it has no weights in safetensors.
    """
    from huggingface_hub import snapshot_download

    found = fetched(name, partial(snapshot_download, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    for pattern in ("config.json", "*.safetensors"):
        if not any(Path(found).glob(pattern)):
            raise ConfigError(
                f"{name!r} is a model of the Hugging Face hub, and {found} has no {pattern}; fetch it again with a "
                "connection, or name a model with weights in safetensors"
            )
    return found


def fetched(name: str, fetch: Callable[..., str]) -> str:
    """What ``fetch(repository, revision=…)`` of the hub's client gives.

    Raises:
        ConfigError: whatever went wrong, with what to do.
    """
    from huggingface_hub import constants

    match = _NAME.fullmatch(name)
    assert match is not None, f"{name} is no name of the hub"
    try:
        return fetch(match[1], revision=match[2])
    except Exception as error:  # noqa: BLE001 - errors of the hub, of its HTTP client and of the disk
        reason = (
            f"the Hugging Face hub does not give it ({' '.join(str(error).split()) or type(error).__name__}); check "
            "the name and the connection, or name a directory"
        )
        if constants.HF_HUB_OFFLINE:
            reason = (
                f"HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} does not have it "
                f"(`hf download {match[1]}` fetches it where there is a connection)"
            )
        raise ConfigError(
            f"{name!r} is neither a directory, seen from the file that names it, nor a model that can be fetched: "
            f"{reason}"
        ) from error
