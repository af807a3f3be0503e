"""What a checkpoint has on this machine: where the server keeps the state, and the adapter's files if it gives them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl_backend_tinker.model import Shape
from agentrl_core.api.errors import CheckpointError

STATE_FILE = "training/tinker.json"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
NOTE_FILE = "WEIGHTS_ARE_AT_THE_SERVER.txt"
NOTE = """\
This checkpoint is
  {state}
at
  {url}

The server does not give out adapters as files. {weights} here is a stand-in without weights, so neither
PEFT nor an engine of this machine can load it. To continue the run, use --resume with the same server and API key.
"""


@dataclass(frozen=True)
class Saved:
    """A state at a server.

    Args:
        state: its path there.
        url: of the server.
        base: name of the base model.
        steps: optimizer steps so far.
    """

    state: str
    url: str
    base: str
    shape: Shape
    steps: int


def write_checkpoint(path: str, saved: Saved, files: Mapping[str, bytes]) -> Sequence[str]:
    """Write a checkpoint; returns the names of its files.

    Args:
        files: of the adapter, as PEFT reads them; without both of them a note says where the weights are.
    """
    written = {STATE_FILE: json.dumps(asdict(saved), indent=2).encode()}
    if {CONFIG_FILE, WEIGHTS_FILE} <= files.keys():
        written |= {name: files[name] for name in (CONFIG_FILE, WEIGHTS_FILE)}
    else:
        written |= {
            CONFIG_FILE: json.dumps({"peft_type": "LORA", "r": saved.shape.rank, "note": NOTE_FILE}).encode(),
            WEIGHTS_FILE: _stand_in(),
            NOTE_FILE: NOTE.format(state=saved.state, url=saved.url, weights=WEIGHTS_FILE).encode(),
        }
    for name, content in written.items():
        file = Path(path) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return list(written)


def _stand_in() -> bytes:
    from safetensors.numpy import save

    return bytes(save({}, {"note": NOTE_FILE}))


def read_saved(path: str) -> Saved:
    """What a checkpoint says.

    Raises:
        CheckpointError: it was not made with this backend, or is damaged.
    """
    file = Path(path) / STATE_FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Saved(**{**found, "shape": Shape(**found["shape"])})
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} has no {STATE_FILE}: the training backend 'tinker' did not make it") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}") from error
