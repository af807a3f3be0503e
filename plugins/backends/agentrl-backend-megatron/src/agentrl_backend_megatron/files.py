"""The files of a model of the Hugging Face hub: config.json and safetensors."""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from agentrl_core.api.errors import ConfigError

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_BESIDES = ("generation_config.json",)


class HubFiles:
    """Reads one tensor at a time.

    Args:
        path: directory of the model.
        key: the config key that it comes from, for messages.

    Raises:
        ConfigError: there is no such model.
    """

    def __init__(self, path: str, key: str) -> None:
        self._path, self._key = Path(path), key
        try:
            self.config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
            self._file_of = self._names()
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ConfigError(f"{key}: megatron cannot load a model from {path!r}: {error}") from error
        self._open: dict[str, Any] = {}

    def _names(self) -> dict[str, str]:
        index = self._path / INDEX
        if index.is_file():
            found: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
            return found
        with safe_open(self._path / WHOLE, "pt") as file:
            return dict.fromkeys(file.keys(), WHOLE)

    def tensor(self, name: str) -> Tensor:
        """A tensor by its name on the hub.

        Raises:
            ConfigError: the model lacks it.
        """
        file = self._file_of.get(name)
        if file is None:
            raise ConfigError(f"{self._key}: the weights in {str(self._path)!r} lack {name!r}; it would be random")
        try:
            if file not in self._open:
                self._open[file] = safe_open(self._path / file, "pt")
            tensor: Tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self._key}: {self._path / file} cannot be read: {error}") from error
        return tensor

    def close(self) -> None:
        """Close the files; they open again when they are read."""
        self._open.clear()

    def copy_config(self, path: str, dtype: str) -> None:
        """Write config.json, with the data type of the weights beside it, and what belongs to it."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        own = json.loads((self._path / "config.json").read_text(encoding="utf-8"))
        own.pop("torch_dtype", None)
        (folder / "config.json").write_text(json.dumps({**own, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")
        for name in _BESIDES:
            if (self._path / name).is_file():
                shutil.copy(self._path / name, folder / name)
