"""A batch in one safetensors file: tensors as they are, everything else as JSON. Loading executes nothing.

JSON holds None, bool, int, float, str, list and dict; tuples, numpy values and tensors inside rows or meta_info are
written as one-entry objects with a tag (``{"$tuple": […]}``) and come back as what they were.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from agentrl_core.api.errors import ProtocolError
from agentrl_core.protocol.containers import ObjectArray, object_array
from agentrl_core.protocol.serialization import from_document, to_document

FORMAT = "agentrl.dataproto/1"
# The JSON is a tensor of bytes, since the header of a safetensors file is limited to 100 MB.
DOCUMENT = "document"
NUMERIC = [np.dtype(name) for name in "? b h i l q B H I L Q e f d F".split()]


def save(path: Path, td: Any, columns: dict[str, ObjectArray], meta: dict[str, Any]) -> None:
    """Writes the file beside its place and moves it there when it is complete."""
    writer = _Writer()
    document = {
        "batch": None if td is None else to_document(td, writer.add),
        "non_tensor_batch": {
            key: {
                "shape": column.shape,
                "rows": [writer.value(f"non_tensor_batch[{key!r}][{i}]", item) for i, item in enumerate(column.flat)],
            }
            for key, column in columns.items()
        },
        "meta_info": writer.value("meta_info", meta),
    }
    text = json.dumps(document).encode("ascii")
    tensors = {**writer.tensors, DOCUMENT: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata={"format": FORMAT})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path) -> tuple[Any, dict[str, ObjectArray], dict[str, Any]]:
    """Tensors, object columns and meta_info of a file. Raises ProtocolError if it is not one of ours."""
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get("format")
            if found != FORMAT:
                raise ProtocolError(f"{path} has the format {found!r}, not {FORMAT!r}: save_to_disk did not write it")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        document = json.loads(tensors.pop(DOCUMENT).numpy().tobytes())
        read = _reader(tensors)
        columns = {
            key: object_array(key, map(read, column["rows"])).reshape(column["shape"])
            for key, column in document["non_tensor_batch"].items()
        }
        td = None if document["batch"] is None else from_document(document["batch"], tensors.__getitem__)
        return td, columns, read(document["meta_info"])
    except FileNotFoundError as error:
        raise ProtocolError(f"{path}: there is no such file") from error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ProtocolError):
            raise
        raise ProtocolError(f"{path} is not a readable batch ({type(error).__name__}: {error})") from error


class _Writer:
    """Turns values into JSON and collects the tensors that they refer to by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._storages: set[int] = set()

    def value(self, where: str, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) in (list, tuple):
            items = [self.value(f"{where}[{number}]", item) for number, item in enumerate(value)]
            return items if type(value) is list else {"$tuple": items}
        if type(value) is dict:
            return self._dict(where, value)
        if isinstance(value, torch.Tensor) and not value.is_nested:
            return {"$tensor": self.add(value)}
        if isinstance(value, np.ndarray) and value.dtype == object:
            return {"$objects": [value.shape, self.value(where, list(value.flat))]}
        if isinstance(value, np.ndarray | np.generic) and value.dtype in NUMERIC:
            tag = "$array" if isinstance(value, np.ndarray) else "$scalar"
            return {tag: self.add(torch.from_numpy(np.array(value)))}
        if isinstance(value, np.str_):
            return str(value)
        raise ProtocolError(
            f"{where}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved; allowed are JSON values, "
            "tuples, numeric arrays and tensors: convert it or drop the column before save_to_disk"
        )

    def _dict(self, where: str, value: dict[Any, Any]) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.value(f"{where}[{key!r}]", item) for key, item in value.items()}
        pairs = [[self.value(f"a key of {where}", key), self.value(f"{where}[{key!r}]", v)] for key, v in value.items()]
        return {"$dict": pairs}

    def add(self, tensor: torch.Tensor) -> str:
        """The name under which the file has a tensor."""
        name = str(len(self.tensors))
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        # safetensors refuses two tensors on one storage.
        self.tensors[name] = tensor.clone() if storage in self._storages else tensor
        self._storages.add(storage)
        return name


def _reader(tensors: Mapping[str, torch.Tensor]) -> Callable[[Any], Any]:
    """The inverse of `_Writer.value`."""

    def read(value: Any) -> Any:
        match value:
            case list():
                return list(map(read, value))
            case {"$tuple": items}:
                return tuple(map(read, items))
            case {"$dict": pairs}:
                return {read(key): read(item) for key, item in pairs}
            case {"$tensor": name}:
                return tensors[name]
            case {"$array": name}:
                return tensors[name].numpy()
            case {"$scalar": name}:
                return tensors[name].numpy()[()]
            case {"$objects": [shape, items]}:
                return object_array("", map(read, items)).reshape(shape)
            case dict():
                return {key: read(item) for key, item in value.items()}
        return value

    return read
