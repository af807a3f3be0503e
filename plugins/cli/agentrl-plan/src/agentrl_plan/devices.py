"""GPUs by name: memory and peaks, from the data sheets of their maker."""

import math
from dataclasses import dataclass, replace

from agentrl_core.api.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A GPU.

    Args:
        memory: bytes that torch reports as its total memory, about.
        half: dense bfloat16 operations per second, sums in float32.
        single: float32 operations per second.
        bandwidth: bytes per second of its memory.
        link: bytes per second to another GPU of the node, in one direction.
        source: where the figures come from.
    """

    name: str
    memory: float
    half: float
    single: float
    bandwidth: float
    link: float
    source: str


NETWORK = 50e9
"""Bytes per second of a GPU to those of other nodes: one port of 400 Gbit/s."""
_DEVICES = (
    Device("h100-80g", 79.1 * GIB, 989e12, 67e12, 3.35e12, 450e9, "H100 data sheet, SXM; memory: prime-rl"),
    Device("h100-pcie-80g", 79.1 * GIB, 756e12, 51e12, 2.0e12, 64e9, "H100 data sheet, PCIe"),
    Device("h200-141g", 139.8 * GIB, 989e12, 67e12, 4.8e12, 450e9, "H200 data sheet, SXM; memory: prime-rl"),
    Device("b200-180g", 178.3 * GIB, 2250e12, 75e12, 7.7e12, 900e9, "HGX B200 data sheet; pytorch/ao#4002"),
    Device("a100-80g", 79.1 * GIB, 312e12, 19.5e12, 2.04e12, 300e9, "A100 data sheet, SXM"),
    Device("a100-40g", 39.4 * GIB, 312e12, 19.5e12, 1.55e12, 300e9, "A100 data sheet, SXM"),
    Device("l40s-48g", 44.4 * GIB, 362e12, 91.6e12, 0.864e12, 32e9, "L40S data sheet"),
    Device("rtx-a6000-48g", 47.4 * GIB, 155e12, 38.7e12, 0.768e12, 32e9, "GA102 whitepaper; memory: prime-rl"),
    Device("rtx-4090-24g", 23.5 * GIB, 165e12, 82.6e12, 1.01e12, 32e9, "Ada whitepaper"),
    Device("rtx-3090-24g", 23.6 * GIB, 71e12, 35.6e12, 0.936e12, 32e9, "GA102 whitepaper"),
)
"""Makers' peaks, without sparsity. What torch reports as the memory is less than the name says.

Checked in November 2026: peaks against reprints of the sheets, memory against public measurements. Not checked:
float32 of the B200, bfloat16 of the RTX A6000 and 3090, memory of the H100 PCIe, L40S and RTX 3090."""
DEVICES = {device.name: device for device in _DEVICES}


def device_called(name: str, memory: int) -> Device:
    """A GPU by the name and memory that torch reports; peaks that are not known count as infinite."""
    words = name.lower()
    known = [each for each in _DEVICES if all(word in words for word in each.name.rpartition("-")[0].split("-"))]
    best = min(known, key=lambda each: (-len(each.name.split("-")), abs(each.memory - memory)), default=None)
    if best is None:
        return Device(name, memory, math.inf, math.inf, math.inf, math.inf, "torch")
    return replace(best, memory=memory)


def device_of(name: str) -> Device:
    """A GPU of the table, or one that the name describes: ``name:GiB:TFLOPS:GB/s``.

    Raises:
        ConfigError: it is neither.
    """
    if name in DEVICES:
        return DEVICES[name]
    label, *figures = name.split(":")
    try:
        memory, half, bandwidth = (float(each) for each in figures)
    except ValueError:
        memory = half = bandwidth = math.nan
    if not all(0 < each < math.inf for each in (memory, half, bandwidth)):
        raise ConfigError(
            f"--gpu: unknown GPU {name!r}; known: {', '.join(DEVICES)}. Describe another one as "
            "name:GiB of memory:dense bfloat16 TFLOPS:GB/s of its memory, three numbers above 0, for example "
            "my-gpu:31.5:209:1790. To add one for everybody, add a line to devices.py of the package agentrl-plan"
        )
    return Device(label, memory * GIB, half * 1e12, half * 1e12 / 8, bandwidth * 1e9, 32e9, "--gpu")
