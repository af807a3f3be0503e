"""What it costs to bring new weights to an engine in another process of this host.

In each repetition, one after the other: a copy of the bytes from memory to memory, both sides in use before; and the
transport, from the actor's module to the mapped tensors in a reader's process. What the reader then does with the bytes
is its own loading, reported apart as one copy of them there.

Apart from that, without a clock: the bytes of a LoRA adapter's update against those of a full one, for models of known
shapes.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from _report import Figure, report

from agentrl_core.api import WeightUpdate
from agentrl_core.engine_kit.adapters import adapter_shapes, linear_modules
from agentrl_core.fsdp2.weights import ModelWeights

TRANSPORT_GOAL = 2.5
LAYERS = 24
ADAPTER_GOAL = 5.0
ADAPTER = {
    "r": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip
MODELS: dict[str, dict[str, int | bool]] = {
    "Qwen2.5-0.5B": {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Shapes, from their configurations."""


class Weights(torch.nn.Module):
    """As many bytes, cut like a transformer: an embedding and the same matrices in every layer."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        width = max(16, int((nbytes / 4 / (LAYERS * 4 + 8)) ** 0.5))
        shapes = [(8 * width, width), *[(width, width)] * (4 * LAYERS), *[(width,)] * (2 * LAYERS)]
        self.tensors = torch.nn.ParameterList(torch.randn(shape) for shape in shapes)


def read(connection: Connection) -> None:
    """The engine's side: maps what it is told, then copies it into its own tensors."""
    own: dict[str, np.ndarray] = {}
    while paths := connection.recv():
        mapped = {name: data for bucket in WeightUpdate(files=paths) for name, _, _, data in bucket.tensors()}
        connection.send(len(mapped))
        connection.recv()
        start = time.perf_counter()
        for name, data in mapped.items():
            np.copyto(own.setdefault(name, np.empty_like(data)), data)
        connection.send(time.perf_counter() - start)


def measure(mib: int, repetitions: int) -> list[Figure]:
    """The figures of one size; the first round makes the files and is reported apart."""
    model = Weights(mib << 20)
    tensors = [tensor.detach().numpy().reshape(-1).view(np.uint8) for tensor in model.tensors]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    copies = [np.zeros_like(tensor) for tensor in tensors]
    files = ModelWeights(model)
    here, there = multiprocessing.Pipe()
    reader = multiprocessing.get_context("fork").Process(target=read, args=(there,), daemon=True)
    reader.start()
    copied, moved, loaded = [], [], []
    try:
        for _ in range(repetitions + 1):
            start = time.perf_counter()
            for source, target in zip(tensors, copies, strict=True):
                np.copyto(target, source)
            copied.append((time.perf_counter() - start) * 1000)
            start = time.perf_counter()
            here.send(files.write_file())
            here.recv()
            moved.append((time.perf_counter() - start) * 1000)
            here.send(None)
            loaded.append(here.recv() * 1000)
        here.send(())
        reader.join()
    finally:
        files.close()
    ratios = [move / copy for move, copy in zip(moved[1:], copied[1:], strict=True)]
    case = f"{nbytes / 2**20:.0f} MiB in {len(tensors)} tensors"
    return [
        Figure(case, "one copy of the bytes", statistics.median(copied[1:]), "ms"),
        Figure(case, "transport", statistics.median(moved[1:]), "ms"),
        Figure(case, "transport / copy, median of pairs", statistics.median(ratios), "", TRANSPORT_GOAL),
        Figure(case, "transport / copy, largest", max(ratios), ""),
        Figure(case, "transport, first time", moved[0], "ms"),
        Figure(case, "engine's loading (one copy)", statistics.median(loaded[1:]), "ms"),
    ]


def count_adapters() -> Iterator[Figure]:
    """Bytes of both kinds of updates in the same dtype; no weights are made."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    for name, fields in MODELS.items():
        with torch.device("meta"):
            model = Qwen2ForCausalLM(Qwen2Config(**fields))
        # Tied weights travel once.
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        full = sum(2 * parameter.numel() for parameter in model.parameters())
        adapter = sum(2 * a * b for a, b in adapter_shapes(ADAPTER, linear_modules(shapes)).values())
        case = f"{name}, LoRA of rank {ADAPTER['r']} on all linear layers, bfloat16"
        yield Figure(case, "a full update", full / 2**20, "MiB")
        yield Figure(case, "an adapter's update", adapter / 2**20, "MiB")
        yield Figure(case, "adapter / full", 100 * adapter / full, "%", ADAPTER_GOAL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--mib", type=int, nargs="+", default=[5, 50, 500], help="sizes")
    parser.add_argument("--repetitions", type=int, default=15, help="pairs of each size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = chain(count_adapters(), (figure for mib in options.mib for figure in measure(mib, options.repetitions)))
    report("New weights for an engine in another process of this host", figures, options.json)


if __name__ == "__main__":
    main()
